"""Overlap ``double_buffer``: ``x[t+1] = x[t] - update(g(x[t-1]))``, to the last bit.

The twin is plain PyTorch: it keeps each gradient for one step and hands it to torch's optimizer.
"""
# ruff: noqa: F811 - fixtures are imported, and named as arguments

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Job, preloaded, start_job  # noqa: F401
from torch import nn

import paradis
from paradis.errors import ConfigError, StateError
from paradis.runtime.worker_node import WorkerNode

Bits = list[torch.Tensor]
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
Sample = Callable[[int], torch.Tensor]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


class Quadratic(nn.Module):
    """``h x x / 2`` in one dimension."""

    def __init__(self, curvature: float = 1.0) -> None:
        super().__init__()
        self.curvature = curvature
        self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.curvature * self.x.square()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 6))


def sample(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def twin(model: nn.Module, make: Make, steps: int, *, warmup: int = 0, drains: tuple[int, ...] = ()
         ) -> list[Bits]:  # fmt: skip
    """Return the parameters after each step, and after the last gradient in the end."""
    parameters = list(model.parameters())
    optimizer = make(parameters)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = []
    late: tuple[Bits, float] | None = None

    def apply(gradients: Bits, rate: float) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        now, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], rate
        optimizer.step()
        optimizer.param_groups[0]["lr"] = now

    for step in range(steps):
        optimizer.zero_grad()
        model(sample(step)).square().mean().backward()
        fresh = [p.grad.clone() for p in parameters if p.grad is not None]
        rate = optimizer.param_groups[0]["lr"]
        if late is not None:
            apply(*late)
        late = fresh, rate
        if step < warmup or step in drains:
            apply(*late)
            late = None
        seen.append([p.detach().clone() for p in parameters])
        schedule.step()
    if late is not None:
        apply(*late)
    seen.append([p.detach().clone() for p in parameters])
    return seen


After = Callable[[int, Any, nn.Module], None]


def train(model: nn.Module, make: Make, steps: int, after: After | None = None) -> list[Bits]:
    """The same through Paradis."""
    parameters = list(model.parameters())
    optimizer = paradis.wrap(model, make(parameters))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = []
    for step in range(optimizer.steps_done, steps):
        model(sample(step)).square().mean().backward()
        optimizer.step()
        assert optimizer.steps_done == optimizer.metrics()["steps"] == step + 1
        if after is not None:
            after(step, optimizer, model)
        else:
            optimizer.zero_grad()
        seen.append([p.detach().clone() for p in parameters])
        schedule.step()
    paradis.close()
    seen.append([p.detach().clone() for p in parameters])
    return seen


def assert_same(got: list[Bits], wanted: list[Bits]) -> None:
    assert len(got) == len(wanted)
    for step, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert all(map(torch.equal, one, other)), f"after step {step}"


pytestmark = pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step", "ignore:GradScaler is going to stop"
)


@pytest.fixture(autouse=True)
def delayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "double_buffer")
    monkeypatch.setenv("PARADIS_TRAINING_DELAY_WARMUP_STEPS", "0")
    monkeypatch.setenv("PARADIS_COMMUNICATION_SHARD_SIZE", "64KiB")
    monkeypatch.setenv("PARADIS_COMMUNICATION_BUCKET_SIZE", "64B")
    monkeypatch.setenv("PARADIS_COMMUNICATION_SMALL_TENSOR", "64B")
    yield
    paradis.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_quadratic_follows_the_recurrence(name: str) -> None:
    got = train(Quadratic(), OPTIMIZERS[name], 12)
    assert_same(got, twin(Quadratic(), OPTIMIZERS[name], 12))
    assert torch.equal(got[0][0], torch.ones(1, dtype=torch.float64)), "step 0 has no gradient"
    assert not torch.equal(got[-1][0], got[-2][0]), "the last gradient is applied at the end"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("warmup", [0, 3, 100])
