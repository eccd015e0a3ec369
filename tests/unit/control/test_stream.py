"""Both ends of a control stream against each other, on loopback with ports from the system."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from paradis.control.client import ControlClient
from paradis.control.service import ControlServer, Session, send_all
from paradis.control.settings import ControlConfig
from paradis.errors import (
    ConfigError,
    JoinRefused,
    LocalProtocolError,
    Overloaded,
    ParadisError,
    PeerUnreachable,
    RemoteProtocolError,
    StaleGeneration,
)
from paradis.wire.messages import Announcement, Beat, ControlMessage, Join, Shutdown

TOKEN = b"secret"
WAIT_S = 20.0


class Leader:
    """Handler that records calls and echoes announcements."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[str, Session, Any]] = queue.Queue()
        self.refuse: ParadisError | None = None

    def opened(self, session: Session) -> None:
        self.calls.put(("opened", session, None))

    def received(self, session: Session, message: ControlMessage) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.calls.put(("received", session, message))
        if isinstance(message, Announcement):
            session.send(message)

    def closed(self, session: Session, reason: ParadisError | None) -> None:
        self.calls.put(("closed", session, reason))

    def next(self, kind: str) -> tuple[Session, Any]:
        got, session, value = self.calls.get(timeout=WAIT_S)
        assert got == kind, value
        return session, value


class Node:
    """Receiver that records calls."""

    def __init__(self) -> None:
        self.messages: queue.Queue[ControlMessage] = queue.Queue()
        self.errors: queue.Queue[ParadisError] = queue.Queue()

    def received(self, message: ControlMessage) -> None:
        self.messages.put(message)

    def lost(self, error: ParadisError) -> None:
        self.errors.put(error)


@pytest.fixture
def leader() -> Leader:
    return Leader()


@pytest.fixture
def server(leader: Leader) -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1:0", TOKEN, leader)
    yield server
    server.close()
    assert not server._thread.is_alive()


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def client(server: ControlServer, node: Node) -> Iterator[ControlClient]:
    client = ControlClient(server.address, TOKEN, node)
    client.connect(WAIT_S)
    yield client
    client.close()
    assert client._reader is not None and not client._reader.is_alive()


def test_messages_travel_both_ways_in_order(
    leader: Leader, client: ControlClient, node: Node
) -> None:
    session, _ = leader.next("opened")
    for i in range(200):
        client.send(Announcement(level="info", text=str(i)))
    assert [node.messages.get(timeout=WAIT_S).text for _ in range(200)] == [  # type: ignore[attr-defined]
        str(i) for i in range(200)
    ]
    for _ in range(200):
        leader.next("received")
    client.send(Beat(nodes=("worker-0",)))
    client.close()
    assert leader.next("received") == (session, Beat(nodes=("worker-0",)))
    assert leader.next("closed") == (session, None)
    assert node.errors.empty()
    with pytest.raises(PeerUnreachable, match="is over"):
        client.send(Beat(nodes=()))


def test_one_message_goes_to_many_sessions(
    leader: Leader, server: ControlServer, client: ControlClient, node: Node
) -> None:
    other_node = Node()
    other = ControlClient(server.address, TOKEN, other_node)
    other.connect(WAIT_S)
    try:
        sessions = [leader.next("opened")[0] for _ in range(2)]
        send_all(sessions, Shutdown(reason="done"))
        for receiver in (node, other_node):
            assert receiver.messages.get(timeout=WAIT_S) == Shutdown(reason="done")
    finally:
        other.close()


def test_a_message_of_many_megabytes_arrives(client: ControlClient, node: Node) -> None:
    message = Announcement(level="info", text="x" * (20 << 20))
    client.send(message)
    assert node.messages.get(timeout=WAIT_S) == message


def test_a_wrong_token_is_refused_before_anything_is_decoded(
    leader: Leader, server: ControlServer, node: Node
) -> None:
    client = ControlClient(server.address, b"other", node)
    client.send(Join(node="worker-0", role="worker", host="h", pid=1))
    with pytest.raises(JoinRefused, match="wrong job token"):
        client.connect(WAIT_S)
    assert leader.calls.empty()
    assert node.errors.empty()


def test_a_busy_port_is_named(leader: Leader, server: ControlServer) -> None:
    with pytest.raises(ConfigError, match=server.address):
        ControlServer(server.address, TOKEN, leader)
    with pytest.raises(ConfigError, match="no such place"):
        ControlServer("no such place", TOKEN, leader)


def test_an_address_that_answers_nothing_is_named(node: Node) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client = ControlClient(address, TOKEN, node)
        with pytest.raises(PeerUnreachable, match=address):
            client.connect(0.3)
    refused = ControlClient(address, TOKEN, node)
    with pytest.raises(PeerUnreachable, match=address):
        refused.connect(0.3)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0", ":7", "host:x"])
def test_a_malformed_address_is_refused(address: str, node: Node) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        ControlClient(address, TOKEN, node)


def test_connecting_twice_is_a_bug(client: ControlClient) -> None:
    with pytest.raises(LocalProtocolError, match="connected already"):
        client.connect(WAIT_S)


def test_an_error_of_the_handler_ends_the_session_with_its_class(
    leader: Leader, client: ControlClient, node: Node
) -> None:
    leader.next("opened")
    leader.refuse = StaleGeneration("generation 3 is stale")
    client.send(Beat(nodes=()))
    error = node.errors.get(timeout=WAIT_S)
    assert type(error) is StaleGeneration
    assert error.message == "generation 3 is stale"
    assert leader.next("closed")[1] is leader.refuse


