"""The pieces of every kernel: a run of elements to bits and back, masks, bfloat16 widened.

Legend: a run is ``n <= RUN`` elements from place ``at`` on. Bits are little-endian in bytes, 1 =
negative, or 1 = real element in a mask. An array without elements stands for an absent one, so
that one compilation serves all cases. Kernels in other files are compiled together with these:
after an edit here, ``make clean`` drops what Numba has kept of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.np import arrayobj
from numpy.typing import NDArray

from paradis.numerics.codecs.compiled import emitted, inlined

Array = NDArray[Any]

_make_array: Any = arrayobj.make_array

RUN: Final = 1024
"""Elements handled at a time: scratch, gradient, momentum and error memory of a run are 20 KiB of
a first-level cache of 32 KiB."""

# What LLVM does not find by itself in loops over bits: a comparison of 8 elements is a byte
# already, and a byte selects among 8 elements. Several times as fast as the loops.


class _Eight:
    """Writes instructions on 8 neighbouring elements of arrays of one floating type."""

    def __init__(self, context: Any, builder: Any, kind: Any) -> None:
        self._context, self.builder = context, builder
        self._vector = ir.VectorType(context.get_value_type(kind), 8)
        self._align = kind.bitwidth // 8

    def _pointer(self, kind: Any, array: Any, index: Any) -> Any:
        data = _make_array(kind)(self._context, self.builder, array).data
        return self.builder.bitcast(self.builder.gep(data, [index]), self._vector.as_pointer())

    def load(self, kind: Any, array: Any, index: Any) -> Any:
        """Return ``array[index : index + 8]``."""
        return self.builder.load(self._pointer(kind, array, index), align=self._align)

    def store(self, eight: Any, kind: Any, array: Any, index: Any) -> None:
        """Write ``array[index : index + 8]``."""
        self.builder.store(eight, self._pointer(kind, array, index), align=self._align)

    def all(self, value: Any) -> Any:
        """Return a value 8 times."""
        undefined = ir.Constant(self._vector, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
        places = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
        return self.builder.shuffle_vector(first, undefined, places)

    def signed(self, mask: Any, magnitude: Any) -> Any:
        """Return ``-magnitude`` where the mask is set, ``magnitude`` elsewhere."""
        negative = self.builder.fneg(magnitude)
        return self.builder.select(mask, self.all(negative), self.all(magnitude))

    def mask(self, byte: Any) -> Any:
        """Return the bits of a byte as a mask."""
        return self.builder.bitcast(byte, ir.VectorType(ir.IntType(1), 8))

    def negative(self, eight: Any) -> Any:
        """Return the mask of the elements below 0; -0.0 is not."""
        return self.builder.fcmp_ordered("<", eight, ir.Constant(self._vector, [0.0] * 8))

    def byte(self, mask: Any) -> Any:
        """Return a mask as the bits of a byte."""
        return self.builder.bitcast(mask, ir.IntType(8))


@emitted
def borrowed(typing: Any, array: Any) -> Any:
    """Return an argument of the kernel without its reference count.

    Each slice of a counted array costs two locked instructions. The caller of a kernel keeps its
    arguments alive; arrays made inside a kernel must not be borrowed.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        view = _make_array(array)(context, builder, values[0])
        view.meminfo = ir.Constant(view.meminfo.type, None)
        view.parent = ir.Constant(view.parent.type, None)
        return view._getvalue()

    return array(array), generate


@emitted
def spread_eight(typing: Any, c: Any, k: Any, byte: Any, magnitude: Any) -> Any:
    """Write ``c[k + i] = -magnitude if bit i of byte else magnitude``, i < 8."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        eight = _Eight(context, builder, c.dtype)
        eight.store(eight.signed(eight.mask(values[2]), values[3]), c, values[0], values[1])
        return context.get_dummy_value()

    return types.void(c, types.intp, types.uint8, c.dtype), generate


@emitted
def add_eight(typing: Any, c: Any, k: Any, byte: Any, magnitude: Any) -> Any:
    """Do ``c[k + i] += -magnitude if bit i of byte else magnitude``, i < 8."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        eight = _Eight(context, builder, c.dtype)
        old = eight.load(c, values[0], values[1])
        new = builder.fadd(old, eight.signed(eight.mask(values[2]), values[3]))
        eight.store(new, c, values[0], values[1])
        return context.get_dummy_value()

    return types.void(c, types.intp, types.uint8, c.dtype), generate


@emitted
def blend_eight(typing: Any, c: Any, k: Any, sign: Any, fresh: Any, g: Any, e: Any) -> Any:
    """Write ``c[k + i] = (m + fresh * g[i]) + e[i]``, i < 8.

    ``sign`` is (byte, magnitude) and gives ``m`` as in `spread_eight`; ``g`` and ``e`` are
    (array, index).
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        eight = _Eight(context, builder, c.dtype)
        part = builder.extract_value
        m = eight.signed(eight.mask(part(values[2], 0)), part(values[2], 1))
        gradient = eight.load(g[0], part(values[4], 0), part(values[4], 1))
        error = eight.load(e[0], part(values[5], 0), part(values[5], 1))
        moved = builder.fadd(m, builder.fmul(eight.all(values[3]), gradient))
        eight.store(builder.fadd(moved, error), c, values[0], values[1])
        return context.get_dummy_value()

    return types.void(c, types.intp, sign, c.dtype, g, e), generate


@emitted
def negative_eight(typing: Any, c: Any, k: Any) -> Any:
    """Return one byte: bit i is whether ``c[k + i] < 0``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        eight = _Eight(context, builder, c.dtype)
        return eight.byte(eight.negative(eight.load(c, *values)))

    return types.uint8(c, types.intp), generate


