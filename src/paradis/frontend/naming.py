"""Names for the tensors of a model and its optimizer, the same on every worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from paradis.errors import ConfigError
from paradis.numerics.memory_order import flat_view
from paradis.wire.messages import ParameterSpec

STORABLE = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
     torch.int16, torch.int8, torch.uint8, torch.bool}
)  # fmt: skip
"""Dtypes that servers hold."""


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor to register, and how."""

    spec: ParameterSpec
    tensor: torch.Tensor


def clean(name: str) -> str:
    """Return a name without what ``torch.compile`` and DDP put before or into it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def every_name(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield all parameters of a model with all their names, tied ones several times."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in module._parameters.items():
            if tensor is not None:
                yield clean(f"{prefix}.{key}" if prefix else key), tensor


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's strides if its memory order is not the row-major one, else ()."""
    if tensor.is_contiguous() or flat_view(tensor) is None or tensor.device.type != "cpu":
        return ()
    return tuple(tensor.stride())


def name_parameters(
    model: torch.nn.Module, groups: Sequence[dict[str, Any]], *, first_group: int = 0
) -> list[Named]:
    """Return the parameters of optimizer groups, named by the model, in the model's order.

    Those that the model does not have follow, named by group and position.

    Args:
        groups: torch parameter groups.
        first_group: index of the first of them.

    Raises:
        ConfigError: a parameter is lazy, complex or otherwise not trainable here.
    """
    group_of = {id(p): first_group + g for g, group in enumerate(groups) for p in group["params"]}
    found: dict[int, Named] = {}
    aliases: dict[int, list[str]] = {}
    for name, tensor in every_name(model):
        _check(name, tensor)
        if id(tensor) in found:
            if name not in aliases[id(tensor)] and name != found[id(tensor)].spec.name:
                aliases[id(tensor)].append(name)
        elif id(tensor) in group_of:
            found[id(tensor)] = Named(_spec(name, tensor, group_of[id(tensor)]), tensor)
            aliases[id(tensor)] = []
    for index, group in enumerate(groups):
        for position, tensor in enumerate(group["params"]):
            if id(tensor) not in found:
                name = f"param_groups.{first_group + index}.{position}"
                _check(name, tensor)
                found[id(tensor)] = Named(_spec(name, tensor, first_group + index), tensor)
                aliases[id(tensor)] = []
    return [_with_aliases(named, aliases[key]) for key, named in found.items()]


def name_buffers(model: torch.nn.Module, trained: Sequence[Named]) -> tuple[list[Named], list[str]]:
    """Return persistent buffers and parameters outside the optimizer: stored, not trained.

    Returns:
        Those that servers can hold, and the names of the others (complex or sparse ones, say).
    """
    known = {id(n.tensor) for n in trained}
    found: dict[int, Named] = {}
    left_out: dict[str, None] = {}
    for prefix, module in model.named_modules():
        stored: dict[str, Any] = dict(module._parameters)
        stored.update(
            (k, b)
            for k, b in module._buffers.items()
            if k not in module._non_persistent_buffers_set
        )
        for key, tensor in stored.items():
            if tensor is None or id(tensor) in known or id(tensor) in found:
                continue
            name = clean(f"{prefix}.{key}" if prefix else key)
            _check_ready(name, tensor)
            if tensor.layout is torch.strided and tensor.dtype in STORABLE:
                found[id(tensor)] = Named(_spec(name, tensor, -1), tensor)
            else:
                left_out[name] = None
    return list(found.values()), list(left_out)


def _spec(name: str, tensor: torch.Tensor, group: int) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        options_group=group,
        trainable=bool(tensor.requires_grad),
        strides=layout_of(tensor),
    )


def _with_aliases(named: Named, aliases: list[str]) -> Named:
    if not aliases:
        return named
    spec = msgspec.structs.replace(named.spec, aliases=tuple(aliases))
    return Named(spec, named.tensor)


def _check(name: str, tensor: torch.Tensor) -> None:
    _check_ready(name, tensor)
    if tensor.is_complex():
        raise ConfigError(
            f"paradis.wrap refused: {name} is {tensor.dtype}; complex parameters are not "
            "supported; hold real and imaginary part as two real parameters"
        )


def _check_ready(name: str, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise ConfigError(
            f"paradis.wrap refused: {name} is lazy and not initialised; run one forward pass "
            "with a batch of the right shape first, then build the optimizer and wrap"
        )
