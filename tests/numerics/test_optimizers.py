"""The optimizers on their own: AdamW before the freeze, the coders' bits after it, convergence."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import paradis
from paradis.core.freezing import FreezeWatch
from paradis.errors import ConfigError, NonFiniteGradient
from paradis.numerics.coding import ServerCoder, State, WorkerCoder
from paradis.numerics.elementwise import options_of
from paradis.numerics.lion_coding import LionServer, LionWorker
from paradis.numerics.onebit_coding import OneBitAdamServer, OneBitAdamWorker, onebit_codec
from paradis.optim import DistributedLion, OneBitAdam

SHAPES = ((40, 60), (60,), (3, 5, 7))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def give_gradients(step: int, *lists: list[torch.nn.Parameter], absent: int = -1) -> None:
    """Give all lists the same gradients; row 3 of the first parameter never has one."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, shape in enumerate(SHAPES):
        grad = torch.randn(shape, generator=generator)
        if index == 0:
            grad[3] = 0.0
        for each in lists:
            each[index].grad = None if index == absent else grad.to(each[index].dtype).clone()


def same(first: list[torch.nn.Parameter], second: list[torch.nn.Parameter]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().reshape(-1)


def test_they_are_public_and_importing_the_package_stays_light() -> None:
    assert paradis.optim.OneBitAdam is OneBitAdam
    check = "import sys, paradis; assert not {'torch', 'numpy', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_before_the_freeze_it_is_adamw(dtype: torch.dtype) -> None:
    mine, plain = parameters(dtype), parameters(dtype)
    ours = OneBitAdam(mine, 0.01, (0.8, 0.95), 1e-6, 0.1, freeze_step=10)
    theirs = torch.optim.AdamW(plain, 0.01, (0.8, 0.95), 1e-6, 0.1)
    for step in range(10):
        give_gradients(step, mine, plain, absent=1 if step in (0, 5) else -1)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
        assert same(mine, plain) and not ours.frozen
    give_gradients(10, mine, plain)
    ours.step()
    theirs.step()
    assert ours.frozen and not same(mine, plain)


class Pair:
    """One worker and one server with all parameters in one shard."""

    def __init__(
        self, worker: WorkerCoder, make: Callable[[list[torch.Tensor]], ServerCoder],
        values: list[torch.Tensor], states: list[State], options: Any,
    ) -> None:  # fmt: skip
        self.copies = [value.clone() for value in values]
        self.values, self.worker, self.server = values, worker, make(values)
        self.worker.begin(states, options)
        self.server.begin(states, options)

    def step(self, gradients: list[torch.Tensor | None], options: Any) -> None:
        code = torch.empty(self.worker.code_bytes, dtype=torch.uint8)
        self.worker.encode(gradients, code, options)
        total = torch.empty(sum(v.numel() for v in self.values), dtype=self.values[0].dtype)
        self.server.add(code, total, first=True)
        present = [g is not None for g in gradients]
        unused: Any = None
        self.server.update(total, unused, present, options)
        self.worker.keep()
        self.worker.install(self.server.code, self.copies, present, options)

    def check(self, owner: list[torch.nn.Parameter]) -> None:
        for parameter, value, copy_ in zip(owner, self.values, self.copies, strict=True):
            assert torch.equal(flat(parameter).view(torch.uint8), value.view(torch.uint8))
            assert torch.equal(copy_.view(torch.uint8), value.view(torch.uint8))


LENGTHS = [math.prod(shape) for shape in SHAPES]
SPANS = [(sum(LENGTHS[:i]), n) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["l1", "l2"])
def test_alone_it_has_the_bits_of_a_worker_and_a_server(dtype: torch.dtype, scale: Any) -> None:
    mine = parameters(dtype)
    optimizer = OneBitAdam(mine, 0.01, weight_decay=0.1, freeze_step=20, scale=scale)
    for step in range(20):
        give_gradients(step, mine)
        optimizer.step()
    group = optimizer.param_groups[0]
    states: list[State] = [
        (
            {k: flat(optimizer.state[p][k]) for k in ("exp_avg", "exp_avg_sq")},
            {"step": float(optimizer.state[p]["step"])},
        )
        for p in mine
    ]
    codec = onebit_codec(options_of(group), dtype)
    pair = Pair(
        OneBitAdamWorker(LENGTHS, codec),
        lambda values: OneBitAdamServer(SPANS, values, codec),
        [flat(p) for p in mine],
        states,
        options_of(group),
    )
    for step in range(20, 40):
        give_gradients(step, mine, absent=2 if step == 25 else -1)
        group["lr"] *= 0.95
        group["betas"] = (0.9, 0.999) if step < 30 else (0.8, 0.999)
        optimizer.step()
        pair.step([None if p.grad is None else flat(p.grad) for p in mine], options_of(group))
        pair.check(mine)
    for key, coder in (("error", pair.worker), ("server_error", pair.server)):
        for p, memory in zip(mine, coder.memories()[key], strict=True):
            assert torch.equal(flat(optimizer.state[p][key]), memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lion_alone_has_the_bits_of_a_vote_of_one(dtype: torch.dtype) -> None:
    mine = parameters(dtype)
    optimizer = DistributedLion(mine, 0.01, weight_decay=0.1)
    options = options_of(optimizer.param_groups[0])
    pair = Pair(
        LionWorker(LENGTHS, dtype),
        lambda values: LionServer(SPANS, values, [0, 0, 0]),
        [flat(p) for p in mine],
        [({}, {})] * 3,
        options,
    )
    for step in range(20):
        give_gradients(step, mine, absent=1 if step == 4 else -1)
        optimizer.step()
        pair.step([None if p.grad is None else flat(p.grad) for p in mine], options)
        pair.check(mine)


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    mine = parameters()
    optimizer = OneBitAdam(mine, freeze_step=5)
    for step in range(8):
        give_gradients(step, mine)
        optimizer.step()
    others = parameters()
    for other, source in zip(others, mine, strict=True):
        other.data.copy_(source)
    restored = OneBitAdam(others, freeze_step=99)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert restored.frozen and restored.param_groups[0]["freeze_step"] == 5
    twin = copy.deepcopy(optimizer)
    for step in range(8, 12):
        give_gradients(step, mine, others)
        optimizer.step()
        restored.step()
        assert same(mine, others)
    assert twin.frozen and twin.param_groups[0]["scale"] == "l1"


def test_a_state_of_adamw_is_taken_over() -> None:
    plain = parameters()
    theirs = torch.optim.AdamW(plain)
    give_gradients(1, plain)
    theirs.step()
    ours = OneBitAdam(parameters(), freeze_step=7)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["freeze_step"] == 7
    ours.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def test_what_is_not_finite_is_refused_after_the_freeze_and_changes_nothing() -> None:
    mine = parameters()
    optimizer = OneBitAdam(mine, freeze_step=2)
    for step in range(4):
        give_gradients(step, mine)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(mine)
    give_gradients(5, mine)
    grad = mine[2].grad
    assert grad is not None
    grad[1, 2, 3] = math.nan
    with pytest.raises(NonFiniteGradient):
        optimizer.step()
    assert same(mine, before[1])
    for index, state in before[0]["state"].items():
        for key, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][index][key], value)


