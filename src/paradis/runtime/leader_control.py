"""The leader's control plane, open before the leader is there.

Importing torch takes seconds. The leader listens first and imports then, so that the other nodes of
a job start at the same time. Invariant: calls reach the leader in the order in which they came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from paradis.control.service import ControlServer, Session, SessionHandler
from paradis.errors import ParadisError
from paradis.runtime.rundir import read_token, write_address
from paradis.wire.messages import ControlMessage


class LeaderControl:
    """Accepts streams at once, and holds what they say until `bind`.

    Args:
        address: ``host:port`` to listen on; port 0 takes a free one.
        token: the job's secret.

    Raises:
        ConfigError: the address is malformed or in use.
    """

    def __init__(self, address: str, token: bytes) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[Session, Callable[[SessionHandler], None]]] = []
        self._handler: SessionHandler | None = None
        self._server = ControlServer(address, token, self)
        self.address = self._server.address

    def bind(self, handler: SessionHandler) -> None:
        """Hand over what was held back, then everything as it comes."""
        with self._lock:
            for session, call in self._held:
                try:
                    call(handler)
                except ParadisError as error:
                    session.close(error)
            self._held.clear()
            self._handler = handler

    def opened(self, session: Session) -> None:
        """Pass on that a stream was opened."""
        self._pass(session, lambda handler: handler.opened(session))

    def received(self, session: Session, message: ControlMessage) -> None:
        """Pass on a message of a stream."""
        self._pass(session, lambda handler: handler.received(session, message))

    def closed(self, session: Session, reason: ParadisError | None) -> None:
        """Pass on that a stream is over."""
        self._pass(session, lambda handler: handler.closed(session, reason))

    def _pass(self, session: Session, call: Callable[[SessionHandler], None]) -> None:
        with self._lock:
            if self._handler is None:
                # Bounded: a node says one thing and waits for the answer; agents beat.
                self._held.append((session, call))
                return
        call(self._handler)

    def close(self) -> None:
        """End every stream in order; idempotent."""
        self._server.close()


def open_control(address: str, token_file: Path, address_file: Path | None) -> LeaderControl:
    """Listen, and publish the address if a file is named.

    Raises:
        ConfigError: the token cannot be read, or the address is malformed or in use.
    """
    control = LeaderControl(address, read_token(token_file))
    if address_file is not None:
        write_address(address_file, control.address)
    return control
