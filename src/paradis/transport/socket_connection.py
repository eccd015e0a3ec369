"""One authenticated link over a stream socket: a reading thread and a writing thread.

Invariants:
* only the thread that set ``_writing`` writes to the socket, and takes sent bytes off the queue;
* the reading thread never waits for the writing thread, and only it calls the sink;
* a lazy frame that the reading thread sends may wait until nothing is left to read, for waking the
  peer costs more than such a frame; the reading thread never waits for a next frame meanwhile;
* the descriptor is closed by whichever thread uses it last (``_users``), so its number cannot be
  reused under a system call that is still in progress.

A broken link is shut down, which wakes the reading thread; it hands over what had arrived and then
reports the loss. A local ``close`` drains the queue, ends our direction, and discards what the
peer still sends, for closing a TCP socket with unread bytes would destroy what was just drained.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from paradis.errors import ParadisError
from paradis.transport.addresses import set_send_timeout
from paradis.transport.base import LinkConfig, Sink
from paradis.transport.filling import Filler
from paradis.transport.fork import watch_link
from paradis.transport.frame_reader import FrameReader
from paradis.transport.handshake import Peer
from paradis.transport.losses import describe_loss, unreachable
from paradis.transport.scheduling import yield_to_compute
from paradis.transport.send_queue import Outgoing, SendQueue
from paradis.wire.messages import DataMessage

INLINE_BYTES_MAX: Final = (64 << 10) + 256
"""Frames up to this size are tried in the caller's thread, which saves a change of threads."""

HELD_MAX: Final = 8
"""Lazy frames held back at most while the peer's next frame is there to be read."""

DRAIN_S: Final = 1.0
"""Deadline of sending what is queued at ``close``, and again of the peer's end of stream."""

_LOOK_UP_S: Final = 0.25
"""A blocked send returns this often, so that a close is noticed."""

_IDLE_S: Final = 60.0
_DISCARD_BYTES: Final = 256 << 10


class _State(enum.Enum):
    OPEN = 1
    BROKEN = 2  # the reading thread will report the loss
    CLOSING = 3  # closed here; draining
    GONE = 4


class _Stopped(Exception):
    """The connection was closed here: stop reading frames."""


