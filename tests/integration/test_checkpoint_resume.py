"""Checkpoints of real jobs: what they hold, resuming on other counts, damage, loss of a server."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Job, preloaded, start_job

from paradis.cli.main import main
from paradis.storage.export import optimizer_state_dict
from paradis.storage.manifest import latest, step_directories

SCRIPT = Path(__file__).with_name("checkpoint_worker.py")
SMALL = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
}
SAVED, LAST = 4, 7

Start = Callable[..., Job]


class Run:
    """A finished or started job and what its script writes."""

    def __init__(self, job: Job, out: Path) -> None:
        self.job = job
        self.out = out
        self.root = job.run.path / "checkpoints"

    def record(self, step: int, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.out / f"{rank}-{step}.pt", weights_only=False)
        return found


@pytest.fixture(scope="module")
def train(
    start_job: Start,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Run]:
    """Start the script; ``restore`` is a checkpoint to begin from."""

    def run(*words: str, restore: Path | None = None, **options: Any) -> Run:
        out = tmp_path_factory.mktemp("out")
        settings = SMALL | options.pop("settings", {})
        if restore is not None:
            settings["checkpoint.restore"] = str(restore)
        if options.pop("held", False):
            os.mkfifo(out / "go")
        return Run(start_job(SCRIPT, str(out), *words, settings=settings, **options), out)

    return run


@pytest.fixture(scope="module")
def saved(train: Callable[..., Run]) -> Run:
    """An uninterrupted run of one worker and two servers that saved while it trained on."""
    run = train(str(LAST), str(SAVED), workers=1, servers=2)
    run.job.succeed()
    return run


def assert_same(got: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, where
        assert torch.equal(got, wanted), where
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key in wanted:
            assert_same(got[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), where
        for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert got == wanted, where


def held(record: dict[str, Any]) -> dict[str, Any]:
    """Return values and optimizer state without what the scheduler sets anew on resuming."""
    parts = {name: record[name] for name in ("net", "tied", "sgd")}
    return parts | {"adam": record["adam"]["state"]}


@pytest.mark.parametrize(("workers", "servers"), [(1, 3), (1, 1), (2, 3)])
def test_resume_on_other_counts(
    workers: int, servers: int, saved: Run, train: Callable[..., Run]
) -> None:
    """From 2 servers to 3 and 1, from 1 worker to 2: the same bits at once and in the end."""
    run = train(str(LAST), restore=saved.root, workers=workers, servers=servers)
    run.job.succeed()
    for rank in range(workers):
        assert_same(held(run.record(SAVED, rank)), held(saved.record(SAVED)))
        end = run.record(LAST, rank)
        assert end.pop("restored") == {"epoch": 3, "loss": 0.25}
        wanted = saved.record(LAST)
        wanted.pop("restored")
        assert_same(end, wanted)
        assert end["epoch"] == LAST


def test_two_workers_to_one(train: Callable[..., Run]) -> None:
    """Buffers are those of worker 0, whatever data the other one saw."""
    two = train(str(LAST), str(SAVED), "ranked", workers=2, servers=2)
    two.job.succeed()
    first, second = two.record(SAVED, 0), two.record(SAVED, 1)
    assert not torch.equal(first["net"]["norm.running_mean"], second["net"]["norm.running_mean"])
    again = train(str(SAVED), restore=two.root, workers=2, servers=1)
    again.job.succeed()
    one = train(str(LAST), restore=two.root, workers=1, servers=2)
    one.job.succeed()
    for record in (again.record(SAVED, 0), again.record(SAVED, 1), one.record(SAVED)):
        assert_same(held(record), held(first))


def test_saved_by_itself(train: Callable[..., Run]) -> None:
    """Every second step, the newest two are kept, each with both groups."""
    settings = {"checkpoint.every_steps": "2", "checkpoint.keep": "2"}
    run = train(str(LAST), workers=1, servers=2, settings=settings)
    run.job.succeed()
    assert [d.name for d in step_directories(run.root)] == ["step-00000004", "step-00000006"]
    assert latest(run.root) == run.root / "step-00000006"
    for directory in step_directories(run.root):
        assert sorted(d.name for d in directory.iterdir()) == ["group-0", "group-1"]


def test_command_on_a_real_checkpoint(
    saved: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``ls``, ``verify`` and ``export``; the export goes on in plain torch, to the same bits."""
    assert main(["checkpoint", "ls", str(saved.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("complete" in line and "step 4" in line for line in lines)
    assert main(["checkpoint", "verify", str(saved.root)]) == 0
    checkpoint = saved.root / f"step-{SAVED:08d}"
    output = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(checkpoint), str(output)]) == 0
    for index, name in enumerate(("net", "tied")):
        output = tmp_path / f"{name}.pt"
        assert main(["checkpoint", "export", str(checkpoint / f"group-{index}"), str(output)]) == 0
        assert_same(torch.load(output), saved.record(SAVED)[name])
    go_on_plainly(checkpoint, tmp_path, saved.record(LAST))


def go_on_plainly(checkpoint: Path, exported: Path, wanted: dict[str, Any]) -> None:
    """Train from exported values and state to the last step without Paradis."""
    worker = importlib.import_module("checkpoint_worker")
    net, tied = worker.build()
    net.load_state_dict(torch.load(exported / "net.pt"))
    tied.load_state_dict(torch.load(exported / "tied.pt"))
    assert tied.head.weight is tied.embed.weight
    plain = worker.optimizers(net, tied)
    for index, optimizer in enumerate(plain):
        optimizer.load_state_dict(optimizer_state_dict(checkpoint / f"group-{index}"))
    schedule = torch.optim.lr_scheduler.StepLR(plain[0], 2, 0.5, last_epoch=SAVED - 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(SAVED, LAST):
        worker.train_step(step, net, tied, *plain)
        schedule.step()
    torch.set_num_threads(threads)
    assert_same(dict(net.state_dict()), dict(wanted["net"]))
    assert_same(dict(tied.state_dict()), dict(wanted["tied"]))


# ------------------------------------------------------------------------- what goes wrong


@pytest.fixture
def damaged(saved: Run, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to damage."""
    target = tmp_path / f"step-{SAVED:08d}"
    for source in (saved.root / target.name).rglob("*.*"):
        copy = target / source.relative_to(saved.root / target.name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    return target


def assert_refused(run: Run, *texts: str) -> None:
    """Assert that every worker ends with one line that holds these texts."""
    codes = run.job.wait()
    for name in (n for n in codes if n.startswith("worker")):
        lines = [line for line in run.job.log(name).splitlines() if "error" in line]
        assert codes[name] != 0 and len(lines) == 1, (codes, run.job.logs())
        assert all(text in lines[0] for text in texts), lines


def test_flipped_byte(
    damaged: Path, train: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """``verify`` and resuming name the file."""
    file = max(damaged.rglob("*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    assert main(["checkpoint", "verify", str(damaged)]) == 1
    assert str(file) in capsys.readouterr().out
    run = train(str(LAST), restore=damaged, workers=2, servers=2)
    assert_refused(run, str(file), "damaged")


def test_another_model(saved: Run, train: Callable[..., Run]) -> None:
    """The message says what differs."""
    run = train(str(LAST), "other", restore=saved.root, workers=2, servers=2)
    assert_refused(run, "embed.weight", "(211, 103)", "(211, 101)", "another model")


def test_incomplete(damaged: Path, train: Callable[..., Run]) -> None:
    """A group without its manifest."""
    (damaged / "group-1" / "manifest.json").unlink()
    run = train(str(LAST), restore=damaged, workers=2, servers=2)
    assert_refused(run, "not complete", "group-1")


def test_server_lost_during_a_save(train: Callable[..., Run]) -> None:
    """The last complete checkpoint stays usable, and is what the directory resumes from."""
    run = train(str(LAST), str(SAVED), "6", workers=1, servers=2, held=True)
    with open(run.out / "go", "w") as go:
        server = run.job.preloaded.pid(run.job.nodes["server-1"])
        os.kill(server, signal.SIGSTOP)  # it will never write its part
        go.write("\n")
    partial = run.root / "step-00000006" / "group-1"
    run.job.until(lambda: any(partial.glob("server-0-*.safetensors")))
    run.job.kill("server-1")
    codes = run.job.wait()
    assert codes["worker-0"] != 0 and "server-1" in run.job.log("worker-0")
    assert latest(run.root) == run.root / f"step-{SAVED:08d}"
    again = train(str(SAVED + 1), restore=run.root, workers=1, servers=2)
    again.job.succeed()
    assert_same(held(again.record(SAVED)), held(run.record(SAVED)))
