"""A node's end of the control plane: one stream to the leader.

Invariant: `Receiver.lost` is called at most once, last, and never after a local `close`. `send`
never waits. A client is used for one connection; after ``lost`` make another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Protocol

import grpc

from paradis.control import codec, fork
from paradis.control.settings import ControlConfig, client_options
from paradis.errors import (
    ConfigError,
    InternalError,
    LocalProtocolError,
    Overloaded,
    ParadisError,
    PeerUnreachable,
)
from paradis.wire.messages import ControlMessage

_IDLE_WAIT_S: Final = 60.0


class Receiver(Protocol):
    """Where a client delivers. Called from the client's one reading thread, in order."""

    def received(self, message: ControlMessage) -> None:
        """Take a message of the leader."""
        ...

    def lost(self, error: ParadisError) -> None:
        """Learn that the stream is over, though nobody here closed it."""
        ...


class ControlClient:
    """A stream to the leader.

    Args:
        address: ``host:port`` of the leader.
        token: the job's secret.
        receiver: where messages go.
        config: settings.

    Raises:
        ConfigError: the address is not ``host:port``.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        receiver: Receiver,
        config: ControlConfig | None = None,
    ) -> None:
        self.address = address
        self._host_port = _split(address)
        self._token = token
        self._receiver = receiver
        self._config = config or ControlConfig()
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._over = False
        self._closed = False
        self._decided = threading.Event()
        self._accepted = False
        self._failure: ParadisError | None = None
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._reader: threading.Thread | None = None
        self._forked = False
        fork.call_in_child(self._after_fork_in_child)

    def connect(self, timeout_s: float) -> None:
        """Open the stream; messages arrive from now on.

        Raises:
            PeerUnreachable: nothing answers within ``timeout_s`` seconds.
            JoinRefused: the leader does not accept the token.
            LocalProtocolError: called twice.
        """
        if self._channel is not None:
            raise LocalProtocolError(f"control client of {self.address} is connected already")
        self._channel = grpc.insecure_channel(self.address, options=client_options(self._config))
        start = self._channel.stream_stream(f"/{codec.SERVICE}/{codec.METHOD}")
        self._call = start(
            self._outgoing(),
            metadata=((codec.TOKEN_KEY, self._token.hex()),),
            wait_for_ready=True,
        )
        self._reader = threading.Thread(target=self._read, name="paradis-leader", daemon=True)
        self._reader.start()
        if not self._decided.wait(timeout_s):
            self.close()
            raise PeerUnreachable(
                f"no leader answers at {self.address} within {timeout_s:g} s; check the address, "
                "that the job is running, and that no firewall is between"
            )
        if not self._accepted:
            self.close()
            assert self._failure is not None
            raise self._failure

    def send(self, message: ControlMessage) -> None:
        """Queue a message for the leader.

        Raises:
            PeerUnreachable: the stream is over, or this is a forked child of its owner.
            Overloaded: the queue is full.
            LocalProtocolError: the message cannot be sent.
        """
        data = codec.encode(message)
        with self._changed:
            if self._over or self._forked:
                why = "belongs to the parent process" if self._forked else "is over"
                raise PeerUnreachable(f"the control stream to {self.address} {why}")
            if (
                len(self._queue) >= self._config.queue_messages_max
                or self._queued_bytes + len(data) > self._config.queue_bytes_max
            ):
                raise Overloaded(
                    f"control queue to {self.address} is full: {len(self._queue)} messages, "
                    f"{self._queued_bytes} bytes; the leader does not read"
                )
            self._queue.append(data)
            self._queued_bytes += len(data)
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is queued and say goodbye, within the close timeout; idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._over = True
            self._changed.notify_all()
        if self._call is None or self._channel is None:
            return
        reader = self._reader
        if reader is not None and reader is not threading.current_thread():
            if self._decided.is_set():
                reader.join(self._config.close_timeout_s)
            self._call.cancel()
            self._channel.close()
            reader.join(self._config.close_timeout_s)
        else:
            self._call.cancel()
            self._channel.close()

    def _outgoing(self) -> Iterator[bytes]:
        """Yield queued messages to gRPC's sending thread; its end half-closes the stream."""
        while True:
            with self._changed:
                if not self._queue and not self._over:
                    self._changed.wait(_IDLE_WAIT_S)
                    continue
                data = self._queue.popleft() if self._queue else None
                self._queued_bytes -= len(data or b"")
            if data is None:
                break
            yield data
        yield codec.GOODBYE

    def _read(self) -> None:
        call = self._call
        try:
            accepted = dict(call.initial_metadata() or ())
            if codec.ACCEPTED_KEY in accepted:
                fork.guard_peer(*self._host_port)
                self._accepted = True
                self._decided.set()
            for data in call:
                self._receiver.received(codec.decode(data))
            error: ParadisError = PeerUnreachable(
                f"the leader at {self.address} ended the control stream"
            )
        except grpc.RpcError:
            error = codec.error_of_call(call, self.address)
        except ParadisError as raised:
            error = raised
        except OSError as raised:
            error = PeerUnreachable(f"the leader at {self.address} has no address: {raised}")
        except Exception as raised:
            error = InternalError(f"control message from {self.address} failed here: {raised!r}")
            error.__cause__ = raised
        self._finish(error)

    def _finish(self, error: ParadisError) -> None:
        with self._changed:
            self._over = True
            tell = self._accepted and not self._closed
            self._failure = error
            self._changed.notify_all()
        self._call.cancel()
        self._decided.set()
        if tell:
            self._receiver.lost(error)

    def _after_fork_in_child(self) -> None:
        """Be of no use in a forked child, whose copy of the lock may be held for ever."""
        self._changed = threading.Condition()
        self._forked = True
        self._closed = True


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"leader's address refused: expected host:port, got {address!r}; "
            "PARADIS_DISPATCHERS names the first dispatcher's control address"
        )
    return host.strip("[]"), int(port)
