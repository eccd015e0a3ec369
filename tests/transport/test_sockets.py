"""What only sockets can show: raw bytes on the wire, files, descriptors, forks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paradis.errors import (
    ConfigError,
    FrameCorrupt,
    JoinRefused,
    PeerUnreachable,
)
from paradis.transport import socket_listener
from paradis.transport.addresses import connect_socket
from paradis.transport.base import LinkConfig
from paradis.transport.handshake import greet_peer
from paradis.transport.sockets import SocketTransport
from paradis.wire.frame import HEADER_BYTES, checksum, encode
from paradis.wire.messages import Challenge, Hello, Pull, Push

from .conftest import (
    DEADLINE_S,
    Links,
    Recorder,
    identity,
    join_our_threads,
    open_descriptors,
)


@contextmanager
def raw_peer(
    links: Links, sink: Recorder, config: LinkConfig | None = None, *, known: bool = True
) -> Iterator[socket.socket]:
    """Yield a bare socket connected to a listener, by default after the handshake."""
    listener = links.listen(sink, config)
    with connect_socket(listener.addresses[0], links.scheme, config or LinkConfig()) as sock:
        if known:
            greet_peer(sock, identity("worker-9"), DEADLINE_S)
        sock.settimeout(DEADLINE_S)
        yield sock


@contextmanager
def raw_listener(scheme: str) -> Iterator[tuple[str, socket.socket]]:
    """Yield the address and the socket of a listener that is no Paradis node."""
    family = socket.AF_INET if scheme == "tcp" else socket.AF_UNIX
    with socket.socket(family) as sock:
        sock.bind(("127.0.0.1", 0) if scheme == "tcp" else "")
        sock.listen()
        sock.settimeout(DEADLINE_S)
        name = sock.getsockname()
        yield (
            (f"tcp://127.0.0.1:{name[1]}" if scheme == "tcp" else f"unix://@{name[1:].decode()}"),
            sock,
        )


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def test_frames_in_single_bytes(socket_links: Links) -> None:
    sink = Recorder(lambda count: [3, count - 3])
    with raw_peer(socket_links, sink) as sock:
        for byte in (
            encode(Push(shard=1), payload_bytes=5) + b"abcde" + encode(Pull(), payload_bytes=0)
        ):
            sock.send(bytes([byte]))
        assert sink.wait_frames(2) == [(Push(shard=1), b"abcde"), (Pull(), None)]


@pytest.mark.parametrize("position", range(0, HEADER_BYTES, 7))
def test_a_flipped_header_bit_drops_the_link(unix_links: Links, position: int) -> None:
    links, sink = unix_links, Recorder()
    with raw_peer(links, sink) as sock:
        frame = bytearray(encode(Push(shard=5, step=3), payload_bytes=8))
        frame[position] ^= 4
        sock.sendall(frame + bytes(8))
        assert "worker-9" in sink.wait_lost()
        assert read_to_end(sock) == b""
    assert not sink.frames and not sink.placed


def test_a_payload_that_does_not_match_is_dropped_and_the_link_stays(
    socket_links: Links,
) -> None:
    sink = Recorder()
    with raw_peer(socket_links, sink) as sock:
        payload = bytes(range(200))
        mark = checksum((memoryview(payload),))
        head = encode(Push(shard=5), payload_bytes=200, payload_checksum=mark)
        sock.sendall(head + payload[:100] + b"!" + payload[101:] + head + payload)
        assert sink.wait_frames(1)[0] == (Push(shard=5), payload)
    assert [h.name for h in sink.dropped] == ["Push"]


def test_a_peer_that_dies_inside_a_frame(socket_links: Links) -> None:
    sink = Recorder()
    with raw_peer(socket_links, sink) as sock:
        sock.sendall(encode(Pull(), payload_bytes=0))
        sock.sendall(encode(Push(shard=5), payload_bytes=100) + bytes(50))
    assert "the peer closed it" in sink.wait_lost()
    assert [m for m, _ in sink.frames] == [Pull()] and len(sink.placed) == 1


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 30, bytes(500)])
def test_garbage_is_not_let_in(socket_links: Links, garbage: bytes) -> None:
    with raw_peer(socket_links, Recorder(), known=False) as sock:
        sock.sendall(garbage)
        assert b"PRDS" in read_to_end(sock)  # the challenge, then the end
    assert not socket_links.accepted


def test_a_large_frame_before_the_proof_is_not_let_in(socket_links: Links) -> None:
    with raw_peer(socket_links, Recorder(), known=False) as sock:
        sock.sendall(encode(Hello(node="w" * 5000, proof=b""), payload_bytes=0)[:HEADER_BYTES])
        read_to_end(sock)
    assert not socket_links.accepted


def test_silence_is_not_waited_for(socket_links: Links) -> None:
    config = LinkConfig(connect_timeout_s=0.05)
    with raw_peer(socket_links, Recorder(), config, known=False) as sock:
        assert b"PRDS" in read_to_end(sock)


def test_the_unauthenticated_are_bounded(
    socket_links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_listener, "UNAUTHENTICATED_MAX", 2)
    sink = Recorder()
    with raw_peer(socket_links, sink, known=False) as first:
        address = socket_links.opened[0].addresses[0]  # type: ignore[union-attr]
        with (
            connect_socket(address, socket_links.scheme, LinkConfig()) as second,
            connect_socket(address, socket_links.scheme, LinkConfig()) as third,
        ):
            assert first.recv(1) and second.recv(1)  # both were challenged
            third.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                third.recv(1)
            first.close()
            third.settimeout(DEADLINE_S)
            assert third.recv(1)


def test_an_impostor_without_the_token_is_found_out(socket_links: Links) -> None:
    with raw_listener(socket_links.scheme) as (address, server):

        def pretend() -> None:
            sock, _ = server.accept()
            with sock:
                sock.settimeout(DEADLINE_S)
                sock.sendall(encode(Challenge(nonce=bytes(32)), payload_bytes=0))
                sock.recv(4096)
                sock.sendall(encode(Hello(node="server-0", proof=bytes(32)), payload_bytes=0))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(JoinRefused, match="did not prove the job token"):
            socket_links.transport().connect(address, identity("worker-0"), Recorder())
        thread.join(DEADLINE_S)


def test_a_stranger_at_the_address(socket_links: Links) -> None:
    with raw_listener(socket_links.scheme) as (address, server):

        def chat() -> None:
            with server.accept()[0] as sock:
                sock.sendall(b"220 mail.example.org ESMTP ready" * 10)
                sock.settimeout(DEADLINE_S)
                read_to_end(sock)

        thread = threading.Thread(target=chat)
        thread.start()
        with pytest.raises(FrameCorrupt, match="connecting to .* failed.*is the peer a Paradis"):
            socket_links.transport().connect(address, identity("worker-0"), Recorder())
        thread.join(DEADLINE_S)


def test_a_silent_address(socket_links: Links) -> None:
    config = LinkConfig(connect_timeout_s=0.05)
    with (
        raw_listener(socket_links.scheme) as (address, _),
        pytest.raises(PeerUnreachable, match="no handshake with"),
    ):
        socket_links.transport(config).connect(address, identity("worker-0"), Recorder())


def test_tcp_options_are_set(tcp_links: Links) -> None:
    config = LinkConfig(user_timeout_ms=4321, keepalive_s=7)
    links = tcp_links
    with raw_peer(links, Recorder(), config) as sock:
        assert links.arrived.wait(DEADLINE_S)
        for end in (sock, links.accepted[0]._sock):  # type: ignore[attr-defined]
            tcp = socket.IPPROTO_TCP
            assert end.getsockopt(tcp, socket.TCP_NODELAY)
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(tcp, socket.TCP_KEEPIDLE) == 7
            assert end.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 4321
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= 4 << 20


def test_ipv6_addresses(tcp_links: Links) -> None:
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    links, sink = tcp_links, Recorder()
    listener = links.listen(sink, address="tcp://[::1]:0")
    near = links.transport().connect(listener.addresses[0], identity("worker-0"), Recorder())
    links.opened.insert(0, near)
    near.send(Pull())
    sink.wait_frames(1)


def test_unix_files_are_removed_by_close(unix_links: Links, tmp_path: Path) -> None:
    links, path = unix_links, tmp_path / "data.sock"
    listener = links.listen(Recorder(), address=f"unix://{path}")
    assert listener.addresses == (f"unix://{path}",) and path.exists()
    with pytest.raises(ConfigError, match="choose another path"):
        links.listen(Recorder(), address=f"unix://{path}")
    listener.close()
    assert not path.exists()
    with pytest.raises(PeerUnreachable):
        links.transport().connect(f"unix://{path}", identity("worker-0"), Recorder())


def test_abstract_names_never_clash(unix_links: Links) -> None:
    links = unix_links
    names = {links.listen(Recorder()).addresses[0] for _ in range(20)}
    assert len(names) == 20 and all(name.startswith("unix://@paradis-") for name in names)


def test_unknown_hosts_and_schemes() -> None:
    with pytest.raises(ConfigError, match="no socket transport for 'udp'"):
        SocketTransport("udp")
    with pytest.raises(ConfigError, match="cannot listen on tcp://256.0.0.1:0"):
        SocketTransport("tcp").listen(
            "tcp://256.0.0.1:0", identity("server-0"), lambda _: Recorder()
        )
    with pytest.raises(ConfigError, match="cannot listen on unix:///"):
        SocketTransport("unix").listen(
            "unix:///" + "x" * 200, identity("server-0"), lambda _: Recorder()
        )


def test_a_bug_in_the_sink_ends_the_link_and_is_shown(
    socket_links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))

    class Broken(Recorder):
        def deliver(self, peer, message, placement):  # type: ignore[no-untyped-def]
            raise KeyError("shard 5")

    pair = socket_links.pair(far_sink=Broken())
    pair.near.send(Pull())
    assert "KeyError('shard 5')" in pair.far_sink.wait_lost()
    pair.near_sink.wait_lost()
    pair.listener.close()
    assert join_our_threads() == []
    assert shown == [KeyError]


def test_a_forked_child_keeps_no_socket_of_ours(socket_links: Links) -> None:
    pair = socket_links.pair()
    ours = {v for v in open_descriptors().values() if v.startswith("socket:")}
    assert len(ours) >= 3
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kept = ours & set(open_descriptors().values())
            try:
                pair.near.send(Pull())
            except PeerUnreachable as error:
                status = 2 if kept else 0 if "fork" in error.message else 3
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pair.near.send(Pull())
    pair.far.send(Pull())
    pair.far_sink.wait_frames(1)
    pair.near_sink.wait_frames(1)


def test_a_child_that_lives_on_does_not_hold_the_link_open(socket_links: Links) -> None:
    pair = socket_links.pair()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    try:
        pair.near._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        pair.near_sink.wait_lost()
        pair.listener.close()
        with pytest.raises(PeerUnreachable):
            socket_links.transport().connect(
                pair.listener.addresses[0], identity("worker-0"), Recorder()
            )
    finally:
        os.close(write_end)
        os.waitpid(child, 0)


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_nothing_stays_open(scheme: str) -> None:
    before = len(open_descriptors())
    links = Links(scheme)
    listener = links.listen(Recorder())
    for i in range(30):
        near = links.transport().connect(listener.addresses[0], identity(f"worker-{i}"), Recorder())
        near.send(Push(), [memoryview(bytes(1000))])
        links.opened.insert(0, near)
    links.close()
    assert join_our_threads() == []
    assert len(open_descriptors()) == before
