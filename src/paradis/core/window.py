"""How many bytes a worker may have under way to a receiver, and which shard goes next.

Invariant: at a receiver, what a pusher may yet send plus what is stored of it never exceeds
``quota + quota // 2``; credit withheld is exactly the stored bytes beyond ``quota // 2``, so it is
back once shards are summed, never only once they are applied. At a pusher, a shard that is not
the lowest unsent one leaves ``reserve`` bytes of the quota free.

Why nobody waits for ever: take the smallest incomplete shard j and a worker that has not sent it.
All below j are summed. Withheld credit grows with the stored bytes alone, and those are the early
ones, which left the reserve free when they were sent. So j fits, and it is ready in the end, for
neither backward nor ``step()`` waits for credit. The order must be the same on all workers.

Source: credit windows after Kung and Morris, "Credit-based flow control for ATM networks", IEEE
Network 9(2), 1995; the reserve is the resource-ordering rule of Havender (IBM Systems Journal
7(2), 1968), relaxed to early sends that leave room for the one in turn.

    >>> sender, receiver = SendWindow(100, 40), ReceiveWindow(100)
    >>> sender.may_send(40, lowest=False), sender.on_sent(40), sender.may_send(40, lowest=False)
    (True, None, False)
    >>> sender.may_send(40, lowest=True), receiver.on_received(40), receiver.credited
    (True, 40, 40)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from paradis.errors import ConfigError, LocalProtocolError, RemoteProtocolError


class ReceiveWindow:
    """Credit accounts of one pusher's connection at a receiver.

    A new connection gets a new window; bytes that came through the old one are released there,
    where the credit goes nowhere, for the pusher starts anew too.

    Args:
        quota_bytes: bytes the pusher may have unreturned.

    Attributes:
        credited: bytes given back since the connection began; never falls, so an
            acknowledgement that carries it may be lost, repeated or overtaken.
        received: bytes taken in since the connection began.
        stored: bytes taken in and not yet summed or dropped.
    """

    __slots__ = ("credited", "quota_bytes", "received", "stored")

    def __init__(self, quota_bytes: int) -> None:
        if quota_bytes < 1:
            raise ConfigError(f"quota refused: expected at least 1 byte, got {quota_bytes}")
        self.quota_bytes = quota_bytes
        self.credited = 0
        self.received = 0
        self.stored = 0

    @property
    def withheld(self) -> int:
        """Bytes taken in whose credit is not given back."""
        return self.received - self.credited

    def on_received(self, n: int) -> int:
        """Account a push that arrived.

        Args:
            n: its payload in bytes, 0 allowed.

        Returns:
            Bytes of credit to give back now.

        Raises:
            RemoteProtocolError: the pusher sent more than it had credit for; drop it.
        """
        if n < 0 or self.withheld + n > self.quota_bytes:
            raise RemoteProtocolError(
                f"push refused: {n} bytes, but the pusher has credit for "
                f"{self.quota_bytes - self.withheld} of {self.quota_bytes}; drop the connection"
            )
        self.received += n
        self.stored += n
        return self._give_back()

    def on_released(self, n: int) -> int:
        """Account stored bytes that were summed or dropped.

        Args:
            n: the payload of a push that was received, released once.

        Returns:
            Bytes of credit to give back now.

        Raises:
            LocalProtocolError: more is released than is stored.
        """
        if not 0 <= n <= self.stored:
            raise LocalProtocolError(
                f"release refused: {n} bytes of {self.stored} stored; release each push once"
            )
        self.stored -= n
        return self._give_back()

    def _give_back(self) -> int:
        credit = self.withheld - max(0, self.stored - self.quota_bytes // 2)
        self.credited += credit
        return credit

    def check(self) -> None:
        """Assert the invariant of the module."""
        assert 0 <= self.credited <= self.received and 0 <= self.stored <= self.received
        assert self.withheld == max(0, self.stored - self.quota_bytes // 2)
        may_arrive = self.quota_bytes - self.withheld
        assert may_arrive >= 0
        assert may_arrive + self.stored <= self.quota_bytes + self.quota_bytes // 2


class SendWindow:
    """Credit accounts of one receiver at a pusher.

    Args:
        quota_bytes: as at the receiver.
        reserve_bytes: at least the largest shard; kept free for the shard whose turn it is.

    Raises:
        ConfigError: the reserve is negative or larger than the quota.
    """

    __slots__ = ("credited", "quota_bytes", "reserve_bytes", "sent")

    def __init__(self, quota_bytes: int, reserve_bytes: int) -> None:
        if not 0 <= reserve_bytes <= quota_bytes or quota_bytes < 1:
            raise ConfigError(
                f"window refused: expected 0 <= reserve <= quota, got a largest shard of "
                f"{reserve_bytes} and a quota of {quota_bytes} bytes; raise the quota to at least "
                "twice the largest shard"
            )
        self.quota_bytes = quota_bytes
        self.reserve_bytes = reserve_bytes
        self.sent = 0
        self.credited = 0

    @property
    def unreturned(self) -> int:
        """Bytes sent whose credit has not come back."""
        return self.sent - self.credited

    def may_send(self, n: int, *, lowest: bool) -> bool:
        """Tell whether a shard may go now.

        Args:
            n: its payload in bytes, at most ``reserve_bytes``.
            lowest: it is the first unsent one in admission order.

        Raises:
            LocalProtocolError: the shard is larger than the reserve, which would break the proof.
        """
        if not 0 <= n <= self.reserve_bytes:
            raise LocalProtocolError(
                f"push refused: a shard of {n} bytes, but the window keeps {self.reserve_bytes} "
                "free for the largest; build the window with the largest shard of the plan"
            )
        kept = 0 if lowest else self.reserve_bytes
        return self.unreturned + n + kept <= self.quota_bytes

    def on_sent(self, n: int) -> None:
        """Account a push that was handed to the connection.

        Raises:
            LocalProtocolError: there is no credit for it.
        """
        if n < 0 or self.unreturned + n > self.quota_bytes:
            raise LocalProtocolError(
                f"push refused: {n} bytes with {self.unreturned} of {self.quota_bytes} unreturned; "
                "ask may_send first"
            )
        self.sent += n

    def on_credit(self, cumulative: int) -> None:
        """Take a receiver's ``credited``; one that is older than the last changes nothing.

        Raises:
            RemoteProtocolError: more is credited than was sent.
        """
        if cumulative > self.sent:
            raise RemoteProtocolError(
                f"credit refused: {cumulative} bytes in all, but only {self.sent} were sent; "
                "drop the connection"
            )
        self.credited = max(self.credited, cumulative)

    def reset(self) -> None:
        """Start anew, with a new connection and a new window at the receiver."""
        self.sent = 0
        self.credited = 0

    def check(self) -> None:
        """Assert that what is unreturned is within the quota."""
        assert 0 <= self.credited <= self.sent
        assert self.unreturned <= self.quota_bytes


class AdmissionQueue:
    """Shards of one receiver that this worker has to push in the current step.

    Each call costs O(log n) amortised. Bounded by the number of shards.

    Args:
        priorities: shard -> place in admission order, unique; the same on all workers.
    """

    __slots__ = ("_expected", "_priorities", "_ready", "_unsent")

    def __init__(self, priorities: Mapping[int, int]) -> None:
        self._priorities = dict(priorities)
        if len(set(self._priorities.values())) != len(self._priorities):
            raise ConfigError("admission order refused: two shards share a priority")
        # Heaps of (priority, shard); an entry of a shard that is not unsent is skipped.
        self._expected: list[tuple[int, int]] = []
        self._ready: list[tuple[int, int]] = []
        self._unsent: dict[int, int | None] = {}

    def __len__(self) -> int:
        """Return the number of unsent shards."""
        return len(self._unsent)

    def __contains__(self, shard: int) -> bool:
        """Tell whether the shard is unsent."""
        return shard in self._unsent

    def add(self, shard: int) -> None:
        """Expect a push of this shard; it is unsent until it goes. Repeating does nothing.

        Raises:
            LocalProtocolError: the shard has no priority.
        """
        if shard not in self._priorities:
            raise LocalProtocolError(
                f"shard {shard} has no place in admission order; build the queue from the plan"
            )
        if shard not in self._unsent:
            if not self._unsent:
                self._expected.clear()
                self._ready.clear()
            self._unsent[shard] = None
            heappush(self._expected, (self._priorities[shard], shard))

    def mark_ready(self, shard: int, n: int) -> None:
        """Say that the gradient of an unsent shard is there.

        Args:
            n: payload in bytes.

        Raises:
            LocalProtocolError: the shard is not unsent, or ready already.
        """
        if self._unsent.get(shard, n) is not None:
            raise LocalProtocolError(
                f"shard {shard} cannot become ready: it is sent, ready or not expected; add it "
                "once a step and mark it once"
            )
        self._unsent[shard] = n
        heappush(self._ready, (self._priorities[shard], shard))

    def discard(self, shard: int) -> None:
        """Expect no push of this shard any more, because it goes another way or not at all."""
        self._unsent.pop(shard, None)

    def lowest_unsent(self) -> int | None:
        """Return the first unsent shard in admission order, ready or not."""
        while self._expected and self._expected[0][1] not in self._unsent:
            heappop(self._expected)
        return self._expected[0][1] if self._expected else None

    def next_sendable(self, window: SendWindow) -> int | None:
        """Take the lowest ready shard if the window allows it, and charge the window.

        A smaller shard never overtakes a ready one that does not fit: order before throughput.
        """
        while self._ready and self._unsent.get(self._ready[0][1]) is None:
            heappop(self._ready)
        if not self._ready:
            return None
        shard = self._ready[0][1]
        n = self._unsent[shard]
        assert n is not None
        if not window.may_send(n, lowest=shard == self.lowest_unsent()):
            return None
        heappop(self._ready)
        del self._unsent[shard]
        window.on_sent(n)
        return shard

    def check(self) -> None:
        """Assert that unsent shards are in the heaps where they belong."""
        expected = {shard for _, shard in self._expected}
        ready = {shard for _, shard in self._ready}
        assert expected >= self._unsent.keys()
        assert ready >= {shard for shard, n in self._unsent.items() if n is not None}


@dataclass(frozen=True, order=True, slots=True)
class LaneItem:
    """Something that travels outside the window: a revised or resent push, or an assignment.

    Attributes:
        priority: place of the shard in admission order.
        revision: of the gradient; 0 for an assignment.
    """

    priority: int
    shard: int
    kind: Literal["push", "assign"]
    revision: int = 0


class Lane:
    """The way past the window: one item in flight until it is acknowledged, in admission order.

    Costs a receiver one largest shard beyond the quota. Bounded: of each (shard, kind) only the
    newest revision waits.
    """

    __slots__ = ("_in_flight", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[LaneItem] = []
        self._in_flight: LaneItem | None = None

    def __len__(self) -> int:
        """Return the number of items that wait or are in flight."""
        return len(self._waiting) + (self._in_flight is not None)

    @property
    def in_flight(self) -> LaneItem | None:
        """The item that was sent and is not acknowledged."""
        return self._in_flight

    def add(self, item: LaneItem) -> None:
        """Queue an item; it replaces an older one of the same shard and kind that still waits."""
        for i, other in enumerate(self._waiting):
            if (other.shard, other.kind) == (item.shard, item.kind):
                if other.revision > item.revision:
                    return
                del self._waiting[i]
                break
        insort(self._waiting, item)

    def next_item(self) -> LaneItem | None:
        """Take the first waiting item to be sent now, or None while one is in flight."""
        if self._in_flight is not None or not self._waiting:
            return None
        self._in_flight = self._waiting.pop(0)
        return self._in_flight

    def on_acked(self, shard: int, kind: Literal["push", "assign"], revision: int = 0) -> bool:
        """Free the lane if this is the item in flight; tell whether it was."""
        item = self._in_flight
        if item is None or (item.shard, item.kind, item.revision) != (shard, kind, revision):
            return False
        self._in_flight = None
        return True

    def reset(self) -> None:
        """Queue the item in flight again, after the connection was lost."""
        item, self._in_flight = self._in_flight, None
        if item is not None:
            self.add(item)

    def check(self) -> None:
        """Assert the order and that no (shard, kind) waits twice."""
        assert self._waiting == sorted(self._waiting)
        keys = [(item.shard, item.kind) for item in self._waiting]
        assert len(set(keys)) == len(keys)
