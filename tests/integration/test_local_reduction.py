"""The workers of one host reduce first: the same bits, fewer bytes to the servers."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preloaded import Job, Preloaded, preloaded, start_job

SCRIPT = Path(__file__).with_name("sharing_worker.py")
SMALL = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
}

Start = Callable[..., Job]


def train(start_job: Start, directory: Path, **settings: str) -> list[dict[str, Any]]:
    """Train with four workers and two servers; return what each wrote, after comparing them."""
    directory.mkdir()
    named = {f"training.{key}": value for key, value in settings.items()}
    job = start_job(SCRIPT, str(directory), workers=4, servers=2, settings=SMALL | named)
    job.succeed()
    found = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(4)]
    assert all(result["digests"] == found[0]["digests"] for result in found)
    return found


def test_the_same_bits(start_job: Start, tmp_path: Path) -> None:
    """Off, on, and on with layerwise overlap; with absent, revised, dropped, clipped gradients."""
    plain = train(start_job, tmp_path / "off")
    for overlap in ("none", "layerwise"):
        shared = train(start_job, tmp_path / overlap, local_reduction="on", overlap=overlap)
        assert shared[0]["digests"] == plain[0]["digests"]
        assert not shared[0]["initialized"]
