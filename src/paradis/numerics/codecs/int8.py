"""One byte per element: 255 levels, a scale per block, and the error kept for the next time.

A block's scale is ``max |c| / 127`` for ``c = value + memory``; an element's code is ``c / scale``
rounded to nearest, ties to even; the memory becomes ``c - code * scale``. A block whose scale would
be below the normal numbers of the dtype sends zeros, and all of it stays in the memory.

Source: blockwise quantisation with error feedback, after QSGD (Alistarh et al., NIPS 2017) and
EF-SGD (Karimireddy et al., ICML 2019); without their random rounding, so that bits repeat.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch

from paradis.errors import ConfigError
from paradis.numerics.codecs.codec import (
    NUMPY_OF,
    Array,
    Codec,
    array,
    block_count,
    gradient_arrays,
    memory_array,
    refusal,
    split_code,
)
from paradis.numerics.codecs.kernels import kernels

BLOCK_ELEMENTS: Final = 256
"""1.6 % of the bytes are scales. The largest of 256 normal numbers is about 2.8 deviations, of 4096
about 3.6: error power 1.6 times as large for 1.5 % fewer bytes."""

assert sys.byteorder == "little"


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """Blockwise int8 with error feedback; the payload is scales, then one int8 per element."""

    name: ClassVar[str] = "int8"
    number: ClassVar[int] = 2
    remembers: ClassVar[bool] = True
    block_elements: int = BLOCK_ELEMENTS
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.block_elements < 1 or self.dtype not in NUMPY_OF:
            raise ConfigError(
                "codec refused: int8; expected blocks of 1 or more elements and float32 or "
                f"float64, got {self.block_elements} and {self.dtype}; leave the defaults"
            )

    def encoded_bytes(self, length: int) -> int:
        return block_count(length, self.block_elements) * self.dtype.itemsize + length

    def encode(
        self, value: torch.Tensor, out: torch.Tensor, memory: torch.Tensor | None = None
    ) -> None:
        length = value.numel()
        wide, half = gradient_arrays(value, self.dtype)
        error = memory_array(memory, length, self.dtype)
        code = array(out, "code", self.encoded_bytes(length), torch.uint8)
        kind = NUMPY_OF[self.dtype]
        scales = np.empty(block_count(length, self.block_elements), kind)
        module = kernels("int8")
        bad = module.encode(
            (wide, half, error),
            (self.block_elements, *_constants(kind)),
            scales,
            code[scales.nbytes :],
            np.empty(module.SCRATCH + length, kind),
        )
        if bad >= 0:
            assert memory is not None
            raise refusal(bad * self.block_elements, {"gradient": value, "error memory": memory})
        code[: scales.nbytes] = scales.view(np.uint8)

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(code, out, add=False)

    def decode_add(self, code: torch.Tensor, total: torch.Tensor) -> None:
        self._decode(code, total, add=True)

    def _decode(self, code: torch.Tensor, target: torch.Tensor, *, add: bool) -> None:
        length = target.numel()
        total = array(target, "numbers", length, self.dtype)
        array(code, "code", self.encoded_bytes(length), torch.uint8)
        blocks = block_count(length, self.block_elements)
        scales, codes = split_code(code, blocks, self.dtype)
        kernels("int8").decode(codes.view(np.int8), scales, self.block_elements, total, add)


def _constants(kind: np.dtype[Any]) -> tuple[Array, Any, Any]:
    """Return bit patterns, least normal number and rounder of a dtype, as `encode` takes them."""
    limits = np.finfo(kind)
    infinity = np.array([np.inf], kind).view(f"u{kind.itemsize}")[0]
    positive = np.array([2 ** (8 * kind.itemsize - 1) - 1, infinity], f"u{kind.itemsize}")
    return positive, limits.tiny, kind.type(1.5 * 2**limits.nmant)
