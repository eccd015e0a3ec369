"""`transport.filling`: every byte in its place, however the stream is cut; its end is told."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.transport.filling import BATCH_BYTES, Filler

SIZES = [1, 47, 65535, 65536, 300_000, BATCH_BYTES, 2_500_001]


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def nothing() -> None:
    """Never stop."""


@settings(max_examples=25, deadline=None)
@given(
    payloads=st.lists(
        st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
        min_size=1, max_size=4,
    ),
    cut=st.integers(1, 700_000),
)  # fmt: skip
def test_fills_every_view_in_order(payloads: list[list[int]], cut: int) -> None:
    near, far = connected()
    total = sum(map(sum, payloads))
    data = memoryview((b"0123456789abcdef!" * (total // 17 + 1))[:total])

    def send() -> None:
        for start in range(0, total, cut):
            near.sendall(data[start : start + cut])

    sender = threading.Thread(target=send)
    with near, far:
        sender.start()
        fill, start = Filler(far, nothing), 0
        for sizes in payloads:
            views = [memoryview(bytearray(size)) for size in sizes]
            fill(views)  # a small one after a large one must not wait for a batch
            for view in views:
                assert view == data[start : start + len(view)]
                start += len(view)
        sender.join(30)
    assert start == total


@pytest.mark.parametrize("sent", [0, 100, BATCH_BYTES + 5])
def test_an_early_end_is_told(sent: int) -> None:
    near, far = connected()
    with far:
        near.sendall(bytes(sent))
        near.close()
        with pytest.raises(EOFError):
            Filler(far, nothing)([memoryview(bytearray(2 * BATCH_BYTES))])


def test_a_shutdown_of_ours_ends_the_wait() -> None:
    near, far = connected()
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(EOFError):
            Filler(far, nothing)([memoryview(bytearray(2 * BATCH_BYTES))])
        ended.set()

    with near, far:
        thread = threading.Thread(target=read)
        thread.start()
        near.sendall(bytes(10))
        far.shutdown(socket.SHUT_RDWR)
        assert ended.wait(30)
        thread.join(30)


def test_whoever_checks_stops_it() -> None:
    near, far = connected()

    def stop() -> None:
        raise KeyError("closed")

    with near, far, pytest.raises(KeyError):
        Filler(far, stop)([memoryview(bytearray(8))])
