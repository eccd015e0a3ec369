"""A node's data connections: one per peer, opened on demand, reported as events.

Invariant: at most one usable connection per peer; the newest wins. Connecting happens on a
thread of its own, so no role ever waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from paradis.errors import Overloaded, ParadisError, PeerUnreachable
from paradis.ids import NodeId
from paradis.observe.metrics import Counters
from paradis.roles.events import Event, PeerLost, PeerUp, Received
from paradis.runtime.arena import Placed
from paradis.transport.base import Connection, Identity, Listener, Placement, Transport
from paradis.wire.frame import HEADER_BYTES, FrameHeader
from paradis.wire.messages import DataMessage

_log = logging.getLogger("paradis.links")
_RETRY_S = 0.2
_CLOSE_S = 10.0

Place = Callable[[NodeId, FrameHeader], Placed]


class _Link:
    """One connection and the `Sink` of what arrives on it.

    It remembers what was sent and not yet reported as sent: a link that is lost never reports.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._unsent: dict[int, Callable[[], None]] = {}
        self._number = 0
        self.over = ""
        self.connection: Connection | None = None

    def send(
        self,
        message: DataMessage,
        buffers: Sequence[memoryview],
        on_sent: Callable[[], None] | None,
    ) -> None:
        """Queue a frame; ``on_sent`` is called in any case, once, sooner or later."""
        connection = self.connection
        assert connection is not None
        report = None if on_sent is None else self._remember(on_sent)
        try:
            connection.send(message, buffers, report)
        except (PeerUnreachable, Overloaded):  # roles send again what matters
            if report is not None:
                report()

    def _remember(self, on_sent: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            self._number += 1
            number = self._number
            self._unsent[number] = on_sent

        def report() -> None:
            with self._lock:
                call = self._unsent.pop(number, None)
            if call is not None:
                call()

        return report

    def place(self, peer: NodeId, header: FrameHeader) -> Placement:
        """Name memory for a payload (see `transport.base.Sink`)."""
        return self._links.name_memory(peer, header)

    def deliver(self, peer: NodeId, message: DataMessage, placement: Placement | None) -> None:
        """Turn a frame into an event."""
        self._links.take(peer, message, placement)

    def abandoned(self, peer: NodeId, header: FrameHeader, placement: Placement) -> None:
        """Give back the memory of a payload that is not delivered."""
        assert isinstance(placement, Placed)
        self._links.abandon(placement)

    def lost(self, peer: NodeId, reason: str) -> None:
        """Turn the end of the connection into an event."""
        self.over = reason or "closed"
        self.give_up()
        self._links.lost(peer, self, reason)

    def give_up(self) -> None:
        """Report as sent what never will be: the memory is free again."""
        with self._lock:
            calls, self._unsent = list(self._unsent.values()), {}
        for call in calls:
            call()


class Links:
    """The data plane of one node.

    Args:
        identity: own name and the job's token.
        transports: by scheme, in order of preference.
        place: names memory for a payload.
        abandon: takes memory back whose payload will never be whole.
        post: takes events.
        counters: bytes in and out are counted there.
    """

    def __init__(
        self,
        identity: Identity,
        transports: Mapping[str, Transport],
        *,
        place: Place,
        abandon: Callable[[Placed], None],
        post: Callable[[Event], None],
        counters: Counters,
    ) -> None:
        self.identity = identity
        self._transports = transports
        self._place = place
        self.abandon = abandon
        self._post = post
        self._counters = counters
        self._lock = threading.Lock()
        self._naming = threading.Lock()
        self._links: dict[NodeId, _Link] = {}
        self._pending: dict[NodeId, None] = {}
        self._listeners: list[Listener] = []
        self._stopped = threading.Event()
        self.on_lost: Callable[[NodeId], None] | None = None

    # -------------------------------------------------------------- opening

    def listen(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Listen on each address; return the real ones.

        Raises:
            ConfigError: an address is malformed or in use.
        """
        for address in addresses:
            transport = self._transports[address.partition("://")[0]]
            self._listeners.append(transport.listen(address, self.identity, self._accept))
        return tuple(a for listener in self._listeners for a in listener.addresses)

    def _accept(self, connection: Connection) -> _Link:
        link = _Link(self)
        self._adopt(link, connection)
        return link

    def _adopt(self, link: _Link, connection: Connection) -> None:
        link.connection = connection
        with self._lock:
            old = self._links.get(connection.peer)
            self._links[connection.peer] = link
        if old is not None and old.connection is not None:
            old.connection.close()
            old.give_up()
        self._post(PeerUp(connection.peer))
        if link.over:  # it was lost before it was known here
            self.lost(connection.peer, link, link.over)

    def connect(self, addresses: Mapping[NodeId, Sequence[str]]) -> None:
        """Open connections to these nodes unless there are some; reports by events."""
        for peer, choices in addresses.items():
            with self._lock:
                if peer in self._links or peer in self._pending or self._stopped.is_set():
                    continue
                self._pending[peer] = None
            threading.Thread(
                target=self._connect, args=(peer, tuple(choices)), daemon=True,
                name=f"paradis-connect-{peer}",
            ).start()  # fmt: skip

    def _connect(self, peer: NodeId, choices: tuple[str, ...]) -> None:
        reason = f"it has no address that this host can use: {choices}"
        connection: Connection | None = None
        link = _Link(self)
        for scheme in self._transports:
            for address in choices:
                if address.partition("://")[0] != scheme or connection is not None:
                    continue
                try:
                    connection = self._transports[scheme].connect(address, self.identity, link)
                except ParadisError as error:
                    reason = error.message
        with self._lock:
            self._pending.pop(peer, None)
        if connection is None:
            if not self._stopped.wait(_RETRY_S):
                self._post(PeerLost(peer, reason))
        elif self._stopped.is_set():
            connection.close()
        else:
            self._adopt(link, connection)

    # -------------------------------------------------------------- sending

    def send(
        self,
        target: NodeId,
        message: DataMessage,
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame; without a connection it is dropped, for roles send again what matters."""
        link = self._links.get(target)
        if link is None:
            if on_sent is not None:
                on_sent()
            return
        nbytes = sum(map(len, buffers))
        self._counters.add(data_bytes_out=nbytes + HEADER_BYTES, payload_bytes_out=nbytes)
        link.send(message, buffers, on_sent)

    # ------------------------------------------------------------ receiving

    def name_memory(self, peer: NodeId, header: FrameHeader) -> Placed:
        """Name memory for a payload.

        Raises:
            PeerUnreachable: the node is closed; its memory is its owner's again.
        """
        with self._naming:
            if self._stopped.is_set():
                raise PeerUnreachable(f"{self.identity.node} is closed; nothing is received")
            return self._place(peer, header)

    def take(self, peer: NodeId, message: DataMessage, placement: Placement | None) -> None:
        """Turn a frame into an event."""
        lease = 0
        nbytes = 0
        if placement is not None:
            assert isinstance(placement, Placed)
            lease = placement.lease
            nbytes = sum(map(len, placement.views))
        self._counters.add(data_bytes_in=nbytes + HEADER_BYTES, payload_bytes_in=nbytes)
        self._post(Received(peer, message, lease))

    def lost(self, peer: NodeId, link: _Link, reason: str) -> None:
        """Turn the end of a connection into an event, unless a newer one has taken its place."""
        if self.on_lost is not None:
            self.on_lost(peer)
        with self._lock:
            current = self._links.get(peer) is link
            if current:
                del self._links[peer]
        if current and not self._stopped.is_set():
            _log.info("%s lost its link to %s: %s", self.identity.node, peer, reason)
            self._post(PeerLost(peer, reason))

    def close(self) -> None:
        """Send what is queued, then close everything; idempotent.

        No thread of a link is inside the node's memory when it returns.
        """
        self._stopped.set()
        if self._naming.acquire(timeout=_CLOSE_S):
            self._naming.release()
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            if link.connection is not None:
                link.connection.close()
        for listener in self._listeners:
            listener.close()
