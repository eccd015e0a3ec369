"""First fit in one piece of memory: nothing taken twice, holes grow together again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paradis.runtime.region import Region


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=80))
def test_nothing_is_taken_twice_and_refusals_are_true(moves: list[tuple[bool, int]]) -> None:
    """A slow twin keeps one flag per step of 64 bytes."""
    region, taken, used = Region(2048), dict[int, int](), [False] * 32
    for give, number in moves:
        if give and taken:
            start = list(taken)[number % len(taken)]
            size = taken.pop(start)
            region.give(start, size)
            used[start // 64 : start // 64 + -(-size // 64)] = [False] * -(-size // 64)
        elif not give:
            count = -(-number // 64)
            fitting = [i for i in range(33 - count) if not any(used[i : i + count])]
            start = region.take(number)
            assert start == (fitting[0] * 64 if fitting else -1), "the lowest that is long enough"
            if fitting:
                taken[start] = number
                used[start // 64 : start // 64 + count] = [True] * count
        region.check()
    for start, size in taken.items():
        region.give(start, size)
    assert region.take(2048) == 0
