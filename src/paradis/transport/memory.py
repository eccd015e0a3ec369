"""Frames within one process: the reference implementation, and the transport of tests.

Frames are encoded, checked and decoded as on a wire, and payloads are copied once, into the memory
that the sink places. Invariant: each end has one delivering thread, which reads the frames that
the other end has sent; so ``send`` never waits, and the sink is called in order by one thread.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from paradis.errors import ConfigError, Overloaded, ParadisError, PeerUnreachable
from paradis.transport.base import Accept, Connection, Identity, LinkConfig, Listener, Sink
from paradis.transport.frame_reader import FrameReader
from paradis.transport.handshake import AcceptingHandshake, ConnectingHandshake, Peer
from paradis.transport.losses import unreachable
from paradis.transport.send_queue import Outgoing
from paradis.wire.messages import DataMessage

_PREFIX: Final = "memory://"
_DRAIN_S: Final = 1.0
_IDLE_S: Final = 60.0
_log = logging.getLogger(__name__)


class _State(enum.Enum):
    OPEN = 1
    CLOSED = 2  # here, by close()
    LOST = 3


class MemoryNetwork:
    """The addresses of one process; share it between the transports that shall meet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, MemoryListener] = {}
        self._numbers = itertools.count()

    def add(self, address: str, listener: MemoryListener) -> str:
        """Register a listener; return its address, made up if ``address`` has no name.

        Raises:
            ConfigError: the address is in use.
        """
        with self._lock:
            if address == _PREFIX:
                address = f"{_PREFIX}{next(self._numbers)}"
            if address in self._listeners:
                raise ConfigError(
                    f"cannot listen on {address}: it is in use; close its listener, or use "
                    f"{_PREFIX} to get a free name"
                )
            self._listeners[address] = listener
            return address

    def remove(self, address: str) -> None:
        """Forget a listener."""
        with self._lock:
            self._listeners.pop(address, None)

    def find(self, address: str) -> MemoryListener:
        """Return the listener at an address.

        Raises:
            PeerUnreachable: nobody listens there.
        """
        with self._lock:
            listener = self._listeners.get(address)
        if listener is None:
            raise PeerUnreachable(f"no connection to {address}: nobody listens there; start it")
        return listener


