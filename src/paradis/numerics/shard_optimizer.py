"""Run a torch optimizer over the pieces of parameters that make up one shard.

Invariant: after the same gradients and hyper-parameters, value and state of a piece have the very
bits that plain torch computes for the whole parameter on one thread. The arithmetic is torch's
own, and pieces are cut at multiples of 64 elements, so that vectorised loops see the same tails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paradis.errors import ConfigError, LocalProtocolError, SnapshotCorrupt
from paradis.numerics.elementwise import Options, check_supported, elementwise

_TORCH_REFUSALS = (AssertionError, KeyError, RuntimeError, TypeError, ValueError)


class ShardOptimizer:
    """One instance of a torch optimizer over the segments of a shard.

    Not thread-safe: one call at a time.

    Args:
        name: class name, one of `ELEMENTWISE`.
        options: hyper-parameters of the shard's parameter group, as of `options_of`. Some count
            only here, such as ``initial_accumulator_value`` of Adagrad.
        values: one (length,) contiguous floating tensor per segment, borrowed for the life of
            this object and updated in place.

    Raises:
        ConfigError: unknown class, hyper-parameters that torch refuses, or a combination that
            `check_supported` refuses.
        LocalProtocolError: a value is not flat and contiguous.
    """

    def __init__(self, name: str, options: Options, values: Sequence[torch.Tensor]) -> None:
        self._name = name
        self._entry = elementwise(name)
        for index, value in enumerate(values):
            check_supported(name, options, value.dtype)
            if value.dim() != 1 or not value.is_contiguous():
                raise LocalProtocolError(
                    f"shard refused: segment {index}; expected a flat contiguous tensor, got "
                    f"shape {tuple(value.shape)}, strides {value.stride()}; pass flat views"
                )
        self._dtypes = {value.dtype for value in values}
        self._parameters = [torch.nn.Parameter(value.detach()) for value in values]
        kind = self._entry.rebuilt or self._entry.kind
        accepted = inspect.signature(kind).parameters
        arguments = {key: _restored(value) for key, value in options.items() if key in accepted}
        constructor: Callable[..., torch.optim.Optimizer] = kind
        try:
            self._optimizer = constructor(self._parameters, **arguments)
        except _TORCH_REFUSALS as error:
            raise ConfigError(_refused(name, error)) from error
        self._group: dict[str, Any] = self._optimizer.param_groups[0]
        self._options: Options = {}
        self._set_options(options)
        # The step without torch's decorators, which serve autograd, profiler and hooks. They cost
        # more than the arithmetic of a small shard, and `apply` turns autograd off itself.
        self._step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(
            type(self._optimizer).step
        )

    def apply(self, grads: Sequence[torch.Tensor | None], options: Options) -> None:
        """Update the values, and the state, by one step.

        Args:
            grads: per segment a (length,) tensor of the value's dtype, or None where the
                parameter has no gradient in this step: it is left untouched and its ``step``
                stands still. May be overwritten, as torch does with some options; not kept.
            options: hyper-parameters of this step. Keys that torch does not know are ignored;
                keys left out keep their value.

        Raises:
            LocalProtocolError: not one gradient per segment, or one of another shape or dtype.
            ConfigError: torch refuses the step, for instance because an option was switched on
                that needs state from the first step on.
        """
        if options != self._options:
            self._set_options(options)
        try:
            self._take(grads)
            with torch.no_grad():
                self._step(self._optimizer)
        except _TORCH_REFUSALS as error:
            raise ConfigError(_refused(self._name, error)) from error
        finally:
            for parameter in self._parameters:
                parameter.grad = None

    def _take(self, grads: Sequence[torch.Tensor | None]) -> None:
        if len(grads) != len(self._parameters):
            raise LocalProtocolError(
                f"update refused: expected {len(self._parameters)} gradients, one per segment, "
                f"got {len(grads)}; pass None for an absent one"
            )
        for index, (parameter, grad) in enumerate(zip(self._parameters, grads, strict=True)):
            if grad is None:
                continue
            if grad.shape != parameter.shape or grad.dtype != parameter.dtype:
                raise LocalProtocolError(
                    f"update refused: segment {index}; expected {tuple(parameter.shape)} "
                    f"{parameter.dtype}, got {tuple(grad.shape)} {grad.dtype}; "
                    "pass the flat gradient of the segment"
                )
            parameter.grad = grad

    def _set_options(self, options: Options) -> None:
        for dtype in self._dtypes:
            check_supported(self._name, options, dtype)
        for key, value in options.items():
            if key in self._group:
                self._group[key] = _restored(value)
        self._options = dict(options)

    def state(self, segment: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Return the optimizer state of a segment.

        Returns:
            The state with one entry per element, (length,) each, lent: valid and unchanged until
            the next `apply` or `load_state`; and the state with one number per parameter. Both
            are empty before the first step, except for Adagrad.
        """
        state = self._optimizer.state.get(self._parameters[segment], {})
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, float] = {}
        for key, value in state.items():
            if key in self._entry.scalars:
                scalars[key] = float(value)
            elif value is not None:
                tensors[key] = value
        return tensors, scalars

    def load_state(
        self, segment: int, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float]
    ) -> None:
        """Replace the optimizer state of a segment by one that `state` returned.

        Args:
            segment: index of the segment.
            tensors: (length,) each, of the value's dtype. Copied.
            scalars: numbers; they take the dtype that torch gives them.

        Raises:
            SnapshotCorrupt: names, lengths or dtypes are not those of this class and segment.
        """
        self._check_names(segment, tensors, scalars)
        parameter = self._parameters[segment]
        for key, value in tensors.items():
            if value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise SnapshotCorrupt(
                    f"optimizer state refused: {key} of segment {segment}; expected "
                    f"{tuple(parameter.shape)} {parameter.dtype}, got {tuple(value.shape)} "
                    f"{value.dtype}; restore a checkpoint of this model"
                )
        if not tensors and not scalars:
            self._optimizer.state.pop(parameter, None)
            return
        dtype = self._scalar_dtype()
        state: dict[str, torch.Tensor] = {
            key: torch.tensor(scalars[key], dtype=dtype) for key in self._entry.scalars
        }
        state.update((key, value.detach().clone()) for key, value in tensors.items())
        self._optimizer.state[parameter] = state

    def _check_names(
        self, segment: int, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float]
    ) -> None:
        entry = self._entry
        if not tensors and not scalars and not entry.eager:
            return
        wanted = set(entry.tensors)
        if not wanted <= set(tensors) <= wanted | set(entry.optional) or (
            set(scalars) != set(entry.scalars)
        ):
            raise SnapshotCorrupt(
                f"optimizer state refused: segment {segment} of {self._name}; expected "
                f"{[*entry.tensors, *entry.scalars]} and perhaps {list(entry.optional)}, "
                f"got {[*tensors, *scalars]}; restore a checkpoint of this optimizer"
            )

    def _scalar_dtype(self) -> torch.dtype:
        # As torch makes them: float32 unless the default is float64; fused kernels read float32
        # whatever the default.
        if self._group.get("fused") or torch.get_default_dtype() != torch.float64:
            return torch.float32
        return torch.float64

    @property
    def beta2(self) -> float:
        """Adam's b2 of the last step."""
        return float(self._group["betas"][1])

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state held now, values not included."""
        return sum(
            value.numel() * value.element_size()
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def _restored(value: object) -> object:
    """Return a value as torch keeps it in a group: sequences of numbers are tuples there."""
    return tuple(value) if isinstance(value, list) else value


def _refused(name: str, error: Exception) -> str:
    return (
        f"optimizer refused: {elementwise(name).home}.{name}; torch says "
        f"{type(error).__name__}: {error}; "
        "change the optimizer's arguments"
    )
