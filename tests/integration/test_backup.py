"""Backup workers on real processes: the others go on, and who was late gets a whole version."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preloaded import Job, Preloaded, preloaded, start_job

SCRIPT = Path(__file__).with_name("backup_worker.py")
SMALL = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
    "communication.retry_interval": "60s",
    "training.backup_workers": "1",
}
END = 12

Start = Callable[..., Job]


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("way", ["none", "bf16", "int8", "onebit", "lion"])
@pytest.mark.parametrize("overlap", ["none", "layerwise"])
def test_a_held_worker_catches_up(way: str, overlap: str, start_job: Start, tmp_path: Path) -> None:
    """Every version has the same bits on all workers that have had it, momenta included."""
    settings = {**SMALL, "training.overlap": overlap}
    if way in ("bf16", "int8"):
        settings["training.compression"] = way
    job = start_job(SCRIPT, str(tmp_path), way, workers=3, servers=2, settings=settings).succeed()
    found = results(tmp_path)
    assert all(each["failures"] == [] for each in found)
    assert found[2]["late"] >= 1 and found[2]["calls"] < END
    assert all(str(END) in each["versions"] for each in found)
    shared = found[0]["versions"].keys() | found[1]["versions"].keys()
    assert any(v in shared for v in found[2]["versions"] if 4 < int(v) < END), "it came back"
    for version in shared | found[2]["versions"].keys():
        digests = {each["versions"][version] for each in found if version in each["versions"]}
        assert len(digests) == 1, (version, digests)
    assert (found[2]["memories"] > 0) == (way in ("int8", "onebit", "lion"))
    assert "worker 2 was late in 1 of " in job.logs()
