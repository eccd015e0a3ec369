"""Flow control of pushes: what a pusher may send next, and when a receiver returns credit.

Invariant: for one (pusher, receiver, group) the bytes sent and not returned never exceed the
quota, plus one largest shard in the lane. A shard that is not the lowest unsent one is sent early only while
a reserve of one largest shard stays free, so the lowest unsent one can always be sent; with one
admission order on all workers there is then no cycle of waits (proof: docs/design/0001). Revised and
resent shards and assignments go through the lane, one at a time, in the same order.

Differs from credit in TCP: credit is tied to the shard it was spent on, not counted, so that lost
or repeated acknowledgements do no harm.

    >>> box = Outbox(quota=8, reserve=4)
    >>> box.begin({10: 4, 11: 4, 12: 4})
    >>> box.ready(11); box.next_push()
    11
    >>> box.ready(12); box.next_push() is None   # the reserve is kept for shard 10
    True
    >>> box.ready(10); box.next_push()
    10
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping


class Outbox:
    """What one pusher may send to one receiver, for one group.

    Attributes:
        quota: bytes that may be unreturned, at least twice the largest shard.
        reserve: bytes of the largest shard.
    """

    def __init__(self, *, quota: int, reserve: int) -> None:
        self.quota = max(quota, 2 * reserve)
        self.reserve = reserve
        self._sizes: dict[int, int] = {}
        self._rank: dict[int, int] = {}
        self._order: list[int] = []
        self._settled: dict[int, None] = {}
        self._lowest = 0
        self._ready: list[tuple[int, int]] = []
        self._unreturned: dict[int, int] = {}
        self._lane: list[tuple[int, int]] = []
        self.in_lane: int | None = None

    def begin(self, sizes: Mapping[int, int]) -> None:
        """Start a step: shard -> bytes, in admission order. Unreturned credit is carried over."""
        self._sizes = dict(sizes)
        self._order = list(sizes)
        self._rank = {shard: i for i, shard in enumerate(self._order)}
        self._settled = {}
        self._lowest = 0
        self._ready = []
        self._lane = []
        self.in_lane = None

    def ready(self, shard: int) -> None:
        """The shard's gradient exists."""
        heapq.heappush(self._ready, (self._rank[shard], shard))

    def settle(self, shard: int) -> None:
        """The shard need not be pushed through the window any more: it was, or it is absent."""
        self._settled[shard] = None
        while self._lowest < len(self._order) and self._order[self._lowest] in self._settled:
            self._lowest += 1

    @property
    def used(self) -> int:
        """Bytes sent and not returned."""
        return sum(self._unreturned.values())

    def next_push(self) -> int | None:
        """Return the next shard to push through the window and count its bytes, or None."""
        while self._ready:
            rank, shard = self._ready[0]
            if shard in self._settled:
                heapq.heappop(self._ready)
                continue
            size = self._sizes[shard]
            free = self.quota - self.used
            if free - size < (0 if rank == self._lowest else self.reserve):
                return None
            heapq.heappop(self._ready)
            self._unreturned[shard] = size
            self.settle(shard)
            return shard
        return None

    def returned(self, shard: int) -> None:
        """The receiver gave back the credit of this shard; unknown shards are ignored."""
        self._unreturned.pop(shard, None)

    def lane_add(self, shard: int) -> None:
        """Queue a revised, resent or assigned shard; one already queued is not queued twice."""
        entry = (self._rank.get(shard, shard), shard)
        if entry not in self._lane and shard != self.in_lane:
            heapq.heappush(self._lane, entry)

    def lane_next(self) -> int | None:
        """Return the next shard of the lane if the lane is free, and take the lane."""
        if self.in_lane is not None or not self._lane:
            return None
        self.in_lane = heapq.heappop(self._lane)[1]
        return self.in_lane

    def lane_done(self, shard: int) -> None:
        """The receiver holds the shard that was sent through the lane."""
        if self.in_lane == shard:
            self.in_lane = None

    @property
    def blocked(self) -> tuple[int, ...]:
        """Ready shards that wait for credit, and the shards that hold it (for the wait graph)."""
        return tuple(s for _, s in self._ready if s not in self._settled)

    @property
    def holding(self) -> tuple[int, ...]:
        """Shards whose credit has not come back."""
        return tuple(self._unreturned)

    def check(self) -> None:
        """Assert the invariant."""
        assert self.used <= self.quota, (self.used, self.quota)
        assert len(self._settled) <= len(self._order)


class Ledger:
    """What one receiver holds for one pusher and group, and which credit it still owes.

    Attributes:
        stored: bytes held.
    """

    def __init__(self, *, quota: int) -> None:
        self.quota = quota
        self.stored = 0
        self._owed: dict[int, int] = {}

    def on_stored(self, shard: int, size: int) -> bool:
        """Count received bytes; return whether their credit goes back at once."""
        self.stored += size
        if self.stored <= self.quota // 2:
            return True
        self._owed[shard] = size
        return False

    def on_released(self, shard: int, size: int) -> bool:
        """Count released bytes; return whether credit that was withheld goes back now."""
        self.stored -= size
        return self._owed.pop(shard, None) is not None

    def owes(self, shard: int) -> bool:
        """Whether the credit of this shard is still withheld."""
        return shard in self._owed

    def check(self) -> None:
        """Assert the invariant."""
        assert self.stored >= 0
        assert sum(self._owed.values()) <= self.stored
