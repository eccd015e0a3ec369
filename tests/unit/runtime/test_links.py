"""Data links as events, over the memory transport."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from paradis.errors import PeerUnreachable
from paradis.ids import NodeId
from paradis.observe.metrics import Counters
from paradis.roles.events import Event, PeerLost, PeerUp, Received
from paradis.runtime.arena import Arena, Placed
from paradis.runtime.links import Links
from paradis.transport.base import Identity
from paradis.transport.memory import MemoryNetwork, MemoryTransport
from paradis.wire.frame import FrameHeader
from paradis.wire.messages import Pull, Push

WAIT_S = 10.0


class End:
    """One node's links with everything it was told."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        self.name = NodeId(name)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.arena = Arena(1 << 20)
        self.abandoned: list[Placed] = []
        self.counters = Counters()
        self.links = Links(
            Identity(node=self.name, incarnation=1, token=b"t"),
            {"memory": MemoryTransport(network)},
            place=self._place,
            abandon=self.abandoned.append,
            post=self.events.put,
            counters=self.counters,
        )

    def _place(self, peer: NodeId, header: FrameHeader) -> Placed:
        return self.arena.place(header.payload_bytes)

    def next(self) -> Event:
        return self.events.get(timeout=WAIT_S)


@pytest.fixture
def pair() -> object:
    network = MemoryNetwork()
    server, worker = End("server-0", network), End("worker-0", network)
    addresses = server.links.listen(["memory://"])
    worker.links.connect({server.name: addresses})
    assert worker.next() == PeerUp(server.name)
    assert server.next() == PeerUp(worker.name)
    yield server, worker, addresses
    worker.links.close()
    server.links.close()


def test_a_frame_becomes_an_event_with_its_payload_leased(pair: tuple[End, End, object]) -> None:
    server, worker, _ = pair
    worker.links.send(server.name, Push(shard=3, step=1), [memoryview(b"abcd"), memoryview(b"ef")])
    event = server.next()
    assert isinstance(event, Received)
    assert event.message == Push(shard=3, step=1)
    assert bytes(server.arena.bytes_of(event.lease).numpy().data) == b"abcdef"
    assert server.counters.get("payload_bytes_in") == worker.counters.get("payload_bytes_out") == 6


def test_sending_to_nobody_reports_the_memory_free(pair: tuple[End, End, object]) -> None:
    _, worker, _ = pair
    sent: list[int] = []
    worker.links.send(NodeId("server-9"), Pull(), [], lambda: sent.append(1))
    assert sent == [1]


def test_on_sent_is_called_once(pair: tuple[End, End, object]) -> None:
    server, worker, _ = pair
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    report: Callable[[], None] = lambda: done.put(1)  # noqa: E731
    worker.links.send(server.name, Push(), [memoryview(b"x" * 100)], report)
    assert isinstance(server.next(), Received)
    assert done.get(timeout=WAIT_S) == 1
    assert done.empty()


def test_a_lost_link_is_told_and_can_be_opened_again(pair: tuple[End, End, object]) -> None:
    server, worker, _ = pair
    server.links.close()
    event = worker.next()
    assert isinstance(event, PeerLost)
    assert event.peer == server.name


def test_connecting_to_nothing_is_told(pair: tuple[End, End, object]) -> None:
    _, worker, _ = pair
    worker.links.connect({NodeId("server-5"): ("memory://nobody",)})
    event = worker.next()
    assert isinstance(event, PeerLost)
    assert event.peer == "server-5"


def test_a_connected_peer_is_not_connected_twice(pair: tuple[End, End, object]) -> None:
    server, worker, addresses = pair
    worker.links.connect({server.name: addresses})  # type: ignore[dict-item]
    worker.links.send(server.name, Pull(shard=1))
    event = server.next()
    assert isinstance(event, Received), "a second PeerUp would have come first"


def test_after_close_no_reading_thread_is_inside_the_nodes_memory() -> None:
    """The interpreter may end after it, and aborts a thread that it finds inside torch."""
    network = MemoryNetwork()
    server, worker = End("server-0", network), End("worker-0", network)
    inside, go = threading.Event(), threading.Event()

    def place(peer: NodeId, header: FrameHeader) -> Placed:
        inside.set()
        assert go.wait(WAIT_S)
        return server.arena.place(header.payload_bytes)

    server.links._place = place
    worker.links.connect({server.name: server.links.listen(["memory://"])})
    assert worker.next() == PeerUp(server.name)
    worker.links.send(server.name, Push(shard=3, step=1), [memoryview(b"abcd")])
    assert inside.wait(WAIT_S)
    closer = threading.Thread(target=server.links.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go.set()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    with pytest.raises(PeerUnreachable, match="server-0 is closed"):
        server.links.name_memory(
            worker.name,
            FrameHeader(
                kind=1, flags=0, fields=(), meta_bytes=0, payload_bytes=4, payload_checksum=0
            ),
        )
    worker.links.close()
