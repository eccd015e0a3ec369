"""The seam of the data plane: connect, send(message, buffers), receive into placed memory, close.

A transport moves frames between two authenticated nodes. What it promises, and what every
implementation is tested for in ``tests/transport``:

* frames of one connection arrive whole, or the connection is lost, once; those without a payload
  arrive in order, but perhaps before earlier ones with one; those with one in order of urgency
  where several wait, else in order;
* a header is checked before memory is asked for its payload; the payload is received straight
  into the memory that `Sink.place` names;
* `Connection.send` never waits for the network: it queues, up to a bound in bytes, and the
  buffers stay borrowed until ``on_sent`` is called or the connection is lost;
* no thread that reads ever waits for a thread that writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paradis.ids import NodeId
from paradis.wire.frame import FrameHeader, Limits
from paradis.wire.messages import DataMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkConfig:
    """Settings of every data connection.

    Attributes:
        connect_timeout_s: deadline of connecting and of the handshake, seconds.
        user_timeout_ms: TCP_USER_TIMEOUT, unacknowledged data after this long ends the link;
            the kernel alone would wait a quarter of an hour.
        keepalive_s: idle seconds before TCP probes the peer.
        socket_buffer_bytes: SO_SNDBUF and SO_RCVBUF; 4 MiB holds one default shard, which arrives
            while the one before is handled.
        congestion_control: TCP_CONGESTION, a name; empty: the system's.
        queue_bytes_max: bound of a connection's send queue; a full queue is an error, since
            credits keep pushes far below it.
        payload_checksum: add and check an xxh3_64 over each payload.
        limits: what a receiver accepts.
    """

    connect_timeout_s: float = 10.0
    user_timeout_ms: int = 5000
    keepalive_s: int = 2
    socket_buffer_bytes: int = 4 << 20
    congestion_control: str = ""
    queue_bytes_max: int = 8 << 30
    payload_checksum: bool = False
    limits: Limits = Limits()


class Placement(Protocol):
    """Memory for one payload, in pieces that are filled in order."""

    @property
    def views(self) -> Sequence[memoryview]:
        """Writable byte views whose lengths add up to the payload's."""
        ...


class Sink(Protocol):
    """Where a transport delivers. Called from the connection's reading thread, in order."""

    def place(self, peer: NodeId, header: FrameHeader) -> Placement:
        """Name the memory for the payload of this header (asked only when it has one).

        Raises:
            ParadisError: the payload is not wanted; the connection is dropped with this reason.
        """
        ...

    def deliver(self, peer: NodeId, message: DataMessage, placement: Placement | None) -> None:
        """Take a whole, checked frame."""
        ...

    def abandoned(self, peer: NodeId, header: FrameHeader, placement: Placement) -> None:
        """Take back placed memory whose payload is not delivered.

        Either the connection broke in the middle, or the bytes do not match their checksum: tensors
        are sent from live memory, and a frame that is queued may have become void meanwhile. Such
        a frame is dropped, for it will be sent again if it is wanted, and the connection stays.
        """
        ...

    def lost(self, peer: NodeId, reason: str) -> None:
        """Learn that the connection is gone; called exactly once, never after local ``close``."""
        ...


class Connection(Protocol):
    """One authenticated link to a peer."""

    peer: NodeId

    def send(
        self,
        message: DataMessage,
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame; ``buffers`` are its payload, sent by scatter-gather without a copy.

        Raises:
            PeerUnreachable: the connection is lost or closed.
            Overloaded: the queue's bound in bytes is reached.
        """
        ...

    def close(self) -> None:
        """Send what is queued (within a second), then close; idempotent."""
        ...


class Listener(Protocol):
    """An accepting end."""

    addresses: tuple[str, ...]

    def close(self) -> None:
        """Stop accepting and close every accepted connection; idempotent."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who we are on the data plane.

    Attributes:
        token: the job's shared secret; never sent, only proven over a fresh nonce.
    """

    node: NodeId
    incarnation: int
    token: bytes


Accept = Callable[[Connection], Sink]
"""Called with each authenticated incoming connection; returns where its frames go."""


class Transport(Protocol):
    """One way of moving frames; addresses are strings with a scheme (``tcp://``, ``unix://``)."""

    scheme: str

    def listen(self, address: str, identity: Identity, accept: Accept) -> Listener:
        """Listen on an address; port 0 or an empty name lets the system choose.

        Raises:
            ConfigError: the address is malformed or in use.
        """
        ...

    def connect(self, address: str, identity: Identity, sink: Sink) -> Connection:
        """Connect, prove the token, and start delivering to ``sink``.

        Raises:
            PeerUnreachable: nothing answers within the deadline.
            JoinRefused: the peer does not accept the token.
        """
        ...