class SocketConnection:
    """A `Connection` over TCP or a Unix socket.

    ``on_sent`` callbacks run in the writing thread, never inside ``send``. A payload that is being
    received when ``close`` is called may still be written to its memory; it is not delivered.

    Attributes:
        peer: name of the other end.
        peer_incarnation: which start of it.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: Peer,
        address: str,
        config: LinkConfig,
        on_end: Callable[[SocketConnection], None] | None = None,
    ) -> None:
        """Take over an authenticated socket and start the writing thread.

        Args:
            sock: owned by the connection from here on.
            address: how the peer was reached, for error messages.
            on_end: called once when both threads are done and the socket is closed.
        """
        self.peer = peer.node
        self.peer_incarnation = peer.incarnation
        self._sock = sock
        self._address = address
        self._config = config
        self._on_end = on_end
        self._queue = SendQueue(config.queue_bytes_max)
        self._sent: list[Callable[[], None]] = []
        self._make_locks()
        self._state = _State.OPEN
        self._writing = self._cut = self._reading_done = False
        self._held = 0
        self._users = 2
        self._reason = ""
        self._deadline = 0.0
        self._reader: threading.Thread | None = None
        sock.settimeout(None)
        set_send_timeout(sock, _LOOK_UP_S)
        watch_link(self)
        self._writer = threading.Thread(
            target=self._write_loop, name=f"paradis-write-{self.peer}", daemon=True
        )
        self._writer.start()

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)

    # ------------------------------------------------------------------------------ sending

    def send(
        self,
        message: DataMessage,
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame, or write it at once if it is small and nothing waits; never blocks.

        Args:
            message: the message.
            buffers: its payload, borrowed until ``on_sent`` is called or the connection is lost.
            on_sent: called once, in the writing thread, when the kernel has taken all bytes.

        Raises:
            PeerUnreachable: the connection is lost or closed.
            Overloaded: the queue's bound in bytes is reached.
        """
        checksums = self._config.payload_checksum
        frame = Outgoing.of(message, buffers, on_sent, payload_checksum=checksums)
        small = frame.left <= INLINE_BYTES_MAX
        with self._lock:
            if self._state is not _State.OPEN:
                raise unreachable(message, self.peer, self._address, self._reason)
            alone = not self._writing and len(self._queue) == self._held
            self._queue.append(frame)
            if message.LAZY and self._hold():
                return
            if not alone or not small:
                if not self._writing:
                    self._work.notify()
                return
            views = self._own()
        self._write(views, socket.MSG_DONTWAIT)
        self._release()

    def _hold(self) -> bool:
        """Whether a lazy frame just queued waits for the reading thread to have read on."""
        if threading.current_thread() is not self._reader or self._held >= HELD_MAX:
            return False
        self._held += 1
        return True

    def _own(self) -> list[memoryview]:
        """Own ``_writing`` and the socket; return what to write. The lock is held."""
        self._writing = True
        self._users += 1
        self._held = 0
        return self._queue.gather()

    def _send_held(self) -> None:
        """Write what is held back, unless the peer's next frame is there already."""
        try:
            if self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return
        except BlockingIOError:
            pass
        with self._lock:
            if self._writing or not self._held or self._state is not _State.OPEN:
                return  # whoever writes, or drains, goes on with the queue
            views = self._own()
        self._write(views, socket.MSG_DONTWAIT)
        self._release()

    def _write(self, views: list[memoryview], flags: int) -> None:
        """Write, as the owner of ``_writing``, and give that ownership back."""
        sent = 0
        try:
            sent = self._sock.sendmsg(views, (), flags)
        except BlockingIOError:
            pass  # full, or the send timeout passed: the writing thread goes on with it
        except OSError as error:
            self._break(error)
        with self._lock:
            self._writing = False
            if self._state is _State.GONE:
                return
            self._sent += self._queue.consume(sent)
            if not self._queue:
                self._progress.notify_all()

    def _write_loop(self) -> None:
        yield_to_compute()
        try:
            while (views := self._next_views()) is not None:
                if views:
                    self._write(views, 0)
                self._call_sent()
        except Exception as error:
            # A callback's bug must not leave a link that looks alive; it is shown, too.
            self._break(error)
            raise
        finally:
            self._end_writing()

    def _next_views(self) -> list[memoryview] | None:
        """Wait for work; return what to write and own ``_writing``, or None to end."""
        with self._lock:
            while True:
                if self._cut or self._state is _State.GONE:
                    return None
                if self._sent:
                    return []
                closing = self._state is _State.CLOSING
                if closing and (not self._queue or time.monotonic() > self._deadline):
                    return None
                if len(self._queue) > self._held and not self._writing:
                    self._writing = True
                    self._held = 0
                    return self._queue.gather()
                self._work.wait(_IDLE_S)

    def _call_sent(self) -> None:
        with self._lock:
            finished, self._sent = self._sent, []
        for on_sent in finished:
            on_sent()

    def _end_writing(self) -> None:
        with self._lock:
            drained = not self._queue
            closing = self._state is _State.CLOSING
        if closing and drained:
            self._shutdown(socket.SHUT_WR)
            with self._lock:
                self._progress.wait_for(lambda: self._reading_done, DRAIN_S)
        if closing:
            self._shutdown(socket.SHUT_RDWR)
        self._release()

    # ------------------------------------------------------------------------------ reading

    def start(self, sink: Sink) -> None:
        """Start the reading thread."""
        threading.Thread(
            target=self.read_until_lost, args=(sink,), name=f"paradis-read-{self.peer}", daemon=True
        ).start()

    def read_until_lost(self, sink: Sink) -> None:
        """Be the reading thread: deliver to ``sink`` until the connection ends."""
        self._reader = threading.current_thread()
        yield_to_compute()
        fill = Filler(self._sock, self._stop_if_closed)
        frames = FrameReader(self.peer, sink, self._config.limits, fill)
        try:
            while True:
                if self._held:
                    self._send_held()
                frames.read_frame()
        except _Stopped:
            pass
        except (OSError, EOFError, ParadisError) as error:
            self._break(error)
        except Exception as error:
            # The sink's bug: the node must learn that its link is gone; then it is shown.
            self._break(error)
            raise
        finally:
            self._end_reading(sink)

    def _stop_if_closed(self) -> None:
        if self._state is _State.CLOSING or self._state is _State.GONE:
            raise _Stopped

    def _end_reading(self, sink: Sink) -> None:
        with self._lock:
            report = self._state is _State.BROKEN
            if report:
                self._state = _State.GONE
                self._queue.clear()
        try:
            if report:
                sink.lost(self.peer, self._reason)
            else:
                self._discard()
        finally:
            self._end_use_by_reader()

    def _discard(self) -> None:
        """Read to the end of the stream; the writing thread shuts it when that takes too long."""
        scratch = bytearray(_DISCARD_BYTES)
        with contextlib.suppress(OSError):
            while self._sock.recv_into(scratch):
                pass

    # ------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Send what is queued (within a second), then close; idempotent.

        Called from one of the connection's own threads it returns at once, and the rest happens
        when that thread goes on.
        """
        self.begin_close()
        if threading.current_thread() not in (self._reader, self._writer):
            self.wait_drained(DRAIN_S)

    def begin_close(self) -> None:
        """Refuse further frames and let the threads drain and end."""
        with self._lock:
            if self._state in (_State.OPEN, _State.BROKEN):
                self._state = _State.CLOSING
                self._held = 0
                self._deadline = time.monotonic() + DRAIN_S
                self._work.notify_all()

    def wait_drained(self, timeout_s: float) -> None:
        """Wait until all queued bytes are with the kernel, at most this long."""
        with self._lock:
            self._progress.wait_for(
                lambda: not self._queue or self._cut or self._state is _State.GONE,
                max(timeout_s, 0.0),
            )

    def abandon(self) -> None:
        """Close at once, instead of `read_until_lost`, when nobody wants the connection."""
        with self._lock:
            self._state = _State.GONE
            self._queue.clear()
            self._work.notify_all()
        self._shutdown(socket.SHUT_RDWR)
        self._end_use_by_reader()

    def forget(self) -> None:
        """Become closed in a forked child, where the threads and the locks' owners are not."""
        self._make_locks()
        self._state = _State.GONE
        self._reason = "this process is a fork of the one that opened the connection"
        self._sock.close()

    def _break(self, error: Exception) -> None:
        timeout_ms = self._config.user_timeout_ms
        with self._lock:
            if self._state is _State.OPEN:
                self._state = _State.BROKEN
                self._reason = describe_loss(error, self.peer, self._address, timeout_ms)
            self._cut = True
            self._work.notify_all()
            self._progress.notify_all()
        self._shutdown(socket.SHUT_RDWR)

    def _shutdown(self, how: int) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(how)

    def _end_use_by_reader(self) -> None:
        with self._lock:
            self._reading_done = True
            self._progress.notify_all()
        self._release()

    def _release(self) -> None:
        """Stop using the socket; the last user closes it, any other wakes who has work left."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
            if last:
                self._state = _State.GONE
                self._queue.clear()
            elif len(self._queue) > self._held or self._sent or self._state is _State.CLOSING:
                self._work.notify()
        if last:
            self._sock.close()
            if self._on_end is not None:
                self._on_end(self)
