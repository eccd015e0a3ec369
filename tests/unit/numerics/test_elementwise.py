"""Which optimizers are accepted, and which options travel."""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec
import numpy
import pytest
import torch

from paradis.errors import ConfigError
from paradis.numerics.elementwise import (
    ELEMENTWISE,
    check_supported,
    elementwise,
    optimizer_name,
    options_of,
)
from paradis.optim import OneBitAdam
from paradis.wire.messages import Options


class MyAdam(torch.optim.Adam):
    """A user's subclass."""


class MyOneBit(OneBitAdam):
    """A user's subclass of ours."""


class Adam(torch.optim.Optimizer):
    """A user's class with a name of torch's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def matrix() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(4, 4))]


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_every_class_is_named_and_its_options_survive_msgpack(name: str) -> None:
    optimizer = elementwise(name).kind(matrix())  # type: ignore[call-arg]
    assert optimizer_name(optimizer) == name
    group = optimizer.param_groups[0]
    options = options_of(group)
    assert set(options) == set(group) - {"params"}
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=Options)
    assert decoded == options
    for key, value in options.items():
        assert value == (list(group[key]) if isinstance(group[key], tuple) else group[key])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MyOneBit(matrix()), "MyOneBit, because it is a subclass of OneBitAdam"),
        (lambda: MyAdam(matrix()), "MyAdam, because it is a subclass of Adam"),
        (lambda: Adam(matrix()), "not one of torch's own classes"),
        (lambda: torch.optim.LBFGS(matrix()), "torch.optim|LBFGS, because .* dot products"),
        (lambda: torch.optim.SparseAdam(matrix()), "SparseAdam, because its gradients are sparse"),
        (lambda: torch.optim.Adafactor(matrix()), "Adafactor, because .* rows and columns"),
        (lambda: torch.optim.Muon(matrix()), "Muon, because .* matrices"),
    ],
)
def test_others_are_refused_with_class_reason_and_choice(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        optimizer_name(make())
    assert "RMSprop" in caught.value.message and "wrap" in caught.value.message
    assert "paradis.optim.{OneBitAdam, DistributedLion}" in caught.value.message


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="Nonesuch"):
        elementwise("Nonesuch")


def test_tensors_and_numpy_numbers_become_plain() -> None:
    group = {
        "params": [],
        "lr": torch.tensor(0.5),
        "eps": numpy.float32(0.25),
        "betas": (torch.tensor(0.5), numpy.float64(0.75)),
        "weight_decay": numpy.int64(3),
        "momentum": math.inf,
    }
    options = options_of(group)
    assert options == {
        "lr": 0.5,
        "eps": 0.25,
        "betas": [0.5, 0.75],
        "weight_decay": 3,
        "momentum": math.inf,
    }
    assert [type(value) for value in options.values()] == [float, float, list, int, float]
    assert type(options["betas"][1]) is float  # type: ignore[index]


def test_keys_of_the_user_are_kept_if_scalar_and_dropped_otherwise() -> None:
    group = {"params": [], "lr": 1, "initial_lr": 0.1, "name": "head", "param_names": ["a"]}
    extra = {"tags": {"a"}, "huge": 2**70, "pair": (1, 2), "f": print}
    assert options_of({**group, **extra}) == {"lr": 1, "initial_lr": 0.1, "name": "head"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", torch.zeros(2)),
        ("lr", lambda: 1),
        ("betas", ("a", 0.9)),
        ("betas", {"a": 1}),
        ("t0", 2**70),
        ("differentiable", True),
        ("capturable", True),
    ],
)
def test_strange_hyper_parameters_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"option refused: {key}"):
        options_of({"params": [], key: value})


@pytest.mark.parametrize("name", ["OneBitAdam", "DistributedLion"])
def test_without_numba_codes_are_refused_early(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_supported(name, {}, torch.float32)
    monkeypatch.setitem(sys.modules, "numba", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"{name} refused.*pip install 'paradis\[codecs\]'"):
        check_supported(name, {}, torch.float32)
