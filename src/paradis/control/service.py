"""The leader's end of the control plane: one stream per node, all served by one thread.

Invariant: `SessionHandler.opened` comes before any other call for a session, `closed` exactly once
and last, and all calls come from one thread. Nothing of a peer is decoded before its token is
checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from paradis.control import codec, fork
from paradis.control.settings import ControlConfig, server_options
from paradis.errors import (
    ConfigError,
    InternalError,
    JoinRefused,
    Overloaded,
    ParadisError,
    PeerUnreachable,
)
from paradis.wire.messages import ControlMessage

_START_TIMEOUT_S: Final = 10.0
_log = logging.getLogger("paradis.control")


class SessionHandler(Protocol):
    """What a leader does with streams. Called from the control thread; must not block."""

    def opened(self, session: Session) -> None:
        """Learn of a stream whose token was right."""
        ...

    def received(self, session: Session, message: ControlMessage) -> None:
        """Take a message.

        Raises:
            ParadisError: the session ends with this error as its status.
        """
        ...

    def closed(self, session: Session, reason: ParadisError | None) -> None:
        """Learn that a stream is over; ``reason`` is None for an orderly end."""
        ...


class Session:
    """One node's stream, as the leader sees it.

    Attributes:
        peer: network address, for messages.
        name: free for the handler: the node that joined on this stream.
    """

    def __init__(self, peer: str, config: ControlConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = peer
        self.name = ""
        self._config = config
        self._loop = loop
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._reason: ParadisError | None = None
        self._wake = asyncio.Event()
        self._torn = asyncio.Event()

    def send(self, message: ControlMessage) -> None:
        """Queue a message; never waits, and does nothing once the session is over.

        A full queue closes the session with `Overloaded`, which the handler learns by ``closed``.

        Raises:
            LocalProtocolError: the message cannot be sent to anybody.
        """
        self._put(codec.encode(message))

    def close(self, reason: ParadisError | None = None) -> None:
        """Send what is queued, then end the stream, with ``reason`` as its status; idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._reason = reason
        self._notify(self._wake.set)

    def _put(self, data: bytes) -> None:
        with self._lock:
            if self._closing:
                return
            full = (
                len(self._queue) >= self._config.queue_messages_max
                or self._queued_bytes + len(data) > self._config.queue_bytes_max
            )
            if full:
                self._closing = True
                self._reason = Overloaded(
                    f"control session of {self.name or self.peer} closed: {len(self._queue)} "
                    f"messages ({self._queued_bytes} bytes) wait unread; is the node frozen?"
                )
            else:
                self._queue.append(data)
                self._queued_bytes += len(data)
        self._notify(self._torn.set if full else self._wake.set)

    def _notify(self, wake: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the session
            self._loop.call_soon_threadsafe(wake)

    def _take(self) -> bytes | None:
        with self._lock:
            if not self._queue:
                return None
            data = self._queue.popleft()
            self._queued_bytes -= len(data)
            return data


def send_all(sessions: Iterable[Session], message: ControlMessage) -> None:
    """Send one message to many sessions, encoded once; plans are large and nodes are many."""
    data = codec.encode(message)
    for session in sessions:
        session._put(data)


class ControlServer:
    """Accepts the streams of a job's nodes; serving from construction until `close`.

    Args:
        address: ``host:port`` to listen on; port 0 lets the system choose, see ``address``.
        token: the job's secret, compared in constant time.
        handler: told of every session.
        config: settings.

    Raises:
        ConfigError: the address is malformed or in use.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        handler: SessionHandler,
        config: ControlConfig | None = None,
    ) -> None:
        self._token = token.hex().encode()
        self._handler = handler
        self._config = config or ControlConfig()
        self._sessions: set[Session] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="paradis-control", daemon=True)
        started: Future[int] = Future()
        self._started = started
        self._asked = address
        self._thread.start()
        port = started.result(_START_TIMEOUT_S)
        host = address.rpartition(":")[0]
        self.address = f"{host}:{port}"
        self._port = port
        fork.guard_port(port)

    def close(self) -> None:
        """End every session in order within the close timeout, then stop; idempotent."""
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(self._config.close_timeout_s * 3 + 1)
        fork.release_port(self._port)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server, port = self._loop.run_until_complete(self._start())
        except ParadisError as error:
            self._started.set_exception(error)
            self._loop.close()
            return
        self._started.set_result(port)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._stop(server))
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _start(self) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(
            options=server_options(self._config),
            maximum_concurrent_rpcs=self._config.sessions_max,
        )
        method = grpc.stream_stream_rpc_method_handler(self._serve)
        service = grpc.method_handlers_generic_handler(codec.SERVICE, {codec.METHOD: method})
        server.add_generic_rpc_handlers((service,))
        cause: Exception | None = None
        port = 0
        try:
            port = server.add_insecure_port(self._asked)
        except (RuntimeError, ValueError) as error:
            cause = error
        if not port:
            raise ConfigError(
                f"control plane cannot listen on {self._asked}: the address is in use or not of "
                "this host; choose another port, or 0 for any free one"
            ) from cause
        await server.start()
        return server, int(port)

    async def _stop(self, server: grpc.aio.Server) -> None:
        for session in self._sessions:
            session.close()
        await server.stop(self._config.close_timeout_s)
        for _ in range(10):  # cancelled calls get a turn each to run their ends
            if not self._sessions:
                break
            await asyncio.sleep(0)

    async def _serve(self, _requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        peer = context.peer()
        if not self._authorised(context):
            await self._abort(context, JoinRefused(
                f"control session of {peer} refused: wrong job token; use the token file of this "
                "job (two jobs on one machine have different ones)"
            ))  # fmt: skip
        session = Session(peer, self._config, self._loop)
        await context.send_initial_metadata(((codec.ACCEPTED_KEY, "1"),))
        self._sessions.add(session)
        reason: ParadisError | None = PeerUnreachable(f"control session of {peer} was lost")
        try:
            self._handler.opened(session)
            reason = await self._exchange(session, context)
        except ParadisError as error:
            reason = error
        except Exception as error:
            _log.exception("control session of %s failed", session.name or peer)
            reason = InternalError(f"control session of {session.name or peer} failed: {error!r}")
        finally:
            session.close(reason)
            self._sessions.discard(session)
            self._handler.closed(session, reason)
        if reason is not None:
            await self._abort(context, reason)

    def _authorised(self, context: grpc.aio.ServicerContext[Any, Any]) -> bool:
        metadata = dict(context.invocation_metadata() or ())
        given = metadata.get(codec.TOKEN_KEY, "")
        data = given.encode("utf-8", "replace") if isinstance(given, str) else bytes(given)
        return hmac.compare_digest(data, self._token)

    async def _abort(
        self, context: grpc.aio.ServicerContext[Any, Any], error: ParadisError
    ) -> None:
        code, details, trailing = codec.status_of(error)
        await context.abort(code, details, trailing)

    async def _exchange(
        self, session: Session, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ParadisError | None:
        """Read and write until either side ends; return why, None for an orderly end."""
        reader = asyncio.create_task(self._read(session, context))
        writer = asyncio.create_task(self._write(session, context))
        torn = asyncio.create_task(session._torn.wait())
        tasks: tuple[asyncio.Task[Any], ...] = (reader, writer, torn)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
                session.close()
                await asyncio.wait((writer, torn), timeout=self._config.close_timeout_s,
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            if writer.done():
                writer.result()
            return session._reason
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, session: Session, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            data = await context.read()
            if data is grpc.aio.EOF:
                raise PeerUnreachable(
                    f"control session of {session.name or session.peer} was lost: "
                    "the stream ended without a goodbye"
                )
            if data == codec.GOODBYE:
                return
            self._handler.received(session, codec.decode(data))

    async def _write(self, session: Session, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            while (data := session._take()) is not None:
                await context.write(data)
            if session._closing and not session._queue:
                return
            await session._wake.wait()
            session._wake.clear()
