"""A node's data connections: one per peer, opened on demand, reported as events.

Invariant: at most one usable connection per peer; the newest wins. Connecting happens on a
thread of its own, so no role ever waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from paradis.errors import ParadisError, PeerUnreachable
from paradis.ids import NodeId
from paradis.observe.metrics import Counters
from paradis.roles.events import Event, PeerLost, PeerUp, Received
from paradis.runtime.arena import Placed
from paradis.transport.base import Connection, Identity, Listener, Placement, Transport
from paradis.wire.frame import HEADER_BYTES, FrameHeader
from paradis.wire.messages import DataMessage

_log = logging.getLogger("paradis.links")
_RETRY_S = 0.2

Place = Callable[[NodeId, FrameHeader], Placed]


class Links:
    """The data plane of one node. It is the `Sink` of all its connections.

    Args:
        identity: own name and the job's token.
        transports: by scheme, in order of preference.
        place: names memory for a payload.
        post: takes events.
        counters: bytes in and out are counted there.
    """

    def __init__(
        self,
        identity: Identity,
        transports: Mapping[str, Transport],
        *,
        place: Place,
        post: Callable[[Event], None],
        counters: Counters,
    ) -> None:
        self.identity = identity
        self._transports = transports
        self._place = place
        self._post = post
        self._counters = counters
        self._lock = threading.Lock()
        self._links: dict[NodeId, Connection] = {}
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

    def _accept(self, connection: Connection) -> Links:
        self._adopt(connection)
        return self

    def _adopt(self, connection: Connection) -> None:
        with self._lock:
            old = self._links.get(connection.peer)
            self._links[connection.peer] = connection
        if old is not None:
            old.close()
        self._post(PeerUp(connection.peer))

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
        for scheme in self._transports:
            for address in choices:
                if address.partition("://")[0] != scheme or connection is not None:
                    continue
                try:
                    connection = self._transports[scheme].connect(address, self.identity, self)
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
            self._adopt(connection)

    # -------------------------------------------------------------- sending

    def send(
        self,
        target: NodeId,
        message: DataMessage,
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame; without a connection it is dropped, for roles send again what matters."""
        connection = self._links.get(target)
        if connection is None:
            if on_sent is not None:
                on_sent()
            return
        nbytes = sum(len(b) for b in buffers)
        self._counters.add("data_bytes_out", nbytes + HEADER_BYTES)
        self._counters.add("payload_bytes_out", nbytes)
        try:
            connection.send(message, buffers, on_sent)
        except PeerUnreachable:
            if on_sent is not None:
                on_sent()

    # ------------------------------------------------------------ receiving

    def place(self, peer: NodeId, header: FrameHeader) -> Placement:
        """Name memory for a payload (see `transport.base.Sink`)."""
        return self._place(peer, header)

    def deliver(self, peer: NodeId, message: DataMessage, placement: Placement | None) -> None:
        """Turn a frame into an event."""
        lease = 0
        nbytes = 0
        if placement is not None:
            assert isinstance(placement, Placed)
            lease = placement.lease
            nbytes = sum(len(v) for v in placement.views)
        self._counters.add("data_bytes_in", nbytes + HEADER_BYTES)
        self._counters.add("payload_bytes_in", nbytes)
        self._post(Received(peer, message, lease))

    def lost(self, peer: NodeId, reason: str) -> None:
        """Turn the end of a connection into an event."""
        with self._lock:
            connection = self._links.pop(peer, None)
        if self.on_lost is not None:
            self.on_lost(peer)
        if connection is not None and not self._stopped.is_set():
            _log.info("%s lost its link to %s: %s", self.identity.node, peer, reason)
            self._post(PeerLost(peer, reason))

    def close(self) -> None:
        """Send what is queued, then close everything; idempotent."""
        self._stopped.set()
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()
        for listener in self._listeners:
            listener.close()
