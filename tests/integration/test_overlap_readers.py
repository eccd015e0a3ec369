"""What scripts do between ``step()`` and the next forward has the bits of overlap ``none``.

As in `test_overlap`, no update is installed while nobody waits: what reads a parameter unseen would
find the value before.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from test_overlap import STEPS, Bits, Holding, same, sessions_end  # noqa: F401
from torch import nn
from torch.utils import checkpoint, dlpack

import paradis
from paradis.frontend.reading import Held
from paradis.runtime.worker_node import WorkerNode
from paradis.storage.export import read_state_dict
from paradis.storage.manifest import group_directory, step_directory

Seen = list[Any]
After = Callable[[nn.Module, Any, Seen], None]
Build = Callable[[], tuple[nn.Module, torch.Tensor]]


class Recomputed(nn.Module):
    """Activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint.checkpoint(lambda y: torch.tanh(self.first(y)), x, use_reentrant=False)
        assert isinstance(inner, torch.Tensor)
        return self.second(inner)


class OwnKind(nn.Parameter):
    """A parameter with a torch function of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 6)), torch.randn(8, 6)


def recomputed() -> tuple[nn.Module, torch.Tensor]:
    return Recomputed(), torch.randn(8, 6)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return layer, torch.randn(2, 5, 16)


def convolution() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    return model.to(memory_format=torch.channels_last), torch.randn(2, 3, 8, 8)


def large() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(200, 200), torch.randn(2, 200)  # cut into three shards


def own_kind() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Linear(4, 4)
    model.weight = OwnKind(model.weight.detach())
    return model, torch.randn(2, 4)


def vector(model: nn.Module, _: Any, seen: Seen) -> None:
    seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())


def vector_back(model: nn.Module, _: Any, seen: Seen) -> None:
    halved = nn.utils.parameters_to_vector(model.parameters()).detach() / 2
    nn.utils.vector_to_parameters(halved, model.parameters())


def averaged_model(model: nn.Module, _: Any, seen: Seen) -> None:
    if not seen:
        seen.append(torch.optim.swa_utils.AveragedModel(model))
    seen[0].update_parameters(model)
    seen += [p.detach().clone() for p in seen[0].parameters()]


def transforms(model: nn.Module, _: Any, seen: Seen) -> None:
    for parameter in model.parameters():
        seen.append(torch.func.grad(lambda w: w.pow(3).sum())(parameter).detach().clone())
        seen.append(torch.func.vmap(lambda w: w.sum() * 2)(parameter).detach().clone())
        seen.append(torch.func.vjp(lambda w: w.pow(2).sum(), parameter)[0].detach().clone())


def functional(model: nn.Module, _: Any, seen: Seen) -> None:
    parameters = dict(model.named_parameters())
    result = torch.func.functional_call(model, parameters, (torch.ones(2, 6),))
    seen.append(result.detach().clone())


@pytest.mark.filterwarnings("ignore:To copy construct")
def constructors(model: nn.Module, _: Any, seen: Seen) -> None:
    for parameter in model.parameters():
        seen.append(torch.tensor(parameter).detach())
        seen.append(torch.as_tensor(parameter, dtype=torch.float64).detach())


def own_parameter(model: nn.Module, _: Any, seen: Seen) -> None:
    for parameter in model.parameters():
        made = nn.Parameter(parameter)
        assert type(made) is nn.Parameter and made.data_ptr() == parameter.data_ptr()
        seen.append(made.detach().clone())


def handed_over(model: nn.Module, _: Any, seen: Seen) -> None:
    for parameter in model.parameters():
        seen.append(dlpack.from_dlpack(dlpack.to_dlpack(parameter)).clone())


def saved(model: nn.Module, _: Any, seen: Seen) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    seen += [p.detach() for p in torch.load(file, weights_only=False).parameters()]
    seen += [p.detach() for p in pickle.loads(pickle.dumps(list(model.parameters())))]


def kept_views(model: nn.Module, _: Any, seen: Seen) -> None:
    """Views made once, read in every step, as some moving averages have them."""
    if not seen:
        seen.append([p.data for p in model.parameters()])
    seen += [view.clone() for view in seen[0]]


def kept_arrays(model: nn.Module, _: Any, seen: Seen) -> None:
    if not seen:
        seen.append([p.detach().numpy() for p in model.parameters()])
    seen += [torch.from_numpy(view.copy()) for view in seen[0]]


def kept_state(model: nn.Module, _: Any, seen: Seen) -> None:
    if not seen:
        seen.append(model.state_dict())
    seen += [value.clone() for value in seen[0].values()]


def evaluates(model: nn.Module, _: Any, seen: Seen) -> None:
    """In evaluation torch's encoder has a fast path, with other bits."""
    model.eval()
    with torch.no_grad():
        seen.append(model(torch.linspace(0, 1, 160).view(2, 5, 16)).clone())
    model.train()


