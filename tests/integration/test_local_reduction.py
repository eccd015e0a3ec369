"""The workers of one host reduce first: the same bits, fewer bytes to the servers."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preloaded import Job, preloaded, start_job

from paradis.observe.spans import read_spans, span_files

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


PLAIN = """
import json, sys, torch, paradis
import torch.distributed as distributed
from paradis.frontend import session

torch.manual_seed(3)
model = torch.nn.Sequential(*[torch.nn.Linear(160, 160) for _ in range(4)])
optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
rank, world = paradis.rank(), paradis.world_size()
if "own" in sys.argv:  # the script's own group, made after wrap, under the same names
    distributed.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/own",
                                   rank=rank, world_size=world)
torch.manual_seed(rank)
for step in range(7 if "leave" not in sys.argv or rank else 3):
    optimizer.wait()
    metrics = optimizer.metrics()  # of the steps before, which all have finished when one leaves
    model(torch.randn(4, 160)).square().mean().backward()
    if "sever" in sys.argv and (rank, step) == (2, 3):
        session.current().node.sharing._group.sever()
    optimizer.step()
    optimizer.zero_grad()
if "own" in sys.argv:
    ranks = torch.full((), float(rank))
    distributed.all_reduce(ranks)
    assert ranks == sum(range(world)), ranks
    distributed.destroy_process_group()
result = {"metrics": metrics, "bytes": sum(p.nbytes for p in model.parameters()),
          "sum": sum(float(p.sum()) for p in model.parameters())}
open(f"{sys.argv[1]}/{rank}.json", "w").write(json.dumps(result))
"""
ON = SMALL | {"training.local_reduction": "on"}


def run(start_job: Start, directory: Path, *words: str, **settings: str) -> tuple[Job, list[Any]]:
    """Run the plain script with four workers; return the job and its results."""
    script = directory / "train.py"
    script.write_text(PLAIN)
    job = start_job(script, str(directory), *words, workers=4, servers=2, settings=ON | settings)
    job.succeed()
    return job, [json.loads((directory / f"{rank}.json").read_text()) for rank in range(4)]


def test_one_model_leaves_the_host_in_a_step(start_job: Start, tmp_path: Path) -> None:
    """And one comes in; each worker pushes about a quarter of it, and records its sums."""
    job, found = run(start_job, tmp_path, **{"observe.trace": "true"})
    whole = 6 * found[0]["bytes"]
    pushed = [result["metrics"]["push_bytes"] for result in found]
    assert sum(pushed) == whole
    assert max(pushed) - min(pushed) <= 6 * (64 << 10)
    links = [result["metrics"]["payload_bytes_in"] for result in found]
    assert sum(links) <= whole + 4 * found[0]["bytes"]  # and once the initial values, to each
    spans = [s for path in span_files(job.run.path) for s in read_spans(path).spans]
    spans = [s for s in spans if s.step < 6]
    sums = [s for s in spans if s.stage == "local reduction"]
    assert {s.step for s in sums} == set(range(6)) and all(s.enter_ns <= s.leave_ns for s in sums)
    assert sum(s.bytes for s in sums) == 4 * whole
    assert {s.what for s in spans if s.stage == "push"} == {"sum", "update"}


def test_the_script_may_have_a_process_group_of_its_own(start_job: Start, tmp_path: Path) -> None:
    run(start_job, tmp_path, "own")


def test_a_worker_that_leaves_early(start_job: Start, tmp_path: Path) -> None:
    """The others go on without local reduction: its group was of four."""
    job, found = run(start_job, tmp_path, "leave")
    assert len({result["sum"] for result in found[1:]}) == 1
    assert max(result["metrics"]["push_bytes"] for result in found[1:]) >= 3 * found[1]["bytes"]


def test_workers_that_lose_each_other_push_directly(start_job: Start, tmp_path: Path) -> None:
    """In the middle of a step, whose bits and those of all later ones stay the same."""
    whole, broken = (tmp_path / name for name in ("whole", "broken"))
    for directory in (whole, broken):
        directory.mkdir()
    _, expected = run(start_job, whole)
    job, found = run(start_job, broken, "sever")
    assert {result["sum"] for result in found} == {expected[0]["sum"]}
    assert all(result["metrics"]["push_bytes"] >= 2 * result["bytes"] for result in found)
    told = "no local reduction any more on the host of worker-"
    assert any(told in job.run.log(f"worker-{rank}").read_text() for rank in range(4))


def test_a_worker_that_is_killed_is_named_and_nothing_stays(cluster: Any) -> None:
    cluster.write(
        "def before_step(step, model, optimizer):\n"
        "    if step == 2 and rank == 1: os.kill(os.getpid(), 9)\n"
    )
    job = cluster.start("run", "--workers", "4", "--servers", "2", "--set",
                        "training.local_reduction=on", "train.py")  # fmt: skip
    code, err = job.end()
    assert code == 128 + 9
    assert "error: worker 1 was killed by signal 9 (SIGKILL)" in err
    assert err.count("error:") == 1, err
    cluster.assert_clean()
