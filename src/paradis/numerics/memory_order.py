"""See a tensor as the flat run of elements that it is in memory, and as bytes.

Invariant: element i of a flat view is the i-th element in memory. A dense tensor of any layout
(contiguous, channels last, transposed) has a flat view, so elementwise work and transfers need no
copy, and an offset means the same on every side that keeps the same layout.

    >>> import torch
    >>> weight = torch.arange(6.0).reshape(2, 3).t()
    >>> flat_view(weight).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    >>> flat_view(torch.ones(1).expand(4)) is None
    True
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from paradis.errors import ConfigError, LocalProtocolError


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a 1-D view of a tensor's elements in memory order.

    Args:
        tensor: any shape, strided.

    Returns:
        (numel,) sharing memory with ``tensor`` and detached from autograd; None if the elements
        overlap (expanded), leave gaps (sliced) or are not strided (sparse).
    """
    values = tensor.detach()
    if not _is_dense(values):
        return None
    return values.as_strided((values.numel(),), (1,), values.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a run of memory, each once."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(_places(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def _places(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of the dimensions whose stride matters: those of more than one."""
    return [
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    ]


def same_order(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one shape lay out their elements alike.

    The stride of a dimension of size 1 says nothing: the weight of a 1x1 convolution is laid out
    alike in channels last and contiguous format.
    """
    if first.shape != second.shape:
        return False
    return first.numel() == 0 or _places(first) == _places(second)


def copy_in_order(source: torch.Tensor, like: torch.Tensor, out_flat: torch.Tensor) -> None:
    """Write a tensor into a flat buffer, in the memory order of another one.

    Args:
        source: the elements, in any layout: expanded (stride 0), transposed, sliced. Not modified.
        like: dense, of the same shape; its layout decides, its values are not read.
        out_flat: (numel,) contiguous, of the dtype of ``source``; written in place.

    Raises:
        ConfigError: ``source`` is sparse or ``like`` is not dense.
        LocalProtocolError: shapes or dtypes do not fit.
    """
    if source.layout is not torch.strided:
        raise ConfigError(
            f"gradient refused: expected a dense one, got layout {source.layout}; "
            "use sparse=False in the embedding"
        )
    if not _is_dense(like):
        raise ConfigError(
            f"parameter refused: shape {tuple(like.shape)}, strides {like.stride()}; expected "
            "elements without overlap or gap; clone it before it becomes a parameter"
        )
    expected = (like.shape, (like.numel(),), source.dtype, True)
    got = (source.shape, tuple(out_flat.shape), out_flat.dtype, out_flat.is_contiguous())
    if got != expected:
        raise LocalProtocolError(
            f"copy refused: expected shape, flat shape, dtype, contiguous {expected}, got {got}; "
            "pass a flat buffer for exactly this tensor"
        )
    target = out_flat.detach().as_strided(like.shape, like.stride(), out_flat.storage_offset())
    target.copy_(source.detach())


def as_bytes(flat: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor as bytes, without a copy.

    Args:
        flat: (N,) contiguous, on the CPU, of any dtype; N may be 0.

    Returns:
        A writable view of format ``B`` that keeps the tensor's memory alive.
    """
    return flat.detach().view(torch.uint8).numpy().data


def copy_bytes(targets: Iterable[memoryview], source: memoryview) -> None:
    """Copy bytes while other threads run: assigning to a view would keep the interpreter's lock.

    Args:
        targets: filled one after the other; none is empty.
        source: as many bytes as all of them, elsewhere in memory.
    """
    start = 0
    for target in targets:
        piece = source[start : start + len(target)]
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(piece, np.uint8)
        start += len(target)


def from_buffer(buffer: bytearray | memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over a writable buffer, without a copy.

    Args:
        buffer: contiguous bytes, a whole number of elements; kept alive by the tensor.
        dtype: dtype of the elements.

    Raises:
        LocalProtocolError: the buffer is read-only or holds a fraction of an element.
    """
    view = memoryview(buffer)
    if view.readonly:
        raise LocalProtocolError(
            f"tensor over a buffer refused: expected writable memory, got {view.nbytes} read-only "
            "bytes; receive into a bytearray or a tensor"
        )
    if view.nbytes % dtype.itemsize:
        raise LocalProtocolError(
            f"tensor over a buffer refused: expected a multiple of {dtype.itemsize} bytes for "
            f"{dtype}, got {view.nbytes}; check the length before"
        )
    if not view.nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype)
