"""Gradients that are let go in backward: the same values, and what cannot go with it is refused."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Job, preloaded, start_job

import paradis
import paradis.optim
from paradis.errors import ConfigError, NonFiniteGradient, ParadisError, StateError
from paradis.storage.manifest import step_directories

SCRIPT = Path(__file__).with_name("freeing_worker.py")
FREEZE = 2
SMALL = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "32KiB",
    "communication.small_tensor": "32KiB",
    "training.free_gradients": "true",
}

Start = Callable[..., Job]


class Lone:
    """One worker in this process; ``weight`` travels as codes, ``bias`` in full."""

    def __init__(self, optimizer: str = "OneBitAdam", **options: Any) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(200, 200)
        if optimizer == "OneBitAdam":
            options.setdefault("freeze_step", FREEZE)
        kind = getattr(paradis.optim, optimizer, None) or getattr(torch.optim, optimizer)
        self.optimizer = paradis.wrap(self.model, kind(self.model.parameters(), lr=1e-3, **options))

    def backward(self, seed: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 200, generator=generator)
        (self.model(x).square().mean() * scale).backward()

    def step(self, seed: int) -> None:
        self.optimizer.zero_grad()
        self.backward(seed)
        self.optimizer.step()

    def until_codes(self) -> None:
        for seed in range(FREEZE):
            self.step(seed)

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.fixture
def lone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lone]]:
    def start(
        *, free: bool = True, overlap: str = "layerwise", shard: str = "64KiB", **options: Any
    ) -> Lone:
        monkeypatch.setenv("PARADIS_TRAINING_FREE_GRADIENTS", str(free).lower())
        monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", overlap)
        for name, size in (
            ("SHARD_SIZE", shard),
            ("BUCKET_SIZE", "32KiB"),
            ("SMALL_TENSOR", "32KiB"),
        ):
            monkeypatch.setenv(f"PARADIS_COMMUNICATION_{name}", size)
        return Lone(**options)

    yield start
    paradis.close()


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
@pytest.mark.parametrize("scale", ["l1", "l2"])
def test_the_same_values(lone: Callable[..., Lone], overlap: str, scale: str) -> None:
    found = []
    for free in (False, True):
        shard = "64KiB" if scale == "l1" else "4MiB"  # one scale per tensor needs whole tensors
        run = lone(free=free, overlap=overlap, shard=shard, scale=scale)
        steps = []
        for seed in range(6):
            run.step(seed)
            steps.append(run.values())
        found.append(steps)
        paradis.close()
    for first, second in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_gradient_is_gone_after_backward(lone: Callable[..., Lone]) -> None:
    run = lone()
    run.until_codes()
    run.optimizer.zero_grad()
    weight, bias = run.model.parameters()
    run.backward(7)
    assert weight.grad is None and bias.grad is not None
    binding = run.optimizer._binding
    assert binding is not None
    binding.compressor._drain()
    handed = binding.collector._handed[0]
    assert handed is not None and not handed.flat.numel(), "its memory is let go before step()"
    assert not binding.memory.gradients().keys() & {0}
    run.optimizer.step()
    run.optimizer.wait()
    assert binding.collector.non_finite() == ""


def test_a_gradient_of_a_pool_is_only_dropped(lone: Callable[..., Lone]) -> None:
    """A script may give all parameters gradients in one memory of its own: nobody writes there."""
    pool = torch.randn(200 * 200, generator=torch.Generator().manual_seed(5))
    before, found = pool.clone(), []

    def assign(parameter: torch.Tensor) -> None:
        parameter.grad = pool[: parameter.numel()].view(parameter.shape)

    for free in (False, True):
        run = lone(free=free)
        collector = run.optimizer._binding.collector  # type: ignore[union-attr]
        collector.detach()
        for parameter in run.model.parameters():
            parameter.register_post_accumulate_grad_hook(assign)
        collector.attach()  # its hooks come after those of the script now
        for seed in range(5):
            run.step(seed)
        found.append(run.values())
        paradis.close()
    assert torch.equal(pool, before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("coded", [False, True])
def test_a_second_gradient_is_refused_by_name(lone: Callable[..., Lone], coded: bool) -> None:
    run = lone()
    if coded:
        run.until_codes()
    run.backward(1)
    with pytest.raises(StateError, match=r"gradient of (weight|bias) refused.*no_sync\(\)"):
        run.backward(2)


def test_a_gradient_that_the_script_puts_back_is_refused(lone: Callable[..., Lone]) -> None:
    run = lone()
    run.until_codes()
    run.backward(1)
    run.model.weight.grad = torch.zeros(200, 200)
    with pytest.raises(StateError, match="gradient of weight refused"):
        run.optimizer.step()


def test_accumulation_under_no_sync(lone: Callable[..., Lone]) -> None:
    found = []
    for free in (False, True):
        run = lone(free=free)
        for step in range(5):
            run.optimizer.zero_grad()
            with run.optimizer.no_sync():
                run.backward(3 * step)
                run.backward(3 * step + 1)
                if free:
                    assert all(p.grad is not None for p in run.model.parameters())
            if step != 3:  # else all that there is comes from before
                run.backward(3 * step + 2)
            run.optimizer.step()
        found.append(run.values())
        paradis.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("how", ["changed", "dropped"])
def test_what_would_be_lost_later_is_refused_at_once(lone: Callable[..., Lone], how: str) -> None:
    run = lone()
    run.backward(1)
    weight = run.model.weight
    assert weight.grad is not None, "this step is in full"
    if how == "changed":
        torch.nn.utils.clip_grad_norm_([weight], 1e-3)
    else:
        weight.grad = None
    with pytest.raises(StateError, match="gradient of weight was changed or dropped"):
        run.optimizer.step()


def test_what_needs_gradients_after_backward_is_refused(lone: Callable[..., Lone]) -> None:
    run = lone()
    run.step(0)
    with pytest.raises(ConfigError, match=r"clip_grad_norm_ refused: training\.free_gradients"):
        run.optimizer.clip_grad_norm_(1.0)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    scaler.scale(run.model(torch.ones(1, 200)).sum()).backward()
    with pytest.raises(ConfigError, match=r"a GradScaler with training\.free_gradients"):
        scaler.step(run.optimizer)


def test_between_backward_and_step(lone: Callable[..., Lone]) -> None:
    run = lone()
    run.until_codes()
    run.backward(1)
    for what in (run.optimizer.zero_grad, run.optimizer.save_checkpoint):
        with pytest.raises(StateError, match="refused between backward and step.*of weight counts"):
            what()
    run.optimizer.step()
    run.optimizer.zero_grad()


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
def test_nan_fails_the_job_by_name(lone: Callable[..., Lone], overlap: str) -> None:
    run = lone(overlap=overlap)
    run.until_codes()
    run.backward(1, scale=float("nan"))
    with pytest.raises(NonFiniteGradient, match="gradient of weight"):
        run.optimizer.step()
        run.optimizer.wait()
    with pytest.raises(ParadisError):  # nothing can be undone: a script cannot go on
        run.optimizer.zero_grad()
        run.backward(2)
        run.optimizer.step()
        run.optimizer.wait()


def test_other_optimizers_keep_gradients(lone: Callable[..., Lone]) -> None:
    run = lone(optimizer="Adam")
    for seed in range(3):
        run.optimizer.zero_grad()
        run.backward(seed)
        assert all(p.grad is not None for p in run.model.parameters())
        run.backward(seed)
        run.optimizer.step()


def run_job(
    start_job: Start, out: Path, what: str, steps: int, servers: int = 2, **settings: str
) -> tuple[Job, list[dict[str, str]]]:
    out.mkdir()
    for name in ("ahead", "saved"):
        os.mkfifo(out / name)
    given = SMALL | {key.replace("__", "."): value for key, value in settings.items()}
    words = [str(out), what, str(steps)]
    job = start_job(SCRIPT, *words, workers=2, servers=servers, settings=given)
    job.succeed()
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["digest"] == found[1]["digest"]
    return job, found


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
def test_worker_0_cannot_save_alone_within_training(
    start_job: Start, tmp_path: Path, overlap: str
) -> None:
    """The job goes on, with the same values; after the last step it can, and that resumes."""
    job, found = run_job(start_job, tmp_path / "1", "alone", 7, training__overlap=overlap)
    assert (
        "worker-1: what codes of worker 1 have left out after 4 steps is gone"
        in (found[0]["refused"])
    )
    assert "call save_checkpoint on every worker" in found[0]["refused"]
    assert not found[1]["refused"]
    root = job.run.path / "checkpoints"
    assert [path.name for path in step_directories(root)] == ["step-00000007"]
    _, whole = run_job(start_job, tmp_path / "2", "every", 10)
    _, resumed = run_job(
        start_job, tmp_path / "3", "every", 10, servers=3, checkpoint__restore=str(root)
    )
    assert resumed[0]["digest"] == whole[0]["digest"]


@pytest.mark.parametrize("at", [3, 6])
def test_scheduled_saves_need_no_call(start_job: Start, tmp_path: Path, at: int) -> None:
    """Updates in backward are allowed, too; on other servers it goes on bit for bit."""
    early = {"training__early_update": "true"}
    job, whole = run_job(
        start_job, tmp_path / "1", "every", 9, checkpoint__every_steps="3", checkpoint__keep="5",
        **early,
    )  # fmt: skip
    root = job.run.path / "checkpoints"
    saved = step_directories(root)
    assert len(saved) == 3
    restore = str(saved[at // 3 - 1])
    _, resumed = run_job(start_job, tmp_path / "2", "every", 9, 3, checkpoint__restore=restore)
    assert resumed[0]["digest"] == whole[0]["digest"]


def test_whoever_saves_without_worker_0_is_told(start_job: Start, tmp_path: Path) -> None:
    _, found = run_job(start_job, tmp_path / "1", "one", 6, communication__sync_timeout="16s")
    assert (
        "save_checkpoint timed out on worker 1 after 8 s: worker 0 did not ask"
        in (found[1]["refused"])
    )
