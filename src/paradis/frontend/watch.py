"""Sees when a name in the model comes to mean another tensor than the one that is trained.

Looked at in every step, so the common case is one pass of identity comparisons over the modules'
own dictionaries; names are compared only when something moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from paradis.errors import ConfigError
from paradis.frontend.naming import Named, every_name, layout_of
from paradis.runtime.bound_tensor import BoundTensor


class ModelWatch:
    """Remembers where a model's trained parameters hang.

    Args:
        model: the wrapped module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._trained: dict[int, torch.Tensor] = {}
        self._names: dict[str, torch.Tensor] = {}
        self._holders: list[tuple[torch.nn.Module, object, object]] = []
        self._anchors: list[tuple[Mapping[str, Any], str, object]] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch these parameters, too, wherever the model holds them now."""
        self._trained.update((id(tensor), tensor) for tensor in tensors)
        self._names = {n: t for n, t in every_name(self._model) if id(t) in self._trained}
        self._anchor()

    def _anchor(self) -> None:
        self._holders, self._anchors = [], []
        for module in self._model.modules():
            self._holders.append((module, module._modules, module._parameters))
            self._anchors += [(module._modules, k, child) for k, child in module._modules.items()]
            self._anchors += [
                (module._parameters, key, tensor)
                for key, tensor in module._parameters.items()
                if id(tensor) in self._trained
            ]

    def replaced(self) -> str:
        """Return a name that means another tensor now, or an empty text.

        A parameter that has left the model counts as unused, as in torch.
        """
        if not self._moved():
            return ""
        present = dict(every_name(self._model))
        for name, tensor in self._names.items():
            if present.get(name, tensor) is not tensor:
                return name
        self._anchor()
        return ""

    def _moved(self) -> bool:
        for module, children, parameters in self._holders:  # Sequential renews its dictionary
            if module._modules is not children or module._parameters is not parameters:
                return True
        return any(holder.get(key) is not thing for holder, key, thing in self._anchors)


def check_tensors(registered: Sequence[Named], tensors: Sequence[BoundTensor]) -> None:
    """Refuse parameters that are of another kind than when they were registered.

    Args:
        registered: as they were, in order.
        tensors: where they are bound, in the same order.

    Raises:
        ConfigError: dtype, shape or memory order of one is another; names it.
    """
    for named, bound in zip(registered, tensors, strict=True):
        tensor = named.tensor
        if tensor.dtype != bound.dtype or tensor.shape != bound.shape:
            raise ConfigError(
                f"step refused: {bound.name} is {tensor.dtype} {tuple(tensor.shape)} now, but "
                f"was {bound.dtype} {tuple(bound.shape)} at paradis.wrap; convert the model "
                "before wrapping it"
            )
        if tensor.stride() != bound.stride:
            _check_layout(named, bound)


def _check_layout(named: Named, bound: BoundTensor) -> None:
    if layout_of(named.tensor) != named.spec.strides:
        raise ConfigError(
            f"step refused: {bound.name} has strides {tuple(bound.tensor.stride())} now, but "
            f"had {bound.stride} at paradis.wrap; choose the memory format before wrapping the "
            "model"
        )
