"""The send queue against the obvious twin: one string of bytes."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from paradis.transport.send_queue import IOV_MAX, Outgoing, SendQueue

FRAMES = st.lists(
    st.tuples(st.binary(min_size=1, max_size=20), st.lists(st.binary(min_size=1, max_size=20))),
    max_size=12,
)


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
        assert finished == [i for i, end in enumerate(ends) if end <= len(taken)]
    assert taken == expected and not queue


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
