"""Training through Paradis gives the bits of plain PyTorch."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preloaded import Job, Preloaded, environment, preloaded, start_job

SCRIPT = Path(__file__).with_name("exact_worker.py")
SMALL = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
}
"""Cut the script's largest parameter into several shards, and its small ones into two buckets."""

Start = Callable[..., Job]


def results(directory: Path, workers: int) -> list[dict[str, Any]]:
    """Return what the script wrote on each rank, after checking that nothing differed."""
    found = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(workers)]
    for rank, result in enumerate(found):
        assert result["failures"] == [], f"rank {rank}"
        assert result["digests"] == found[0]["digests"], f"rank {rank}"
    return found


def test_alone(preloaded: Preloaded, tmp_path: Path) -> None:
    """``python script.py``: the server is in the process."""
    sizes = {f"PARADIS_{k.replace('.', '_').upper()}": v for k, v in SMALL.items()}
    log = tmp_path / "log"
    words = ["python", str(SCRIPT), str(tmp_path), "one"]
    number = preloaded.start(words, environment(sizes), tmp_path, log)
    assert preloaded.code(number) == 0, log.read_text()
    (result,) = results(tmp_path, 1)
    assert len(result["digests"]) > 130


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
def test_one_worker(start_job: Start, tmp_path: Path, overlap: str) -> None:
    """One worker and three servers, each a process."""
    settings = {**SMALL, "training.overlap": overlap}
    start_job(SCRIPT, str(tmp_path), "some", workers=1, servers=3, settings=settings).succeed()
    (result,) = results(tmp_path, 1)
    assert len(result["digests"]) > 40


RACKS = {"dispatchers": 2, "racks": 2}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "1 server, rack agents": {"servers": 1, **RACKS},
    "2 servers, rack agents": {"servers": 2, **RACKS},
    "3 servers, rack agents": {"servers": 3, **RACKS},
    "no rack agents": {"servers": 2, **RACKS, "communication.rack_aggregation": "off"},
    "fixed groups, one rack": {"servers": 3, "topology.reduction_groups": "[[0, 1], [2, 3]]"},
}


SEEN: dict[str, dict[str, str]] = {}
"""Digests of the first topology, which all others must give."""


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_mean_over_the_tree(name: str, start_job: Start, tmp_path: Path) -> None:
    """Four workers get the optimizer's step on ((g0 + g1) + (g2 + g3)) / 4, whatever the topology.

    Workers are late by random amounts, so that contributions arrive in any order.
    """
    counts = {k: v for k, v in TOPOLOGIES[name].items() if "." not in k}
    settings = SMALL | {k: v for k, v in TOPOLOGIES[name].items() if "." in k}
    words = (str(tmp_path), "mean", "slow")
    start_job(SCRIPT, *words, workers=4, settings=settings, **counts).succeed()
    found = results(tmp_path, 4)
    agents = ["dispatcher-0", "dispatcher-1"] if name.endswith(", rack agents") else []
    assert [a for a in found[0]["agents"] if a] == agents
    assert found[0]["digests"] == SEEN.setdefault("digests", found[0]["digests"])


def test_workers_with_several_threads(start_job: Start, tmp_path: Path) -> None:
    """Elementwise gradients and servers do not care how many threads the workers have."""
    start_job(
        SCRIPT, str(tmp_path), "few", workers=4, servers=2, **RACKS, settings=SMALL,
        environ={"OMP_NUM_THREADS": "2"},
    ).succeed()  # fmt: skip
    assert results(tmp_path, 4)[0]["threads"] == 2


def test_four_workers_or_a_batch_of_four(start_job: Start, tmp_path: Path) -> None:
    """Four quarters of a batch or the whole: equal but for the order of sums."""
    start_job(SCRIPT, str(tmp_path), "batch", workers=4, servers=2, settings=SMALL).succeed()
    results(tmp_path, 4)