def test_a_model_follows_the_recurrence(
    name: str, warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any warm-up; one that is never over trains without delay."""
    monkeypatch.setenv("PARADIS_TRAINING_DELAY_WARMUP_STEPS", str(warmup))
    torch.manual_seed(5)
    first = perceptron()
    torch.manual_seed(5)
    second = perceptron()
    wanted = twin(second, OPTIMIZERS[name], 7, warmup=warmup)
    assert_same(train(first, OPTIMIZERS[name], 7), wanted)


def keeps_gradients(step: int, optimizer: Any, model: nn.Module) -> None:
    """Their memory stays, and the next backward writes into it."""
    optimizer.zero_grad(set_to_none=False)


def spoils_gradients(step: int, optimizer: Any, model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))
    optimizer.zero_grad()


@pytest.mark.parametrize("after", [keeps_gradients, spoils_gradients], ids=lambda f: f.__name__)
def test_gradients_are_the_script_s_own_again_after_step(after: After) -> None:
    torch.manual_seed(5)
    first = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 6))
    second = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 6))
    second.load_state_dict(first.state_dict())
    wanted = twin(second, OPTIMIZERS["Adam"], 6)
    assert_same(train(first, OPTIMIZERS["Adam"], 6, after), wanted)


@pytest.mark.parametrize(("rate", "converges"), [(0.99, True), (1.01, False)])
def test_momentum_s_margin_is_gone(rate: float, converges: bool) -> None:
    """Averaged momentum 0.9 is stable for lr * h < 1 (without delay, for < 38)."""
    model = Quadratic()
    inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, dampening=0.9)
    optimizer = paradis.wrap(model, inner)
    sizes = []
    for _ in range(900):
        model(torch.empty(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(abs(float(model.x.detach())))
    early, end = max(sizes[300:500]), max(sizes[700:])
    assert (end < early) == converges


@pytest.mark.parametrize("how", ["wait", "state_dict", "save_checkpoint"])
def test_what_asks_for_the_whole_gets_the_late_gradient(how: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    first = perceptron()
    second = perceptron()
    second.load_state_dict(first.state_dict())

    def after(step: int, optimizer: Any, model: nn.Module) -> None:
        optimizer.zero_grad()
        if step == 3:
            getattr(optimizer, how)()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARADIS_CHECKPOINT_DIRECTORY", str(tmp_path))
        got = train(first, OPTIMIZERS["Adam"], 7, after)
    assert_same(got, twin(second, OPTIMIZERS["Adam"], 7, drains=(3,)))


def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARADIS_CHECKPOINT_EVERY_STEPS", "3")
    monkeypatch.setenv("PARADIS_CHECKPOINT_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("PARADIS_TRAINING_DELAY_WARMUP_STEPS", "1")

    def make(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    def run(steps: int) -> Bits:
        torch.manual_seed(5)
        model = perceptron()
        optimizer = paradis.wrap(model, make(list(model.parameters())))
        for step in range(optimizer.steps_done, steps):
            model(sample(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        paradis.close()
        return [p.detach().clone() for p in model.parameters()]

    whole = run(8)
    monkeypatch.setenv("PARADIS_CHECKPOINT_RESTORE", str(tmp_path / "step-00000003"))
    assert all(map(torch.equal, run(8), whole))


def test_a_changed_value_is_refused_unless_the_late_step_is_in() -> None:
    model = perceptron()
    optimizer = paradis.wrap(model, OPTIMIZERS["SGD"](list(model.parameters())))
    for step in range(2):
        model(sample(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    with torch.no_grad():
        model[2].weight.clamp_(-0.01, 0.01)
    model(sample(2)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model[2].bias.zero_()
    model(sample(3)).square().mean().backward()
    with pytest.raises(StateError, match=r"value of 2\.bias .* optimizer\.wait\(\) first"):
        optimizer.step()
    paradis.close()
    assert not model[2].bias.any(), "what the script made of it stays"


def test_a_scaler_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARADIS_TRAINING_DELAY_WARMUP_STEPS", "1000")
    model = perceptron()
    optimizer = paradis.wrap(model, OPTIMIZERS["SGD"](list(model.parameters())))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(sample(0)).square().mean()).backward()
    with pytest.raises(ConfigError, match=r"GradScaler .* double_buffer"):
        scaler.step(optimizer)


def test_the_caveat_is_told_once_when_the_delay_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, str]] = []
    steps = 0
    monkeypatch.setattr(
        WorkerNode, "announce", lambda self, level, text, once=False: said.append((steps, text))
    )
    monkeypatch.setenv("PARADIS_TRAINING_DELAY_WARMUP_STEPS", "2")
    model = perceptron()
    optimizer = paradis.wrap(model, OPTIMIZERS["SGD"](list(model.parameters())))
    for steps in range(5):
        model(sample(steps)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [step for step, _ in said] == [2]
    assert "from step 2 on" in said[0][1] and "< 1" in said[0][1]


SCRIPT = Path(__file__).with_name("delayed_worker.py")


def test_two_workers_agree_with_the_mean(start_job: Callable[..., Job], tmp_path: Path) -> None:
    """Also with a norm that is clipped over both of them."""
    settings = {"training.overlap": "double_buffer", "training.delay_warmup_steps": "2"}
    job = start_job(SCRIPT, str(tmp_path), workers=2, servers=2, settings=settings)
    job.succeed()
    first, second, wanted = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("0", "1", "twin")
    )
    assert_same(first, wanted)
    assert_same(second, wanted)


def test_a_worker_with_a_batch_less_ends_with_its_last_gradient_in(
    start_job: Callable[..., Job], tmp_path: Path
) -> None:
    settings = {"training.overlap": "double_buffer", "training.delay_warmup_steps": "2"}
    job = start_job(SCRIPT, str(tmp_path), "uneven", workers=2, servers=2, settings=settings)
    job.succeed()
    first, second, wanted = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("0", "1", "twin")
    )
    assert_same(first, wanted)
    assert_same(second[:-1], wanted[:5])
    assert_same(second[-1:], wanted[5:6])
    assert "worker 1 finished early" in job.logs()


def test_workers_that_wait_unlike_are_refused(
    start_job: Callable[..., Job], tmp_path: Path
) -> None:
    settings = {"training.overlap": "double_buffer", "training.delay_warmup_steps": "0"}
    job = start_job(SCRIPT, str(tmp_path), "unlike", workers=2, servers=1, settings=settings)
    codes = job.wait()
    assert codes["worker-0"] == 1
    assert "steps late on worker" in job.logs() and "on every worker" in job.logs()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this host has none")
def test_on_a_gpu_the_recurrence_is_the_same() -> None:
    torch.manual_seed(5)
    first = perceptron()
    second = perceptron()
    second.load_state_dict(first.state_dict())
    wanted = twin(second, OPTIMIZERS["SGD"], 5)
    model = first.cuda()
    parameters = list(model.parameters())
    optimizer = paradis.wrap(model, OPTIMIZERS["SGD"](parameters))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(5):
        model(sample(step).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    optimizer.wait()
    for parameter, value in zip(parameters, wanted[-1], strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), value)
