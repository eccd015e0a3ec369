"""Sum contributions in one canonical order, and square sums for gradient norms.

Invariant: the result depends on the contributions and on the tree of groups alone: never on
arrival order, on which contribution lives in the accumulator, on the block size or on the number
of threads.

A pairwise sum of whole tensors streams every intermediate result through memory. Here a block
of every contribution is summed while it is in the cache: each contribution is read once, the
result is written once, and no temporary is larger than a block.

    >>> import torch
    >>> parts = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([6.0])]
    >>> reduce_tree([parts[:2], parts[2:]], out=parts[2], divisor=3)
    >>> parts[2].item()
    3.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy
import torch

from paradis.errors import LocalProtocolError

BLOCK_BYTES: Final = 256 * 1024
"""Bytes of each contribution summed at a time (64 Ki float32): half an L2 cache. Median for the
mean of 4 times 4 MiB on one shared EPYC core: 1.5 ms; 1.7 ms with 64 KiB and 3 ms with 16 KiB
(cost of calls); 1.3 ms for whole tensors while the 32 MiB cache holds the accumulator."""

SQUARE_BLOCK_ELEMENTS: Final = 32 * 1024
"""Elements squared at a time. Part of the result: another number gives other last bits."""

_NUMPY_DTYPES: Final = frozenset({torch.float32, torch.float64})
"""NumPy adds these with the same IEEE roundings as torch, at a third of torch's cost per call."""


def reduce_tree(
    groups: Sequence[Sequence[torch.Tensor]],
    out: torch.Tensor,
    divisor: int,
    partial: bool = False,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Write the mean over a tree of contributions into ``out``.

    Within each group ``((c0 + c1) + c2) + ...``, then over the group sums in the same way, then
    divided; every operation is rounded to the dtype of the tensors.

    Args:
        groups: contributions, each (N,) contiguous and of the dtype of ``out``, in member order
            within groups in group order. A member without a contribution is left out, and so is
            a group without any. Not modified, except where ``out`` is one of them.
        out: (N,) contiguous, written in place. May be one of the contributions (the first to
            arrive is received into the accumulator), but not overlap one at another offset.
        divisor: number of members, those without a contribution included; 1 does not divide.
        partial: whether some member contributed nothing, which counts as zeros. A zero changes
            no sum except one of negative zeros alone (``-0.0 + 0.0 == +0.0``), so one ``+ 0.0``
            at the end gives the same bits as zeros in the places of the absent members.
        block_bytes: bytes summed at a time; changes speed only.

    Raises:
        LocalProtocolError: no contribution, one of another length or dtype than ``out``, or a
            divisor below 1.
    """
    inputs = [tensor.detach() for group in groups for tensor in group]
    target = out.detach()
    _check(inputs, target, divisor)
    alone = len(inputs) == 1 and inputs[0].data_ptr() == target.data_ptr()
    if alone and divisor == 1 and not partial:
        return  # one worker: its gradient was received where the sum belongs
    program = _program([len(group) for group in groups if group])
    count = max(1, block_bytes // target.element_size())
    scratch = target.new_empty((2, min(count, target.numel())))
    tensors = [*inputs, target]
    if target.dtype in _NUMPY_DTYPES and target.device.type == "cpu":
        arrays = [tensor.numpy() for tensor in tensors]
        # Overflow and NaN go through as in torch; who minds asks `first_non_finite`.
        with numpy.errstate(all="ignore"):
            _run(numpy, arrays, scratch.numpy(), program, (divisor, partial))
    else:
        _run(torch, tensors, scratch, program, (divisor, partial))


def _run(
    library: Any,
    arrays: Sequence[Any],
    scratch: Any,
    program: Sequence[tuple[int, int, int]],
    finish: tuple[int, bool],
) -> None:
    """Carry out the program block by block with NumPy's or torch's ``add`` and ``divide``."""
    add, divide = library.add, library.divide
    divisor, partial = finish
    total, subtotal = scratch
    block, length = len(total), len(arrays[-1])
    for start in range(0, length, block or 1):
        stop = min(start + block, length)
        registers = [array[start:stop] for array in arrays]
        target = registers[-1]
        registers += [total[: stop - start], subtotal[: stop - start]]
        for left, right, result in program:
            add(registers[left], registers[right], out=registers[result])
        if not program:
            target[:] = registers[0]
        if partial:
            add(target, 0.0, out=target)
        if divisor != 1:
            divide(target, divisor, out=target)


def _program(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the additions of one block as numbers of registers: (left, right, result).

    Registers: the contributions, ``out``, the running total, the running sum of a later group.
    Only the last addition writes to ``out``: by then every contribution has been read.
    """
    out = sum(sizes)
    total, subtotal = out + 1, out + 2
    program: list[tuple[int, int, int]] = []
    whole, next_input = -1, 0
    for size in sizes:
        group = next_input
        result = total if whole < 0 else subtotal
        for member in range(next_input + 1, next_input + size):
            program.append((group, member, result))
            group = result
        next_input += size
        if whole < 0:
            whole = group
        else:
            program.append((whole, group, total))
            whole = total
    if program:
        left, right, _ = program[-1]
        program[-1] = (left, right, out)
    return program


def _check(inputs: Sequence[torch.Tensor], out: torch.Tensor, divisor: int) -> None:
    if not inputs:
        raise LocalProtocolError(
            "reduction failed: expected at least one contribution, got none; "
            "leave a shard that nobody contributed to untouched"
        )
    if divisor < 1:
        raise LocalProtocolError(
            f"reduction failed: expected a divisor of 1 or more, got {divisor}; "
            "pass the number of members"
        )
    for tensor in (*inputs, out):
        if tensor.shape != (out.numel(),) or tensor.dtype != out.dtype:
            raise LocalProtocolError(
                f"reduction failed: expected ({out.numel()},) {out.dtype}, "
                f"got {tuple(tensor.shape)} {tensor.dtype}; pass flat tensors of one shard"
            )


def square_sum(tensor: torch.Tensor) -> float:
    """Return the sum of squares, in float64 and in a fixed order.

    NumPy sums a block pairwise on one thread, in an order that depends on nothing but its
    length; torch's order would depend on the number of threads.

    Args:
        tensor: (N,) contiguous, of a floating dtype. Not modified.

    Returns:
        The sum; infinite or NaN if an element is, or if a square overflows float64.
    """
    values = tensor.detach()
    scratch = torch.empty(min(SQUARE_BLOCK_ELEMENTS, values.numel()), dtype=torch.float64)
    squares = scratch.numpy()
    array = values.numpy() if values.dtype in _NUMPY_DTYPES else None
    total = 0.0
    with numpy.errstate(all="ignore"):
        for start in range(0, values.numel(), SQUARE_BLOCK_ELEMENTS):
            stop = min(start + SQUARE_BLOCK_ELEMENTS, values.numel())
            block = squares[: stop - start]
            if array is not None:
                numpy.copyto(block, array[start:stop])
            else:
                scratch[: stop - start].copy_(values[start:stop])
            numpy.multiply(block, block, out=block)
            total += float(numpy.add.reduce(block))
    return total
