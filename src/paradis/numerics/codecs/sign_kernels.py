"""Loops that encode signs with a scale per block, and those that say what the signs leave.

Legend: N elements; B elements of a block; T is float32 or float64, the same for all floating
arrays of a call. Loops walk blocks and, inside, runs that stay in the first-level cache.

Where a code may be made anew, or its step be skipped, there are two passes over the memory of a
shard. The first one reads only: what is not finite may turn up in the last block and must leave
nothing changed. The second one computes the same numbers again, when the code counts, and replaces
the error memory. So there is no copy of what the error memory was; both together move as many bytes
as one pass that keeps such a copy.

Where a code counts as soon as it is made, `encode` is given the error memory to write, too: one
pass, 12 bytes an element instead of 20, and the same bits.

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
    pack,
    pack_and_leave,
    widened,
)

SCRATCH: Final = 3 * RUN + 64
"""Elements of scratch: what is encoded of a run, its gradient widened, zeros, lanes."""


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
def _run(sources: Any, at: int, n: int, sign: Any, factors: Any, room: Array) -> Array:
    """Return what is to be encoded of one run, before the mask; see `encode`."""
    wide, half, momentum, error = sources
    g = widened(wide, half, at, n, room[RUN : 2 * RUN])
    e = error[at : at + n] if error.size else room[2 * RUN : 2 * RUN + n]
    _load(room[:RUN], g, e, at, momentum, sign, factors)
    return room[:n]


@inlined
def _borrowed_sources(sources: Any) -> Any:
    wide, half, momentum, error = sources[0], sources[1], sources[2], sources[5]
    return borrowed(wide), borrowed(half), borrowed(momentum), borrowed(error)


@compiled
def encode(sources: Any, factors: Any, rule: Any, mask: Array, out: Any, room: Array) -> int:
    """Write scales and sign bits, and what they leave where it is asked for.

    Args:
        sources: gradient (N,) T, or (N,) bfloat16 as uint16; momentum (N,) T, or bits and scales
            of the last update, or none of them; error (N,) T, or absent for zeros. Absent ones
            have no elements.
        factors: (share of the momentum kept, share of the gradient), of T.
        rule: (elements of a block, whether a scale is ``sqrt(sum(c * c) / n)`` instead of
            ``sum(|c|) / n``).
        mask: bits, 1 = real element, or absent when all are.
        out: (scales (blocks,) T, code (ceil(N / 8),) uint8 where bits beyond N become 0, what the
            code leaves (N,) T, or absent where that is not to be written). What is left may go
            where the error lies, or a momentum in numbers, among the sources.
        room: (SCRATCH,) T, scratch.

    Returns:
        -1, or the first block with an element, or a sum, that is not finite; of that block and
        those after it nothing has been left.
    """
    parts, mask, room = _borrowed_sources(sources), borrowed(mask), borrowed(room)
    last_bits, last_scales = borrowed(sources[3]), borrowed(sources[4])
    (block, squared), scales, code, left = (
        rule,
        borrowed(out[0]),
        borrowed(out[1]),
        borrowed(out[2]),
    )
    size, lane = parts[0].size + parts[1].size, room[3 * RUN :]
    room[2 * RUN : 3 * RUN] = 0
    for index in range(scales.size):
        start, stop = index * block, min(index * block + block, size)
        sign = (last_bits, factors[0] * last_scales[index] if last_scales.size else factors[0])
        total = 0.0
        for at in range(start, stop, RUN):
            n = min(RUN, stop - at)
            c = _run(parts, at, n, sign, factors, room)
            total += _poison(c, n, mask)
            clear_masked(c, at, mask)
            total += _squares(c, n) if squared else _magnitudes(room[:RUN], n, lane)
        mean = total / max(1, kept(start, stop, mask))
        scale = scales.dtype.type(np.sqrt(mean) if squared else mean)
        if not np.isfinite(scale):
            return index
        scales[index] = scale
        for at in range(start, stop, RUN):
            n = min(RUN, stop - at)
            c = room[:n]
            if stop - start > RUN:  # else it is still there
                c = _run(parts, at, n, sign, factors, room)
                clear_masked(c, at, mask)
            if left.size:
                e = left[at : at + n]
                pack_and_leave(c, at, code, e, scale)
                clear_masked(e, at, mask)
            else:
                pack(c, at, code)
    return -1


@compiled
def leave(sources: Any, factors: Any, block: int, mask: Array, out: Any, room: Array) -> None:
    """Write what a code leaves of the numbers that `encode` made it of.

    Args:
        sources: as `encode` had them, unchanged.
        factors: as `encode` had them.
        block: elements of a block.
        mask: as `encode` had it.
        out: (scales (blocks,) T as `encode` wrote them, (N,) T to write). What is written may be
            the memory of the error, or of a momentum in numbers, among the sources.
        room: (SCRATCH,) T, scratch.
    """
    parts, mask, room = _borrowed_sources(sources), borrowed(mask), borrowed(room)
    last_bits, last_scales = borrowed(sources[3]), borrowed(sources[4])
    scales, error = borrowed(out[0]), borrowed(out[1])
    room[2 * RUN : 3 * RUN] = 0
    zero = error.dtype.type(0)
    for index in range(scales.size):
        start, stop, scale = index * block, min(index * block + block, error.size), scales[index]
        sign = (last_bits, factors[0] * last_scales[index] if last_scales.size else factors[0])
        for at in range(start, stop, RUN):
            n = min(RUN, stop - at)
            c = _run(parts, at, n, sign, factors, room)
            clear_masked(c, at, mask)
            e = error[at : at + n]
            for k in range(n):
                e[k] = c[k] - (-scale if c[k] < zero else scale)
            clear_masked(e, at, mask)
