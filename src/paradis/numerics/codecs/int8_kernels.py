"""Loops of the int8 code: one scale per block, 127 levels on each side of zero.

Legend: N elements; B elements of a block; T is float32 or float64, the same for all floating arrays
of a call. As for signs, one pass over the memory of a shard, with the old errors kept aside.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from paradis.numerics.codecs.compiled import compiled, inlined
from paradis.numerics.codecs.run_kernels import RUN, Array, borrowed, widened

SCRATCH: Final = 3 * RUN
"""Elements of scratch besides what the error memory was."""


@inlined
def _load(c: Array, g: Array, e: Array) -> None:
    for k in range(g.size):
        c[k] = g[k] + e[k]


@inlined
def _largest(bits: Array, n: int, size: Any) -> Any:
    """Return the largest of the first ``n`` bit patterns without their sign: that of max |c|."""
    largest = size ^ size
    for k in range(n):
        magnitude = bits[k] & size
        largest = magnitude if magnitude > largest else largest
    return largest


@inlined
def _settle(c: Array, q: Array, e: Array, scale: Any, rounder: Any) -> None:
    """Write rounded quotients, plus ``rounder``, into ``q``, and what they leave into ``e``."""
    divisor = scale if scale > 0 else scale + c.dtype.type(np.inf)
    for k in range(e.size):
        q[k] = c[k] / divisor + rounder
    for k in range(e.size):
        e[k] = c[k] - (q[k] - rounder) * scale


@compiled
def encode(sources: Any, rule: Any, scales: Array, code: Array, room: Array) -> int:
    """Write scales and integers, and replace the error memory.

    Args:
        sources: (gradient (N,) T; or (N,) bfloat16 as uint16; error (N,) T, replaced); the absent
            gradient has no elements.
        rule: (elements of a block; bit patterns, unsigned and as wide as T, of all but the sign
            and of infinity; least normal number; 1.5 times the power of two from which on T has
            no fractions: after adding it an integer, rounded to nearest even, is in the low bits).
        scales: (blocks,) T; written; 0 where it would not be a normal number.
        code: (N,) uint8, the two's complement of the integers; written.
        room: (SCRATCH + N,) T, scratch.

    Returns:
        -1, or the first block with an element that is not finite; then the error memory is as
        before.
    """
    wide, half, error = borrowed(sources[0]), borrowed(sources[1]), borrowed(sources[2])
    scales, code, room = borrowed(scales), borrowed(code), borrowed(room)
    c, g16, q, undo = room[:RUN], room[RUN : 2 * RUN], room[2 * RUN : SCRATCH], room[SCRATCH:]
    block, patterns, least, rounder = rule
    size, infinity = patterns[0], patterns[1]
    bits, words = c.view(patterns.dtype), q.view(patterns.dtype)
    greatest = np.zeros(1, patterns.dtype)
    steps = error.dtype.type(127)
    for index in range(scales.size):
        start, stop = index * block, min(index * block + block, error.size)
        greatest[0] = 0
        for at in range(start, stop, RUN):
            n = min(RUN, stop - at)
            _load(c, widened(wide, half, at, n, g16), error[at : at + n])
            greatest[0] = max(greatest[0], _largest(bits, n, size))
        if greatest[0] >= infinity:
            error[:start] = undo[:start]
            return index
        scale = greatest.view(error.dtype)[0] / steps
        scale = scale if scale >= least else steps - steps
        scales[index] = scale
        for at in range(start, stop, RUN):
            n = min(RUN, stop - at)
            e, old, target = error[at : at + n], undo[at : at + n], code[at : at + n]
            if stop - start > RUN:  # else it is still there
                _load(c, widened(wide, half, at, n, g16), e)
            for k in range(n):
                old[k] = e[k]
            _settle(c, q, e, scale, rounder)
            for k in range(n):
                target[k] = np.uint8(words[k] & 255)
    return -1


@compiled
def decode(code: Array, scales: Array, block: int, total: Array, adding: bool) -> None:
    """Write or add ``scale * integer``.

    Args:
        code: (N,) int8.
        scales: (blocks,) T.
        block: elements of a block.
        total: (N,) T; written in place.
        adding: whether to add instead of replacing.
    """
    code, scales, total = borrowed(code), borrowed(scales), borrowed(total)
    for index in range(scales.size):
        start, stop = index * block, min(index * block + block, total.size)
        scale, source, target = scales[index], code[start:stop], total[start:stop]
        if adding:
            for k in range(target.size):
                target[k] += scale * np.float32(source[k])
        else:
            for k in range(target.size):
                target[k] = scale * np.float32(source[k])
