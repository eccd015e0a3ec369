"""Flow control of pushes: what a pusher may send next, and when a receiver returns credit.

Invariant: for one (pusher, receiver, group) the bytes sent and not returned never exceed the
quota, plus what is in the lane. A shard that is not the lowest unsent one is sent early only while
a reserve of one largest shard stays free, so the lowest unsent one can always be sent; with one
admission order on all workers there is then no cycle of waits (proof: docs/design/0001).

The lane is for revised and resent shards and for assignments: one at a time, and the next when its
credit is back. Only a lower shard may overtake, so that the lowest shard that anybody waits for
never waits itself; with everything queued in admission order, as ``step()`` does, nothing overtakes
and the lane costs a receiver one largest shard beyond the quota.

Source: credit after Kung and Morris, "Credit-based flow control for ATM networks", IEEE Network
9(2), 1995; the reserve is Havender's resource ordering (IBM Systems Journal 7(2), 1968), relaxed to
early sends that leave room for the one in turn. Differs from both: credit is tied to the shard it
was spent on, not counted, so that lost or repeated acknowledgements do no harm.

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

PUSH = 1
ASSIGN = 0
"""Kinds of lane entries: of one shard, the assignment goes before the push."""

Entry = tuple[int, int, int]
"""A lane entry: place in admission order, kind, shard."""


class Outbox:
    """What one pusher may send to one receiver, for one group.

    Args:
        quota: bytes that may be unreturned; raised to twice the largest shard.
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
        self._used = 0
        self._lane: list[Entry] = []
        self._in_lane: dict[tuple[int, int], Entry] = {}

    def grow(self, reserve: int) -> None:
        """A later plan has a larger shard."""
        if reserve > self.reserve:
            self.reserve = reserve
            self.quota = max(self.quota, 2 * reserve)

    def begin(self, sizes: Mapping[int, int], *, keep_lane: bool = False) -> None:
        """Start a step: shard -> bytes, in admission order. Unreturned credit is carried over.

        Args:
            sizes: every shard that may go through the window in this step.
            keep_lane: the step goes on with more shards: what is in the lane stays.
        """
        self._sizes = dict(sizes)
        self._order = list(sizes)
        self._rank = {shard: i for i, shard in enumerate(self._order)}
        self._settled = {}
        self._lowest = 0
        self._ready = []
        if not keep_lane:
            self._lane = []
            self._in_lane = {}

    # ----------------------------------------------------------------- window

    def ready(self, shard: int) -> None:
        """The shard's gradient exists."""
        heapq.heappush(self._ready, (self._rank[shard], shard))

    def settle(self, shard: int) -> None:
        """The shard need not be pushed through the window any more: it was, or it is absent."""
        self._settled[shard] = None
        while self._lowest < len(self._order) and self._order[self._lowest] in self._settled:
            self._lowest += 1

    def settled(self, shard: int) -> bool:
        """Whether the shard can no longer go through the window in this step."""
        return shard in self._settled or shard not in self._rank

    @property
    def used(self) -> int:
        """Bytes sent through the window and not returned."""
        return self._used

    def may_push(self, rank: int, size: int) -> bool:
        """Whether a shard at this place fits now: all of the quota is for the lowest one only."""
        kept = 0 if rank == self._lowest else self.reserve
        return self.used + size + kept <= self.quota

    def next_push(self) -> int | None:
        """Return the next shard to push through the window and count its bytes, or None."""
        while self._ready:
            rank, shard = self._ready[0]
            if shard in self._settled:
                heapq.heappop(self._ready)
                continue
            size = self._sizes[shard]
            if not self.may_push(rank, size):
                return None
            heapq.heappop(self._ready)
            self._used += size - self._unreturned.get(shard, 0)
            self._unreturned[shard] = size
            self.settle(shard)
            return shard
        return None

    def returned(self, shard: int) -> None:
        """The receiver gave back the credit of this shard; unknown shards are ignored."""
        self._used -= self._unreturned.pop(shard, 0)

    # ------------------------------------------------------------------- lane

    def lane_add(self, shard: int, place: int, kind: int = PUSH) -> None:
        """Queue a revised, resent or assigned shard; one already queued is not queued twice.

        One that is under way is queued again: what is on its way may be an older revision.

        Args:
            place: the shard's place in admission order, the same at all pushers and receivers.
        """
        entry = (place, kind, shard)
        if entry not in self._lane:
            heapq.heappush(self._lane, entry)

    def lane_next(self) -> tuple[int, int] | None:
        """Take the next (shard, kind) of the lane: the lowest, if nothing lower is under way."""
        if not self._lane:
            return None
        if self._in_lane and self._lane[0] > min(self._in_lane.values()):
            return None
        entry = heapq.heappop(self._lane)
        self._in_lane[entry[2], entry[1]] = entry
        return entry[2], entry[1]

    def lane_done(self, shard: int, kind: int = PUSH) -> None:
        """The receiver gave back what the shard took in the lane."""
        self._in_lane.pop((shard, kind), None)

    def lane_drop(self, shard: int) -> None:
        """The shard is finished: forget its pushes in the lane, waiting or under way."""
        self._in_lane.pop((shard, PUSH), None)
        if any(e[1] == PUSH and e[2] == shard for e in self._lane):
            self._lane = [e for e in self._lane if e[1] != PUSH or e[2] != shard]
            heapq.heapify(self._lane)

    def lane_again(self, kind: int) -> None:
        """Queue again what is under way and has no answer."""
        for entry in [e for e in self._in_lane.values() if e[1] == kind]:
            self.lane_done(entry[2], kind)
            self.lane_add(entry[2], entry[0], kind)

    # ------------------------------------------------------------- inspection

    @property
    def blocked(self) -> tuple[int, ...]:
        """Ready shards that wait for credit (for the wait graph)."""
        return tuple(s for _, s in sorted(self._ready) if s not in self._settled)

    @property
    def unsent(self) -> tuple[int, ...]:
        """Shards still to go through the window in this step, in admission order."""
        return tuple(s for s in self._order if s not in self._settled)

    @property
    def holding(self) -> tuple[int, ...]:
        """Shards whose credit has not come back."""
        return tuple(self._unreturned)

    def size_of(self, shard: int) -> int:
        """Return the bytes of a shard of this step, or of one whose credit is not back."""
        return self._sizes.get(shard, self._unreturned.get(shard, 0))

    def check(self) -> None:
        """Assert the invariant."""
        assert self.used == sum(self._unreturned.values())
        assert self.used <= self.quota, (self.used, self.quota)
        assert self._lowest == len(self._order) or self._order[self._lowest] not in self._settled