class MemoryConnection:
    """One end of an in-process link; see `Connection`.

    Attributes:
        peer: name of the other end.
        peer_incarnation: which start of it.
    """

    def __init__(
        self,
        *,
        peer: Peer,
        address: str,
        config: LinkConfig,
        on_end: Callable[[MemoryConnection], None] | None = None,
    ) -> None:
        self.peer = peer.node
        self.peer_incarnation = peer.incarnation
        self._address = address
        self._config = config
        self._on_end = on_end
        self._other: MemoryConnection = self
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inbox: deque[Outgoing] = deque()
        self._inbox_bytes = 0
        self._ended = ""  # why no further frames will come
        self._state = _State.OPEN
        self._reason = ""
        self._current: Outgoing | None = None
        self._reader: threading.Thread | None = None

    def join(self, other: MemoryConnection) -> None:
        """Make the two ends each other's."""
        self._other, other._other = other, self

    def start(self, sink: Sink) -> None:
        """Start the delivering thread."""
        self._reader = threading.Thread(
            target=self._deliver_loop, args=(sink,), name=f"paradis-read-{self.peer}", daemon=True
        )
        self._reader.start()

    def send(
        self,
        message: DataMessage,
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame for the other end's thread, which calls ``on_sent`` after copying.

        Raises:
            PeerUnreachable: the connection is lost or closed.
            Overloaded: the queue's bound in bytes is reached.
        """
        checksums = self._config.payload_checksum
        frame = Outgoing.of(message, buffers, on_sent, payload_checksum=checksums)
        if self._state is not _State.OPEN:
            raise unreachable(message, self.peer, self._address, self._reason)
        self._other._enqueue(frame)

    def _enqueue(self, frame: Outgoing) -> None:
        with self._lock:
            if self._ended or self._state is not _State.OPEN:
                return  # as on a wire: the sender learns by lost()
            bound = self._config.queue_bytes_max
            if self._inbox_bytes + frame.left > bound:
                raise Overloaded(
                    f"frame not queued: its {frame.left} bytes and the {self._inbox_bytes} waiting "
                    f"exceed the send queue's bound of {bound} bytes; wait until the peer has "
                    "read, or raise queue_bytes_max"
                )
            self._inbox.append(frame)
            self._inbox_bytes += frame.left
            self._changed.notify_all()

    def close(self) -> None:
        """Let the peer take what is queued (within a second), then close; idempotent.

        Called from one of the link's own threads it does not wait.
        """
        delivering = (self._reader, self._other._reader)
        if self._begin_close() and threading.current_thread() not in delivering:
            self._other._wait_empty(_DRAIN_S)

    def _begin_close(self) -> bool:
        with self._lock:
            if self._state is not _State.OPEN:
                return False
            self._state = _State.CLOSED
            self._inbox.clear()
            self._inbox_bytes = 0
            self._changed.notify_all()
        self._other._end("the peer closed it")
        return True

    def _end(self, reason: str) -> None:
        with self._lock:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def _wait_empty(self, timeout_s: float) -> None:
        with self._lock:
            if not self._changed.wait_for(lambda: self._inbox_bytes == 0, timeout_s):
                self._inbox.clear()

    def _deliver_loop(self, sink: Sink) -> None:
        frames = FrameReader(self.peer, sink, self._config.limits, self._fill)
        cause = ""
        try:
            while (frame := self._next_frame()) is not None:
                self._current = frame
                size = frame.left
                frames.read_frame()
                self._current = None
                if frame.on_sent is not None:
                    frame.on_sent()
                self._frame_taken(size)
            cause = self._ended
        except ParadisError as error:
            cause = error.message
        except Exception as error:
            # The sink's bug: the node must learn that its link is gone; then it is shown.
            cause = repr(error)
            raise
        finally:
            self._finish(sink, cause)

    def _next_frame(self) -> Outgoing | None:
        with self._lock:
            while self._state is _State.OPEN:
                if self._inbox:
                    return self._inbox.popleft()
                if self._ended:
                    return None
                self._changed.wait(_IDLE_S)
        return None

    def _fill(self, views: Sequence[memoryview]) -> None:
        """Copy from the frame being read, as a socket would."""
        frame = self._current
        assert frame is not None
        for target in views:
            while target:
                source = frame.pending(1)[0]
                count = min(len(source), len(target))
                target[:count] = source[:count]
                frame.advance(count)
                target = target[count:]

    def _frame_taken(self, size: int) -> None:
        with self._lock:
            self._inbox_bytes = max(self._inbox_bytes - size, 0)
            self._changed.notify_all()

    def _finish(self, sink: Sink, cause: str) -> None:
        with self._lock:
            report = self._state is _State.OPEN
            if report:
                self._state = _State.LOST
                self._reason = f"connection to {self.peer} at {self._address} lost: {cause}"
            self._current = None
            self._inbox.clear()
            self._inbox_bytes = 0
            self._changed.notify_all()
        self._other._end("the peer dropped the link")
        try:
            if report:
                sink.lost(self.peer, self._reason)
        finally:
            if self._on_end is not None:
                self._on_end(self)


class MemoryListener:
    """An accepting end within the process; see `Listener`."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        *,
        identity: Identity,
        accept: Accept,
        config: LinkConfig,
    ) -> None:
        self.identity = identity
        self._network = network
        self._accept = accept
        self._config = config
        self._lock = threading.Lock()
        self._links: set[MemoryConnection] = set()
        self._closed = False
        self.addresses: tuple[str, ...] = (network.add(address, self),)

    def close(self) -> None:
        """Stop accepting and close every accepted connection; idempotent."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        self._network.remove(self.addresses[0])
        for link in links:
            link.close()

    def admit(self, link: MemoryConnection) -> None:
        """Take an authenticated connection's accepting end and start it, or turn it away.

        Raises:
            PeerUnreachable: the listener is closed.
        """
        with self._lock:
            if self._closed:
                raise PeerUnreachable(f"no connection to {self.addresses[0]}: it has closed")
            self._links.add(link)
        try:
            sink = self._accept(link)
        except ParadisError as error:
            _log.warning("%s: %s was turned away: %s", self.addresses[0], link.peer, error)
            self.forget(link)
            link.close()
        else:
            link.start(sink)

    def forget(self, link: MemoryConnection) -> None:
        """Drop a connection that has ended."""
        with self._lock:
            self._links.discard(link)


class MemoryTransport:
    """A `Transport` within one process.

    Attributes:
        scheme: ``memory``.
    """

    scheme = "memory"

    def __init__(self, network: MemoryNetwork, config: LinkConfig | None = None) -> None:
        """Join a network.

        Args:
            network: shared by the transports that shall meet.
            config: bounds and limits; the defaults when left out.
        """
        self._network = network
        self._config = config or LinkConfig()

    def listen(self, address: str, identity: Identity, accept: Accept) -> Listener:
        """Listen on ``memory://name``; without a name a free one is chosen.

        Raises:
            ConfigError: the address is malformed or in use.
        """
        return MemoryListener(
            self._network,
            self._checked(address),
            identity=identity,
            accept=accept,
            config=self._config,
        )

    def connect(self, address: str, identity: Identity, sink: Sink) -> Connection:
        """Connect, prove the token, and start delivering to ``sink``.

        Raises:
            ConfigError: the address is malformed.
            PeerUnreachable: nobody listens there, or the listener turned us away.
            JoinRefused: one of the two ends does not know the job's token.
        """
        listener = self._network.find(self._checked(address))
        accepting, connecting = AcceptingHandshake(listener.identity), ConnectingHandshake(identity)
        us, reply = accepting.verify(connecting.answer(accepting.challenge))
        them = connecting.verify(reply)
        near = MemoryConnection(peer=them, address=address, config=self._config)
        far = MemoryConnection(
            peer=us, address=address, config=self._config, on_end=listener.forget
        )
        near.join(far)
        listener.admit(far)
        near.start(sink)
        return near

    @staticmethod
    def _checked(address: str) -> str:
        if not address.startswith(_PREFIX):
            raise ConfigError(
                f"address {address!r} refused: expected {_PREFIX}name; correct the address"
            )
        return address
