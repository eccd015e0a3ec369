"""What every transport promises (`transport/base.py`), run against each of them."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from paradis.errors import (
    ConfigError,
    JoinRefused,
    Overloaded,
    PeerUnreachable,
    StaleGeneration,
)
from paradis.transport.base import LinkConfig
from paradis.wire.frame import Limits
from paradis.wire.messages import Commit, Hello, Pull, Push, PushAck, Resend, StepCommit, Update

from .conftest import DEADLINE_S, LISTEN_ON, Links, Recorder, identity


def pattern(count: int, seed: int = 1) -> bytes:
    block = bytes((i * (2 * seed + 1) + seed) % 251 for i in range(251))
    return (block * (count // 251 + 1))[:count]


def test_frames_arrive_whole_and_each_kind_in_order(links: Links) -> None:
    """A frame without a payload may overtake others, but none of its own kind."""
    pair = links.pair()
    sizes = [0, 1, 3000, 0, 70_000, 12, 300_000, 0, 5]
    for i, size in enumerate(sizes):
        pair.near.send(Push(shard=i, step=9, revision=2), [memoryview(pattern(size, i))])
    got = pair.far_sink.wait_frames(len(sizes))
    for heavy in (False, True):
        mine = [(m, p) for m, p in got if (p is not None) == heavy]
        assert mine == [
            (Push(shard=i, step=9, revision=2), pattern(size, i) if size else None)
            for i, size in enumerate(sizes)
            if bool(size) == heavy
        ]


def test_sections_and_both_directions(links: Links) -> None:
    pair = links.pair()
    commit = Commit(
        step=4, commit=StepCommit(revisions={3: 1}, present=b"\x07", options=[{"lr": 0.1}])
    )
    pair.near.send(commit)
    pair.far.send(Resend(shard=1, sequence=1 << 40, direct=True))
    assert pair.far_sink.wait_frames(1) == [(commit, None)]
    assert pair.near_sink.wait_frames(1) == [(Resend(shard=1, sequence=1 << 40, direct=True), None)]


def test_peers_know_each_other(links: Links) -> None:
    pair = links.pair()
    assert (pair.near.peer, pair.far.peer) == ("server-0", "worker-3")


def test_several_buffers_and_several_views(links: Links) -> None:
    sink = Recorder(lambda count: [1, 0, count // 2, count - count // 2 - 1, 0])
    pair = links.pair(far_sink=sink)
    data = pattern(100_001)
    views = memoryview(data)
    pair.near.send(Push(), [views[:0], views[:7], views[7:50_000], views[50_000:], views[:0]])
    assert sink.wait_frames(1)[0][1] == data


def test_more_views_than_one_system_call_takes(links: Links) -> None:
    sink = Recorder(lambda count: [5] * (count // 5))
    pair = links.pair(far_sink=sink)
    data = pattern(30_000)
    pair.near.send(Push(), [memoryview(data)[i : i + 3] for i in range(0, 30_000, 3)])
    assert sink.wait_frames(1)[0][1] == data


def test_typed_buffers_are_sent_as_bytes(links: Links) -> None:
    pair = links.pair()
    data = pattern(4096)
    square = memoryview(data).cast("B", (64, 64))
    pair.near.send(Push(), [memoryview(data).cast("i"), square])
    assert pair.far_sink.wait_frames(1)[0][1] == data * 2


def test_big_payload(links: Links) -> None:
    pair = links.pair(LinkConfig(payload_checksum=True))
    data = pattern(16 << 20)
    pair.near.send(Update(shard=2, version=1), [memoryview(data)])
    assert pair.far_sink.wait_frames(1)[0] == (Update(shard=2, version=1), data)


def test_many_small_frames(links: Links) -> None:
    pair = links.pair()
    for i in range(3000):
        pair.near.send(PushAck(sequence=i))
    got = pair.far_sink.wait_frames(3000)
    assert [m.sequence for m, _ in got] == list(range(3000))


def test_several_senders_each_keep_their_order(links: Links) -> None:
    pair = links.pair(LinkConfig(socket_buffer_bytes=8192))
    data = memoryview(pattern(5000))

    def run(worker: int) -> None:
        for i in range(200):
            pair.near.send(Push(worker=worker, step=i), [data[: i * 25]])

    threads = [threading.Thread(target=run, args=(w,)) for w in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    got = pair.far_sink.wait_frames(600)
    for worker in range(3):
        assert [m.step for m, _ in got if m.worker == worker] == list(range(200))
    assert all((p or b"") == data[: m.step * 25] for m, p in got)


def test_both_directions_flood_without_deadlock(links: Links) -> None:
    pair = links.pair(LinkConfig(socket_buffer_bytes=4096))
    for sink in (pair.near_sink, pair.far_sink):
        sink.keep = False
    data = memoryview(pattern(1 << 20))
    for i in range(64):
        pair.near.send(Push(step=i), [data])
        pair.far.send(Update(step=i), [data])
    for sink in (pair.near_sink, pair.far_sink):
        assert [m.step for m, _ in sink.wait_frames(64)] == list(range(64))


def test_replies_from_the_reading_thread(links: Links) -> None:
    class Echo(Recorder):
        def deliver(self, peer, message, placement):  # type: ignore[no-untyped-def]
            super().deliver(peer, message, placement)
            pair.far.send(PushAck(sequence=message.sequence))

    pair = links.pair(far_sink=Echo())
    for i in range(200):
        pair.near.send(Push(sequence=i), [memoryview(pattern(i))])
    assert [m.sequence for m, _ in pair.near_sink.wait_frames(200)] == list(range(200))


def test_held_replies_keep_their_order(links: Links) -> None:
    """Acknowledgements may be held back while more arrives; none is overtaken by its own kind."""

    class Answering(Recorder):
        def deliver(self, peer, message, placement):  # type: ignore[no-untyped-def]
            super().deliver(peer, message, placement)
            reply = Resend if message.sequence % 7 == 6 else PushAck
            payload = [memoryview(b"x" * 100_000)] if message.sequence % 11 == 10 else []
            pair.far.send(reply(sequence=message.sequence), payload)

    pair = links.pair(far_sink=Answering())
    for i in range(300):
        pair.near.send(Push(sequence=i), [memoryview(pattern(i))])
    got = pair.near_sink.wait_frames(300)
    for heavy in (False, True):
        mine = [m.sequence for m, p in got if (p is not None) == heavy]
        assert mine == [i for i in range(300) if (i % 11 == 10) == heavy]


def test_held_replies_are_sent_at_close(links: Links) -> None:
    class Closing(Recorder):
        def deliver(self, peer, message, placement):  # type: ignore[no-untyped-def]
            pair.far.send(PushAck(sequence=message.sequence))
            if message.sequence == 2:
                pair.far.close()

    pair = links.pair(far_sink=Closing())
    for i in range(3):
        pair.near.send(Push(sequence=i), [memoryview(pattern(50))])
    assert [m.sequence for m, _ in pair.near_sink.wait_frames(3)] == [0, 1, 2]


def test_on_sent_is_called_once_and_not_inside_send(links: Links) -> None:
    pair = links.pair()
    calls: list[int] = []
    threads: set[int] = set()
    done = threading.Event()

    def on_sent(i: int) -> None:
        calls.append(i)
        threads.add(threading.get_ident())
        if i == 49:
            done.set()

    data = memoryview(pattern(200_000))
    for i in range(50):
        pair.near.send(Push(step=i), [data[: i * 4000]], partial(on_sent, i))
    pair.far_sink.wait_frames(50)
    assert done.wait(DEADLINE_S)
    assert calls == list(range(50))
    assert threading.get_ident() not in threads


def test_wrong_token_is_refused(links: Links) -> None:
    sink = Recorder()
    listener = links.listen(Recorder())
    with pytest.raises(JoinRefused, match="token does not match.*same token"):
        links.transport().connect(
            listener.addresses[0], identity("worker-0", b"another token"), sink
        )
    assert not links.accepted and not sink.reasons


def test_nobody_listens(links: Links) -> None:
    listener = links.listen(Recorder())
    listener.close()
    with pytest.raises(PeerUnreachable, match="no connection to"):
        links.transport().connect(listener.addresses[0], identity("worker-0"), Recorder())


def test_an_address_in_use_is_a_configuration_error(links: Links) -> None:
    listener = links.listen(Recorder())
    address = listener.addresses[0]
    with pytest.raises(ConfigError, match=f"cannot listen on {address}".replace("[", r"\[")):
        links.listen(Recorder(), address=address)


@pytest.mark.parametrize("address", ["", "nothing", "http://host:1", "tcp://", "tcp://host:x"])
def test_malformed_addresses(links: Links, address: str) -> None:
    with pytest.raises(ConfigError, match="refused: expected"):
        links.transport().connect(address, identity("worker-0"), Recorder())


def test_an_accept_that_raises_turns_the_peer_away(links: Links) -> None:
    def accept(connection: object) -> Recorder:
        raise StaleGeneration("not a member of this view")

    listener = links.transport().listen(LISTEN_ON[links.scheme], identity("server-0"), accept)
    links.opened.append(listener)
    sink = Recorder()
    near = links.transport().connect(listener.addresses[0], identity("worker-0"), sink)
    links.opened.append(near)
    assert "server-0" in sink.wait_lost()


def test_oversize_frames_are_refused_before_memory_is_asked(links: Links) -> None:
    config = LinkConfig(limits=Limits(meta_bytes_max=100, payload_bytes_max=1000))
    pair = links.pair(config)
    pair.near.send(Push(shard=5), [memoryview(bytes(1001))])
    assert "1001 bytes exceed the limits" in pair.far_sink.wait_lost()
    assert not pair.far_sink.placed
    pair.near_sink.wait_lost()


def test_oversize_sections_are_refused(links: Links) -> None:
    pair = links.pair(LinkConfig(limits=Limits(meta_bytes_max=100, payload_bytes_max=1000)))
    pair.near.send(Commit(commit=StepCommit(revisions={}, present=bytes(101), options=[])))
    assert "exceed the limits" in pair.far_sink.wait_lost()


def test_a_handshake_frame_later_is_refused(links: Links) -> None:
    pair = links.pair()
    pair.near.send(Hello(node="worker-4", proof=b""))
    assert "Hello refused: the handshake is over" in pair.far_sink.wait_lost()
    assert not pair.far_sink.frames


def test_an_unwanted_payload_drops_the_connection(links: Links) -> None:
    pair = links.pair()
    pair.far_sink.refusal = StaleGeneration("generation 8 is stale, current is 9")
    pair.near.send(Push(shard=5), [memoryview(bytes(1001))])
    assert "generation 8 is stale" in pair.far_sink.wait_lost()
    pair.near_sink.wait_lost()
    assert not pair.far_sink.frames


@pytest.mark.parametrize("lengths", [[999], [1002], [500, 502], []])
def test_placed_memory_must_fit(links: Links, lengths: list[int]) -> None:
    sink = Recorder(lambda count: lengths)
    pair = links.pair(far_sink=sink)
    pair.near.send(Push(shard=5), [memoryview(bytes(1001))])
    assert f"expected 1001 writable bytes, got {sum(lengths)}" in sink.wait_lost()


def test_lost_once_when_the_peer_closes(links: Links) -> None:
    pair = links.pair()
    pair.far.close()
    reason = pair.near_sink.wait_lost()
    assert "server-0" in reason and pair.listener.addresses[0] in reason
    assert "the peer closed it" in reason
    with pytest.raises(PeerUnreachable, match="Pull to server-0 not sent.*connect again"):
        pair.near.send(Pull())
    pair.near.close()
    assert len(pair.near_sink.reasons) == 1 and not pair.far_sink.reasons


def test_close_sends_what_is_queued(links: Links) -> None:
    pair = links.pair(LinkConfig(socket_buffer_bytes=65536))
    data = pattern(4 << 20)
    for i in range(4):
        pair.near.send(Push(step=i), [memoryview(data)])
        pair.far.send(Update(step=i), [memoryview(data)])  # unread bytes must do no harm
    pair.near.close()
    got = pair.far_sink.wait_frames(4)
    assert [(m.step, p == data) for m, p in got] == [(i, True) for i in range(4)]
    pair.far_sink.wait_lost()
    assert not pair.near_sink.reasons


def test_close_is_idempotent_and_final(links: Links) -> None:
    pair = links.pair()
    for _ in range(3):
        pair.near.close()
        pair.listener.close()
    with pytest.raises(PeerUnreachable):
        pair.near.send(Pull())
    with pytest.raises(PeerUnreachable):
        pair.far.send(Pull())


def test_close_from_the_reading_thread(links: Links) -> None:
    class Closing(Recorder):
        def deliver(self, peer, message, placement):  # type: ignore[no-untyped-def]
            super().deliver(peer, message, placement)
            pair.far.send(PushAck(sequence=5))
            pair.far.close()

    pair = links.pair(far_sink=Closing())
    pair.near.send(Pull())
    pair.near.send(Pull())
    assert pair.near_sink.wait_frames(1)[0][0] == PushAck(sequence=5)
    pair.near_sink.wait_lost()
    assert len(pair.far_sink.frames) == 1 and not pair.far_sink.reasons


def test_close_from_on_sent(links: Links) -> None:
    pair = links.pair()
    closed = threading.Event()

    def on_sent() -> None:
        pair.near.close()
        closed.set()

    pair.near.send(Push(), [memoryview(bytes(200_000))], on_sent)
    assert closed.wait(DEADLINE_S)
    assert "the peer closed it" in pair.far_sink.wait_lost()


def test_closing_the_listener_closes_its_connections(links: Links) -> None:
    pair = links.pair()
    pair.listener.close()
    pair.near_sink.wait_lost()
    with pytest.raises(PeerUnreachable):
        links.transport().connect(pair.listener.addresses[0], identity("worker-4"), pair.near_sink)


def test_the_queue_is_bounded_in_bytes(links: Links) -> None:
    gate = threading.Event()

    class Slow(Recorder):
        def deliver(self, peer, message, placement):  # type: ignore[no-untyped-def]
            assert gate.wait(DEADLINE_S)
            super().deliver(peer, message, placement)

    pair = links.pair(
        LinkConfig(socket_buffer_bytes=4096, queue_bytes_max=1 << 20), far_sink=Slow()
    )
    data = memoryview(bytes(200_000))
    sent = 0
    with pytest.raises(Overloaded, match="bound of 1048576 bytes; wait"):
        for _ in range(100):
            pair.near.send(Push(step=sent), [data])
            sent += 1
    gate.set()
    got = pair.far_sink.wait_frames(sent)
    assert [m.step for m, _ in got] == list(range(sent))
    pair.near.send(Push(step=sent), [data[:100]])
    assert pair.far_sink.wait_frames(sent + 1)[-1][0].step == sent


def test_close_gives_up_on_a_peer_that_does_not_read(links: Links) -> None:
    gate = threading.Event()

    class Stuck(Recorder):
        def deliver(self, peer, message, placement):  # type: ignore[no-untyped-def]
            assert gate.wait(DEADLINE_S)

    pair = links.pair(LinkConfig(socket_buffer_bytes=4096), far_sink=Stuck())
    for _ in range(8):
        pair.near.send(Push(), [memoryview(bytes(1 << 20))])
    pair.near.close()
    with pytest.raises(PeerUnreachable):
        pair.near.send(Pull())
    gate.set()
    pair.far_sink.wait_lost()
