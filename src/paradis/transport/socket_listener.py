"""The accepting end of the socket transports.

Invariant: at most ``UNAUTHENTICATED_MAX`` accepted connections have not proven the token; further
ones wait in the kernel's backlog, and each holds its place no longer than the connect timeout.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Final

from paradis.errors import ParadisError
from paradis.transport.addresses import local_address, remove_file, set_options
from paradis.transport.base import Accept, Identity, LinkConfig
from paradis.transport.fork import watch_socket
from paradis.transport.handshake import Peer, accept_peer
from paradis.transport.socket_connection import DRAIN_S, SocketConnection

UNAUTHENTICATED_MAX: Final = 64

_RETRY_S: Final = 0.1
_IDLE_S: Final = 60.0
_log = logging.getLogger(__name__)


class SocketListener:
    """A `Listener` on one socket: one accepting thread, and the links it has made.

    The thread that runs a connection's handshake becomes its reading thread.
    """

    def __init__(
        self, sock: socket.socket, *, identity: Identity, accept: Accept, config: LinkConfig
    ) -> None:
        self.addresses: tuple[str, ...] = (local_address(sock),)
        self._sock = sock
        self._identity = identity
        self._accept = accept
        self._config = config
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._pending: set[socket.socket] = set()
        self._links: set[SocketConnection] = set()
        self._closed = False
        self._thread = threading.Thread(
            target=self._accept_loop, name=f"paradis-accept-{identity.node}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop accepting and close every accepted connection; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending, links = list(self._pending), list(self._links)
            self._room.notify_all()
        for sock in (self._sock, *pending):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # The accepting thread runs no code but ours, so it ends now.
        self._thread.join(DRAIN_S)
        self._sock.close()
        remove_file(self.addresses[0])
        for link in links:
            link.begin_close()
        deadline = time.monotonic() + DRAIN_S
        for link in links:
            link.wait_drained(deadline - time.monotonic())

    def _accept_loop(self) -> None:
        while self._wait_for_room():
            try:
                sock = watch_socket(self._sock.accept()[0])
            except OSError as error:
                self._pause(error)
                continue
            with self._lock:
                self._pending.add(sock)
            threading.Thread(
                target=self._serve, args=(sock,), name="paradis-handshake", daemon=True
            ).start()

    def _wait_for_room(self) -> bool:
        with self._lock:
            while len(self._pending) >= UNAUTHENTICATED_MAX and not self._closed:
                self._room.wait(_IDLE_S)
            return not self._closed

    def _pause(self, error: OSError) -> None:
        """Do not spin when the process is out of descriptors."""
        with self._lock:
            if not self._closed:
                _log.warning("%s: a connection was not accepted: %s", self.addresses[0], error)
                self._room.wait(_RETRY_S)

    def _serve(self, sock: socket.socket) -> None:
        peer = self._authenticate(sock)
        if peer is None:
            return
        link = SocketConnection(
            sock, peer=peer, address=self.addresses[0], config=self._config, on_end=self._forget
        )
        threading.current_thread().name = f"paradis-read-{peer.node}"
        with self._lock:
            closed = self._closed
            self._links.add(link)
        if closed:
            link.abandon()
            return
        try:
            sink = self._accept(link)
        except ParadisError as error:
            _log.warning("%s: %s was turned away: %s", self.addresses[0], peer.node, error)
            link.abandon()
        except Exception:
            link.abandon()
            raise
        else:
            link.read_until_lost(sink)

    def _authenticate(self, sock: socket.socket) -> Peer | None:
        try:
            set_options(sock, self._config)
            return accept_peer(sock, self._identity, self._config.connect_timeout_s)
        except (OSError, ParadisError) as error:
            _log.warning("%s: a connection was refused: %s", self.addresses[0], error)
            sock.close()
            return None
        finally:
            with self._lock:
                self._pending.discard(sock)
                self._room.notify_all()

    def _forget(self, link: SocketConnection) -> None:
        with self._lock:
            self._links.discard(link)