def initialises(model: nn.Module, _: Any, seen: Seen) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
            parameter[0].zero_()


def loads(model: nn.Module, _: Any, seen: Seen) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def converts(model: nn.Module, _: Any, seen: Seen) -> None:
    seen += [p.detach() for p in model.to(torch.float64).parameters()]
    model.to(torch.float32)


def trace(model: nn.Module, _: Any, seen: Seen) -> None:
    traced = torch.jit.trace(model, torch.ones(2, 6))
    seen.append(traced(torch.ones(2, 6)).detach().clone())


CASES: list[tuple[Build, After]] = [
    (perceptron, f)
    for f in (vector, vector_back, averaged_model, transforms, functional, constructors,
              own_parameter, handed_over, saved, kept_views, kept_arrays, kept_state,
              initialises, loads, converts, trace)
]  # fmt: skip
CASES += [(recomputed, vector), (encoder, evaluates), (convolution, kept_state), (large, vector),
          (own_kind, vector)]  # fmt: skip


def train(build: Build, after: After) -> Bits:
    """Train in a job of its own; return everything that can be seen."""
    torch.manual_seed(5)
    model, x = build()
    seen: Seen = []
    optimizer = paradis.wrap(model, torch.optim.Adam(model.parameters(), lr=0.05))
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model, optimizer, seen)
    values = [p.detach().clone() for p in model.parameters()]
    paradis.close()
    return values + [each for each in seen if isinstance(each, torch.Tensor)]


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:`torch.jit")
@pytest.mark.parametrize("build, after", CASES, ids=lambda f: f.__name__)
def test_the_bits_are_those_of_no_overlap(
    build: Build, after: After, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "none")
    expected = train(build, after)
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "layerwise")
    Holding(monkeypatch)
    assert same(train(build, after), expected)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the worker announced."""
    texts: list[str] = []
    monkeypatch.setattr(
        WorkerNode, "announce", lambda self, level, text, once=False: texts.append(text)
    )
    return texts


def wrapped(model: nn.Module) -> Any:
    return paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def wrapped_part(model: nn.Module, part: nn.Module) -> Any:
    return paradis.wrap(model, torch.optim.SGD(part.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "build", [perceptron, recomputed, encoder, convolution, large], ids=lambda f: f.__name__
)
def test_an_ordinary_loop_waits_for_nothing(
    build: Build, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Nothing but Paradis holds the memory of parameters and gradients there."""
    Holding(monkeypatch)
    model, x = build()
    optimizer = wrapped(model)
    norms, losses = [], []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        losses.append(loss)
        optimizer.step()
        assert all(isinstance(p, Held) for p in model.parameters())
        optimizer.zero_grad()
    assert not said


def test_two_optimizers_of_one_model_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Each binds, as values to store, what the other one trains."""
    Holding(monkeypatch)
    model, x = perceptron()
    assert isinstance(model, nn.Sequential)
    optimizers = [wrapped_part(model, model[0]), wrapped_part(model, model[2])]
    for _ in range(3):
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert all(isinstance(p, Held) for p in model.parameters())
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert not said


def test_a_checkpoint_stores_what_another_optimizer_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARADIS_CHECKPOINT_DIRECTORY", str(tmp_path))
    Holding(monkeypatch)
    model, x = perceptron()
    assert isinstance(model, nn.Sequential)
    first, second = wrapped_part(model, model[0]), wrapped_part(model, model[2])
    for optimizer in (first, second):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(model[2].weight, Held)
    first.save_checkpoint(wait=True)
    stored = read_state_dict(group_directory(step_directory(tmp_path, 1), 0))
    assert torch.equal(stored["2.weight"], model[2].weight)


@pytest.mark.parametrize("what", ["gradients", "a flat buffer"])
def test_kept_gradients_are_not_written_while_they_are_sent(
    what: str, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    Holding(monkeypatch)
    model, x = perceptron()
    optimizer = wrapped(model)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    if what == "a flat buffer":
        pieces = flat.split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        del pieces, piece
    for _ in range(3):
        model(x).square().mean().backward()
        kept = [p.grad for p in parameters] if what == "gradients" else [flat]
        optimizer.step()
        assert not any(isinstance(p, Held) for p in parameters)
        torch._foreach_zero_(kept)
        del kept
    assert len(said) == 1 and "0.weight" in said[0] and "let go of it" in said[0]


def test_a_forked_child_finds_finished_values(monkeypatch: pytest.MonkeyPatch) -> None:
    Holding(monkeypatch)
    model, x = perceptron()
    optimizer = wrapped(model)
    before = [p.detach().clone() for p in model.parameters()]
    model(x).square().mean().backward()
    optimizer.step()
    assert all(isinstance(p, Held) for p in model.parameters())
    pid = os.fork()
    if not pid:
        plain = all(type(p) is nn.Parameter for p in model.parameters())
        new = not any(map(torch.equal, before, (p.detach() for p in model.parameters())))
        os._exit(0 if plain and new else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_interrupt_of_a_wait_leaves_the_step_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Holding(monkeypatch)
    model, x = perceptron()
    optimizer = wrapped(model)
    model(x).square().mean().backward()
    optimizer.step()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerNode, "wait_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert isinstance(next(model.parameters()), Held)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.wait()
    assert optimizer.steps_done == 2


def saved_at(line: int, model: nn.Module, run: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Run, and save the model when so many of our lines have begun, as a signal handler would."""
    saved: dict[str, torch.Tensor] = {}
    begun = 0

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal begun
        if f"{os.sep}paradis{os.sep}" not in frame.f_code.co_filename:
            return None
        begun += what == "line"
        if begun == line and not saved:
            saved.update({k: v.clone() for k, v in model.state_dict().items()})
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return saved


@pytest.mark.timeout(400)  # some 900 steps, traced
def test_a_signal_handler_may_save_the_model_at_any_line_of_step() -> None:
    """It finds one version, that of before or that of after, and never waits for itself."""
    previous = signal.signal(signal.SIGUSR2, lambda *_: None)  # as events go where there is one
    try:
        model, x = perceptron()
        optimizer = wrapped(model)
        line, found = 0, dict[str, int]()
        while True:
            line += 1
            out = model(x)
            (out - torch.randn_like(out)).square().mean().backward()  # never done, so values change
            before = {k: v.clone() for k, v in model.state_dict().items()}
            saved = saved_at(line, model, optimizer.step)
            optimizer.wait()
            optimizer.zero_grad()
            if not saved:
                break
            same = [k for k, v in saved.items() if torch.equal(v, before[k])]
            after = [k for k, v in saved.items() if torch.equal(v, model.state_dict()[k])]
            assert len(saved) in (len(same), len(after)), (line, same, after)
            found["before" if len(same) == len(saved) else "after"] = line
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert line > 100 and found["before"] < found["after"] == line - 1


def test_a_parameter_with_a_torch_function_of_its_own_is_waited_for(said: list[str]) -> None:
    model, x = own_kind()
    optimizer = wrapped(model)
    model(x).square().mean().backward()
    optimizer.step()
    assert type(model.weight) is OwnKind
    assert said == ["step() waits for all updates: weight is of OwnKind, a class of its own"]


def test_the_step_on_its_way_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    Holding(monkeypatch)
    model, x = perceptron()
    optimizer = wrapped(model)
    for step in range(1, 4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.metrics()["steps"] == optimizer.steps_done == step
    optimizer.wait()
    assert optimizer.metrics()["steps"] == 3
