"""What number a byte string has on the ring: CityHash64, the same on every machine for ever.

Invariant: the value depends on the bytes alone, never on the process, the platform or on whether
the optional ``cityhash`` wheel is installed; the wheel is faster and gives the same numbers.

Source: Geoff Pike and Jyrki Alakuijala, CityHash v1.1 (Google, 2013). Other products ship v1.0.2
under the same name, whose values differ. Integers here are taken modulo 2**64 by masking.

    >>> hash64(b"abc")
    2640714258260161385
    >>> city64(b"") == 0x9AE16A3B2F90404F
    True
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

_MASK: Final = (1 << 64) - 1
_K0: Final = 0xC3A5C85C97CB3127
_K1: Final = 0xB492B66FBE98F273
_K2: Final = 0x9AE16A3B2F90404F
_MUL: Final = 0x9DDFEA08EB382D69

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


def _fetch64(data: bytes, at: int) -> int:
    word: int = _u64(data, at)[0]
    return word


def _fetch32(data: bytes, at: int) -> int:
    word: int = _u32(data, at)[0]
    return word


def _rotate(value: int, bits: int) -> int:
    value &= _MASK
    return (value >> bits | value << (64 - bits)) & _MASK


def _shift_mix(value: int) -> int:
    value &= _MASK
    return value ^ value >> 47


def _swap_bytes(value: int) -> int:
    return int.from_bytes((value & _MASK).to_bytes(8, "little"), "big")


def _mix16(u: int, v: int, mul: int = _MUL) -> int:
    """Hash 128 bits into 64 in the manner of Murmur."""
    a = _shift_mix(((u ^ v) & _MASK) * mul)
    b = _shift_mix(((v ^ a) & _MASK) * mul)
    return b * mul & _MASK


def _hash_upto_16(data: bytes) -> int:
    length = len(data)
    mul = _K2 + length * 2
    if length >= 8:
        a = _fetch64(data, 0) + _K2
        b = _fetch64(data, length - 8)
        return _mix16(_rotate(b, 37) * mul + a, (_rotate(a, 25) + b) * mul, mul)
    if length >= 4:
        return _mix16(length + (_fetch32(data, 0) << 3), _fetch32(data, length - 4), mul)
    if length > 0:
        y = data[0] + (data[length >> 1] << 8)
        z = length + (data[-1] << 2)
        return _shift_mix(y * _K2 ^ z * _K0) * _K2 & _MASK
    return _K2


def _hash_17_to_32(data: bytes) -> int:
    length = len(data)
    mul = _K2 + length * 2
    a = _fetch64(data, 0) * _K1
    b = _fetch64(data, 8)
    c = _fetch64(data, length - 8) * mul
    d = _fetch64(data, length - 16) * _K2
    return _mix16(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, mul)


def _hash_33_to_64(data: bytes) -> int:
    length = len(data)
    mul = _K2 + length * 2
    a = _fetch64(data, 0) * _K2
    b = _fetch64(data, 8)
    c = _fetch64(data, length - 24)
    d = _fetch64(data, length - 32)
    e = _fetch64(data, 16) * _K2
    f = _fetch64(data, 24) * 9
    g = _fetch64(data, length - 8)
    h = _fetch64(data, length - 16) * mul
    u = _rotate(a + g, 43) + (_rotate(b, 30) + c) * 9
    v = ((a + g & _MASK) ^ d) + f + 1
    w = _swap_bytes((u + v) * mul) + h
    x = _rotate(e + f, 42) + c
    y = (_swap_bytes((v + w) * mul) + g) * mul
    z = e + f + c
    a = _swap_bytes((x + z) * mul + y) + b
    return _shift_mix((z + a) * mul + d + h) * mul + x & _MASK


def _weak_32(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    """Hash 32 bytes at an offset, with two seeds, into a pair."""
    w, x, y, z = struct.unpack_from("<4Q", data, at)
    a += w
    b = _rotate(b + a + z, 21)
    c = a
    a += x + y
    b += _rotate(a, 44)
    return a + z & _MASK, b + c & _MASK


def _hash_long(data: bytes) -> int:
    """Hash more than 64 bytes: 56 bytes of state, 64 bytes a round."""
    n = len(data)
    x = _fetch64(data, n - 40)
    y = _fetch64(data, n - 16) + _fetch64(data, n - 56) & _MASK
    z = _mix16(_fetch64(data, n - 48) + n, _fetch64(data, n - 24))
    v0, v1 = _weak_32(data, n - 64, n, z)
    w0, w1 = _weak_32(data, n - 32, y + _K1, x)
    x = x * _K1 + _fetch64(data, 0) & _MASK
    for at in range(0, n - 1 & ~63, 64):
        x = _rotate(x + y + v0 + _fetch64(data, at + 8), 37) * _K1 & _MASK
        y = _rotate(y + v1 + _fetch64(data, at + 48), 42) * _K1 & _MASK
        x ^= w1
        y = y + v0 + _fetch64(data, at + 40) & _MASK
        z = _rotate(z + w0, 33) * _K1 & _MASK
        v0, v1 = _weak_32(data, at, v1 * _K1, x + w0)
        w0, w1 = _weak_32(data, at + 32, z + w1, y + _fetch64(data, at + 16))
        z, x = x, z
    return _mix16(_mix16(v0, w0) + _shift_mix(y) * _K1 + z, _mix16(v1, w1) + x)


def city64(data: bytes) -> int:
    """Return CityHash64 v1.1 of the bytes, in [0, 2**64), in pure Python."""
    length = len(data)
    if length <= 16:
        return _hash_upto_16(data)
    if length <= 32:
        return _hash_17_to_32(data)
    if length <= 64:
        return _hash_33_to_64(data)
    return _hash_long(data)


def city64_with_seed(data: bytes, seed: int) -> int:
    """Return CityHash64WithSeed v1.1 of the bytes.

    Args:
        data: any bytes.
        seed: in [0, 2**64).
    """
    return _mix16(city64(data) - _K2 & _MASK, seed)


def _fastest() -> Callable[[bytes], int]:
    try:
        from cityhash import CityHash64
    except ImportError:
        return city64
    wheel: Callable[[bytes], int] = CityHash64
    return wheel


hash64: Callable[[bytes], int] = _fastest()
"""CityHash64 v1.1 of bytes, by the wheel where it is installed, else by `city64`."""
