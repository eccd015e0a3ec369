"""Memory that something else can reach: a view of it, or a gradient, that was kept from before.

While a step is on its way, a parameter is waited for where it is read by its own name
(`paradis.frontend.reading`). Nobody sees what the script reads through a ``p.data`` or a
``state_dict()`` that it made earlier, or writes through a gradient that it keeps. Counts of
references tell that there is such a thing, and ``step()`` then waits for that parameter. An address
that was taken as a number (``data_ptr()``) leaves no trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from paradis.numerics.memory_order import as_bytes
from paradis.runtime.bound_tensor import BoundTensor

_CORE: Any = torch._C
_LOOK = 1
"""Whoever looks at a storage uses it."""


class Sent(Protocol):
    """A gradient that the links read.

    Attributes:
        grad: as the script sees it.
        flat: what is sent; its bytes are held by one more object.
    """

    grad: torch.Tensor
    flat: torch.Tensor


def reachable_values(tensors: Sequence[BoundTensor], others: Iterable[BoundTensor]) -> list[int]:
    """Return the indices of tensors whose memory something else holds, too.

    Args:
        tensors: those to look at; several may lie in one storage.
        others: what other ``wrap`` calls have bound, perhaps of the same model.
    """
    alone, in_place = _uses_of_values()
    ours: dict[int, int] = {}
    seen: dict[int, None] = {}
    uses: list[tuple[int, int]] = []
    # Another call's step may be on its way: where a tensor lies is no value to wait for.
    with torch._C.DisableTorchFunctionSubclass():
        for bound in (*tensors, *others):
            storage = bound.tensor.untyped_storage()
            where = storage._cdata
            uses.append((where, _CORE._storage_Use_Count(where)))
            again = alone if id(bound.tensor) in seen else 0  # bound twice, it counts itself once
            seen[id(bound.tensor)] = None
            ours[where] = ours.get(where, _LOOK) + (alone if bound.staged else in_place) - again
    found = enumerate(uses[: len(tensors)])
    return [index for index, (where, count) in found if count > ours[where]]


def reachable_gradients(sent: Iterable[tuple[int, Sent]]) -> list[int]:
    """Return the indices of gradients that something else could write while they are sent.

    Args:
        sent: by index; each of the tensors is held by its `Sent` and by ``.grad`` alone.
    """
    references, uses = _references_to_gradients()
    return [
        index
        for index, each in sent
        if each.flat.data_ptr() == each.grad.data_ptr()  # else what is sent is a copy
        and (sys.getrefcount(each.grad) > references or _uses(each.grad) > uses)
    ]


def _uses(tensor: torch.Tensor) -> int:
    """Return how many tensors share a tensor's storage, itself included."""
    storage = tensor.untyped_storage()
    return int(_CORE._storage_Use_Count(storage._cdata)) - _LOOK


@lru_cache(1)
def _uses_of_values() -> tuple[int, int]:
    """Return the uses of a storage by a tensor alone, and by one that is bound in place."""
    tensor = torch.nn.Parameter(torch.zeros(2))
    alone = _uses(tensor)
    bound = BoundTensor("", tensor)
    assert not bound.staged
    return alone, _uses(tensor)


@dataclass(slots=True)
class _Sample:
    grad: torch.Tensor
    flat: torch.Tensor


@lru_cache(1)
def _references_to_gradients() -> tuple[int, int]:
    """Return the references to a gradient, and the uses of its storage, that are our own."""
    tensor = torch.nn.Parameter(torch.zeros(2))
    tensor.grad = torch.zeros(2)
    flat = BoundTensor("", tensor).gradient()
    assert flat is not None
    sample = _Sample(tensor.grad, flat)
    del flat
    borrowed = as_bytes(sample.flat)
    counted = sys.getrefcount(sample.grad), _uses(sample.grad)
    borrowed.release()
    return counted
