"""A forked child holds no socket of the control plane.

gRPC keeps its descriptors to itself, so after a fork the child looks through its open descriptors
and closes the sockets whose ends are known to be ours. Invariant: sockets of the user's script are
never touched, for they have other ends. The child runs no gRPC code: no thread of it survives.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

End = tuple[str, int]

_lock = threading.Lock()
_peers: set[End] = set()
_listening_ports: set[int] = set()
_callbacks: list[WeakMethod[Callable[[], None]]] = []


def guard_peer(host: str, port: int) -> None:
    """Close connections to this peer in forked children.

    Raises:
        OSError: the host has no address.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with _lock:
        _peers.update((_plain(str(sockaddr[0])), port) for *_, sockaddr in found)


def guard_port(port: int) -> None:
    """Close listening and accepted sockets of this local port in forked children."""
    with _lock:
        _listening_ports.add(port)


def release_port(port: int) -> None:
    """Forget a port that is closed: it may be the user's next time."""
    with _lock:
        _listening_ports.discard(port)


def call_in_child(method: Callable[[], None]) -> None:
    """Call a bound method in every forked child while its object lives."""
    with _lock:
        _callbacks[:] = [ref for ref in _callbacks if ref() is not None]
        _callbacks.append(WeakMethod(method))


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:").partition("%")[0]


def _is_ours(fd: int) -> bool:
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        return False
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if sock.getsockname()[1] in _listening_ports:
            return True
        peer: tuple[Any, ...] = sock.getpeername()
        return (_plain(peer[0]), peer[1]) in _peers
    except OSError:
        return False
    finally:
        sock.detach()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it at the fork
    if not _peers and not _listening_ports:
        return
    for name in os.listdir("/proc/self/fd"):
        if _is_ours(int(name)):
            os.close(int(name))
    for ref in _callbacks:
        method = ref()
        if method is not None:
            method()
    _peers.clear()
    _listening_ports.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
