"""What the transport tests share: a recording sink, pairs of connections, a leak check."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from paradis.errors import ParadisError
from paradis.ids import NodeId
from paradis.transport.base import Connection, Identity, LinkConfig, Listener, Placement, Transport
from paradis.transport.memory import MemoryNetwork, MemoryTransport
from paradis.transport.sockets import SocketTransport
from paradis.wire.frame import FrameHeader
from paradis.wire.messages import DataMessage

DEADLINE_S = 30.0
TOKEN = b"the token of this job"
LISTEN_ON = {"memory": "memory://", "unix": "unix://", "tcp": "tcp://127.0.0.1:0"}


@dataclass
class Pieces:
    """A placement."""

    views: Sequence[memoryview]


class Recorder:
    """A sink that keeps everything; ``split`` cuts the memory for a payload of n bytes."""

    def __init__(self, split: Callable[[int], Sequence[int]] | None = None) -> None:
        self.split = split or (lambda count: [count])
        self.keep = True
        self.refusal: ParadisError | None = None
        self.placed: list[FrameHeader] = []
        self.frames: list[tuple[DataMessage, bytes | None]] = []
        self.reasons: list[str] = []
        self.dropped: list[FrameHeader] = []
        self._changed = threading.Condition()

    def place(self, peer: NodeId, header: FrameHeader) -> Pieces:
        self.placed.append(header)
        if self.refusal is not None:
            raise self.refusal
        return Pieces([memoryview(bytearray(n)) for n in self.split(header.payload_bytes)])

    def deliver(self, peer: NodeId, message: DataMessage, placement: Placement | None) -> None:
        payload = None
        if placement is not None:
            payload = b"".join(placement.views) if self.keep else b""
        with self._changed:
            self.frames.append((message, payload))
            self._changed.notify_all()

    def abandoned(self, peer: NodeId, header: FrameHeader, placement: Placement) -> None:
        with self._changed:
            self.dropped.append(header)
            self._changed.notify_all()

    def lost(self, peer: NodeId, reason: str) -> None:
        with self._changed:
            self.reasons.append(reason)
            self._changed.notify_all()

    def wait(self, predicate: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(predicate, DEADLINE_S), (
                f"{len(self.frames)} frames, lost {self.reasons}"
            )

    def wait_frames(self, count: int) -> list[tuple[DataMessage, bytes | None]]:
        self.wait(lambda: len(self.frames) >= count)
        return self.frames

    def wait_lost(self) -> str:
        self.wait(lambda: bool(self.reasons))
        return self.reasons[0]


@dataclass
class Pair:
    """Two connected ends: ``near`` connected, ``far`` accepted."""

    near: Connection
    far: Connection
    near_sink: Recorder
    far_sink: Recorder
    listener: Listener


@dataclass
class Links:
    """Makes transports and pairs of one scheme and closes what it made."""

    scheme: str
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    opened: list[Connection | Listener] = field(default_factory=list)

    def transport(self, config: LinkConfig | None = None) -> Transport:
        if self.scheme == "memory":
            return MemoryTransport(self.network, config)
        return SocketTransport(self.scheme, config)

    def listen(
        self, sink: Recorder, config: LinkConfig | None = None, address: str = ""
    ) -> Listener:
        self.accepted: list[Connection] = []
        self.arrived = threading.Event()

        def accept(connection: Connection) -> Recorder:
            self.accepted.append(connection)
            self.opened.append(connection)
            self.arrived.set()
            return sink

        listener = self.transport(config).listen(
            address or LISTEN_ON[self.scheme], identity("server-0"), accept
        )
        self.opened.append(listener)
        return listener

    def pair(
        self,
        config: LinkConfig | None = None,
        *,
        near_sink: Recorder | None = None,
        far_sink: Recorder | None = None,
    ) -> Pair:
        near_sink, far_sink = near_sink or Recorder(), far_sink or Recorder()
        listener = self.listen(far_sink, config)
        near = self.transport(config).connect(
            listener.addresses[0], identity("worker-3"), near_sink
        )
        self.opened.insert(0, near)
        assert self.arrived.wait(DEADLINE_S)
        return Pair(near, self.accepted[0], near_sink, far_sink, listener)

    def close(self) -> None:
        for end in self.opened:
            end.close()


def identity(node: str, token: bytes = TOKEN) -> Identity:
    return Identity(node=NodeId(node), incarnation=7, token=token)


def open_descriptors() -> dict[str, str]:
    """Descriptor -> what it is, for this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


def join_our_threads() -> list[str]:
    """Wait for the transports' threads to end; return the names of those that did not."""
    deadline = time.monotonic() + DEADLINE_S
    ours = [t for t in threading.enumerate() if t.name.startswith("paradis-")]
    for thread in ours:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return [t.name for t in ours if t.is_alive()]


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Every test leaves no thread and no descriptor behind."""
    before = set(open_descriptors().values())
    yield
    assert join_our_threads() == []
    assert {v for v in open_descriptors().values() if v.startswith("socket:")} <= before


@pytest.fixture(params=["memory", "unix", "tcp"])
def links(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[Links]:
    """One of the transports."""
    made = Links(request.param)
    yield made
    made.close()


@pytest.fixture(params=["unix", "tcp"])
def socket_links(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[Links]:
    """One of the socket transports."""
    made = Links(request.param)
    yield made
    made.close()


@pytest.fixture
def unix_links(no_leaks: None) -> Iterator[Links]:
    """Unix sockets, where one family is enough."""
    made = Links("unix")
    yield made
    made.close()


@pytest.fixture
def tcp_links(no_leaks: None) -> Iterator[Links]:
    """TCP, for what only TCP has."""
    made = Links("tcp")
    yield made
    made.close()
