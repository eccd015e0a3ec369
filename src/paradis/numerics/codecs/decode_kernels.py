"""Loops that decode signs: alone, added, averaged over workers, or as a step of the optimizer.

Legend: N elements; B elements of a block, which has one scale; W workers; T is float32 or float64,
the same for all floating arrays of a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paradis.numerics.codecs.compiled import compiled, inlined
from paradis.numerics.codecs.run_kernels import (
    RUN,
    Array,
    add,
    borrowed,
    clear_masked,
    spread,
    widened,
)


@inlined
def _unfinished(scales: Array) -> int:
    """Return the first scale that is not finite, or -1."""
    for index in range(scales.size):
        if not np.isfinite(scales[index]):
            return index
    return -1


@compiled
def decode(bits: Array, scales: Array, block: int, mask: Array, total: Array, adding: bool) -> int:
    """Write or add the decoded signs.

    Args:
        bits: (ceil(N / 8),) uint8.
        scales: (blocks,) T.
        block: elements of a block.
        mask: bits, 1 = real element, or absent; others are decoded as 0.
        total: (N,) T; written in place.
        adding: whether to add instead of replacing.

    Returns:
        -1, or the first block whose scale is not finite; then nothing is written.
    """
    bits, scales = borrowed(bits), borrowed(scales)
    mask, total = borrowed(mask), borrowed(total)
    bad = _unfinished(scales)
    if bad >= 0:
        return bad
    c = np.empty(RUN, total.dtype)
    for index in range(scales.size):
        start, stop = index * block, min(index * block + block, total.size)
        for at in range(start, stop, RUN):
            target = total[at : min(at + RUN, stop)]
            if not adding:
                spread(target, at, bits, scales[index])
                clear_masked(target, at, mask)
            elif not mask.size:
                add(target, at, bits, scales[index])
            else:
                one = c[: target.size]
                spread(one, at, bits, scales[index])
                clear_masked(one, at, mask)
                for k in range(target.size):
                    target[k] += one[k]
    return -1


@compiled
def mean(bits: Array, scales: Array, block: int, mask: Array, total: Array) -> int:
    """Write the mean of W decoded codes, added in the order of their rows, then divided.

    Args:
        bits: (W, ceil(N / 8)) uint8.
        scales: (W, blocks) T.
        block: elements of a block.
        mask: bits, 1 = real element, or absent.
        total: (N,) T; overwritten.

    Returns:
        -1, or the first row with a scale that is not finite; then nothing is written.
    """
    bits, scales = borrowed(bits), borrowed(scales)
    mask, total = borrowed(mask), borrowed(total)
    for worker in range(scales.shape[0]):
        if _unfinished(scales[worker]) >= 0:
            return worker
    workers = total.dtype.type(bits.shape[0])
    for index in range(scales.shape[1]):
        start, stop = index * block, min(index * block + block, total.size)
        for at in range(start, stop, RUN):
            target = total[at : min(at + RUN, stop)]
            spread(target, at, bits[0], scales[0, index])
            for worker in range(1, bits.shape[0]):
                add(target, at, bits[worker], scales[worker, index])
            for k in range(target.size):
                target[k] /= workers
            clear_masked(target, at, mask)
    return -1


@inlined
def _move(x: Array, m: Array, i: Array, rate: Any, decay: Any) -> None:
    """Do ``x -= rate * ((m * i) + (decay * x))``, or without ``i``."""
    if i.size:
        for k in range(x.size):
            x[k] = x[k] - rate * (m[k] * i[k] + decay * x[k])
    else:
        for k in range(x.size):
            x[k] = x[k] - rate * (m[k] + decay * x[k])


@inlined
def _inverse(inverse: Any, at: int, n: int, room: Array) -> Array:
    """Return a run of the inverse denominators, which are all absent for 1."""
    if inverse[0].size or inverse[1].size:
        return widened(inverse[0], inverse[1], at, n, room)
    return room[:0]


@compiled
def step(bits: Array, scales: Array, block: int, value: Array, inverse: Any, rates: Any) -> int:
    """Move values along decoded signs, see `_move`.

    Args:
        bits: (ceil(N / 8),) uint8.
        scales: (blocks,) T.
        block: elements of a block.
        value: (N,) T; updated in place.
        inverse: (N,) T and (N,) bfloat16 as uint16, one of them absent, or both for 1.
        rates: (learning rate, weight decay), of T.

    Returns:
        -1, or the first block whose scale is not finite; then nothing has moved.
    """
    bits, scales, value = borrowed(bits), borrowed(scales), borrowed(value)
    inverses = (borrowed(inverse[0]), borrowed(inverse[1]))
    bad = _unfinished(scales)
    if bad >= 0:
        return bad
    m, room = np.empty(RUN, value.dtype), np.empty(RUN, value.dtype)
    rate, decay = rates
    for index in range(scales.size):
        start, stop = index * block, min(index * block + block, value.size)
        for at in range(start, stop, RUN):
            x = value[at : min(at + RUN, stop)]
            spread(m[: x.size], at, bits, scales[index])
            _move(x, m, _inverse(inverses, at, x.size, room), rate, decay)
    return -1


@compiled
def step_dense(m: Array, value: Array, inverse: Any, rates: Any) -> None:
    """Move values along a momentum that is given element by element, see `step`."""
    inverses = (borrowed(inverse[0]), borrowed(inverse[1]))
    room = np.empty(RUN, value.dtype)
    rate, decay = rates
    for at in range(0, value.size, RUN):
        x = value[at : at + RUN]
        _move(x, m[at : at + RUN], _inverse(inverses, at, x.size, room), rate, decay)
