"""Overlap ``layerwise`` has the bits of ``none``, whatever reads a parameter, however late.

In the held runs no update is installed while nobody waits: a read that did not wait would see the
value before, and the bits would differ.
"""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Job, Preloaded, environment, preloaded, start_job
from torch import nn
from torch.nn import functional

import paradis
from paradis.errors import NonFiniteGradient
from paradis.frontend.reading import Held
from paradis.runtime.worker_node import WorkerNode

STEPS = 4
DEADLINE_S = 60.0
Bits = list[torch.Tensor]


class TiedByFunction(nn.Module):
    """The output layer is the embedding's weight, read by no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(self.embedding(tokens)))
        return functional.linear(hidden, self.embedding.weight)


class SometimesUsed(nn.Module):
    """A branch that is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x)
        return self.other(x) if self.calls % 2 else x


def encoder(_: list[Any]) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return model, lambda: model(torch.randn(2, 5, 16)).square().mean()


def tied(_: list[Any]) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = TiedByFunction()
    tokens = torch.arange(10) % 11
    return model, lambda: functional.cross_entropy(model(tokens), (tokens + 1) % 11)


def perceptron(_: list[Any]) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 6))
    return model, lambda: model(torch.randn(8, 6)).square().mean()


def branches(_: list[Any]) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = SometimesUsed()
    return model, lambda: model(torch.randn(8, 6)).square().mean()


MODELS = {"encoder": encoder, "tied": tied, "perceptron": perceptron, "branches": branches}
After = Callable[[nn.Module, Any, list[torch.Tensor], list[Any]], None]


