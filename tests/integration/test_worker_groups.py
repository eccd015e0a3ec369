"""Worker groups on real processes: disjoint parameters, bounded reads, one checkpoint."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Job, preloaded, start_job

from paradis.cli.main import main

SCRIPT = Path(__file__).with_name("groups_worker.py")
SMALL = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
}

Start = Callable[..., Job]


def groups(tick: str = "", tock: str = "", *, workers: int = 2) -> dict[str, str]:
    """Return settings of a group of some workers and one of a single worker."""
    first = f"tick: {{workers: {workers}, parameters: [tick]{tick}}}"
    second = f"tock: {{workers: 1, parameters: 'tock*'{tock}}}"
    return {**SMALL, "topology.worker_groups": f"{{{first}, {second}}}"}


def record(out: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / f"{rank}.pt", weights_only=False)
    return found


@pytest.mark.parametrize(
    ("tick", "bound"),
    [(", staleness: 0", 0), ("", 1), (", staleness: 4", 4), (", compression: bf16", 1)],
    ids=["fresh", "default", "loose", "bf16"],
)
def test_reads_stay_within_their_bound(
    tick: str, bound: int, start_job: Start, tmp_path: Path
) -> None:
    """What a reader has misses at most the bound's updates of those done when its step began.

    It stands still for a while, which keeps nobody back, and reads the last value in the end.
    """
    (tmp_path / "limit").write_text("9")
    start_job(SCRIPT, str(tmp_path), "read", servers=2, settings=groups(tick)).succeed()
    owners, reader = [record(tmp_path, rank) for rank in range(2)], record(tmp_path, 2)
    assert [(o["group"], o["place"], o["trained"]) for o in owners] == [
        ("tick", 0, ["tick"]), ("tick", 1, ["tick"]),
    ]  # fmt: skip
    assert (reader["group"], reader["place"], reader["trained"]) == ("tock", 0, ["tock"])
    lowest, highest = 0.0, 0.0
    for done, least, most in reader["read"]:
        assert done - bound <= least, reader["read"]
        assert least >= lowest and most >= highest, "a version went back"
        lowest, highest = least, most
    assert reader["read"][1][0] >= 9 and reader["read"][-1][1:] == (12.0, 12.0)
    assert reader["own"] == len(reader["read"])


def test_groups_have_modes_of_their_own(start_job: Start, tmp_path: Path) -> None:
    """In ssp each of two workers adds a half by itself, and a whole when the other has left."""
    (tmp_path / "limit").write_text("3")
    settings = groups(", mode: ssp, staleness: 3")
    start_job(SCRIPT, str(tmp_path), "read", servers=2, settings=settings).succeed()
    reader = record(tmp_path, 2)
    assert all(done / 2 - 3 <= least for done, least, _ in reader["read"])  # the bound is updates
    assert 12.0 <= reader["read"][-1][1] <= 18.0


def test_a_checkpoint_holds_the_whole_model(start_job: Start, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir()
    again.mkdir()
    job = start_job(SCRIPT, str(first), "save", servers=2, settings=groups()).succeed()
    root = job.run.path / "checkpoints"
    assert main(["checkpoint", "verify", str(root)]) == 0
    exported = tmp_path / "model.pt"
    assert main(["checkpoint", "export", str(root), str(exported)]) == 0
    saved = torch.load(exported)
    assert saved.keys() == {"tick", "tock", "seen"}
    assert torch.equal(saved["tick"], torch.full((40_000,), 4.0))
    assert saved["tock"].unique().numel() == 1 and saved["seen"].tolist() == [0.0] * 3
    settings = {**groups(workers=1), "checkpoint.restore": str(root)}
    start_job(SCRIPT, str(again), "save", servers=1, settings=settings).succeed()
    tick, tock = record(again, 0), record(again, 1)
    assert (tick["start"], tock["start"]) == (4, int(saved["tock"][0, 0]))
    for found in (tick, tock):
        assert found["restored"] == {"at": "end"}
        assert torch.equal(found["values"]["tock"], saved["tock"]) or found is tick
        # Each group goes on at once, so what is read may be newer; what is trained is not.
    assert torch.equal(tick["values"]["tick"], saved["tick"])


def test_what_is_refused_says_why(start_job: Start, tmp_path: Path) -> None:
    job = start_job(SCRIPT, str(tmp_path), "names", servers=1, settings=groups())
    assert any(job.wait().values())
    assert "paradis.wrap refused: worker groups refused: tack matches no group" in job.logs()
    job = start_job(SCRIPT, str(tmp_path), "add", servers=1, settings=groups())
    assert any(job.wait().values())
    assert "add_param_group refused: in a job with several worker groups" in job.logs()
