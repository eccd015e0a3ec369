"""The loop: events one at a time in order, whoever posts them; timers; a role that breaks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from paradis.errors import InternalError
from paradis.roles.effects import Announce, Effect
from paradis.roles.events import Event, ShardReady, TimerFired
from paradis.runtime.driver import Driver


class Echo:
    """A role that answers each event with a line, and notes when two run at once."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.inside = 0
        self.overlapped = False

    def handle(self, event: Event, now_ns: int) -> Sequence[Effect]:
        self.inside += 1
        self.overlapped |= self.inside > 1
        if isinstance(event, ShardReady) and event.shard < 0:
            raise ValueError("planted")
        self.seen.append(event)
        self.inside -= 1
        return [Announce("info", str(len(self.seen)))]


def make(role: Echo) -> tuple[Driver, list[Effect], list[InternalError]]:
    effects: list[Effect] = []
    broken: list[InternalError] = []
    return Driver("test", role, effects.append, broken.append), effects, broken


def test_events_of_many_threads_are_handled_one_at_a_time_and_none_is_lost() -> None:
    role = Echo()
    driver, effects, _ = make(role)

    def post(group: int) -> None:
        for shard in range(500):
            driver.post(ShardReady(group, shard))

    threads = [threading.Thread(target=post, args=(g,)) for g in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(role.seen) == len(effects) == 2000
    assert not role.overlapped
    for group in range(4):
        mine = [e.shard for e in role.seen if isinstance(e, ShardReady) and e.group == group]
        assert mine == list(range(500))


def test_an_event_posted_while_carrying_an_effect_is_handled_after_it() -> None:
    role = Echo()
    order: list[str] = []
    driver: Driver

    def carry(effect: Effect) -> None:
        assert isinstance(effect, Announce)
        if effect.text == "1":
            driver.post(ShardReady(0, 2))
        order.append(effect.text)

    driver = Driver("test", role, carry, lambda _: None)
    driver.post(ShardReady(0, 1))
    assert order == ["1", "2"]


def test_a_broken_role_ends_the_node_with_the_story_and_handles_nothing_more() -> None:
    role = Echo()
    driver, _, broken = make(role)
    driver.post(ShardReady(0, -1))
    driver.post(ShardReady(0, 1))
    assert len(broken) == 1
    assert "planted" in broken[0].message
    assert role.seen == []


def test_timers_fire_by_name_and_a_later_one_replaces_an_earlier() -> None:
    role = Echo()
    fired = threading.Event()
    driver = Driver("test", role, lambda _: fired.set(), lambda _: None)
    driver.set_timer("a", 1 << 62)
    driver.set_timer("a", 0)
    assert fired.wait(10)
    driver.stop()
    assert [e.name for e in role.seen if isinstance(e, TimerFired)] == ["a"]