@emitted
def leave_eight(typing: Any, c: Any, k: Any, e: Any, scale: Any) -> Any:
    """Write ``e[k + i] = c[k + i] - (-scale if c[k + i] < 0 else scale)``, i < 8.

    Returns the byte of `negative_eight`, of ``c`` as it was: ``e`` may be its memory.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        eight = _Eight(context, builder, c.dtype)
        numbers = eight.load(c, values[0], values[1])
        below = eight.negative(numbers)
        left = builder.fsub(numbers, eight.signed(below, values[3]))
        eight.store(left, e, values[2], values[1])
        return eight.byte(below)

    return types.uint8(c, types.intp, e, c.dtype), generate


@inlined
def spread(c: Array, at: int, bits: Array, magnitude: Any) -> None:
    """Write the signs of the elements from ``at`` on times a magnitude into ``c``."""
    whole = c.size // 8 * 8 if at % 8 == 0 else 0
    bytes_of = bits[at // 8 : (at + whole) // 8]
    for j in range(bytes_of.size):
        spread_eight(c, j * 8, bytes_of[j], magnitude)
    for k in range(whole, c.size):
        c[k] = -magnitude if bit(bits, at + k) else magnitude


@inlined
def add(c: Array, at: int, bits: Array, magnitude: Any) -> None:
    """Add the signs of the elements from ``at`` on times a magnitude to ``c``."""
    whole = c.size // 8 * 8 if at % 8 == 0 else 0
    bytes_of = bits[at // 8 : (at + whole) // 8]
    for j in range(bytes_of.size):
        add_eight(c, j * 8, bytes_of[j], magnitude)
    for k in range(whole, c.size):
        c[k] += -magnitude if bit(bits, at + k) else magnitude


@inlined
def pack(c: Array, at: int, bits: Array) -> None:
    """Write the sign bits of ``c`` to the places from ``at`` on."""
    whole = c.size // 8 * 8 if at % 8 == 0 else 0
    bytes_of = bits[at // 8 : (at + whole) // 8]
    for j in range(bytes_of.size):
        bytes_of[j] = negative_eight(c, j * 8)
    zero = c.dtype.type(0)
    for k in range(whole, c.size):
        set_bit(bits, at + k, c[k] < zero)


@inlined
def pack_and_leave(c: Array, at: int, bits: Array, e: Array, scale: Any) -> None:
    """Do what `pack` does, and write into ``e`` what the signs leave of ``c``."""
    whole = c.size // 8 * 8 if at % 8 == 0 else 0
    bytes_of = bits[at // 8 : (at + whole) // 8]
    for j in range(bytes_of.size):
        bytes_of[j] = leave_eight(c, j * 8, e, scale)
    zero = c.dtype.type(0)
    for k in range(whole, c.size):
        negative = c[k] < zero
        set_bit(bits, at + k, negative)
        e[k] = c[k] - (-scale if negative else scale)


@inlined
def bit(bits: Array, place: int) -> Any:
    """Return one bit."""
    return (bits[place >> 3] >> (place & 7)) & 1


@inlined
def set_bit(bits: Array, place: int, value: bool) -> None:
    """Write one bit; the first of a byte clears the byte."""
    if place & 7 == 0:
        bits[place >> 3] = 0
    bits[place >> 3] |= np.uint8(value) << np.uint8(place & 7)


@inlined
def clear_masked(c: Array, at: int, mask: Array) -> None:
    """Set the elements of ``c`` to 0 whose bit of the mask, from ``at`` on, is 0.

    Most bytes of a mask are all ones, and these need no look at their elements.
    """
    if mask.size:
        zero = c.dtype.type(0)
        whole = c.size // 8 * 8 if at % 8 == 0 else 0
        bytes_of = mask[at // 8 : (at + whole) // 8]
        for j in range(bytes_of.size):
            byte = bytes_of[j]
            if byte != 255:
                for k in range(8):
                    if not (byte >> k) & 1:
                        c[j * 8 + k] = zero
        for k in range(whole, c.size):
            if not bit(mask, at + k):
                c[k] = zero


@inlined
def kept(start: int, stop: int, mask: Array) -> int:
    """Return how many elements of a block are real."""
    if not mask.size:
        return stop - start
    whole = (stop - start) // 8 * 8 if start % 8 == 0 else 0
    bytes_of = mask[start // 8 : (start + whole) // 8]
    count = whole
    for j in range(bytes_of.size):
        byte = bytes_of[j]
        if byte != 255:
            for k in range(8):
                count -= 1 - ((byte >> k) & 1)
    for place in range(start + whole, stop):
        count += bit(mask, place)
    return count


@inlined
def widened(wide: Array, half: Array, at: int, n: int, room: Array) -> Array:
    """Return a gradient's elements, those in bfloat16 widened into ``room``."""
    if half.size:
        bits = room.view(np.uint32)[:n]
        source = half[at : at + n]
        for k in range(n):
            bits[k] = np.uint32(source[k]) << np.uint32(16)
        return room[:n]
    return wide[at : at + n]
