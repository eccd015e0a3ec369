"""Whose turn it is: in which order a pusher serves its receivers, so that all get done together.

Servers own unequal shares of the model, but a link between many connections gives each the same.
Left alone, the small shares are through early, and the link idles while the large ones crawl
through what they have of it. So no more is on the way than keeps the links busy, and what goes next
goes to the receiver that is furthest behind its share.

Invariant: bytes count as on the way from when they are sent until their receipt is acknowledged or
nobody waits for it any more. A receiver acknowledges without waiting for anybody, unlike credit,
and what it had no memory for is sent again past the turns, by the retry timer; so turns add nothing
to the graph of who waits for whom. Half of the room is closed to any one receiver, so one that is
stuck does not hold up the others.

Source: weighted fair queueing, Demers, Keshav and Shenker, SIGCOMM 1989, with a step's bytes as
weights; that unequal shares need chunks interleaved in proportion is in Jiang et al., OSDI 2020.

    >>> turns = Turns()
    >>> turns.begin({"large": 75, "small": 25}, room=40)
    >>> turns.ask("large"); turns.ask("small")
    >>> turns.next()
    'large'
    >>> turns.sent("large", 1, 20); turns.next()
    'small'
    >>> turns.sent("small", 2, 20); turns.next() is None   # no room
    True
    >>> turns.received(1); turns.next()                    # 20 of 75 are behind 20 of 25
    'large'
"""

from __future__ import annotations

from collections.abc import Mapping

_UNBOUND = 1 << 62
"""Room where there is a single receiver: its credit bounds what is on the way."""


class Turns:
    """The receivers of one pusher, for one group."""

    def __init__(self) -> None:
        self._room = 0
        self._bytes: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._asking: dict[str, None] = {}
        self._flying: dict[int, tuple[str, int]] = {}
        self._used: dict[str, int] = {}

    def begin(self, nbytes: Mapping[str, int], *, room: int) -> None:
        """Start a step.

        Args:
            nbytes: receiver -> bytes that it gets in the step.
            room: bytes that may be on the way, at least; the last to leave may exceed them.
        """
        self._bytes = dict(nbytes)
        self._room = room if len(nbytes) > 1 else _UNBOUND
        self._sent = {}
        self._flying = {}
        self._used = {}

    def ask(self, receiver: str) -> None:
        """There may be something to send to this receiver."""
        self._asking[receiver] = None

    def rest(self, receiver: str) -> None:
        """There is nothing to send to this receiver at present."""
        self._asking.pop(receiver, None)

    def next(self) -> str | None:
        """Return the receiver whose turn it is, or None: nobody asks, or there is no room."""
        if sum(self._used.values()) >= self._room:
            return None
        open_to = (r for r in self._asking if 2 * self._used.get(r, 0) < self._room)
        return min(open_to, key=self._progress, default=None)

    def _progress(self, receiver: str) -> float:
        return self._sent.get(receiver, 0) / max(1, self._bytes.get(receiver, 1))

    def sent(self, receiver: str, shard: int, nbytes: int) -> None:
        """Count a shard that is on its way."""
        self._sent[receiver] = self._sent.get(receiver, 0) + nbytes
        self._used[receiver] = self._used.get(receiver, 0) + nbytes
        self._flying[shard] = (receiver, nbytes)

    def received(self, shard: int) -> None:
        """A shard has arrived, or nobody waits for that any more; others are ignored."""
        receiver, nbytes = self._flying.pop(shard, ("", 0))
        if receiver:
            self._used[receiver] -= nbytes

    def lost(self, receiver: str) -> None:
        """A receiver is out of reach: nothing is on its way there."""
        for shard in [s for s, (r, _) in self._flying.items() if r == receiver]:
            self.received(shard)

    def check(self) -> None:
        """Assert the invariant."""
        assert sum(self._used.values()) == sum(n for _, n in self._flying.values())
        assert all(used >= 0 for used in self._used.values())
