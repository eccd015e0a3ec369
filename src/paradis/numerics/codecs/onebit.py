"""One bit per element and one scale per block, with the error kept for the next time.

``C(x) = s * sgn(x)`` with ``sgn(0) = sgn(-0.0) = +1``; a bit is 1 for negative. The memory
becomes ``c - C(c)`` for ``c = value + memory``. With ``r = |x|_1 / (sqrt(n) |x|_2)`` of a block:

* norm ``l1``: ``s = |x|_1 / n``, least squares; ``|x - C(x)|^2 = (1 - r^2) |x|^2``, always less;
* norm ``l2``: ``s = |x|_2 / sqrt(n)``; ``|x - C(x)|^2 = 2 (1 - r) |x|^2`` grows for spiky blocks,
  r < 1/2. With one block per tensor it is what DeepSpeed's 1-bit Adam does; for comparison only.

Elements of zero variance cannot be said in one bit: a mask takes them out of the scale, and they
are decoded as 0 and have no error. Scales count real elements only, never padding.

Sources: Tang et al., 1-bit Adam, ICML 2021; Karimireddy et al., EF-SGD, ICML 2019 (norm l1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
import torch

from paradis.errors import ConfigError, LocalProtocolError, NonFiniteGradient
from paradis.numerics.codecs.codec import (
    NUMPY_OF,
    Array,
    Codec,
    array,
    block_count,
    gradient_arrays,
    memory_array,
    refusal,
    scale_refusal,
    split_code,
)
from paradis.numerics.codecs.kernels import kernels

BLOCK_ELEMENTS: Final = 1024
"""With it a shard of 4096 elements, the least worth compressing, and 120 bytes of headers take 25
times fewer bytes than in float32, and large ones 31 times; with 256 it would be 24.6 and 28.4. The
gain in error of smaller blocks is below what training shows."""

Sources = tuple[Array, Array, Array, Array, Array, Array]
"""What is encoded, as kernels take it: gradient, or gradient in bfloat16; momentum in numbers, or
its bits and scales; error. Absent ones have no elements."""

_ABSENT_BITS: Final = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Blend:
    """What is to be encoded: ``(beta * momentum + (1 - beta) * numbers) + error``. Borrowed.

    Attributes:
        numbers: (N,) of the codec's dtype, or bfloat16, which is widened.
        error: (N,) of the codec's dtype, or None for zeros.
        momentum: the last common momentum: (N,) of the codec's dtype, or (encoded_bytes(N),)
            uint8, the last update's code as it came, which reads 32 times fewer bytes; None: the
            numbers themselves are encoded.
        beta: share of the momentum that is kept, b1.
        mask: `pack_mask` of the real elements, None when all are.
    """

    numbers: torch.Tensor
    error: torch.Tensor | None
    momentum: torch.Tensor | None = None
    beta: float = 0.0
    mask: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class OneBit(Codec):
    """Sign code with error feedback; the payload is scales, then bits, little-endian in bytes.

    Attributes:
        block_elements: elements that share a scale; None for one scale per tensor.
        norm: how a scale is taken, ``l1`` or ``l2``.
        dtype: float32, or float64 for tests.
    """

    name: ClassVar[str] = "onebit"
    number: ClassVar[int] = 3
    remembers: ClassVar[bool] = True
    block_elements: int | None = BLOCK_ELEMENTS
    norm: Literal["l1", "l2"] = "l1"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if (self.block_elements is not None and self.block_elements < 1) or (
            self.norm not in ("l1", "l2") or self.dtype not in NUMPY_OF
        ):
            raise ConfigError(
                "codec refused: onebit; expected blocks of 1 or more elements, norm l1 or l2, "
                f"float32 or float64; got {self.block_elements}, {self.norm}, {self.dtype}; "
                "leave the defaults"
            )

    def block_of(self, length: int) -> int:
        """Return the elements of a block of a tensor: at most ``length``."""
        return length if self.block_elements is None else self.block_elements

    def encoded_bytes(self, length: int) -> int:
        return self.scale_bytes(length) + (length + 7) // 8

    def scale_bytes(self, length: int) -> int:
        """Return how many bytes of a code are scales; they come first."""
        return self._scale_count(length) * self.dtype.itemsize

    def _scale_count(self, length: int) -> int:
        return block_count(length, self.block_of(length))

    def encode(
        self,
        value: torch.Tensor,
        out: torch.Tensor,
        memory: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Write the code; see `Codec.encode`.

        Args:
            value: as in `Codec.encode`.
            out: as in `Codec.encode`.
            memory: as in `Codec.encode`.
            mask: `pack_mask` of the real elements; None when all are. The memory of the others
                becomes 0.
        """
        memory_array(memory, value.numel(), self.dtype)
        blend = Blend(value, memory, mask=mask)
        self.leave(blend, self.signs(blend, out), memory)

    def signs(self, blend: Blend, out: torch.Tensor) -> torch.Tensor:
        """Write the code of a blend; nothing else changes.

        Args:
            blend: what is to be encoded.
            out: as in `Codec.encode`.

        Returns:
            (blocks,) of the codec's dtype: the scales, for `leave`.

        Raises:
            NonFiniteGradient: as in `Codec.encode`.
            LocalProtocolError: as in `Codec.encode`.
            ConfigError: as in `Codec.encode`.
        """
        return self._signs(blend, out, np.empty(0, NUMPY_OF[self.dtype]))

    def signs_and_leave(self, blend: Blend, out: torch.Tensor, target: torch.Tensor) -> None:
        """Do what `signs` and then `leave` do, in one pass over memory: the code counts at once.

        With one scale per tensor the numbers are computed twice all the same.

        Args:
            blend: what is to be encoded.
            out: as in `Codec.encode`.
            target: as in `leave`.

        Raises:
            NonFiniteGradient: as in `Codec.encode`, but blocks of the target before the one that is
                told are written.
            LocalProtocolError: as in `Codec.encode`.
            ConfigError: as in `Codec.encode`.
        """
        self._signs(blend, out, memory_array(target, blend.numbers.numel(), self.dtype))

    def _signs(self, blend: Blend, out: torch.Tensor, left: Array) -> torch.Tensor:
        length = blend.numbers.numel()
        code = array(out, "code", self.encoded_bytes(length), torch.uint8)
        mask = mask_bits(blend.mask, length)
        scales, bad = self.write_signs(self._sources(blend), blend.beta, mask, code, left)
        if bad >= 0:
            raise self.refused(bad, blend.numbers, blend.error)
        return torch.from_numpy(scales)

    def write_signs(
        self, sources: Sources, beta: float, mask: Array, code: Array, left: Array
    ) -> tuple[Array, int]:
        """Do what `signs` does, on arrays that fit: nothing is checked.

        Args:
            sources: what is encoded.
            beta: share of the momentum that is kept.
            mask: packed bits, or without elements.
            code: the whole code.
            left: written with what the code leaves, unless it has no elements.

        Returns:
            (scales, -1), or the first block that is not finite; then the code is undefined, and
            ``left`` is written up to that block.
        """
        length = sources[0].size + sources[1].size
        kind, module = NUMPY_OF[self.dtype], kernels("sign")
        scales = np.empty(self._scale_count(length), kind)
        bad = module.encode(
            sources, self._factors(beta), (self.block_of(length), self.norm == "l2"), mask,
            (scales, code[scales.nbytes :], left), np.empty(module.SCRATCH, kind),
        )  # fmt: skip
        code[: scales.nbytes] = scales.view(np.uint8)
        return scales, bad

    def refused(
        self, bad: int, numbers: torch.Tensor, error: torch.Tensor | None
    ) -> NonFiniteGradient:
        """Return the error for a block that `write_signs` has found not finite."""
        inputs = {"gradient": numbers}
        if error is not None:
            inputs["error memory"] = error
        return refusal(bad * self.block_of(numbers.numel()), inputs)

    def leave(self, blend: Blend, scales: torch.Tensor, target: torch.Tensor | None) -> None:
        """Write what a code leaves of a blend: the next error memory.

        Args:
            blend: what `signs` was given, with the same numbers.
            scales: what `signs` returned.
            target: (N,) of the codec's dtype, written in place; may be the blend's error, or its
                momentum in numbers.

        Raises:
            LocalProtocolError: as in `Codec.encode`.
        """
        length = blend.numbers.numel()
        self.write_left(
            self._sources(blend), blend.beta, mask_bits(blend.mask, length),
            array(scales, "scales", self._scale_count(length), self.dtype),
            memory_array(target, length, self.dtype),
        )  # fmt: skip

    def write_left(
        self, sources: Sources, beta: float, mask: Array, scales: Array, target: Array
    ) -> None:
        """Do what `leave` does, on arrays that fit: nothing is checked."""
        module = kernels("sign")
        module.leave(
            sources, self._factors(beta), self.block_of(target.size), mask, (scales, target),
            np.empty(module.SCRATCH, NUMPY_OF[self.dtype]),
        )  # fmt: skip

    def _factors(self, beta: float) -> tuple[Any, Any]:
        kind = NUMPY_OF[self.dtype].type
        return kind(beta), kind(1.0 - beta)

    def _sources(self, blend: Blend) -> Sources:
        """Return a blend as kernels take it: gradient, momentum and error, absent ones empty."""
        length, momentum = blend.numbers.numel(), blend.momentum
        absent = np.empty(0, NUMPY_OF[self.dtype])
        error = absent if blend.error is None else memory_array(blend.error, length, self.dtype)
        numbers, bits, scales = absent, _ABSENT_BITS, absent
        if momentum is not None and momentum.dtype == torch.uint8:
            scales, bits = self.parts(momentum, length)
        elif momentum is not None:
            numbers = array(momentum, "momentum", length, self.dtype)
        return (*gradient_arrays(blend.numbers, self.dtype), numbers, bits, scales, error)

    def decode(
        self, code: torch.Tensor, out: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        """Write the decoded numbers, 0 where the mask is 0; see `Codec.decode`."""
        self._decode(code, out, mask, add=False)

    def decode_add(
        self, code: torch.Tensor, total: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        """Add the decoded numbers, 0 where the mask is 0; see `Codec.decode_add`."""
        self._decode(code, total, mask, add=True)

    def _decode(
        self, code: torch.Tensor, target: torch.Tensor, mask: torch.Tensor | None, *, add: bool
    ) -> None:
        length = target.numel()
        total = array(target, "numbers", length, self.dtype)
        given = array(code, "code", self.encoded_bytes(length), torch.uint8)
        self.take(given, total, mask_bits(mask, length), add=add)

    def take(self, code: Array, total: Array, mask: Array, *, add: bool) -> None:
        """Do what `decode` or `decode_add` does, on arrays that fit: only scales are checked."""
        size = self.scale_bytes(total.size)
        scales = code[:size].copy().view(NUMPY_OF[self.dtype])  # aligned
        block = self.block_of(total.size)
        bad = kernels("decode").decode(code[size:], scales, block, mask, total, add)
        if bad >= 0:
            raise scale_refusal(scales, bad)

    def parts(self, code: torch.Tensor, length: int) -> tuple[Array, Array]:
        """Return the scales, copied, and the bits of a code, as kernels take them.

        Raises:
            NonFiniteGradient: a scale is not finite.
            LocalProtocolError: the code is not that of ``length`` elements.
        """
        array(code, "code", self.encoded_bytes(length), torch.uint8)
        return split_code(code, self._scale_count(length), self.dtype)

    def code_of_decoded(
        self, numbers: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the code that decodes to some numbers, where one does.

        Args:
            numbers: (N,) of the codec's dtype. Not modified.
            mask: as in `encode`; elements where it is 0 may be anything.

        Returns:
            (encoded_bytes(N),) uint8; None: the numbers are not those of a code.
        """
        length = numbers.numel()
        values = array(numbers, "numbers", length, self.dtype)
        count, block = self._scale_count(length), self.block_of(length)
        sizes = np.zeros(count * block, values.dtype)
        np.abs(values, out=sizes[:length])
        if mask is not None:
            absent = np.unpackbits(mask_bits(mask, length), count=length, bitorder="little") == 0
            sizes[:length][absent] = 0
        rows = sizes.reshape(count, -1) if count else sizes.reshape(0, 1)
        scales = rows.max(axis=1, initial=0)
        same = (rows == scales[:, None]).reshape(-1)[:length]
        if mask is not None:
            same |= absent
        if not same.all() or not np.isfinite(scales).all():
            return None
        bits = np.packbits(np.signbit(values), bitorder="little")
        return torch.from_numpy(np.concatenate([scales.view(np.uint8), bits]))

    def mean(
        self,
        codes: Sequence[torch.Tensor],
        out: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Write the mean of several decoded codes, in one pass over ``out``.

        Added in the order given, then divided, so the caller gives them in the order of workers,
        whatever the order in which they came.

        Args:
            codes: one or more, (encoded_bytes(N),) uint8 each. Not modified.
            out: (N,) of the codec's dtype, written in place.
            mask: as in `decode`.

        Raises:
            NonFiniteGradient: a scale is not finite.
            LocalProtocolError: no code, or shapes, dtypes or devices do not fit.
            ConfigError: as in `Codec.decode`.
        """
        if not codes:
            raise LocalProtocolError(
                "mean of codes refused: expected one code per worker, got none; "
                "leave a shard that nobody contributed to untouched"
            )
        length = out.numel()
        total = array(out, "mean", length, self.dtype)
        size = self.encoded_bytes(length)
        given = [array(code, "code", size, torch.uint8) for code in codes]
        self.take_mean(given, total, mask_bits(mask, length))

    def take_mean(self, codes: Sequence[Array], total: Array, mask: Array) -> None:
        """Do what `mean` does, on arrays that fit: only scales are checked."""
        size = self.scale_bytes(total.size)
        scales = np.stack([code[:size] for code in codes]).view(NUMPY_OF[self.dtype])
        bits = np.stack([code[size:] for code in codes])
        worker = kernels("decode").mean(bits, scales, self.block_of(total.size), mask, total)
        if worker >= 0:
            raise scale_refusal(scales[worker], int(np.isfinite(scales[worker]).argmin()))


def pack_mask(real: torch.Tensor) -> torch.Tensor:
    """Return a mask of elements as bits, as the codec takes it.

    Args:
        real: (N,) bool, true for elements that count. Not modified.

    Returns:
        (ceil(N / 8),) uint8, little-endian bits, 1 = counts, 0 beyond N.
    """
    flags: Any = array(real, "mask", real.numel(), torch.bool)
    return torch.from_numpy(np.packbits(flags, bitorder="little"))


def mask_bits(mask: torch.Tensor | None, length: int) -> Array:
    """Return a packed mask as kernels take it; without elements when there is none.

    Raises:
        LocalProtocolError: it is not the mask of ``length`` elements.
    """
    return _ABSENT_BITS if mask is None else array(mask, "mask", (length + 7) // 8, torch.uint8)
