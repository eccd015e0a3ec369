"""Modes ``ssp`` and ``async`` on real processes."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cluster
from preloaded import Job, preloaded, start_job

from paradis.cli.main import main

SCRIPT = Path(__file__).with_name("modes_worker.py")
EXACT = Path(__file__).with_name("exact_worker.py")
SMALL = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
}
ASYNC = {**SMALL, "training.mode": "async"}
SCALED = {**ASYNC, "training.staleness_scaling": "true"}

Start = Callable[..., Job]


def ssp(staleness: int) -> dict[str, str]:
    return {**SMALL, "training.mode": "ssp", "training.staleness": str(staleness)}


def record(out: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / f"{rank}.pt", weights_only=False)
    return found


@pytest.mark.parametrize("settings", [ssp(1), ASYNC, SCALED], ids=["ssp", "async", "scaled"])
def test_one_worker_has_the_bits_of_plain_torch(
    settings: dict[str, str], start_job: Start, tmp_path: Path
) -> None:
    start_job(EXACT, str(tmp_path), "some", workers=1, servers=2, settings=settings).succeed()
    result = json.loads((tmp_path / "0.json").read_text())
    assert result["failures"] == [] and len(result["digests"]) > 40


def test_async_waits_for_nobody(start_job: Start, tmp_path: Path) -> None:
    """Worker 2 goes on from its second step only when the others have called their last."""
    (tmp_path / "limit").write_text("5")
    start_job(SCRIPT, str(tmp_path), "slow", workers=3, servers=2, settings=ASYNC).succeed()
    story = (tmp_path / "story").read_text().splitlines()
    assert story.index("call 0 5") < story.index("call 2 1")
    assert [record(tmp_path, r)["steps"] for r in range(3)] == [6, 4, 6]


@pytest.mark.parametrize("bound", [1, 3])
def test_ssp_holds_its_bound(bound: int, start_job: Start, tmp_path: Path) -> None:
    """Nobody begins step k before all have called ``step()`` for step k - bound - 1.

    Worker 2 waits in its step 1 until the others are as far ahead as they may be. Worker 1 ends
    after four steps, which keeps nobody back.
    """
    (tmp_path / "limit").write_text(str(1 + bound))
    settings = ssp(bound)
    start_job(SCRIPT, str(tmp_path), "slow", workers=3, servers=2, settings=settings).succeed()
    story = [line.split() for line in (tmp_path / "story").read_text().splitlines()]
    ends = {0: 6, 1: 4, 2: 6}
    called: dict[str, None] = {}
    ahead = 0
    for word, rank, *steps in story:
        if word == "call":
            called[f"{rank} {steps[0]}"] = None
        elif word == "begin":
            step = int(steps[0])
            for other, end in ends.items():
                for each in range(min(step - bound, end)):
                    assert f"{other} {each}" in called, (story, rank, step)
            ahead = max(ahead, step - sum(c.startswith("2 ") for c in called))
    assert ahead == bound
    assert [record(tmp_path, r)["steps"] for r in range(3)] == [6, 4, 6]


def test_training_on_data_comes_to_where_sync_comes(start_job: Start, tmp_path: Path) -> None:
    last = {}
    modes = {"sync": SMALL, "ssp": ssp(2), "async": ASYNC, "scaled": SCALED}
    for name, settings in modes.items():
        out = tmp_path / name
        out.mkdir()
        start_job(SCRIPT, str(out), "fit", workers=3, servers=2, settings=settings).succeed()
        results = [record(out, rank) for rank in range(3)]
        assert all(r["last"] < r["first"] / 50 for r in results), (name, results)
        last[name] = max(r["last"] for r in results)
    assert all(loss < 10 * last["sync"] + 1e-3 for loss in last.values()), last


def test_clipping_is_of_the_own_gradient(start_job: Start, tmp_path: Path) -> None:
    job = start_job(SCRIPT, str(tmp_path), "clip", workers=2, servers=1, settings=ASYNC).succeed()
    norms = [record(tmp_path, rank) for rank in range(2)]
    for each in norms:
        assert each["norm"] == pytest.approx(each["wanted"], rel=1e-5)
    assert norms[0]["norm"] != norms[1]["norm"]
    assert "clips each worker's own gradient in mode async" in job.logs()


def test_overflow_skips_the_step_of_its_worker_only(start_job: Start, tmp_path: Path) -> None:
    start_job(SCRIPT, str(tmp_path), "overflow", workers=2, servers=2, settings=ssp(1)).succeed()
    assert [record(tmp_path, r)["scale"] for r in range(2)] == [1024.0, 512.0]
    assert all(record(tmp_path, r)["finite"] and record(tmp_path, r)["steps"] == 3 for r in (0, 1))


def test_state_is_loaded_while_others_train(start_job: Start, tmp_path: Path) -> None:
    start_job(SCRIPT, str(tmp_path), "reload", workers=2, servers=2, settings=ASYNC).succeed()
    found = [record(tmp_path, rank) for rank in range(2)]
    assert all(each["finite"] for each in found)
    # All updates count, less those of worker 1 between asking for the state and giving it.
    last = max(each["counts"][-1] for each in found)
    assert 6 <= last <= 12


def test_changed_values_are_refused_by_name(start_job: Start, tmp_path: Path) -> None:
    job = start_job(SCRIPT, str(tmp_path), "change", workers=2, servers=2, settings=ASYNC)
    assert any(job.wait().values())
    assert "the script changed the value of 2.weight" in job.logs()
    assert "in mode async nobody can tell whose change counts" in job.logs()


def test_checkpoint_and_resume(
    start_job: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards are saved as they are, each whole; everybody resumes from them at worker 0's step."""
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir()
    again.mkdir()
    job = start_job(SCRIPT, str(first), "save", workers=2, servers=2, settings=ASYNC).succeed()
    root = job.run.path / "checkpoints"
    assert main(["checkpoint", "verify", str(root)]) == 0
    exported = tmp_path / "model.pt"
    assert main(["checkpoint", "export", str(root), str(exported)]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "ls", str(root)]) == 0
    assert "mode async  at=2" in capsys.readouterr().out
    settings = {**ssp(1), "checkpoint.restore": str(root)}
    start_job(SCRIPT, str(again), "save", workers=3, servers=1, settings=settings).succeed()
    saved = torch.load(exported)
    begun = [record(again, rank) for rank in range(3)]
    assert all(found["start"] == 3 and found["restored"] == {"at": 2} for found in begun)
    assert record(first, 0)["values"].keys() == saved.keys()
    assert any(all(torch.equal(found["values"][k], v) for k, v in saved.items()) for found in begun)


def test_staleness_is_counted(cluster: Cluster) -> None:
    script = cluster.write()
    code, err = cluster.run(
        "--workers", "2", "--servers", "2", "--set", "training.mode=async", str(script)
    )
    assert code == 0, err
    nodes = json.loads((cluster.run_directory / "nodes.json").read_text())
    servers = [n for name, n in nodes.items() if name.startswith("server") and n.get("updates")]
    assert servers
    for counters in servers:
        buckets = {k: v for k, v in counters.items() if k.startswith("staleness_")}
        total = buckets.pop("staleness_sum")
        assert sum(buckets.values()) == counters["updates"]
        assert 0 <= total <= 12 * counters["updates"]
