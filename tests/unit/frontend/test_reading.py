"""A held tensor is waited for by whatever reads its value, and by nothing else."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paradis.frontend.reading import Held, hold, release, watch_modules

Read = Callable[[nn.Linear], Any]


class Waits:
    """Holds a layer's parameters; counts who waits."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 4)
        self.count = 0
        for parameter in self.layer.parameters():
            parameter.grad = torch.ones_like(parameter)
            self.hold(parameter)

    def hold(self, tensor: torch.Tensor) -> None:
        def wait() -> None:
            self.count += 1
            release(tensor)

        hold(tensor, wait)


@pytest.fixture
def waits() -> Iterator[Waits]:
    made = Waits()
    yield made
    for parameter in made.layer.parameters():
        release(parameter)


def own_average(layer: nn.Linear) -> None:
    with torch.no_grad():
        torch.zeros(4, 4).lerp_(layer.weight, 0.5)


READERS: dict[str, Read] = {
    "its module": lambda m: m(torch.ones(2, 4)),
    "a functional call": lambda m: functional.linear(torch.ones(2, 4), m.weight),
    "an operator": lambda m: m.weight + 1,
    "a matrix product from the right": lambda m: torch.ones(4) @ m.weight,
    "a list of tensors": lambda m: torch.stack([torch.ones(4, 4), m.weight]),
    "a fused call": lambda m: torch._foreach_norm([m.weight]),
    "a keyword": lambda m: torch.add(input=torch.ones(4, 4), other=m.weight),
    "data": lambda m: m.weight.data,
    "detach": lambda m: m.weight.detach(),
    "an element": lambda m: m.weight[0, 0],
    "a number": lambda m: m.weight.sum().item(),
    "a list": lambda m: m.weight.tolist(),
    "a pointer": lambda m: m.weight.data_ptr(),
    "print": lambda m: repr(m.weight),
    "a state dict": lambda m: m.state_dict(keep_vars=False)["weight"],
    "a saved state": lambda m: torch.save({"w": m.weight}, io.BytesIO()),
    "a moving average": own_average,
    "a vector of parameters": lambda m: nn.utils.parameters_to_vector([m.weight]),
    "a copy": lambda m: copy.deepcopy(m.weight),
    "a pickle": lambda m: pickle.dumps(m.weight),
    "an assignment": lambda m: m.weight.data.zero_(),
    "a move": lambda m: m.weight.to(torch.float64),
    "its gradient": lambda m: m.weight.grad,
    "a gradient zeroed in place": lambda m: m.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_waits(waits: Waits, reader: str) -> None:
    READERS[reader](waits.layer)
    assert waits.count >= 1
    assert type(waits.layer.weight) is nn.Parameter


OTHERS: dict[str, Read] = {
    "shape": lambda m: (m.weight.shape, m.weight.size(), m.weight.numel(), m.weight.stride()),
    "kind": lambda m: (m.weight.dtype, m.weight.device, m.weight.is_leaf, m.weight.requires_grad),
    "names": lambda m: (list(m.named_parameters()), m.weight is m.weight, {m.weight: 1}),
    "identity": lambda m: isinstance(m.weight, nn.Parameter),
    "dropped gradients": lambda m: m.zero_grad(),
    "an optimizer's dropped gradients": lambda m: torch.optim.SGD(m.parameters()).zero_grad(),
    "a new gradient": lambda m: setattr(m.weight, "grad", None),
    "hooks": lambda m: m.weight.register_hook(lambda grad: grad),
}


@pytest.mark.parametrize("other", OTHERS)
def test_who_reads_no_value_does_not_wait(waits: Waits, other: str) -> None:
    OTHERS[other](waits.layer)
    assert waits.count == 0
    assert isinstance(waits.layer.weight, Held)


class Extension(torch.autograd.Function):
    """Reads the weight as code in C++ does: without a torch function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return x @ weight


class Extended(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Extension.apply(x, self.weight)  # type: ignore[no-any-return]


def test_a_module_waits_for_its_own_parameters_before_it_is_called(waits: Waits) -> None:
    waits.layer.__class__ = Extended
    handle = watch_modules()
    waits.layer(torch.ones(1, 4))
    assert waits.count == 2
    handle.remove()
    waits.hold(waits.layer.weight)
    waits.layer(torch.ones(1, 4))
    assert waits.count == 2, "without the watch nobody sees it"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_waits_for_all_inside_it() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    count = 0

    def wait(tensor: torch.Tensor) -> None:
        nonlocal count
        count += 1
        release(tensor)

    parameters = list(model.parameters())
    for parameter in parameters:
        hold(parameter, partial(wait, parameter))
    handle = watch_modules()
    model(torch.ones(1, 2))
    handle.remove()
    assert count == len(parameters) == 4


def test_results_are_those_of_the_plain_tensor(waits: Waits) -> None:
    copied = copy.deepcopy(waits.layer)
    assert type(copied.weight) is nn.Parameter
    assert torch.equal(copied.weight, waits.layer.weight)
    waits.hold(waits.layer.weight)
    assert type(waits.layer.weight * 2) is torch.Tensor
    waits.hold(waits.layer.weight)
    waits.layer(torch.ones(1, 4)).sum().backward()
    assert waits.layer.weight.grad is not None


def test_an_error_of_the_wait_reaches_the_reader() -> None:
    layer = nn.Linear(2, 2)

    def wait() -> None:
        raise LookupError("planted")

    hold(layer.weight, wait)
    with pytest.raises(LookupError, match="planted"):
        layer(torch.ones(1, 2))
    release(layer.weight)
    release(layer.weight)
    layer(torch.ones(1, 2))


def test_a_plain_leaf_tensor_can_be_held() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    hold(tensor, lambda: release(tensor))
    assert torch.equal(tensor + 1, torch.ones(3)) and type(tensor) is torch.Tensor
