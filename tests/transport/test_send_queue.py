"""The send queue against the obvious twin: one string of bytes."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradis.transport.send_queue import IOV_MAX, Outgoing, SendQueue

FRAMES = st.lists(
    st.tuples(st.binary(min_size=1, max_size=20), st.lists(st.binary(min_size=1, max_size=20))),
    max_size=12,
)


def by_weight(frames: list[tuple[bytes, list[bytes]]]) -> list[int]:
    """Return the order in which frames leave that were all queued before the first one left."""
    return sorted(range(len(frames)), key=lambda i: bool(frames[i][1]))


@given(frames=FRAMES, steps=st.lists(st.integers(0, 60), max_size=100))
def test_bytes_leave_in_order_however_they_are_taken(
    frames: list[tuple[bytes, list[bytes]]], steps: list[int]
) -> None:
    queue = SendQueue(1 << 20)
    finished: list[int] = []
    ends: list[int] = []
    expected = b""
    for i, (head, payload) in enumerate(frames):
        views = tuple(memoryview(piece) for piece in payload)
        queue.append(Outgoing(head, views, partial(finished.append, i)))
    order = by_weight(frames)
    for i in order:
        head, payload = frames[i]
        expected += head + b"".join(payload)
        ends.append(len(expected))
    taken = b""
    for step in [*steps, *[60] * (len(expected) // 60 + 1)]:
        offered = b"".join(queue.gather())
        assert expected[len(taken) :].startswith(offered)
        assert bool(offered) == (len(taken) < len(expected))
        taken += offered[:step]
        for on_sent in queue.consume(min(step, len(offered))):
            on_sent()
        assert queue.bytes == len(expected) - len(taken)
        assert finished == [i for i, end in zip(order, ends, strict=True) if end <= len(taken)]
    assert taken == expected and not queue


def test_the_more_urgent_of_those_that_wait_leaves_first() -> None:
    queue = SendQueue(1 << 22)
    size = 300_000
    for name, urgency in ((b"a", 0), (b"b", -1), (b"c", -3), (b"d", -3), (b"e", 2)):
        queue.append(Outgoing(name, (memoryview(bytes(size)),), None, urgency))
        queue.gather()  # the first one begins at once
    order = b""
    while views := queue.gather():
        order += bytes(views[0])
        queue.consume(sum(map(len, views)))
    assert order == b"acdbe"


@pytest.mark.parametrize("sent", [0, 1, 40])
def test_a_frame_without_payload_overtakes_what_has_not_begun(sent: int) -> None:
    queue = SendQueue(1 << 20)
    begun, waiting = bytes(300_000), bytes(400_000)
    queue.append(Outgoing(b"first ", (memoryview(begun),), None))
    queue.append(Outgoing(b"second ", (memoryview(waiting),), None))
    queue.gather()
    queue.consume(sent)
    queue.append(Outgoing(b"light", (), None))
    taken = b""
    while views := queue.gather():
        taken += b"".join(views)
        queue.consume(sum(map(len, views)))
    assert taken == (b"first " + begun)[sent:] + b"light" + b"second " + waiting


def test_one_call_never_gets_more_views_than_the_system_takes() -> None:
    queue = SendQueue(1 << 20)
    for _ in range(3):
        queue.append(Outgoing(b"head", (memoryview(b"x"),) * (IOV_MAX - 2), None))
    total = queue.bytes
    sizes = []
    while views := queue.gather():
        assert len(views) <= IOV_MAX
        sizes.append(sum(map(len, views)))
        queue.consume(sizes[-1])
    assert sum(sizes) == total
