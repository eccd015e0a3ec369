"""Frames that wait to be written, bounded in bytes, and what one system call may take of them.

Invariant: a frame leaves whole before the next one begins; its buffers are held until its last byte
has left. A frame without a payload overtakes those with one that have not begun: a commit or an
acknowledgement must not wait behind seconds of gradients. Among those with one the more urgent
leaves first: the update of the layer that the next forward pass reads first. Not locked: the
connection's lock guards it.
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from paradis.errors import Overloaded
from paradis.wire.frame import checksum, encode
from paradis.wire.messages import DataMessage

IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
"""Most buffers that one scatter-gather call takes."""

COALESCED_BYTES_MAX: Final = 256 << 10
"""Small frames share a system call up to this size; beyond it the call itself costs little."""

_EMPTY: Final = memoryview(b"")


def byte_views(buffers: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """Return flat byte views of the buffers that are not empty.

    Args:
        buffers: C-contiguous memory of any format; borrowed, not copied.
    """
    return tuple(
        view if view.format == "B" and view.ndim == 1 else view.cast("B")
        for view in buffers
        if view.nbytes
    )


class Outgoing:
    """One encoded frame on its way out.

    Attributes:
        views: what is to be sent; pieces already sent are released.
        left: bytes not yet sent.
        urgency: the lowest number leaves first (of frames with a payload).
        on_sent: called once, by the connection, when nothing is left.
    """

    __slots__ = ("_first", "left", "on_sent", "urgency", "views")

    def __init__(
        self,
        head: bytes,
        payload: tuple[memoryview, ...],
        on_sent: Callable[[], None] | None,
        urgency: int = 0,
    ) -> None:
        self.views: list[memoryview] = [memoryview(head), *payload]
        self.left = len(head) + sum(map(len, payload))
        self.on_sent = on_sent
        self.urgency = urgency
        self._first = 0

    @classmethod
    def of(
        cls,
        message: DataMessage,
        buffers: Sequence[memoryview],
        on_sent: Callable[[], None] | None,
        *,
        payload_checksum: bool,
    ) -> Outgoing:
        """Encode a message; its payload stays where it is, borrowed until it is sent."""
        payload = byte_views(buffers)
        size = sum(map(len, payload))
        mark = checksum(payload) if size and payload_checksum else None
        head = encode(message, payload_bytes=size, payload_checksum=mark)
        return cls(head, payload, on_sent, message.urgency)

    def pending(self, count: int) -> list[memoryview]:
        """Return up to ``count`` views that are still to be sent."""
        return self.views[self._first : self._first + count]

    def advance(self, count: int) -> None:
        """Forget ``count`` bytes that were sent."""
        self.left -= count
        while count:
            view = self.views[self._first]
            if count < len(view):
                self.views[self._first] = view[count:]
                return
            count -= len(view)
            self.views[self._first] = _EMPTY
            self._first += 1


class SendQueue:
    """Outgoing frames: those without a payload first, then by urgency, else in order.

    Attributes:
        bytes: what is queued and not yet sent.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._started: deque[Outgoing] = deque()  # offered by `gather`: they go out before others
        self._light: deque[Outgoing] = deque()
        self._heavy: list[tuple[int, int, Outgoing]] = []  # a heap
        self._count = 0

    def __len__(self) -> int:
        return len(self._started) + len(self._light) + len(self._heavy)

    def append(self, frame: Outgoing) -> None:
        """Queue a frame.

        Raises:
            Overloaded: the bound in bytes would be passed; the queue is as before.
        """
        if self.bytes + frame.left > self._bytes_max:
            raise Overloaded(
                f"frame not queued: its {frame.left} bytes and the {self.bytes} waiting exceed the "
                f"send queue's bound of {self._bytes_max} bytes; wait until the peer has read, or "
                "raise queue_bytes_max"
            )
        self.bytes += frame.left
        if len(frame.views) == 1:
            self._light.append(frame)
        else:
            self._count += 1
            heapq.heappush(self._heavy, (frame.urgency, self._count, frame))

    def gather(self) -> list[memoryview]:
        """Return the views of the next system call: one large frame or several small ones."""
        views: list[memoryview] = []
        size = 0
        for frame in self._started:
            views += frame.pending(IOV_MAX - len(views))
            size += frame.left
        while len(views) < IOV_MAX and (self._light or self._heavy):
            frame = self._light[0] if self._light else self._heavy[0][2]
            if views and size + frame.left > COALESCED_BYTES_MAX:
                break
            if self._light:
                self._light.popleft()
            else:
                heapq.heappop(self._heavy)
            self._started.append(frame)
            views += frame.pending(IOV_MAX - len(views))
            size += frame.left
        return views

    def consume(self, count: int) -> list[Callable[[], None]]:
        """Take ``count`` sent bytes off what was gathered; return the finished frames' callbacks.

        Args:
            count: at most the bytes that `gather` returned last.
        """
        finished: list[Callable[[], None]] = []
        self.bytes -= count
        while count:
            frame = self._started[0]
            if count < frame.left:
                frame.advance(count)
                break
            count -= frame.left
            self._started.popleft()
            if frame.on_sent is not None:
                finished.append(frame.on_sent)
        return finished

    def clear(self) -> None:
        """Drop everything; the callbacks are not called."""
        self._started.clear()
        self._light.clear()
        self._heavy.clear()
        self.bytes = 0
