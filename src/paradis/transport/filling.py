"""Receiving exactly as many bytes as memory was named for.

A link slower than memory delivers a payload in hundreds of pieces, and wakes a thread that waits
for all of it in one system call for each of them. So for large payloads over TCP the thread asks to
be woken for a batch. SO_RCVLOWAT counts for ``poll`` here: a blocking receive that has taken a part
would wait for a whole batch more.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final

from paradis.transport.send_queue import IOV_MAX

BATCH_BYTES: Final = 1 << 20
"""One wake-up for this much; the kernel takes half its receive buffer where that is less."""

_PIECE_BYTES: Final = 64 << 10
"""Less than this arrives at once, or nearly."""


class Filler:
    """Fills memory from a blocking stream socket, for one reading thread.

    Args:
        sock: connected; borrowed.
        check: called before every wait and at the end; raises to stop.
    """

    def __init__(self, sock: socket.socket, check: Callable[[], None]) -> None:
        self._sock = sock
        self._check = check
        self._batches = sock.family != socket.AF_UNIX  # there each piece is one send of the peer's
        self._low = 1
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def __call__(self, views: Sequence[memoryview]) -> None:
        """Receive into the views, in order.

        Raises:
            EOFError: the stream ended before.
            OSError: the connection broke.
        """
        pending = list(views)
        left = sum(map(len, pending))
        while pending:
            self._check()
            got = self._receive(pending, left)
            left -= got
            done = 0
            while done < len(pending) and got >= len(pending[done]):
                got -= len(pending[done])
                done += 1
            del pending[:done]
            if got:
                pending[0] = pending[0][got:]
        self._check()

    def _receive(self, pending: list[memoryview], left: int) -> int:
        """Receive some bytes, all there is room for if that is little; return how many."""
        flags = socket.MSG_WAITALL
        if self._batches and left >= _PIECE_BYTES:
            self._wake_at(min(left, BATCH_BYTES))
            self._poll.poll()
            flags = socket.MSG_DONTWAIT
        else:
            self._wake_at(1)
        with contextlib.suppress(BlockingIOError):
            if len(pending) == 1:
                got = self._sock.recv_into(pending[0], 0, flags)
            else:
                got = self._sock.recvmsg_into(pending[:IOV_MAX], 0, flags)[0]
            if not got:
                raise EOFError
            return got
        return 0

    def _wake_at(self, nbytes: int) -> None:
        if self._low != nbytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low = nbytes
