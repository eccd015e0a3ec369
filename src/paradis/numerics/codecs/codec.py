"""What a codec is: numbers to fewer bytes and back, with closed forms for every length.

Invariant: a codec keeps nothing between calls. What it must remember, the error of its last code,
is the caller's tensor, and one `encode` replaces it exactly once: a retry sends the same bytes
again and never encodes again. A refused gradient changes no error memory.

Tensors are flat, contiguous and on the CPU. Payloads are little-endian: scales first, in the
codec's dtype, then codes; nothing else, no padding between or after them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray

from paradis.errors import LocalProtocolError, NonFiniteGradient
from paradis.numerics.finite import first_non_finite

Array = NDArray[Any]

NUMPY_OF: Final[Mapping[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
"""The dtypes that codecs compute in. float32 is for use, float64 for tests against theory."""


class Codec(ABC):
    """A pure function from numbers to bytes, and back.

    Attributes:
        name: its name in settings.
        number: its number on the wire; never given to another codec.
        remembers: whether `encode` needs error memory.
        dtype: float32 or float64: of scales, error memory and decoded numbers.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    remembers: ClassVar[bool]
    dtype: torch.dtype

    @abstractmethod
    def encoded_bytes(self, length: int) -> int:
        """Return the bytes of the code of ``length`` elements, exactly."""

    @abstractmethod
    def encode(
        self, value: torch.Tensor, out: torch.Tensor, memory: torch.Tensor | None = None
    ) -> None:
        """Write the code of ``value + memory``, and into memory what the code leaves of it.

        Args:
            value: (N,) of the codec's dtype, or bfloat16, which is widened. Not modified.
            out: (encoded_bytes(N),) uint8, written in place; undefined after a refusal.
            memory: (N,) of the codec's dtype, updated in place, once; zeros at first. None for a
                codec that does not remember.

        Raises:
            NonFiniteGradient: NaN or infinity in ``value`` or ``value + memory``, or numbers too
                large for the code. Memory is as it was, bit for bit.
            LocalProtocolError: shapes, dtypes or devices do not fit.
            ConfigError: the codec's kernels need Numba, which is not installed.
        """

    @abstractmethod
    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """Write the decoded numbers.

        Args:
            code: (encoded_bytes(N),) uint8. Not modified.
            out: (N,) of the codec's dtype, written in place.

        Raises:
            NonFiniteGradient: a scale in the code is not finite.
            LocalProtocolError: shapes, dtypes or devices do not fit.
            ConfigError: the codec's kernels need Numba, which is not installed.
        """

    @abstractmethod
    def decode_add(self, code: torch.Tensor, total: torch.Tensor) -> None:
        """Add the decoded numbers to ``total``, (N,) of the codec's dtype; else as `decode`."""


def block_count(length: int, block: int) -> int:
    """Return how many blocks, the last one perhaps shorter, hold ``length`` elements."""
    return -(-length // block) if block else 0


def array(tensor: torch.Tensor, what: str, length: int, *dtypes: torch.dtype) -> Array:
    """Return a flat tensor's memory; bfloat16 appears as its bits, in uint16.

    Raises:
        LocalProtocolError: it is not flat, contiguous, on the CPU, of one of the dtypes and
            ``length`` elements long.
    """
    fits = tensor.shape == (length,) and tensor.dtype in dtypes and tensor.is_contiguous()
    if not fits or not tensor.is_cpu:
        raise LocalProtocolError(
            f"codec call refused: {what}; expected ({length},) of {' or '.join(map(str, dtypes))}, "
            f"contiguous, on the CPU; got {tuple(tensor.shape)} {tensor.dtype}, strides "
            f"{tensor.stride()}, {tensor.device}; pass flat tensors of one shard"
        )
    values = tensor.detach() if tensor.requires_grad else tensor
    if values.dtype == torch.bfloat16:
        return values.view(torch.uint16).numpy()
    return values.numpy()


def gradient_arrays(
    value: torch.Tensor, dtype: torch.dtype, length: int | None = None
) -> tuple[Array, Array]:
    """Return a gradient as kernels take it: (in the codec's dtype, as bfloat16 bits).

    One of the two is empty. Without a length any is right.

    Raises:
        LocalProtocolError: as `array`.
    """
    wanted = value.numel() if length is None else length
    values = array(value, "gradient", wanted, dtype, torch.bfloat16)
    absent = np.empty(0, np.uint16 if value.dtype == dtype else NUMPY_OF[dtype])
    return (values, absent) if value.dtype == dtype else (absent, values)


def memory_array(memory: torch.Tensor | None, length: int, dtype: torch.dtype) -> Array:
    """Return the error memory.

    Raises:
        LocalProtocolError: there is none, or as `array`.
    """
    if memory is None:
        raise LocalProtocolError(
            f"codec call refused: error memory; expected ({length},) of {dtype}, got None; "
            "pass zeros at first, and the same tensor from then on"
        )
    return array(memory, "error memory", length, dtype)


def no_memory(memory: torch.Tensor | None, name: str) -> None:
    """Refuse error memory for a codec that has none.

    Raises:
        LocalProtocolError: some was given.
    """
    if memory is not None:
        raise LocalProtocolError(
            f"codec call refused: error memory of the codec {name}; expected None, got a tensor; "
            "this codec remembers nothing"
        )


def split_code(code: torch.Tensor, blocks: int, dtype: torch.dtype) -> tuple[Array, Array]:
    """Return a code's scales, copied and so aligned, and the rest of its bytes.

    Raises:
        NonFiniteGradient: a scale is not finite.
    """
    size = blocks * dtype.itemsize
    everything = code.detach().numpy()
    scales = everything[:size].copy().view(NUMPY_OF[dtype])
    if not np.isfinite(scales).all():
        raise scale_refusal(scales, int(np.isfinite(scales).argmin()))
    return scales, everything[size:]


def scale_refusal(scales: Array, block: int) -> NonFiniteGradient:
    """Return the error for a code whose block has a scale that is not finite."""
    return NonFiniteGradient(
        f"decoding refused: block {block} has the scale {scales[block]}; expected a finite one; "
        "do not apply this code",
        block=block,
    )


def refusal(start: int, inputs: dict[str, torch.Tensor]) -> NonFiniteGradient:
    """Return the error for inputs that a kernel found not finite from element ``start`` on."""
    for what, tensor in inputs.items():
        place = first_non_finite(tensor[start:])
        if place is not None:
            number = float(tensor[start + place])
            return NonFiniteGradient(
                f"encoding refused: {what}, element {start + place}; expected a finite number, "
                f"got {'nan' if math.isnan(number) else number}; leave this step out",
                element=start + place,
            )
    return NonFiniteGradient(
        f"encoding refused: element {start} or one soon after it; expected sums within the "
        "dtype's range, got an overflow; leave this step out",
        element=start,
    )
