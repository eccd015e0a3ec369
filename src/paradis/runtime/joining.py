"""How a process joins a job: token, control stream, welcome, transports."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from paradis.control.client import ControlClient
from paradis.control.settings import ControlConfig
from paradis.errors import DeadlineExceeded, Overloaded, ParadisError, from_name
from paradis.ids import LEADER, NodeId
from paradis.observe.metrics import Counters
from paradis.roles.events import Event, PeerLost, Received
from paradis.settings import SharedSettings, settings_from
from paradis.transport.base import LinkConfig, Transport
from paradis.transport.congestion import choose_congestion_control
from paradis.transport.sockets import SocketTransport
from paradis.wire.messages import Beat, ControlMessage, Failed, Join, Refused, Report, Welcome


def capability() -> dict[str, str]:
    """Return what bits may depend on: CPU capability, torch version, machine."""
    return {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__.partition("+")[0],
        "machine": platform.machine(),
    }


_WATCHED: Final = ControlConfig(keepalive_s=60.0, keepalive_timeout_s=7200.0)
"""A ping under way when a debugger stops a node looks unanswered when the node goes on."""


class LeaderStream:
    """A node's stream to the leader: holds messages back until the node exists.

    Args:
        address: control address of the leader.
        token: the job's secret.
        watched: a host agent looks after this node, and ends it when the leader is silent.
    """

    def __init__(self, address: str, token: bytes, *, watched: bool = False) -> None:
        self._lock = threading.Lock()
        self._held: deque[Event] = deque()
        self._arrived = threading.Event()
        self._post: Callable[[Event], None] | None = None
        config = _WATCHED if watched else ControlConfig()
        self._client = ControlClient(address, token, self, config)
        self.address = address

    def received(self, message: ControlMessage) -> None:
        """Take a message (called by the client's reading thread)."""
        self._take(Received(LEADER, message))

    def lost(self, error: ParadisError) -> None:
        """Learn that the leader is gone (called by the client's reading thread)."""
        self._take(PeerLost(LEADER, error.message, control=True))

    def _take(self, event: Event) -> None:
        with self._lock:
            if self._post is None:
                self._held.append(event)  # bounded: the leader waits for the node's next message
                self._arrived.set()
                return
        self._post(event)

    def join(self, join: Join, *, connect_timeout_s: float, welcome_timeout_s: float) -> Welcome:
        """Connect, ask to join, and wait for the answer.

        Raises:
            PeerUnreachable: nothing answers.
            JoinRefused: wrong token, or the leader refuses; its text says why.
            DeadlineExceeded: the leader accepts the stream but does not answer.
        """
        self._client.connect(connect_timeout_s)
        self._client.send(join)
        if not self._arrived.wait(welcome_timeout_s):
            self.close()
            raise DeadlineExceeded(
                f"the leader at {self.address} did not answer within {welcome_timeout_s:.0f} s; "
                "look at the log of dispatcher-0"
            )
        first = self._held[0]
        answer = first.message if isinstance(first, Received) else first
        if isinstance(answer, Welcome):
            return answer
        self.close()
        if isinstance(answer, Refused | Failed):
            raise from_name(answer.error, answer.text)
        raise from_name("PeerUnreachable", f"the leader at {self.address} closed the stream")

    def bind(self, post: Callable[[Event], None]) -> None:
        """Deliver what was held back (the welcome too), then everything as it comes."""
        with self._lock:
            held, self._held = self._held, deque()
            for event in held:
                post(event)
            self._post = post

    def send(self, message: ControlMessage) -> None:
        """Queue a message for the leader; never blocks.

        Raises:
            PeerUnreachable: the stream is over.
        """
        self._client.send(message)

    def close(self) -> None:
        """Send what is queued, then close; idempotent."""
        self._client.close()


def make_join(role: str, index: int | None, *, rack: str, beside: int = -1) -> Join:
    """Return the request of this process to join; ``beside``: the worker of a co-located server."""
    node = "" if index is None else f"{role}-{index}"
    return Join(
        node=node,
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        rack=rack,
        beside=beside,
        capability=capability(),
    )


def shared_settings(welcome: Welcome) -> SharedSettings:
    """Return the job's settings as the leader sent them."""
    return settings_from(welcome.settings)


def make_transports(settings: SharedSettings, *, remote: bool) -> dict[str, Transport]:
    """Return the transports of a node, in order of preference.

    Args:
        remote: peers may be on other hosts: payloads over TCP are checksummed then ("auto").

    Raises:
        ConfigError: the kernel here does not offer the congestion control asked for.
    """
    congestion = choose_congestion_control(settings.congestion_control)
    checked = settings.payload_checksum == "on" or (settings.payload_checksum == "auto" and remote)

    def config(check: bool) -> LinkConfig:
        return LinkConfig(
            connect_timeout_s=settings.rpc_timeout_s,
            user_timeout_ms=int(settings.user_timeout_s * 1000),
            socket_buffer_bytes=settings.socket_buffer_bytes,
            congestion_control=congestion,
            payload_checksum=check,
        )

    transports: dict[str, Transport] = {}
    if settings.same_host == "unix":
        transports["unix"] = SocketTransport("unix", config(settings.payload_checksum == "on"))
    transports["tcp"] = SocketTransport("tcp", config(checked))
    return transports


def is_remote(host: str) -> bool:
    """Return whether an address is not a loopback one."""
    return not host.startswith(("127.", "localhost", "[::1]", "::1"))


class Pulse:
    """Sends counters, and beats where no host agent does, once an interval.

    Args:
        beat: whether this process must say that it is alive itself.
    """

    def __init__(
        self,
        node: NodeId,
        counters: Counters,
        send: Callable[[ControlMessage], None],
        *,
        interval_s: float,
        beat: bool,
    ) -> None:
        self._node = node
        self._counters = counters
        self._send = send
        self._interval_s = interval_s
        self._beat = beat
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paradis-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                if self._beat:
                    self._send(Beat(nodes=(self._node,)))
                self._send(Report(node=self._node, counters=self._counters.snapshot()))
            except Overloaded:
                continue  # the leader is slow just now
            except ParadisError:
                return  # the stream's end is reported by its own event

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
