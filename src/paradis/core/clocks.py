"""Which steps of which worker a shard's value holds, and who may go on with it.

Each worker has a clock of its own. ``done(rank)`` counts the steps of a worker that the value
holds: each of them applied once, or passed over because it had no gradient. Invariants:

* a worker's steps enter the value one by one and in order, so none is counted twice;
* whoever begins step k with a value finds in it all his own steps before k, and, with a staleness
  bound s, all steps t <= k - s - 1 of every member. A worker begins a step only with all shards,
  so nobody is more than s steps ahead of the slowest member.

Source: stale synchronous parallel, Ho et al., "More effective distributed ML via a stale
synchronous parallel parameter server", NIPS 2013, section 3. There the bound is on a worker's clock
for a whole table; here each shard keeps it, so that no server asks another.

    >>> clocks = Clocks(start=0, bound=1)
    >>> clocks.finish(0, 0); clocks.may_begin(0, 1, (0, 1))   # one step ahead of worker 1
    True
    >>> clocks.finish(0, 1); clocks.may_begin(0, 2, (0, 1))   # two
    False
    >>> clocks.waits_for(2, (0, 1))
    (1,)
"""

from __future__ import annotations

from collections.abc import Sequence

NO_BOUND = -1
"""In place of a staleness bound: nobody waits for anybody."""


class Clocks:
    """Clocks of the workers at one shard.

    Args:
        start: the step at which the shard was registered.
        bound: how many steps ahead of the slowest member a worker may be, or `NO_BOUND`.
    """

    __slots__ = ("_start", "_bound", "_done")

    def __init__(self, *, start: int, bound: int) -> None:
        self._start = start
        self._bound = bound
        self._done: dict[int, int] = {}

    def done(self, rank: int) -> int:
        """Return how many steps of a worker are in the value; also the step it is at here."""
        return self._done.get(rank, self._start)

    def finish(self, rank: int, step: int) -> None:
        """The value now holds this step of a worker."""
        assert step == self.done(rank), f"step {step} of worker {rank} after {self.done(rank)}"
        self._done[rank] = step + 1

    def may_begin(self, rank: int, step: int, members: Sequence[int]) -> bool:
        """Whether a worker may begin ``step`` with the value as it is."""
        return self.done(rank) >= step and not self.waits_for(step, members)

    def waits_for(self, step: int, members: Sequence[int]) -> tuple[int, ...]:
        """Return the members that are too far behind for anybody to begin ``step``."""
        if self._bound < 0:
            return ()
        return tuple(r for r in members if step - self.done(r) > self._bound)


def rate_divisor(*, members: int, staleness: int, scaled: bool) -> int:
    """Return what the learning rate of one worker's update is divided by.

    Where each worker's gradient is an update of its own, n workers of equal speed make n updates in
    the time in which ``sync`` makes one with the mean. So each update counts for an n-th. With
    ``scaled`` it counts by its own staleness instead, which is n - 1 in the mean.

    Source: Zhang et al., "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016,
    section 3.2 (rate divided by the staleness).

    Args:
        members: number of workers that take part.
        staleness: updates that were applied since the worker read the value.
        scaled: divide by the staleness.
    """
    return max(1, staleness if scaled else members)