def own_average(model: nn.Module, _: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    """The script keeps an average over a list of parameters that it made before."""
    if not seen:
        seen += [torch.zeros_like(p) for p in held]
    with torch.no_grad():
        for average, parameter in zip(seen, held, strict=True):
            average.lerp_(parameter, 0.25)


def named(model: nn.Module, _: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    seen += [value.detach().clone() for _, value in model.named_parameters()]


def state(model: nn.Module, _: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    seen += [value.clone() for value in model.state_dict().values()]


def copies(model: nn.Module, _: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    seen += [p.detach() for p in copy.deepcopy(model).parameters()]


def clamps(model: nn.Module, _: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    for parameter in held:
        parameter.data.clamp_(-0.2, 0.2)


def waits(model: nn.Module, optimizer: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    optimizer.wait()
    assert not any(isinstance(p, Held) for p in held)
    seen += [p.detach().clone() for p in held]


def zeroes_in_place(model: nn.Module, _: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    for parameter in held:
        if parameter.grad is not None:
            parameter.grad.zero_()


def keeps_memory(model: nn.Module, opt: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    opt.zero_grad(set_to_none=False)


def optimizer_state(model: nn.Module, opt: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    entries = opt.state_dict()["state"].values()
    seen += [t.clone() for entry in entries for t in entry.values() if torch.is_tensor(t)]


def nothing(model: nn.Module, _: Any, held: list[torch.Tensor], seen: list[Any]) -> None:
    """Gradients accumulate over all steps, in the same memory."""


AFTER: dict[str, After] = {
    f.__name__: f
    for f in (own_average, named, state, copies, clamps, waits, zeroes_in_place, keeps_memory,
              optimizer_state, nothing)
}  # fmt: skip


def train(model_name: str, after: After, *, zero: bool) -> Bits:
    """Train in a job of its own; return everything that can be seen."""
    torch.manual_seed(5)
    model, loss_of = MODELS[model_name]([])
    held, seen, losses = list(model.parameters()), [], []
    optimizer = paradis.wrap(model, torch.optim.Adam(held, lr=0.05))
    for step in range(STEPS):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        after(model, optimizer, held, seen)
        if zero:
            optimizer.zero_grad()
        assert optimizer.steps_done == step + 1
    values = [p.detach().clone() for p in held]
    paradis.close()
    return [*losses, *values, *seen]


@pytest.fixture(autouse=True)
def sessions_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PARADIS_COMMUNICATION_SHARD_SIZE", "64KiB")
    monkeypatch.setenv("PARADIS_COMMUNICATION_BUCKET_SIZE", "64B")
    monkeypatch.setenv("PARADIS_COMMUNICATION_SMALL_TENSOR", "64B")
    yield
    paradis.close()


class Holding:
    """Installs updates only while somebody waits for some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._waiting = 0
        wait_until, install = WorkerNode.wait_until, WorkerNode._install

        def waiting(node: WorkerNode, *args: Any, **kwargs: Any) -> None:
            self._count(1)
            try:
                wait_until(node, *args, **kwargs)
            finally:
                self._count(-1)

        def installing(node: WorkerNode, effect: Any) -> None:
            # The script's own thread may be handling the event: it cannot wait for itself.
            own = threading.current_thread() is threading.main_thread()
            with self._changed:
                assert own or self._changed.wait_for(lambda: self._waiting, DEADLINE_S)
            install(node, effect)

        monkeypatch.setattr(WorkerNode, "wait_until", waiting)
        monkeypatch.setattr(WorkerNode, "_install", installing)

    def _count(self, change: int) -> None:
        with self._changed:
            self._waiting += change
            self._changed.notify_all()


def same(first: Bits, second: Bits) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


PAIRS = [(model, "own_average") for model in MODELS] + [
    (model, after)
    for model, after in zip(["encoder", "tied", "branches"] * len(AFTER), AFTER, strict=False)
    if after != "own_average"
]


@pytest.mark.parametrize("model, after", PAIRS)
def test_the_bits_are_those_of_no_overlap(
    model: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = after not in ("zeroes_in_place", "keeps_memory", "nothing")
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "none")
    expected = train(model, AFTER[after], zero=zero)
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "layerwise")
    assert same(train(model, AFTER[after], zero=zero), expected)
    Holding(monkeypatch)
    assert same(train(model, AFTER[after], zero=zero), expected)


def test_step_returns_before_any_update_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "layerwise")
    Holding(monkeypatch)
    torch.manual_seed(5)
    model = nn.Linear(40, 40)
    optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.randn(2, 40)).square().mean().backward()
        optimizer.step()
        assert all(isinstance(p, Held) for p in model.parameters())
        optimizer.zero_grad()
        assert all(isinstance(p, Held) for p in model.parameters())
        model(torch.randn(2, 40))
        assert not any(isinstance(p, Held) for p in model.parameters())


def test_only_what_is_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer is read while the second one's update is still outside."""
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "layerwise")
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(2, 40)).square().mean().backward()
    optimizer.step()
    optimizer.wait()
    binding = optimizer._bound
    late = {
        s for s, m in binding.memory.shards.items()
        if any(m.plan.segments[i].parameter >= 2 for i in range(len(m.plan.segments)))
    }  # fmt: skip
    let_in, install = threading.Event(), WorkerNode._install

    def installing(node: WorkerNode, effect: Any) -> None:
        if effect.shard in late:
            assert let_in.wait(DEADLINE_S)
        install(node, effect)

    monkeypatch.setattr(WorkerNode, "_install", installing)
    optimizer.zero_grad()
    model(torch.randn(2, 40)).square().mean().backward()
    optimizer.step()
    first, second = model[0], model[1]
    assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
    first(torch.randn(2, 40))
    assert isinstance(second.weight, Held)
    let_in.set()
    second(torch.randn(2, 40))
    assert not isinstance(second.weight, Held)


class Ready(torch.autograd.Function):
    """Hands out gradients of ones, and reads no value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.ones(ctx.shape)


@pytest.mark.parametrize("early", ["false", "true"])
def test_backward_goes_on_while_updates_arrive(monkeypatch: pytest.MonkeyPatch, early: str) -> None:
    """No layer reads its parameters: a whole pass is done before the step before has arrived."""
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "layerwise")
    monkeypatch.setenv("PARADIS_TRAINING_EARLY_UPDATE", early)
    weights = nn.ParameterList([nn.Parameter(torch.zeros(40, 40)) for _ in range(3)])
    optimizer = paradis.wrap(weights, torch.optim.SGD(weights.parameters(), lr=0.25))
    own = [*weights]

    def backward() -> None:
        optimizer.zero_grad()
        x = torch.zeros(1, requires_grad=True)
        for weight in own:
            x = Ready.apply(x, weight)  # type: ignore[no-untyped-call]
        x.sum().backward()

    backward()
    optimizer.step()
    optimizer.wait()
    let_in, install = threading.Event(), WorkerNode._install

    def installing(node: WorkerNode, effect: Any) -> None:
        assert let_in.wait(DEADLINE_S)
        install(node, effect)

    monkeypatch.setattr(WorkerNode, "_install", installing)
    backward()
    optimizer.step()
    backward()
    assert all(isinstance(w, Held) for w in own), "nothing has arrived"
    let_in.set()
    optimizer.step()
    assert all(torch.equal(w, torch.full_like(w, -0.75)) for w in own)


def test_parameters_added_while_a_step_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Bits:
        torch.manual_seed(5)
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        model = nn.Sequential(first, second)
        optimizer = paradis.wrap(model, torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9))
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.05})
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
        values = [p.detach().clone() for p in model.parameters()]
        paradis.close()
        return values

    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "none")
    expected = run()
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "layerwise")
    Holding(monkeypatch)
    assert same(run(), expected)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_an_error_of_the_step_comes_where_the_script_waits_next(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Codes are made after ``step()``: what cannot be coded is told as late."""
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "layerwise")
    monkeypatch.setenv("PARADIS_TRAINING_COMPRESSION", codec)
    monkeypatch.setenv("PARADIS_TRAINING_COMPRESSION_BENEFIT", "assumed")
    model = nn.Linear(64, 64)
    optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (model(torch.ones(1, 64)).sum() * float("nan")).backward()
    optimizer.step()
    with pytest.raises(NonFiniteGradient, match="gradient of weight"):
        model(torch.ones(1, 64))
    assert type(model.weight) is nn.Parameter, "readable as it is"
    with pytest.raises(NonFiniteGradient):
        optimizer.step()


def test_compiled_code_gets_finished_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds tensors, not names: where anything was compiled, step() waits."""
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "layerwise")
    monkeypatch.setattr("paradis.frontend.overlap.compiles", lambda: True)
    model = nn.Linear(4, 4)
    optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert type(model.weight) is nn.Parameter


LAST = """
import sys, torch, paradis
model = torch.nn.Linear(4, 4)
optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
(model(torch.ones(1, 4)).sum() * float("nan")).backward()
optimizer.step()
print("the script ends", flush=True)
"""


def test_an_error_of_the_last_step_is_the_process_s(preloaded: Preloaded, tmp_path: Path) -> None:
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(LAST)
    settings = {"PARADIS_TRAINING_OVERLAP": "layerwise"}
    number = preloaded.start(["python", str(script)], environment(settings), tmp_path, log)
    assert preloaded.code(number) == 1
    assert "the script ends" in log.read_text() and "holds NaN" in log.read_text()


SCRIPT = Path(__file__).with_name("exact_worker.py")
SMALL = {
    "training.overlap": "layerwise",
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
}


def test_several_workers_and_racks(start_job: Callable[..., Job], tmp_path: Path) -> None:
    counts = {"workers": 4, "servers": 2, "dispatchers": 2, "racks": 2}
    start_job(SCRIPT, str(tmp_path), "few", settings=SMALL, **counts).succeed()
