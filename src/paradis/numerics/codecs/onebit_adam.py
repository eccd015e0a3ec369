"""The arithmetic of 1-bit Adam after its warm-up: what worker, server and step do with signs.

    worker:  u = b1 * m + (1 - b1) * g;  c = u + e;  push C(c);  e = c - C(c)
    server:  a = mean of the decoded pushes, in worker order, + E;  send M = C(a);  E = a - M
    both:    m = M;  x -= lr * (m / (sqrt(v) + eps) + wd * x),  v frozen

The quotient is a product with ``inverse_denominator``, computed once: v does not change any more.
Every operation is rounded once, in the order written; there is no bias correction of m. The inverse
denominator is rounded once more, when it is kept (`inverse_dtype`).

Source: Tang et al., 1-bit Adam, ICML 2021, algorithm 1. The server's half is `OneBit.mean` and
then `OneBit.encode` with the server's memory.
"""

from __future__ import annotations

from typing import Any

import torch

from paradis.errors import LocalProtocolError
from paradis.numerics.codecs.codec import (
    NUMPY_OF,
    Array,
    array,
    gradient_arrays,
    memory_array,
    scale_refusal,
)
from paradis.numerics.codecs.kernels import kernels
from paradis.numerics.codecs.onebit import Blend, OneBit


def encode_momentum(
    codec: OneBit,
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    memory: torch.Tensor,
    out: torch.Tensor,
    *,
    beta: float,
    mask: torch.Tensor | None = None,
) -> None:
    """Write the code of a worker's new momentum, and into memory what the code leaves of it.

    Momentum, error feedback, signs, packing and scales in two passes over memory.

    Args:
        codec: gives blocks, norm and dtype T.
        gradient: (N,) T or bfloat16. Not modified.
        momentum: the last common momentum: (N,) T, or (encoded_bytes(N),) uint8, the last
            update's code as it came, which reads 32 times fewer bytes. Not modified.
        memory: (N,) T, the worker's error; updated in place, once.
        out: (encoded_bytes(N),) uint8, written in place; undefined after a refusal. Not the
            memory of ``momentum``.
        beta: b1.
        mask: packed bits, 1 = real element, or None when all are.

    Raises:
        NonFiniteGradient: NaN or infinity in the gradient or in what is to be encoded. Memory is
            as it was, bit for bit.
        LocalProtocolError: shapes, dtypes or devices do not fit.
        ConfigError: Numba is not installed.
    """
    memory_array(memory, gradient.numel(), codec.dtype)
    blend = Blend(gradient, memory, momentum, beta, mask)
    codec.leave(blend, codec.signs(blend, out), memory)


def inverse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the inverse denominators of values of a dtype are kept.

    bfloat16 for float32, as it is: half a model less on each worker and on the servers, and a
    rate that is off by 1/256 at most, the same on all nodes. Of float64, float64.
    """
    return torch.bfloat16 if dtype == torch.float32 else dtype


def inverse_denominator(
    variance: torch.Tensor, eps: float, real: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``1 / (sqrt(v) + eps)``, and 0 for elements that do not count.

    With 0 there a step needs no mask: such an element is moved by weight decay alone.

    Args:
        variance: (N,) float32 or float64, the frozen v. Not modified.
        eps: as in Adam.
        real: (N,) bool, or None when all count.

    Returns:
        (N,) of `inverse_dtype` of the dtype of ``variance``, rounded to nearest.
    """
    inverse = variance.detach().sqrt().add_(eps).reciprocal_()
    if real is not None:
        inverse.masked_fill_(~real, 0.0)
    return inverse.to(inverse_dtype(variance.dtype))


def move(
    codec: OneBit, bits: Array, scales: Array, x: Array, inverse: tuple[Array, Array],
    rates: tuple[Any, Any],
) -> None:  # fmt: skip
    """Do what `frozen_step` does along a code, on arrays that fit: only scales are checked."""
    bad = kernels("decode").step(bits, scales, codec.block_of(x.size), x, inverse, rates)
    if bad >= 0:
        raise scale_refusal(scales, bad)


def frozen_step(
    codec: OneBit,
    momentum: torch.Tensor,
    value: torch.Tensor,
    inverse: torch.Tensor,
    *,
    lr: float,
    weight_decay: float,
) -> None:
    """Do ``x -= lr * ((m * inverse) + (weight_decay * x))`` in one pass, on server and workers.

    Args:
        codec: gives blocks and dtype T.
        momentum: as in `encode_momentum`: (N,) T, or the update's code. Not modified.
        value: (N,) T, x; updated in place.
        inverse: (N,) T or bfloat16, from `inverse_denominator`. Not modified.
        lr: learning rate of this step.
        weight_decay: decoupled, never compressed.

    Raises:
        NonFiniteGradient: a scale of the code is not finite; nothing has changed.
        LocalProtocolError: shapes, dtypes or devices do not fit.
        ConfigError: Numba is not installed.
    """
    length = value.numel()
    if value.dtype not in NUMPY_OF:
        raise LocalProtocolError(
            f"step refused: expected values of float32 or float64, got {value.dtype}; "
            "keep a float32 copy of half-precision parameters and step that"
        )
    x = array(value, "value", length, codec.dtype)
    array(inverse, "inverse denominator", length, codec.dtype, torch.bfloat16)
    scale = gradient_arrays(inverse, codec.dtype)
    kind = NUMPY_OF[codec.dtype].type
    rates = (kind(lr), kind(weight_decay))
    if momentum.dtype == torch.uint8:
        code = array(momentum, "code", codec.encoded_bytes(length), torch.uint8)
        size = codec.scale_bytes(length)
        aligned = code[:size].copy().view(NUMPY_OF[codec.dtype])
        move(codec, code[size:], aligned, x, scale, rates)
    else:
        m = array(momentum, "momentum", length, codec.dtype)
        kernels("decode").step_dense(m, x, scale, rates)
