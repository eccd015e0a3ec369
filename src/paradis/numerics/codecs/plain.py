"""Codecs without kernels: all bits, and bfloat16 rounded to nearest even."""

from __future__ import annotations

from typing import ClassVar, Final

import torch

from paradis.errors import NonFiniteGradient
from paradis.numerics.codecs.codec import Codec, array, no_memory, refusal
from paradis.numerics.finite import first_non_finite

_PIECE: Final = 64 * 1024
"""Elements widened at a time before they are added: 256 KiB of float32, half a second-level
cache. torch adds bfloat16 straight to float32 at a third of the speed."""

_BFLOAT16_LIMIT: Final = float.fromhex("0x1.ffp+127")
"""From here on float32 rounds to infinity: half a unit above the largest bfloat16."""


class Uncompressed(Codec):
    """The bytes of the numbers themselves; what bfloat16 gradients widen to.

    Source of the name ``none``: the setting that switches compression off.
    """

    name: ClassVar[str] = "none"
    number: ClassVar[int] = 0
    remembers: ClassVar[bool] = False

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def encoded_bytes(self, length: int) -> int:
        return length * self.dtype.itemsize

    def encode(
        self, value: torch.Tensor, out: torch.Tensor, memory: torch.Tensor | None = None
    ) -> None:
        no_memory(memory, self.name)
        array(value, "gradient", value.numel(), self.dtype, torch.bfloat16)
        array(out, "code", self.encoded_bytes(value.numel()), torch.uint8)
        place = first_non_finite(value)
        if place is not None:
            raise refusal(place, {"gradient": value.detach()})
        if value.dtype == self.dtype:
            out.copy_(value.detach().view(torch.uint8))
        else:
            out.copy_(value.detach().to(self.dtype).view(torch.uint8))

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        array(out, "numbers", out.numel(), self.dtype)
        array(code, "code", self.encoded_bytes(out.numel()), torch.uint8)
        out.view(torch.uint8).copy_(code)

    def decode_add(self, code: torch.Tensor, total: torch.Tensor) -> None:
        array(total, "sum", total.numel(), self.dtype)
        array(code, "code", self.encoded_bytes(total.numel()), torch.uint8)
        room = total.new_empty(min(_PIECE, total.numel()))
        size = self.dtype.itemsize
        for start in range(0, total.numel(), _PIECE):
            target = total[start : start + _PIECE]
            piece = room[: target.numel()]
            # Through bytes: a code inside a frame need not be aligned to 4.
            piece.view(torch.uint8).copy_(code[start * size :][: target.numel() * size])
            target.add_(piece)


class Bfloat16(Codec):
    """The upper half of each float32, rounded to nearest, ties to even."""

    name: ClassVar[str] = "bf16"
    number: ClassVar[int] = 1
    remembers: ClassVar[bool] = False
    dtype = torch.float32

    def encoded_bytes(self, length: int) -> int:
        return 2 * length

    def encode(
        self, value: torch.Tensor, out: torch.Tensor, memory: torch.Tensor | None = None
    ) -> None:
        no_memory(memory, self.name)
        array(value, "gradient", value.numel(), self.dtype, torch.bfloat16)
        array(out, "code", self.encoded_bytes(value.numel()), torch.uint8)
        values = value.detach()
        _check_range(values)
        if values.dtype == torch.bfloat16:
            out.copy_(values.view(torch.uint8))
            return
        room = values.new_empty(min(_PIECE, values.numel()), dtype=torch.bfloat16)
        for start in range(0, values.numel(), _PIECE):
            source = values[start : start + _PIECE]
            piece = room[: source.numel()]
            piece.copy_(source)
            out[2 * start :][: 2 * source.numel()].copy_(piece.view(torch.uint8))

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        self._widen(code, out, add=False)

    def decode_add(self, code: torch.Tensor, total: torch.Tensor) -> None:
        self._widen(code, total, add=True)

    def _widen(self, code: torch.Tensor, target: torch.Tensor, *, add: bool) -> None:
        array(target, "numbers", target.numel(), self.dtype)
        array(code, "code", self.encoded_bytes(target.numel()), torch.uint8)
        room = target.new_empty(min(_PIECE, target.numel()))
        half = room.new_empty(room.numel(), dtype=torch.bfloat16)
        for start in range(0, target.numel(), _PIECE):
            part = target[start : start + _PIECE]
            source = half[: part.numel()]
            source.view(torch.uint8).copy_(code[2 * start :][: 2 * part.numel()])
            if add:
                part.add_(room[: part.numel()].copy_(source))
            else:
                part.copy_(source)


def _check_range(values: torch.Tensor) -> None:
    """Refuse numbers that are not finite in bfloat16.

    Raises:
        NonFiniteGradient: there is one.
    """
    if not values.numel():
        return
    low, high = (bound.item() for bound in values.aminmax())  # NaN if any element is
    if low > -_BFLOAT16_LIMIT and high < _BFLOAT16_LIMIT:
        return
    place = first_non_finite(values)
    if place is not None:
        raise refusal(place, {"gradient": values})
    place = int(values.abs().argmax())
    raise NonFiniteGradient(
        f"encoding refused: gradient, element {place}; expected less than {_BFLOAT16_LIMIT:.4g}, "
        f"which bfloat16 can hold, got {float(values[place])}; leave this step out",
        element=place,
    )
