"""One piece of memory that payloads of all lengths take turns in.

Memory that is kept by length is made anew whenever the lengths in use change, as they do in the
course of each step, and making it (page faults, zeros) costs as much as receiving into it. Here the
lowest hole that is long enough is taken, so the same pages serve again and again, and pages never
needed stay with the system.

Invariant: holes are in order, none touches another, and what is taken is in none of them.

Source: first fit in address order with coalescing, Knuth, The Art of Computer Programming, volume
1, section 2.5; that it fragments little: Johnstone and Wilson, "The Memory Fragmentation Problem:
Solved?", ISMM 1998.

    >>> region = Region(256)
    >>> region.take(100), region.take(100), region.take(100)   # in steps of 64
    (0, 128, -1)
    >>> region.give(0, 100); region.take(20)
    0
"""

from __future__ import annotations

from bisect import bisect
from typing import Final

from paradis.runtime.pages import allocate

_ALIGNMENT: Final = 64
"""A line of the cache; views of any dtype begin on it."""


class Region:
    """Not thread-safe.

    Args:
        nbytes: what all payloads share; resident as far as it has been used.

    Attributes:
        memory: (nbytes,) uint8.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = allocate(nbytes)
        self._holes = [(0, nbytes)]

    def take(self, nbytes: int) -> int:
        """Return where in `memory` so many bytes are free, now taken; -1: nowhere."""
        size = _aligned(nbytes)
        for index, (start, free) in enumerate(self._holes):
            if free >= size:
                rest = [(start + size, free - size)] if free > size else []
                self._holes[index : index + 1] = rest
                return start
        return -1

    def give(self, start: int, nbytes: int) -> None:
        """Take back what `take` returned ``start`` for, with the same ``nbytes``."""
        stop = start + _aligned(nbytes)
        index = bisect(self._holes, (start, 0))
        first = last = index
        if index and sum(self._holes[index - 1]) == start:
            first, start = index - 1, self._holes[index - 1][0]
        if index < len(self._holes) and self._holes[index][0] == stop:
            last, stop = index + 1, sum(self._holes[index])
        self._holes[first:last] = [(start, stop - start)]

    def check(self) -> None:
        """Assert the invariant."""
        stops = [sum(hole) for hole in self._holes]
        assert all(free > 0 for _, free in self._holes)
        assert all(s < hole[0] for s, hole in zip(stops, self._holes[1:], strict=False))
        assert not stops or stops[-1] <= self.memory.numel()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