class Ledger:
    """What one receiver holds for one pusher and group, and which credit it still owes.

    Credit goes back at once while no more than half of the quota is held, and the rest when the
    bytes are released because the shard is summed: never only when the update is applied, for that
    needs every commit, which needs every push.

    Attributes:
        stored: bytes held.
    """

    def __init__(self, *, quota: int) -> None:
        self.quota = quota
        self.stored = 0
        self._owed: dict[tuple[int, int], int] = {}

    def on_stored(self, shard: int, tag: int, size: int) -> bool:
        """Count received bytes; return whether their credit goes back at once.

        Args:
            tag: what the pusher calls the push: of one shard an old one may be summed still while
                a newer one is held.
            size: bytes.
        """
        self.stored += size
        if self.stored <= self.quota // 2:
            return True
        self._owed[shard, tag] = size
        return False

    def on_released(self, shard: int, tag: int, size: int) -> bool:
        """Count released bytes; return whether credit that was withheld goes back now."""
        self.stored -= size
        return self._owed.pop((shard, tag), None) is not None

    def owes(self, shard: int, tag: int) -> bool:
        """Whether the credit of this push is still withheld."""
        return (shard, tag) in self._owed

    def check(self) -> None:
        """Assert the invariant."""
        assert self.stored >= 0, self.stored
        assert sum(self._owed.values()) <= self.stored
