"""What a forked child (a data loader's worker) must not keep: sockets of the data plane.

A child that held a copy of a socket would keep the connection open after its parent died, and the
peer would wait. Invariant: after ``fork`` the child has no descriptor of ours, and its copies of
our connections refuse to send. Nothing is shut down, so the parent's links live on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Protocol


class Forgetful(Protocol):
    """Something that must drop its locks and sockets in a forked child."""

    def forget(self) -> None:
        """Become closed without waiting for, waking or telling anybody."""
        ...


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_links: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def watch_socket(sock: socket.socket) -> socket.socket:
    """Close this socket in forked children; return it."""
    _sockets.add(sock)
    return sock


def watch_link(link: Forgetful) -> None:
    """Call ``link.forget()`` in forked children."""
    _links.add(link)


def forget_after_fork() -> None:
    """Close every watched socket and forget every link. Runs in the child after each fork."""
    for link in list(_links):
        link.forget()
    for sock in list(_sockets):
        with contextlib.suppress(OSError):
            sock.close()


os.register_at_fork(after_in_child=forget_after_fork)
