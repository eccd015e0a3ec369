"""Distributed Lion: workers push signs, the server sends the sign of most, and keeps nothing.

    worker:  d = sgn(b1 * m + (1 - b1) * g);  m = b2 * m + (1 - b2) * g;  push d
    server:  D = sgn(sum of d);  a tie is +1 if (version + index) is even, else -1
    both:    x -= lr * (D + wd * x)

A code is ``ceil(N / 8)`` bytes of little-endian bits, 1 = negative; there are no scales. Ties are
settled by a rule, not by 0, so that an answer too has one bit per element; the rule favours no
sign.

Source: Liu et al., Communication Efficient Distributed Training with Distributed Lion, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from paradis.errors import LocalProtocolError
from paradis.numerics.codecs.codec import NUMPY_OF, Array, array, gradient_arrays, refusal
from paradis.numerics.codecs.kernels import kernels

_PIECE_BYTES: Final = 16 * 1024
"""Bytes of each code counted at a time, so that the counters stay in the cache."""


def code_bytes(length: int) -> int:
    """Return the bytes of a code of ``length`` elements."""
    return (length + 7) // 8


def encode_lion(
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    out: torch.Tensor,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
) -> None:
    """Write a worker's signs and update its momentum.

    Args:
        gradient: (N,) of the dtype of ``momentum``, or bfloat16. Not modified.
        momentum: (N,) float32 or float64; updated in place, once.
        out: (code_bytes(N),) uint8, written in place; undefined after a refusal.
        beta1: share of the momentum in the sign.
        beta2: share of the momentum that is kept.

    Raises:
        NonFiniteGradient: NaN or infinity; the momentum is as it was, bit for bit.
        LocalProtocolError: shapes, dtypes or devices do not fit.
        ConfigError: Numba is not installed.
    """
    length = gradient.numel()
    m = array(momentum, "momentum", length, *NUMPY_OF)
    wide, half = gradient_arrays(gradient, momentum.dtype)
    code = array(out, "code", code_bytes(length), torch.uint8)
    kind = NUMPY_OF[momentum.dtype].type
    factors = (kind(beta1), kind(1.0 - beta1), kind(beta2), kind(1.0 - beta2))
    module = kernels("lion")
    bad = module.unfinished(wide, half, m, factors)
    if bad >= 0:
        raise refusal(bad, {"gradient": gradient, "momentum": momentum})
    module.encode(wide, half, m, factors, code)


def majority_vote(
    codes: Sequence[torch.Tensor], out: torch.Tensor, *, version: int, first_index: int = 0
) -> None:
    """Write the sign that most workers sent; needs no Numba.

    Bits are counted 8 at a time in counters that lie crosswise, one byte per power of two.

    Args:
        codes: one per worker, (code_bytes(N),) uint8 each. Not modified; the order does not matter.
        out: (code_bytes(N),) uint8, written in place. Bits beyond N mean nothing.
        version: of the shard, the same for all who compute this vote.
        first_index: place of the first element in whatever is voted on, so that a cut into shards
            does not change ties.

    Raises:
        LocalProtocolError: no code, or shapes, dtypes or devices do not fit.
    """
    if not codes:
        raise LocalProtocolError(
            "vote refused: expected one code per worker, got none; "
            "leave a shard that nobody contributed to untouched"
        )
    size = out.numel()
    target = array(out, "vote", size, torch.uint8)
    votes = [array(code, "code", size, torch.uint8) for code in codes]
    # Places of one parity share a byte's bits 0, 2, 4, 6: 1 = negative where it is odd.
    tie = np.uint8(0xAA if (version + first_index) % 2 == 0 else 0x55)
    for start in range(0, size, _PIECE_BYTES):
        part = slice(start, min(start + _PIECE_BYTES, size))
        _vote([vote[part] for vote in votes], target[part], tie)


def _vote(votes: Sequence[Array], out: Array, tie: Any) -> None:
    counters: list[Array] = []
    for vote in votes:
        carry = vote
        for place, counter in enumerate(counters):
            counters[place], carry = counter ^ carry, counter & carry
        if len(votes) >> len(counters):
            counters.append(carry.copy())
    # count * 2 against the number of votes, from the highest bit down.
    half, odd = divmod(len(votes), 2)
    more = np.zeros_like(out)
    equal = np.full_like(out, 0xFF)
    for place in reversed(range(len(counters))):
        counter = counters[place]
        if half >> place & 1:
            equal &= counter
        else:
            more |= equal & counter
            equal &= ~counter
    out[:] = more if odd else more | (equal & tie)


def lion_step(code: torch.Tensor, value: torch.Tensor, *, lr: float, weight_decay: float) -> None:
    """Do ``x -= lr * (D + weight_decay * x)`` in one pass, on server and workers.

    Args:
        code: (code_bytes(N),) uint8, the vote. Not modified.
        value: (N,) float32 or float64, x; updated in place.
        lr: learning rate of this step.
        weight_decay: decoupled.

    Raises:
        LocalProtocolError: shapes, dtypes or devices do not fit.
        ConfigError: Numba is not installed.
    """
    length = value.numel()
    x = array(value, "value", length, *NUMPY_OF)
    bits = array(code, "code", code_bytes(length), torch.uint8)
    kind = NUMPY_OF[value.dtype]
    scales = np.ones(1 if length else 0, kind)
    rates = (kind.type(lr), kind.type(weight_decay))
    inverse = (np.empty(0, kind), np.empty(0, np.uint16))
    kernels("decode").step(bits, scales, max(1, length), x, inverse, rates)