def test_a_parameter_without_gradients_before_the_freeze_moves_by_weight_decay_alone() -> None:
    mine = parameters()
    optimizer = OneBitAdam(mine, 0.1, weight_decay=0.5, freeze_step=2)
    for step in range(2):
        give_gradients(step, mine, absent=1)
        optimizer.step()
    before = flat(mine[1])
    give_gradients(2, mine)
    optimizer.step()
    expected = before - 0.1 * (0.5 * before)
    assert torch.allclose(flat(mine[1]), expected, rtol=1e-6) and mine[1].grad is not None


def test_strided_parameters_move_like_packed_ones() -> None:
    mine, packed = parameters(), parameters()
    mine[0] = torch.nn.Parameter(mine[0].detach().t().contiguous().t())
    assert not mine[0].is_contiguous()
    ours, theirs = (OneBitAdam(each, freeze_step=2) for each in (mine, packed))
    for step in range(6):
        give_gradients(step, mine, packed)
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, packed, strict=True))


def test_steady_gradients_freeze_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.nn.Parameter(torch.zeros(64))
    optimizer = OneBitAdam([value], 1e-4, (0.9, 0.99), warm_up_steps=230)
    seen: list[int] = []
    observe = FreezeWatch.observe

    def noted(self: FreezeWatch, step: int, norms: Any, counts: Any) -> bool:
        seen.append(step)
        return observe(self, step, norms, counts)

    monkeypatch.setattr(FreezeWatch, "observe", noted)
    frozen_at = 0
    generator = torch.Generator().manual_seed(1)
    for step in range(400):
        value.grad = torch.randn(64, generator=generator).sign()
        optimizer.step()
        if optimizer.frozen:
            frozen_at = step
            break
    assert seen == [50, 100, 150, 200, 250, 300, 350]
    assert frozen_at == 350  # three checks after the warm-up: 250, 300, 350


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: OneBitAdam(p, freeze_step=0), "freeze_step of OneBitAdam"),
        (lambda p: OneBitAdam(p, warm_up_steps=-1), "warm_up_steps of 0 or more"),
        (lambda p: OneBitAdam(p, scale="max"), "scale 'l1' or 'l2'"),
        (lambda p: OneBitAdam([p[0].half()]), "float16 of OneBitAdam"),
        (lambda p: DistributedLion([p[0].bfloat16()]), "bfloat16 of DistributedLion"),
        (lambda p: DistributedLion(p, betas=(1.0, 0.9)), r"betas in \[0, 1\)"),
        (lambda p: OneBitAdam([{"params": p, "freeze_step": 3}]), "all groups freeze together"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make([p.detach() for p in parameters()])
    with pytest.raises(TypeError, match="unexpected keyword arguments.*amsgrad"):
        OneBitAdam(parameters(), amsgrad=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [OneBitAdam, DistributedLion])
def test_sparse_gradients_are_refused(kind: Any) -> None:
    embedding = torch.nn.Embedding(5, 4)
    optimizer = kind(embedding.parameters(), **({"freeze_step": 1} if kind is OneBitAdam else {}))
    embedding.weight.grad = torch.ones(5, 4)
    optimizer.step()
    embedding.weight.grad = torch.ones(5, 4).to_sparse()
    with pytest.raises(ConfigError, match="sparse gradient"):
        optimizer.step()


def test_a_closure_is_called_and_hooks_run_once() -> None:
    mine, calls = parameters(), [0, 0]
    optimizer = OneBitAdam(mine, freeze_step=1)

    def count(*_: Any) -> None:
        calls[0] += 1

    def closure() -> str:
        assert torch.is_grad_enabled()
        calls[1] += 1
        give_gradients(calls[1], mine)
        return "loss"

    optimizer.register_step_post_hook(count)
    for _ in range(3):
        assert optimizer.step(closure) == "loss"
    assert calls == [3, 3]
