"""Pieces of a parameter are updated to the very bits of plain torch on the whole parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paradis.errors import ConfigError, LocalProtocolError, SnapshotCorrupt
from paradis.numerics.elementwise import ELEMENTWISE, options_of
from paradis.numerics.shard_optimizer import ShardOptimizer

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
LENGTH = 64 * 7 + 37
CUTS = (0, 64, 320, LENGTH)
STEPS = 5
COMMON: list[dict[str, Any]] = [{}, {"maximize": True}, {"foreach": True}]
DECAY: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "foreach": True},
    {"weight_decay": 0.1, "maximize": True, "foreach": True},
]
FUSED: list[dict[str, Any]] = [{"fused": True}, {"fused": True, "weight_decay": 0.1}]
AMSGRAD: list[dict[str, Any]] = [
    {"amsgrad": True, "lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6},
    {"amsgrad": True, "foreach": True},
    {"amsgrad": True, "fused": True, "maximize": True},
]
OWN: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "foreach": True, "nesterov": True},
        {"momentum": 0.9, "fused": True, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.1, "maximize": True, "fused": True},
        *FUSED,
    ],
    "Adam": [*AMSGRAD, *FUSED, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "AdamW": [*AMSGRAD, *FUSED],
    "Adagrad": [
        {"initial_accumulator_value": 0.5, "lr_decay": 0.1},
        {"initial_accumulator_value": 0.5, "foreach": True},
        *FUSED,
    ],
    "RMSprop": [
        {"momentum": 0.9},
        {"centered": True},
        {"momentum": 0.9, "centered": True, "alpha": 0.5},
        {"momentum": 0.9, "centered": True, "foreach": True},
    ],
    "Adadelta": [{"rho": 0.5, "lr": 0.3}],
    "Adamax": [{"betas": (0.5, 0.9)}],
    "NAdam": [{"momentum_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"betas": (0.5, 0.6)}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "Rprop": [{"etas": (0.4, 1.3), "step_sizes": (1e-5, 0.1)}],
    "ASGD": [{"t0": 1.0, "lambd": 0.01}, {"t0": 1.0, "foreach": True}],
    "OneBitAdam": [{}, {"weight_decay": 0.1, "freeze_step": 1000, "scale": "l2"}],
    "DistributedLion": [{}, {"weight_decay": 0.1, "betas": (0.5, 0.9)}],
}


def cases() -> Iterator[tuple[str, dict[str, Any], torch.dtype]]:
    for name, entry in ELEMENTWISE.items():
        decay = [] if name == "Rprop" else DECAY
        shared = [] if entry.coded else [*COMMON, *decay]
        for arguments in (*shared, *OWN[name]):
            for dtype in DTYPES[:2] if entry.coded else DTYPES:
                if not (name == "SGD" and arguments.get("fused") and dtype == torch.bfloat16):
                    yield name, arguments, dtype


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Every update runs on one thread, on the server and in the comparison."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor[start:stop] for start, stop in itertools.pairwise(CUTS)]


class Pair:
    """Plain torch on a whole parameter beside shard optimizers over its pieces."""

    def __init__(self, name: str, arguments: dict[str, Any], dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        value = torch.randn(LENGTH).to(dtype)
        self.name = name
        self.whole = torch.nn.Parameter(value.clone())
        kind: Any = ELEMENTWISE[name].kind
        self.plain: torch.optim.Optimizer = kind([self.whole], **arguments)
        self.values = [piece.clone() for piece in pieces(value)]
        self.shards = self.build()

    def build(self) -> list[ShardOptimizer]:
        """Pieces 0 and 1 share a shard, piece 2 has one of its own."""
        options = options_of(self.plain.param_groups[0])
        shares = (self.values[:2], self.values[2:])
        return [ShardOptimizer(self.name, options, share) for share in shares]

    def step(self, lr_factor: float = 1.0, present: bool = True) -> None:
        group = self.plain.param_groups[0]
        group["lr"] *= lr_factor
        grad = torch.randn(LENGTH).to(self.whole.dtype) if present else None
        self.whole.grad = None if grad is None else grad.clone()
        self.plain.step()
        parts: list[torch.Tensor | None]
        parts = [None] * 3 if grad is None else [piece.clone() for piece in pieces(grad)]
        options = {**options_of(group), "initial_lr": 0.5}
        self.shards[0].apply(parts[:2], options)
        self.shards[1].apply(parts[2:], options)

    def states(self) -> list[tuple[dict[str, torch.Tensor], dict[str, float]]]:
        return [self.shards[0].state(0), self.shards[0].state(1), self.shards[1].state(0)]

    def restart(self) -> None:
        """Carry the state over into new objects, as a restore or a move does."""
        saved = [
            ({key: value.clone() for key, value in tensors.items()}, scalars)
            for tensors, scalars in self.states()
        ]
        self.shards = self.build()
        for index, (tensors, scalars) in enumerate(saved):
            self.shards[index // 2].load_state(index % 2, tensors, scalars)

    def check(self) -> None:
        for mine, theirs in zip(self.values, pieces(self.whole.detach()), strict=True):
            assert same_bits(mine, theirs)
        plain = self.plain.state.get(self.whole, {})
        for index, (tensors, scalars) in enumerate(self.states()):
            expected = {key: value for key, value in plain.items() if value is not None}
            assert {*tensors, *scalars} == set(expected)
            for key, tensor in tensors.items():
                assert same_bits(tensor, pieces(expected[key])[index])
            for key, scalar in scalars.items():
                assert scalar == expected[key].item()


@pytest.mark.parametrize(("name", "arguments", "dtype"), list(cases()))
def test_pieces_have_the_bits_of_the_whole(
    name: str, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    pair = Pair(name, arguments, dtype)
    pair.check()
    for step in range(STEPS):
        if step == 3:
            pair.restart()
        pair.step(lr_factor=0.5 if step == 2 else 1.0, present=step != 1)
        pair.check()


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_state_before_the_first_step_can_be_carried_over(name: str) -> None:
    pair = Pair(name, {}, torch.float32)
    pair.restart()
    pair.step()
    pair.check()


@pytest.mark.parametrize("name", list(ELEMENTWISE))
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_restored_numbers_have_the_dtype_of_fresh_ones(name: str, default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        pair = Pair(name, {}, torch.float32)
        pair.step()
        pair.restart()
        pair.step()
        pair.check()
        for tensors, _ in pair.states():
            assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
        scalar_bytes = len(ELEMENTWISE[name].scalars) * default.itemsize
        tensor_bytes = sum(t.numel() * 4 for t in pair.shards[1].state(0)[0].values())
        assert pair.shards[1].state_bytes() == tensor_bytes + scalar_bytes
    finally:
        torch.set_default_dtype(before)


def test_segments_of_different_parameters_step_on_their_own() -> None:
    values = [torch.zeros(64), torch.zeros(3)]
    shard = ShardOptimizer("Adam", {"lr": 0.1}, values)
    shard.apply([torch.ones(64), None], {"lr": 0.1})
    shard.apply([torch.ones(64), torch.ones(3)], {"lr": 0.1})
    assert [shard.state(index)[1]["step"] for index in (0, 1)] == [2.0, 1.0]
    shard.apply([None, None], {"lr": 0.1})
    assert shard.state(0)[1]["step"] == 2.0


def test_options_take_effect_only_with_their_step_and_stay_when_left_out() -> None:
    value = torch.zeros(1)
    options: dict[str, Any] = {"lr": 1.0}
    shard = ShardOptimizer("SGD", options, [value])
    shard.apply([torch.ones(1)], options)
    options["lr"] = 10.0
    shard.apply([torch.ones(1)], options)
    shard.apply([torch.ones(1)], {})
    assert value.item() == -21.0


def test_momentum_switched_on_later_starts_as_in_torch() -> None:
    pair = Pair("SGD", {}, torch.float32)
    pair.step()
    pair.plain.param_groups[0]["momentum"] = 0.9
    pair.step()
    pair.step()
    pair.check()


def test_gradients_are_released_even_after_an_error() -> None:
    value, grad = torch.zeros(2), torch.ones(2)
    shard = ShardOptimizer("Adam", {"lr": 0.1}, [value])
    shard.apply([grad], {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"torch.optim.Adam; torch says KeyError.*max_exp_avg_sq"):
        shard.apply([grad], {"lr": 0.1, "amsgrad": True})
    with pytest.raises(LocalProtocolError, match="segment 0; expected"):
        shard.apply([torch.ones(3)], {})
    with pytest.raises(LocalProtocolError, match="expected 1 gradients"):
        shard.apply([], {})
    before = value.clone()
    shard.apply([None], {"amsgrad": False})
    assert torch.equal(value, before)


@pytest.mark.parametrize(
    ("name", "options", "value", "text"),
    [
        ("Adam", {"lr": -1.0}, torch.zeros(2), "ValueError: Invalid learning rate"),
        ("Adam", {"fused": True, "foreach": True}, torch.zeros(2), "cannot be"),
        ("LBFGS", {}, torch.zeros(2), "optimizer refused: LBFGS"),
        ("SGD", {}, torch.zeros(2, dtype=torch.complex64), "complex64"),
        ("SGD", {}, torch.zeros(2, dtype=torch.int64), "int64"),
        ("SGD", {"fused": True}, torch.zeros(2, dtype=torch.bfloat16), "191763"),
        ("OneBitAdam", {}, torch.zeros(2, dtype=torch.bfloat16), "bfloat16 with OneBitAdam"),
        ("DistributedLion", {}, torch.zeros(2, dtype=torch.float16), "use autocast"),
        ("OneBitAdam", {"amsgrad": True}, torch.zeros(2), "amsgrad=True of OneBitAdam"),
        ("DistributedLion", {"lr": -1.0}, torch.zeros(2), "lr and weight_decay of 0 or more"),
    ],
)
def test_construction_refusals(
    name: str, options: dict[str, Any], value: torch.Tensor, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        ShardOptimizer(name, options, [value])


@pytest.mark.parametrize("value", [torch.zeros(2, 2), torch.zeros(4)[::2]])
def test_values_that_are_not_flat_are_refused(value: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match="segment 0; expected a flat contiguous"):
        ShardOptimizer("SGD", {}, [value])


def test_fused_sgd_in_half_precision_is_refused_when_switched_on_later() -> None:
    shard = ShardOptimizer("SGD", {}, [torch.zeros(2, dtype=torch.float16)])
    with pytest.raises(ConfigError, match="construct SGD without fused"):
        shard.apply([None], {"fused": True})


@pytest.mark.parametrize(
    ("name", "tensors", "scalars", "text"),
    [
        ("Adam", {"exp_avg": torch.zeros(4)}, {"step": 1.0}, "expected .*exp_avg_sq"),
        ("Adam", {}, {"step": 1.0}, "expected .*exp_avg"),
        ("SGD", {"exp_avg": torch.zeros(4)}, {}, "momentum_buffer"),
        ("SGD", {"momentum_buffer": torch.zeros(5)}, {}, r"got \(5,\)"),
        ("SGD", {"momentum_buffer": torch.zeros(4, dtype=torch.float64)}, {}, "float64"),
        ("Adagrad", {}, {}, "expected .*'sum', 'step'"),
    ],
)
def test_state_of_another_model_is_refused_and_changes_nothing(
    name: str, tensors: dict[str, torch.Tensor], scalars: dict[str, float], text: str
) -> None:
    shard = ShardOptimizer(name, {"lr": 0.1}, [torch.zeros(4)])
    shard.apply([torch.ones(4)], {})
    before = shard.state(0)
    with pytest.raises(SnapshotCorrupt, match=text):
        shard.load_state(0, tensors, scalars)
    after = shard.state(0)
    assert after[1] == before[1] and list(after[0]) == list(before[0])
    assert all(after[0][key] is before[0][key] for key in before[0])


def test_loading_an_empty_state_starts_anew() -> None:
    shard = ShardOptimizer("Adam", {"lr": 0.1}, [torch.zeros(4)])
    shard.apply([torch.ones(4)], {})
    shard.load_state(0, {}, {})
    assert shard.state(0) == ({}, {}) and shard.state_bytes() == 0
