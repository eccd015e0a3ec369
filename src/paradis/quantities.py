"""Durations and sizes as people write them: ``2000ms``, ``1h30m``, ``32GB``, ``4MiB``.

Invariant: ``parse(format(x)) == x`` exactly, for every value that a parser can return. A number
without a unit is refused, since seconds and milliseconds are too easily confused.

    >>> parse_duration("1h30m"), parse_size("32GB"), format_size(4 << 20)
    (5400.0, 32000000000, '4MiB')
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Final

DURATION_FORMS: Final = "a duration such as 2000ms, 5s, 10m or 1h30m"
SIZE_FORMS: Final = "a size such as 512KiB, 4MiB, 32GiB (powers of 1024) or 32GB (powers of 1000)"

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(rf"(?:{_NUMBER}h)?(?:{_NUMBER}m(?!s))?(?:{_NUMBER}s)?(?:{_NUMBER}ms)?")
_SECONDS: Final = (Fraction(3600), Fraction(60), Fraction(1), Fraction(1, 1000))
_SIZE = re.compile(rf"{_NUMBER}([KMGT]i?B|kB|B)")
_BYTES: Final = {
    "TiB": 1 << 40,
    "TB": 10**12,
    "GiB": 1 << 30,
    "GB": 10**9,
    "MiB": 1 << 20,
    "MB": 10**6,
    "KiB": 1 << 10,
    "KB": 10**3,
    "kB": 10**3,
    "B": 1,
}


def parse_duration(text: str) -> float:
    """Return the seconds that the text says, rounded once.

    Raises:
        ValueError: not of the allowed forms; the message is `DURATION_FORMS`.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not match.group():
        raise ValueError(DURATION_FORMS)
    parts = zip(match.groups(), _SECONDS, strict=True)
    return float(sum(Fraction(number) * unit for number, unit in parts if number))


def format_duration(seconds: float) -> str:
    """Return the shortest usual form of a duration of zero or more seconds."""
    exact = Decimal(repr(seconds))
    if exact != exact.to_integral_value():
        # Below a second milliseconds read best; "1500ms" is also the form users know.
        return f"{(exact * 1000).normalize():f}ms"
    minutes, rest = divmod(int(exact), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (rest, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def parse_size(text: str) -> int:
    """Return the bytes that the text says.

    Raises:
        ValueError: not of the allowed forms, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(SIZE_FORMS)
    size = Fraction(match.group(1)) * _BYTES[match.group(2)]
    if size.denominator != 1:
        raise ValueError(f"a whole number of bytes, written as {SIZE_FORMS}")
    return int(size)


def format_size(size: int) -> str:
    """Return the size with the unit that gives the smallest whole number."""
    fitting = [unit for unit, scale in _BYTES.items() if size % scale == 0 and size >= scale]
    unit = max(fitting, key=lambda unit: _BYTES[unit], default="B")
    return f"{size // _BYTES[unit]}{unit}"
