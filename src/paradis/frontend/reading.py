"""Parameters that are waited for where they are read.

While a parameter is held, its class is a subclass of its own class with ``__torch_function__``, as
torch itself changes the class of a lazy parameter: any torch function that takes the parameter
waits, then runs as if nothing had been. Released, the parameter is what it was, and reading
it costs nothing. What tells no value (shape, requires_grad, hooks) does not wait.

Where a module hook sees that a module is called, this sees that a parameter is read: by
attention, which takes ``out_proj.weight`` without calling that module, by ``F.linear`` with a tied
weight, or by a script's own moving average. What it does not see is code that is handed tensors in
C++, as extensions and scripted modules are; for those a module's own parameters are waited for
before it is called (`watch_modules`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_WAITS: dict[int, Callable[[], None]] = {}
"""id of a held tensor -> waits until it is released."""

_TENSOR: Any = torch.Tensor
_GRAD = _TENSOR.grad.__get__
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "names",
    "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_meta", "output_nr", "retains_grad",
    "itemsize", "nbytes",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device",
    "is_contiguous", "is_floating_point", "is_complex", "storage_offset", "requires_grad_",
    "register_hook", "register_post_accumulate_grad_hook", "__hash__", "__len__",
)  # fmt: skip
_VALUELESS = frozenset(
    [getattr(_TENSOR, n).__get__ for n in _PROPERTIES if hasattr(_TENSOR, n)]
    + [_TENSOR.grad.__set__, _TENSOR.requires_grad.__set__]
    + [getattr(_TENSOR, n) for n in _METHODS]
)
_MAKING = torch.nn.Parameter.__new__.__code__
_PLAIN = (torch._C._disabled_torch_function_impl, _TENSOR.__torch_function__)
_ZEROING = frozenset(
    inspect.unwrap(f).__code__ for f in (torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad)
)


class Held:
    """Mixed into the class of a tensor whose value is on its way."""

    _torchdynamo_disable = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Wait for every held tensor among the arguments, then call."""
        kwargs = kwargs or {}
        if func not in _VALUELESS and not (func == _GRAD and _only_cleared(sys._getframe(1))):
            await_all((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func is _TENSOR.detach and sys._getframe(1).f_code is _MAKING:
            # torch.nn.Parameter(p) took the class for one that wants to stay what it is.
            return _TENSOR._make_subclass(type(args[0]), result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy under the class that the value will have."""
        await_value(self)
        return type(self).__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle under the class that the value will have."""
        await_value(self)
        return type(self).__reduce_ex__(self, protocol)


def hold(tensor: torch.Tensor, wait: Callable[[], None]) -> None:
    """Make whoever reads the tensor call ``wait`` first, until `release`.

    Args:
        tensor: not held yet.
        wait: returns when the tensor has been released, or raises.

    Raises:
        TypeError: the tensor's class cannot be changed, or has a torch function of its own; the
            tensor is as before.
    """
    cls = type(tensor)
    if cls.__torch_function__ not in _PLAIN:
        raise TypeError(f"{cls.__qualname__} has a torch function of its own")
    _WAITS[id(tensor)] = wait
    try:
        tensor.__class__ = _held_class(cls)
    except TypeError:
        del _WAITS[id(tensor)]
        raise


def release(tensor: torch.Tensor) -> None:
    """The value is there, and the tensor is what it was; nothing happens to one that is not held.

    Called by whichever thread brought the value in.
    """
    if isinstance(tensor, Held):
        tensor.__class__ = type(tensor).__bases__[1]
    _WAITS.pop(id(tensor), None)


def await_value(tensor: Any) -> None:
    """Wait until a tensor is released, if it is held.

    Raises:
        ParadisError: its value cannot come any more.
    """
    wait = _WAITS.get(id(tensor))
    if wait is not None:
        wait()


def await_all(value: Any) -> None:
    """Wait for every held tensor among arguments, those in lists and dictionaries, too.

    Raises:
        ParadisError: a value cannot come any more.
    """
    if _WAITS:
        for tensor in _held(value):
            await_value(tensor)


_AT_ONCE = (torch.jit.ScriptModule, torch.nn.DataParallel)
"""Modules that read the parameters of those inside them without calling them."""


def watch_modules() -> RemovableHandle:
    """Make every module wait for its own parameters before it is called, until the handle goes."""
    return torch.nn.modules.module.register_module_forward_pre_hook(_before_forward)


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    if not _WAITS:
        return
    # In evaluation torch's transformer layers look at the classes of what is inside them, and take
    # a path with other bits where one has a torch function.
    if isinstance(module, _AT_ONCE) or not module.training:
        for parameter in module.parameters():
            await_value(parameter)
        return
    for own in module._parameters.values():
        if own is not None:
            await_value(own)


@lru_cache
def _held_class(cls: type) -> type:
    return type(f"Held{cls.__name__}", (Held, cls), {})


def _held(value: Any) -> Iterator[Any]:
    """Yield held tensors in arguments, inside lists and dictionaries, too."""
    if isinstance(value, Held):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _held(item)
    elif isinstance(value, dict):
        yield from _held(list(value.values()))


def _only_cleared(frame: Any) -> bool:
    """Whether a gradient is looked at only to be dropped: that need not wait for its parameter.

    Any other look at it might write to memory that is still being sent.
    """
    return frame.f_code in _ZEROING and bool(frame.f_locals.get("set_to_none"))
