"""Loops that encode signs with a scale per block and update the error memory.

Legend: N elements; B elements of a block; T is float32 or float64, the same for all floating
arrays of a call. Loops walk blocks and, inside, runs that stay in the first-level cache.

One pass over the memory of a shard: a block's scale is known when it has been read once, and then
the block is in the cache. What the error memory was is kept aside, because what is not finite may
turn up in the last block and must leave nothing changed. That takes an eighth of the time; reading
the whole shard twice instead takes a quarter more, as the second time it comes from the third-level
cache at best.

Order of a block's sum, the same for every T and machine: a run is filled up with zeros to rows of
64; four rows at a time ``lane[k] += (|r0[k]| + |r1[k]|) + (|r2[k]| + |r3[k]|)``; the 64 lanes
are halved until one is left (``lane[k] += lane[k + half]``); runs add up in float64.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from paradis.numerics.codecs.compiled import compiled, inlined
from paradis.numerics.codecs.run_kernels import (
    RUN,
    Array,
    bit,
    blend_eight,
    borrowed,
    clear_masked,
    kept,
    set_bit,
    settle_eight,
    widened,
)

SCRATCH: Final = 2 * RUN + 64
"""Elements of scratch besides what the error memory was."""


@inlined
def _load_plain(c: Array, g: Array, e: Array) -> None:
    for k in range(g.size):
        c[k] = g[k] + e[k]


@inlined
def _load_dense(c: Array, g: Array, e: Array, m: Array, factors: Any) -> None:
    keep, fresh = factors
    for k in range(g.size):
        c[k] = (keep * m[k] + fresh * g[k]) + e[k]


@inlined
def _load_packed(c: Array, g: Array, e: Array, at: int, sign: Any, fresh: Any) -> None:
    """Write ``(m + fresh * g) + e`` where ``sign`` is (bits, magnitude) of ``m``; whole arrays."""
    bits, magnitude = sign
    whole = g.size // 8 * 8 if at % 8 == 0 else 0
    bytes_of = bits[at // 8 : (at + whole) // 8]
    for j in range(bytes_of.size):
        blend_eight(c, j * 8, (bytes_of[j], magnitude), fresh, (g, j * 8), (e, j * 8))
    for k in range(whole, g.size):
        m = -magnitude if bit(bits, at + k) else magnitude
        c[k] = (m + fresh * g[k]) + e[k]


@inlined
def _load(c: Array, g: Array, e: Array, at: int, momentum: Array, sign: Any, factors: Any) -> None:
    """Write what is to be encoded of one run; ``g`` and ``e`` are the run, the rest whole."""
    if momentum.size:
        _load_dense(c, g, e, momentum[at : at + g.size], factors)
    elif sign[0].size:
        _load_packed(c, g, e, at, sign, factors[1])
    else:
        _load_plain(c, g, e)


@inlined
def _magnitudes(c: Array, n: int, lane: Array) -> float:
    """Return the sum of ``|c[:n]|`` in the order told at the head; fills ``c`` up with zeros."""
    whole = (n + 255) // 256 * 256
    for k in range(n, whole):
        c[k] = 0
    for k in range(64):
        lane[k] = 0
    for start in range(0, whole, 256):
        r0, r1 = c[start : start + 64], c[start + 64 : start + 128]
        r2, r3 = c[start + 128 : start + 192], c[start + 192 : start + 256]
        for k in range(64):
            lane[k] += (abs(r0[k]) + abs(r1[k])) + (abs(r2[k]) + abs(r3[k]))
    for k in range(32):
        lane[k] += lane[k + 32]
    for k in range(16):
        lane[k] += lane[k + 16]
    for k in range(8):
        lane[k] += lane[k + 8]
    a, b = (lane[0] + lane[4]) + (lane[2] + lane[6]), (lane[1] + lane[5]) + (lane[3] + lane[7])
    return np.float64(a + b)


@inlined
def _squares(c: Array, n: int) -> float:
    """Return the sum of squares of ``c[:n]``, one after the other, in float64."""
    total = 0.0
    for k in range(n):
        total += np.float64(c[k]) * np.float64(c[k])
    return total


@inlined
def _poison(c: Array, n: int, mask: Array) -> float:
    """Return 0, or NaN if an element is not finite: a mask must not hide one."""
    bad = np.uint32(0)
    if mask.size:
        zero = c.dtype.type(0)
        for k in range(n):
            bad |= np.uint32(c[k] - c[k] != zero)
    return np.nan if bad else 0.0


@inlined
def _settle(c: Array, at: int, scale: Any, e: Array, undo: Array, code: Array) -> None:
    """Write the sign bits of a run and what they leave of it as error ``e``, the old one aside."""
    whole = e.size // 8 * 8 if at % 8 == 0 else 0
    bits = code[at // 8 : (at + whole) // 8]
    for j in range(bits.size):
        bits[j] = settle_eight(c, j * 8, scale, e, undo)
    zero = c.dtype.type(0)
    for k in range(whole, e.size):
        set_bit(code, at + k, c[k] < zero)
        undo[k] = e[k]
        e[k] = c[k] - (-scale if c[k] < zero else scale)


@compiled
def encode(sources: Any, factors: Any, rule: Any, mask: Array, out: Any, room: Array) -> int:
    """Write scales and sign bits, and replace the error memory.

    Args:
        sources: gradient (N,) T, or (N,) bfloat16 as uint16; momentum (N,) T, or bits and scales
            of the last update, or none of them; error (N,) T, replaced. Absent ones have no
            elements.
        factors: (share of the momentum kept, share of the gradient), of T.
        rule: (elements of a block, whether a scale is ``sqrt(sum(c * c) / n)`` instead of
            ``sum(|c|) / n``).
        mask: bits, 1 = real element, or absent when all are.
        out: (scales (blocks,) T, code (ceil(N / 8),) uint8 where bits beyond N become 0).
        room: (SCRATCH + N,) T, scratch.

    Returns:
        -1, or the first block with an element, or a sum, that is not finite; then the error
        memory is as before.
    """
    error, momentum, mask = borrowed(sources[5]), borrowed(sources[2]), borrowed(mask)
    wide, half, room = borrowed(sources[0]), borrowed(sources[1]), borrowed(room)
    last_bits, last_scales = borrowed(sources[3]), borrowed(sources[4])
    (block, squared), scales, code = rule, borrowed(out[0]), borrowed(out[1])
    c, g16, lane, undo = room[:RUN], room[RUN : 2 * RUN], room[2 * RUN : SCRATCH], room[SCRATCH:]
    for index in range(scales.size):
        start, stop = index * block, min(index * block + block, error.size)
        sign = (last_bits, factors[0] * last_scales[index] if last_scales.size else factors[0])
        total = 0.0
        for at in range(start, stop, RUN):
            n = min(RUN, stop - at)
            g, e = widened(wide, half, at, n, g16), error[at : at + n]
            _load(c, g, e, at, momentum, sign, factors)
            total += _poison(c, n, mask)
            clear_masked(c[:n], at, mask)
            total += _squares(c, n) if squared else _magnitudes(c, n, lane)
        mean = total / max(1, kept(start, stop, mask))
        scale = error.dtype.type(np.sqrt(mean) if squared else mean)
        if not np.isfinite(scale):
            error[:start] = undo[:start]
            return index
        scales[index] = scale
        for at in range(start, stop, RUN):
            n = min(RUN, stop - at)
            e = error[at : at + n]
            if stop - start > RUN:  # else it is still there
                _load(c, widened(wide, half, at, n, g16), e, at, momentum, sign, factors)
                clear_masked(c[:n], at, mask)
            _settle(c, at, scale, e, undo[at : at + n], code)
            clear_masked(e, at, mask)
    return -1
