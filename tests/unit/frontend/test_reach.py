"""Memory that something else holds is found, and nothing of our own is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paradis.frontend.reach import reachable_gradients, reachable_values
from paradis.numerics.memory_order import as_bytes
from paradis.runtime.bound_tensor import BoundTensor


@dataclass
class Sent:
    grad: torch.Tensor
    flat: torch.Tensor


LAYERS: dict[str, Callable[[], nn.Parameter]] = {
    "a matrix": lambda: nn.Linear(3, 4).weight,
    "a vector": lambda: nn.Linear(3, 4).bias,
    "channels last": lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last).weight,
    "transposed": lambda: nn.Parameter(torch.randn(3, 4).t()),
    "not dense": lambda: nn.Parameter(torch.randn(4, 6)[:, ::2]),
    "frozen": lambda: nn.Parameter(torch.zeros(2), requires_grad=False),
}

KEEPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda t: t.data,
    "a view": lambda t: t.view_as(t),
    "a piece": lambda t: t.detach()[:1],
    "an array": lambda t: t.detach().numpy(),
    "a dictionary": lambda t: {"weight": t.detach()},
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_value_that_is_kept_is_found(layer: str, keeper: str) -> None:
    bound = [BoundTensor("other", nn.Linear(2, 2).weight), BoundTensor("own", LAYERS[layer]())]
    assert reachable_values(bound, []) == []
    kept = KEEPERS[keeper](bound[1].tensor)
    assert reachable_values(bound, []) == [1]
    del kept
    assert reachable_values(bound, []) == []


def test_tensors_of_one_storage_and_of_several_calls_are_ours() -> None:
    whole = torch.zeros(10)
    pieces = [nn.Parameter(whole[:4]), nn.Parameter(whole[4:])]
    del whole
    mine = [BoundTensor("first", pieces[0])]
    others = [BoundTensor("second", pieces[1]), BoundTensor("first again", pieces[0])]
    assert reachable_values(mine, others) == []
    assert reachable_values(mine, others[:1]) == [0], "somebody else has bound it, too"
    others.append(BoundTensor("first once more", pieces[0]))
    kept = pieces[1].data
    assert reachable_values(mine, others) == [0]
    del kept


@pytest.mark.parametrize("keeper", [*KEEPERS, "the gradient"])
def test_a_gradient_that_is_kept_is_found(keeper: str) -> None:
    layer = nn.Linear(3, 4)
    layer(torch.randn(2, 3)).square().sum().backward()
    bound = [BoundTensor("weight", layer.weight), BoundTensor("bias", layer.bias)]
    sent = [Sent(t.tensor.grad, t.gradient()) for t in bound]  # type: ignore[arg-type]
    borrowed = [as_bytes(each.flat) for each in sent]
    assert reachable_gradients(enumerate(sent)) == []
    grad = layer.bias.grad
    assert grad is not None
    kept = grad if keeper == "the gradient" else KEEPERS[keeper](grad)
    del grad
    assert reachable_gradients(enumerate(sent)) == [1]
    del kept
    assert reachable_gradients(enumerate(sent)) == []
    del borrowed


def test_a_gradient_that_is_sent_as_a_copy_may_be_kept() -> None:
    layer = nn.Linear(3, 4)
    layer.weight.grad = torch.ones(4, 3).to(torch.float32)[:, [2, 1, 0]].t().contiguous().t()
    bound = BoundTensor("weight", layer.weight)
    kept, flat = layer.weight.grad, bound.gradient()
    assert kept is not None and flat is not None
    assert reachable_gradients([(0, Sent(kept, flat))]) == []