def test_garbage_ends_the_session(leader: Leader, client: ControlClient, node: Node) -> None:
    leader.next("opened")
    with client._changed:
        client._queue.append(b"\xc1\xc1")
        client._changed.notify_all()
    assert isinstance(node.errors.get(timeout=WAIT_S), RemoteProtocolError)
    assert isinstance(leader.next("closed")[1], RemoteProtocolError)


def test_the_end_of_the_leader_is_noticed(
    server: ControlServer, client: ControlClient, node: Node
) -> None:
    server.close()
    assert isinstance(node.errors.get(timeout=WAIT_S), PeerUnreachable)


def test_what_is_queued_is_sent_before_the_leader_closes(
    leader: Leader, client: ControlClient, node: Node
) -> None:
    session, _ = leader.next("opened")
    for i in range(100):
        session.send(Shutdown(reason=str(i)))
    session.close()
    session.send(Shutdown(reason="late"))
    for i in range(100):
        assert node.messages.get(timeout=WAIT_S) == Shutdown(reason=str(i))
    node.errors.get(timeout=WAIT_S)
    assert node.messages.empty()
    assert leader.next("closed") == (session, None)


def test_full_queues_are_errors_and_not_waits(leader: Leader, node: Node) -> None:
    config = ControlConfig(queue_messages_max=3)
    server = ControlServer("127.0.0.1:0", TOKEN, leader, config)
    client = ControlClient(server.address, TOKEN, node, config)
    try:
        for _ in range(3):
            client.send(Beat(nodes=()))
        with pytest.raises(Overloaded, match="queue to .* is full: 3 messages"):
            client.send(Beat(nodes=()))
        client.connect(WAIT_S)
        session, _ = leader.next("opened")
        big = Announcement(level="info", text="x" * (30 << 20))
        for _ in range(12):
            session.send(big)
        while not isinstance(reason := leader.calls.get(timeout=WAIT_S)[2], Overloaded):
            assert not isinstance(reason, ParadisError)
    finally:
        client.close()
        server.close()


CHILD = """
import sys, threading
from paradis.control.client import ControlClient
class Node:
    def received(self, message): print(message.text, flush=True)
    def lost(self, error): pass
client = ControlClient(sys.argv[1], b"secret", Node())
client.connect(20)
sys.stdin.readline()
"""


def test_a_killed_node_is_lost_and_not_left(leader: Leader, server: ControlServer) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, server.address], stdin=subprocess.PIPE)
    try:
        session, _ = leader.next("opened")
    finally:
        child.kill()
        child.communicate()
    got, reason = leader.next("closed")
    assert got is session
    assert isinstance(reason, PeerUnreachable)


FROZEN = """
import sys
from paradis.control.service import ControlServer
class Leader:
    def opened(self, session): pass
    def received(self, session, message): pass
    def closed(self, session, reason): pass
print(ControlServer("127.0.0.1:0", b"secret", Leader()).address, flush=True)
sys.stdin.readline()
"""


def test_a_frozen_leader_is_noticed(node: Node) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", FROZEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        config = ControlConfig(keepalive_s=0.2, keepalive_timeout_s=0.3)
        client = ControlClient(child.stdout.readline().strip(), TOKEN, node, config)
        client.connect(WAIT_S)
        child.send_signal(signal.SIGSTOP)
        assert isinstance(node.errors.get(timeout=WAIT_S), PeerUnreachable)
        client.close()
    finally:
        child.kill()
        child.communicate()


FORKING = """
import multiprocessing, os, socket, sys
from paradis.control.client import ControlClient
from paradis.errors import PeerUnreachable
from paradis.wire.messages import Beat
class Node:
    def received(self, message): pass
    def lost(self, error): print("lost", error, flush=True)

def sockets():
    links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
             if os.path.lexists(f"/proc/self/fd/{n}")]
    return sum(link.startswith("socket:") for link in links)

def work(how):
    assert sockets() == 2, sockets()     # the user's pair stays
    try:
        client.send(Beat(nodes=()))
    except PeerUnreachable as error:
        assert "parent process" in str(error)
    else:
        raise AssertionError("sent")
    client.close()

mine = socket.socketpair()
client = ControlClient(sys.argv[1], b"secret", Node())
client.connect(20)
assert sockets() == 3, sockets()
context = multiprocessing.get_context("fork")
child = context.Process(target=work, args=("multiprocessing",))
child.start(); child.join(20); assert child.exitcode == 0, child.exitcode
pid = os.fork()
if pid == 0:
    work("plain"); sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
client.send(Beat(nodes=("still", "there")))
client.close()
print("done", flush=True)
"""


def test_a_forked_child_holds_no_socket_and_ends(leader: Leader, server: ControlServer) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FORKING, server.address],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
    session, _ = leader.next("opened")
    assert leader.next("received") == (session, Beat(nodes=("still", "there")))
    assert leader.next("closed") == (session, None)


SERVING = """
import os, socket, sys
from paradis.control.client import ControlClient
from paradis.control.service import ControlServer
class Both:
    def opened(self, session): pass
    def received(self, *message): pass
    def lost(self, error): pass
    def closed(self, session, reason): pass
server = ControlServer("127.0.0.1:0", b"secret", Both())
client = ControlClient(server.address, b"secret", Both())
client.connect(20)
pid = os.fork()
if pid == 0:
    left = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{n}")]
    port = int(server.address.rpartition(":")[2])
    for fd in range(3, 200):
        try: sock = socket.socket(fileno=fd)
        except OSError: continue
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            os._exit(9)
        sock.detach()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
client.close(); server.close()
"""


def test_a_child_of_the_leader_holds_no_socket_either() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SERVING], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
