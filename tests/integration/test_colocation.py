"""Jobs with servers beside the workers: the same bits, and shares that follow the weights."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from preloaded import Job, preloaded, start_job

from paradis.core.colocation import split
from paradis.observe.spans import read_spans, span_files

SCRIPT = """
import hashlib, os, sys, torch, paradis

torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)])
optimizer = paradis.wrap(model, torch.optim.Adam(model.parameters()))
for step in range(3):
    generator = torch.Generator().manual_seed(10 * step + paradis.rank())
    model(torch.randn(4, 256, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.md5(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
open(os.path.join(sys.argv[1], str(paradis.rank())), "w").write(digest.hexdigest())
"""
SETTINGS = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
    "observe.trace": "true",
}
MODEL_BYTES = 12 * (256 * 256 + 256) * 4

Start = Callable[..., Job]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def digests(directory: Path) -> set[str]:
    """Return the digests of final parameters that workers wrote."""
    return {path.read_text() for path in directory.iterdir()}


def owned_bytes(job: Job) -> Counter[str]:
    """Return the bytes of shards that each server updated in the first step."""
    held: Counter[str] = Counter()
    for path in span_files(job.run.path):
        file = read_spans(path)
        for span in file.spans:
            if span.stage == "update" and span.step == 0:
                held[file.header.node] += span.bytes
    return held


def test_colocated_servers_change_owners_and_no_bit(
    start_job: Start, script: Path, tmp_path: Path
) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    start_job(script, str(one), workers=2, servers=1, settings=SETTINGS).succeed()
    beside = SETTINGS | {"topology.colocated": "true"}
    job = start_job(script, str(many), workers=2, servers=1, settings=beside).succeed()
    assert digests(one) == digests(many) and len(digests(one)) == 1
    held = owned_bytes(job)
    assert sum(held.values()) == MODEL_BYTES
    shares = split(workers=2, dedicated=1)
    expected = [shares.dedicated, shares.colocated, shares.colocated]
    got = [held[f"server-{i}"] / MODEL_BYTES for i in range(3)]
    assert got == pytest.approx(expected, abs=0.03)
