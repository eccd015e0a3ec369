"""Outbox and ledger, one rule at a time."""

from __future__ import annotations

from paradis.core.flow import ASSIGN, PUSH, Ledger, Outbox


def test_credit_at_once_below_half_then_on_release() -> None:
    ledger = Ledger(quota=100)
    assert ledger.on_stored(1, 0, 40)
    assert not ledger.on_stored(2, 0, 30)
    assert ledger.owes(2, 0) and not ledger.owes(1, 0)
    assert not ledger.on_released(1, 0, 40)
    assert ledger.on_released(2, 0, 30)
    assert not ledger.owes(2, 0) and ledger.stored == 0
    ledger.check()


def test_an_old_and_a_new_push_of_a_shard_have_their_own_credit() -> None:
    ledger = Ledger(quota=10)
    assert not ledger.on_stored(1, 0, 8)
    assert not ledger.on_stored(1, 1, 8)
    assert ledger.on_released(1, 0, 8)
    assert ledger.owes(1, 1)
    assert ledger.on_released(1, 1, 8)


def test_early_shard_leaves_the_reserve_free() -> None:
    box = Outbox(quota=100, reserve=40)
    box.begin({7: 40, 8: 40, 9: 20})
    box.ready(9)
    box.ready(8)
    assert box.next_push() == 8
    assert box.next_push() == 9
    assert box.used == 60 and box.next_push() is None
    box.ready(7)
    assert box.next_push() == 7
    assert box.unsent == ()
    box.returned(8)
    box.returned(8)
    box.returned(123)
    assert box.holding == (9, 7) and box.used == 60
    box.check()


def test_small_shard_does_not_overtake_a_ready_one_that_does_not_fit() -> None:
    box = Outbox(quota=80, reserve=40)
    box.begin({0: 40, 1: 40, 2: 1})
    box.ready(1)
    assert box.next_push() == 1
    box.ready(2)
    assert box.blocked == (2,)
    assert box.next_push() is None


def test_absent_shard_no_longer_holds_the_reserve() -> None:
    box = Outbox(quota=8, reserve=4)
    box.begin({0: 4, 1: 4, 2: 4})
    box.ready(1)
    box.ready(2)
    assert box.next_push() == 1
    assert box.next_push() is None
    box.settle(0)
    assert box.next_push() == 2
    assert box.settled(0) and box.settled(99)


def test_quota_is_at_least_two_largest_shards_and_grows_with_a_later_part() -> None:
    box = Outbox(quota=1, reserve=4)
    assert box.quota == 8
    box.grow(10)
    assert (box.quota, box.reserve) == (20, 10)
    box.grow(2)
    assert box.reserve == 10


def test_unreturned_credit_is_carried_into_the_next_step() -> None:
    box = Outbox(quota=8, reserve=4)
    box.begin({0: 4, 1: 4})
    box.ready(0)
    box.ready(1)
    assert box.next_push() == 0 and box.next_push() == 1
    box.begin({0: 4, 1: 4})
    box.ready(0)
    assert box.next_push() is None
    assert box.size_of(0) == 4 and box.size_of(5) == 0
    box.returned(0)
    assert box.next_push() == 0


def test_lane_sends_one_at_a_time_and_only_lower_ones_overtake() -> None:
    box = Outbox(quota=8, reserve=4)
    assert box.lane_next() is None
    box.lane_add(12, 2)
    assert box.lane_next() == (12, PUSH)
    box.lane_add(13, 3)
    assert box.lane_next() is None
    box.lane_add(11, 1)
    box.lane_add(11, 1)
    assert box.lane_next() == (11, PUSH)
    assert box.lane_next() is None
    box.lane_done(11)
    box.lane_done(12)
    assert box.lane_next() == (13, PUSH)


def test_lane_assigns_before_it_pushes_and_forgets_finished_shards() -> None:
    box = Outbox(quota=8, reserve=4)
    box.lane_add(11, 1)
    box.lane_add(11, 1, ASSIGN)
    assert box.lane_next() == (11, ASSIGN)
    box.lane_again(ASSIGN)
    assert box.lane_next() == (11, ASSIGN)
    box.lane_drop(11)
    assert box.lane_next() is None
    box.lane_done(11, ASSIGN)
    assert box.lane_next() is None


def test_lane_stays_when_a_step_goes_on_with_more_shards() -> None:
    box = Outbox(quota=8, reserve=4)
    box.lane_add(11, 1)
    box.begin({11: 4, 12: 4}, keep_lane=True)
    assert box.lane_next() == (11, PUSH)
    box.begin({11: 4})
    assert box.lane_next() is None
