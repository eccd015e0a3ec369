"""Loops of a worker of Distributed Lion: the sign of a blend, and the momentum after it.

Legend: N elements; T is float32 or float64, the same for all floating arrays of a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paradis.numerics.codecs.compiled import compiled
from paradis.numerics.codecs.run_kernels import RUN, Array, pack, widened


@compiled
def unfinished(wide: Array, half: Array, momentum: Array, factors: Any) -> int:
    """Return where the first run begins whose blend or new momentum is not finite, or -1.

    Args:
        wide: gradient (N,) T, or absent.
        half: gradient (N,) bfloat16 as uint16, or absent.
        momentum: (N,) T.
        factors: (b1, 1 - b1, b2, 1 - b2), of T.
    """
    room = np.empty(RUN, momentum.dtype)
    blend_keep, blend_fresh, keep, fresh = factors
    zero = momentum.dtype.type(0)
    for at in range(0, momentum.size, RUN):
        n = min(RUN, momentum.size - at)
        g, m = widened(wide, half, at, n, room), momentum[at : at + n]
        bad = np.uint32(0)
        for k in range(n):
            c = blend_keep * m[k] + blend_fresh * g[k]
            new = keep * m[k] + fresh * g[k]
            bad |= np.uint32((c - c) + (new - new) != zero)
        if bad:
            return at
    return -1


@compiled
def encode(wide: Array, half: Array, momentum: Array, factors: Any, code: Array) -> None:
    """Write the sign bits of ``b1 * m + (1 - b1) * g``; ``m`` becomes ``b2 * m + (1 - b2) * g``.

    Args:
        wide: gradient (N,) T, or absent.
        half: gradient (N,) bfloat16 as uint16, or absent.
        momentum: (N,) T; updated in place.
        factors: (b1, 1 - b1, b2, 1 - b2), of T.
        code: (ceil(N / 8),) uint8; written, bits beyond N are 0.
    """
    c, room = np.zeros(RUN, momentum.dtype), np.empty(RUN, momentum.dtype)
    blend_keep, blend_fresh, keep, fresh = factors
    for at in range(0, momentum.size, RUN):
        n = min(RUN, momentum.size - at)
        g, m = widened(wide, half, at, n, room), momentum[at : at + n]
        for k in range(n):
            c[k] = blend_keep * m[k] + blend_fresh * g[k]
        for k in range(n):
            m[k] = keep * m[k] + fresh * g[k]
        pack(c[:n], at, code)
