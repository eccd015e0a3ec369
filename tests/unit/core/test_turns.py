"""Turns: receivers get their shares side by side, and one that is stuck holds up nobody."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.core.turns import Turns

ROOM = 40


def drain(turns: Turns, left: dict[str, list[int]], arrive: list[int]) -> list[str]:
    """Send all that there is; what is on the way arrives when there is no room.

    Args:
        turns: begun.
        left: receiver -> sizes of its shards.
        arrive: which of those on the way arrives next, each number modulo their count.
    """
    order: list[str] = []
    flying: list[int] = []
    numbers = iter(range(1 << 20))
    arrivals = iter(arrive * 1000)
    for receiver in left:
        turns.ask(receiver)
    while any(left.values()):
        receiver = turns.next()
        turns.check()
        if receiver is None:
            turns.received(flying.pop(next(arrivals) % len(flying)))
            continue
        number, size = next(numbers), left[receiver].pop()
        turns.sent(receiver, number, size)
        if not left[receiver]:
            turns.rest(receiver)
        order.append(receiver)
        flying.append(number)
    return order


sizes = st.lists(st.integers(1, 10), min_size=1, max_size=40)


@given(st.lists(sizes, min_size=2, max_size=6), st.lists(st.integers(0, 9), min_size=1))
@settings(max_examples=200, deadline=None)
def test_shares_are_served_side_by_side(shares: list[list[int]], arrive: list[int]) -> None:
    left = {f"server-{n}": list(each) for n, each in enumerate(shares)}
    total = {name: sum(each) for name, each in left.items()}
    turns = Turns()
    turns.begin(total, room=10_000)  # nobody's half is ever full
    order = drain(turns, left, arrive)
    assert sorted(order) == sorted(n for n, each in zip(total, shares, strict=True) for _ in each)
    sent = dict.fromkeys(total, 0.0)
    sizes_of = {f"server-{n}": list(each) for n, each in enumerate(shares)}
    for receiver in order:
        behind = min(sent[r] / total[r] for r in total if sizes_of[r])
        assert sent[receiver] / total[receiver] == behind, "who is furthest behind is next"
        sent[receiver] += sizes_of[receiver].pop()


@given(st.lists(sizes, min_size=2, max_size=6), st.lists(st.integers(0, 9), min_size=1))
@settings(max_examples=100, deadline=None)
def test_what_is_on_the_way_is_bounded(shares: list[list[int]], arrive: list[int]) -> None:
    left = {f"server-{n}": list(each) for n, each in enumerate(shares)}
    turns = Turns()
    turns.begin({name: sum(each) for name, each in left.items()}, room=ROOM)
    flying: dict[int, int] = {}
    sent, received = turns.sent, turns.received

    def sending(receiver: str, shard: int, nbytes: int) -> None:
        sent(receiver, shard, nbytes)
        flying[shard] = nbytes
        assert sum(flying.values()) < ROOM + 10, "more than one shard too many"

    def receiving(shard: int) -> None:
        received(shard)
        del flying[shard]

    turns.sent, turns.received = sending, receiving  # type: ignore[method-assign]
    drain(turns, left, arrive)


def test_one_that_is_stuck_leaves_half_of_the_room() -> None:
    turns = Turns()
    turns.begin({"stuck": 900, "other": 100}, room=ROOM)
    turns.ask("stuck")
    turns.ask("other")
    served = []
    for number in range(100):
        receiver = turns.next()
        if receiver is None:
            break
        served.append(receiver)
        turns.sent(receiver, number, 10)
        if receiver == "other":
            turns.received(number)
        if served.count("other") == 10:
            turns.rest("other")
    assert served.count("other") == 10 and served.count("stuck") == 2
    assert turns.next() is None


def test_what_was_on_the_way_to_a_lost_receiver_takes_no_room() -> None:
    turns = Turns()
    turns.begin({"a": 100, "b": 100}, room=ROOM)
    turns.ask("a")
    turns.ask("b")
    for number, receiver in enumerate("abab"):
        turns.sent(receiver, number, 10)
    assert turns.next() is None
    turns.lost("a")
    assert turns.next() == "a"
    turns.received(0)
    turns.received(99)
    turns.check()


def test_a_single_receiver_is_left_to_its_credit() -> None:
    turns = Turns()
    turns.begin({"a": 1000}, room=ROOM)
    turns.ask("a")
    for number in range(10):
        assert turns.next() == "a"
        turns.sent("a", number, 100)


def test_a_step_begins_with_nothing_on_the_way() -> None:
    turns = Turns()
    turns.begin({"a": 100, "b": 1}, room=ROOM)
    turns.ask("a")
    turns.sent("a", 1, 20)
    assert turns.next() is None
    turns.begin({"a": 100, "b": 1}, room=ROOM)
    assert turns.next() == "a", "who has asked need not ask again"
    turns.received(1)
    turns.check()
