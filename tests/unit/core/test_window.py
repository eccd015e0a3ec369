"""Windows, admission queue and lane, one rule at a time."""

import pytest

from paradis.core.window import AdmissionQueue, Lane, LaneItem, ReceiveWindow, SendWindow
from paradis.errors import ConfigError, LocalProtocolError, RemoteProtocolError


def test_credit_at_once_below_half_then_on_release() -> None:
    window = ReceiveWindow(100)
    assert window.on_received(40) == 40
    assert window.on_received(30) == 10
    assert window.on_received(30) == 0
    assert (window.withheld, window.stored, window.credited) == (50, 100, 50)
    assert window.on_released(30) == 30
    assert window.on_released(70) == 20
    assert (window.withheld, window.stored, window.credited) == (0, 0, 100)
    assert window.on_received(0) == 0
    window.check()


def test_receiver_refuses_what_has_no_credit() -> None:
    window = ReceiveWindow(100)
    window.on_received(100)
    with pytest.raises(RemoteProtocolError, match="credit for 50 of 100"):
        window.on_received(51)
    with pytest.raises(RemoteProtocolError):
        window.on_received(-1)
    with pytest.raises(LocalProtocolError, match="of 100 stored"):
        window.on_released(101)
    window.check()
    with pytest.raises(ConfigError):
        ReceiveWindow(0)


def test_early_shard_leaves_the_reserve_free() -> None:
    window = SendWindow(100, 40)
    assert window.may_send(40, lowest=False)
    window.on_sent(40)
    assert window.may_send(20, lowest=False)
    assert not window.may_send(21, lowest=False)
    window.on_sent(20)
    assert window.may_send(40, lowest=True)
    window.on_sent(40)
    assert not window.may_send(1, lowest=True)
    assert window.may_send(0, lowest=True)
    window.check()


def test_credit_is_cumulative_and_idempotent() -> None:
    window = SendWindow(100, 40)
    window.on_sent(40)
    window.on_sent(40)
    window.on_credit(70)
    window.on_credit(40)
    window.on_credit(70)
    assert window.unreturned == 10
    with pytest.raises(RemoteProtocolError, match="81 bytes in all, but only 80"):
        window.on_credit(81)
    window.reset()
    assert window.unreturned == 0
    window.check()


def test_sender_refuses_its_own_mistakes() -> None:
    window = SendWindow(100, 40)
    with pytest.raises(LocalProtocolError, match="a shard of 41 bytes"):
        window.may_send(41, lowest=True)
    with pytest.raises(LocalProtocolError, match="ask may_send first"):
        window.on_sent(101)
    with pytest.raises(ConfigError, match="raise the quota"):
        SendWindow(39, 40)


def test_queue_takes_the_lowest_ready_and_sends_early_within_the_reserve() -> None:
    queue = AdmissionQueue({7: 0, 8: 1, 9: 2})
    window = SendWindow(80, 40)
    for shard in (9, 8, 7, 7):
        queue.add(shard)
    assert len(queue) == 3 and queue.lowest_unsent() == 7
    assert queue.next_sendable(window) is None
    queue.mark_ready(9, 30)
    queue.mark_ready(8, 30)
    assert queue.next_sendable(window) == 8
    assert queue.next_sendable(window) is None  # 9 would eat the reserve kept for 7
    queue.mark_ready(7, 40)
    assert queue.next_sendable(window) == 7
    assert queue.next_sendable(window) is None  # the lowest now, but no credit
    window.on_credit(70)
    queue.check()
    assert queue.next_sendable(window) == 9
    assert len(queue) == 0 and queue.lowest_unsent() is None


def test_small_shard_does_not_overtake() -> None:
    queue = AdmissionQueue({0: 0, 1: 1, 2: 2})
    window = SendWindow(80, 40)
    for shard in (0, 1, 2):
        queue.add(shard)
    window.on_sent(30)
    queue.mark_ready(1, 20)
    queue.mark_ready(2, 1)
    assert queue.next_sendable(window) is None


def test_discarded_shard_no_longer_holds_the_reserve() -> None:
    queue = AdmissionQueue({0: 0, 1: 1})
    window = SendWindow(40, 40)
    queue.add(0)
    queue.add(1)
    queue.mark_ready(1, 40)
    queue.mark_ready(0, 40)
    queue.discard(0)
    assert 0 not in queue and 1 in queue
    queue.add(0)
    assert queue.lowest_unsent() == 0
    assert queue.next_sendable(window) is None
    queue.discard(0)
    assert queue.next_sendable(window) == 1
    queue.check()


def test_queue_refuses() -> None:
    with pytest.raises(ConfigError, match="share a priority"):
        AdmissionQueue({0: 0, 1: 0})
    queue = AdmissionQueue({0: 0})
    with pytest.raises(LocalProtocolError, match="no place"):
        queue.add(5)
    with pytest.raises(LocalProtocolError, match="cannot become ready"):
        queue.mark_ready(0, 4)
    queue.add(0)
    queue.mark_ready(0, 4)
    with pytest.raises(LocalProtocolError, match="cannot become ready"):
        queue.mark_ready(0, 4)


def test_lane_sends_one_at_a_time_in_order() -> None:
    lane = Lane()
    assert lane.next_item() is None
    first, second = LaneItem(1, 11, "push", 1), LaneItem(0, 10, "assign")
    lane.add(first)
    assert lane.next_item() == first
    lane.add(LaneItem(2, 12, "push"))
    lane.add(second)
    assert lane.next_item() is None
    assert not lane.on_acked(11, "push", 0)
    assert lane.on_acked(11, "push", 1)
    assert not lane.on_acked(11, "push", 1)
    assert lane.next_item() == second
    assert lane.in_flight == second and len(lane) == 2
    lane.check()


def test_lane_keeps_the_newest_revision_and_resends_after_reset() -> None:
    lane = Lane()
    lane.add(LaneItem(0, 10, "push", 1))
    assert lane.next_item() == LaneItem(0, 10, "push", 1)
    lane.add(LaneItem(0, 10, "push", 3))
    lane.add(LaneItem(0, 10, "push", 2))
    lane.add(LaneItem(0, 10, "assign"))
    lane.reset()
    lane.check()
    assert len(lane) == 2
    assert lane.next_item() == LaneItem(0, 10, "assign")
    lane.reset()
    assert lane.next_item() == LaneItem(0, 10, "assign")
    assert lane.on_acked(10, "assign")
    assert lane.next_item() == LaneItem(0, 10, "push", 3)
