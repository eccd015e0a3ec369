"""Sees when a name in the model comes to mean another tensor than the one that is trained.

Looked at in every step, so the common case is one pass of identity comparisons over the modules'
own dictionaries; names are compared only when something moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paradis.frontend.naming import every_name


class ModelWatch:
    """Remembers where a model's trained parameters hang.

    Args:
        model: the wrapped module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._trained: dict[int, torch.Tensor] = {}
        self._names: dict[str, torch.Tensor] = {}
        self._anchors: list[tuple[dict[str, Any], str, object]] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch these parameters, too, wherever the model holds them now."""
        self._trained.update((id(tensor), tensor) for tensor in tensors)
        self._names = {n: t for n, t in every_name(self._model) if id(t) in self._trained}
        self._anchor()

    def _anchor(self) -> None:
        self._anchors = []
        for module in self._model.modules():
            children: dict[str, Any] = dict(module._modules)
            self._anchors += [(module._modules, k, child) for k, child in children.items()]
            self._anchors += [
                (module._parameters, key, tensor)
                for key, tensor in module._parameters.items()
                if id(tensor) in self._trained
            ]

    def replaced(self) -> str:
        """Return a name that means another tensor now, or an empty text.

        A parameter that has left the model counts as unused, as in torch.
        """
        for holder, key, thing in self._anchors:
            if holder.get(key) is not thing:
                break
        else:
            return ""
        present = dict(every_name(self._model))
        for name, tensor in self._names.items():
            if present.get(name, tensor) is not tensor:
                return name
        self._anchor()
        return ""
