"""Clocks of workers at a shard, against a slow twin that keeps the whole log."""

from __future__ import annotations

import random

import pytest

from paradis.core.clocks import NO_BOUND, Clocks, rate_divisor


@pytest.mark.parametrize("bound", [NO_BOUND, 0, 1, 3])
def test_who_may_begin_is_what_the_log_says(bound: int) -> None:
    """A worker begins step k with all its steps before k, and all others' before k - bound."""
    source = random.Random(bound)
    for _ in range(200):
        start, members = source.randint(0, 2), tuple(range(source.randint(1, 4)))
        clocks = Clocks(start=start, bound=bound)
        log: set[tuple[int, int]] = set()
        for _ in range(source.randint(0, 20)):
            rank = source.choice(members)
            log.add((rank, clocks.done(rank)))
            clocks.finish(rank, clocks.done(rank))
        for rank in members:
            step = source.randint(start, start + 8)
            needed = {(rank, t) for t in range(start, step)}
            if bound >= 0:
                needed |= {(r, t) for r in members for t in range(start, step - bound)}
            assert clocks.may_begin(rank, step, members) == (needed <= log)


def test_who_has_left_keeps_nobody_back() -> None:
    clocks = Clocks(start=0, bound=1)
    clocks.finish(0, 0)
    clocks.finish(0, 1)
    assert clocks.waits_for(2, (0, 1)) == (1,) and not clocks.may_begin(0, 2, (0, 1))
    assert clocks.waits_for(2, (0,)) == () and clocks.may_begin(0, 2, (0,))


def test_a_step_is_counted_once_and_in_order() -> None:
    clocks = Clocks(start=3, bound=NO_BOUND)
    clocks.finish(1, 3)
    for step in (3, 5):
        with pytest.raises(AssertionError, match=f"step {step} of worker 1 after 4"):
            clocks.finish(1, step)
    assert clocks.done(1) == 4


def test_one_worker_has_the_whole_rate_and_several_share_it() -> None:
    assert rate_divisor(members=1, staleness=0, scaled=False) == 1
    assert rate_divisor(members=1, staleness=0, scaled=True) == 1
    assert rate_divisor(members=4, staleness=9, scaled=False) == 4
    assert [rate_divisor(members=4, staleness=t, scaled=True) for t in (0, 1, 2, 9)] == [1, 1, 2, 9]
