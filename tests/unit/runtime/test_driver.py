"""The loop: events one at a time in order, whoever posts them; timers; a role that breaks."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Sequence

import pytest

from paradis.errors import InternalError, ParadisError, StateError
from paradis.roles.effects import Announce, Effect
from paradis.roles.events import Event, Reduced, TimerFired
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
        if isinstance(event, Reduced) and event.ticket < 0:
            raise ValueError("planted")
        self.seen.append(event)
        self.inside -= 1
        return [Announce("info", str(len(self.seen)))]


def make(role: Echo) -> tuple[Driver, list[Effect], list[ParadisError]]:
    effects: list[Effect] = []
    broken: list[ParadisError] = []
    return Driver("test", role, effects.append, broken.append), effects, broken


def test_events_of_many_threads_are_handled_one_at_a_time_and_none_is_lost() -> None:
    role = Echo()
    driver, effects, _ = make(role)

    def post(group: int) -> None:
        for shard in range(500):
            driver.post(Reduced(group, shard))

    threads = [threading.Thread(target=post, args=(g,)) for g in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(role.seen) == len(effects) == 2000
    assert not role.overlapped
    for group in range(4):
        mine = [e.ticket for e in role.seen if isinstance(e, Reduced) and e.shard == group]
        assert mine == list(range(500))


def test_an_event_posted_while_carrying_an_effect_is_handled_after_it() -> None:
    role = Echo()
    order: list[str] = []
    driver: Driver

    def carry(effect: Effect) -> None:
        assert isinstance(effect, Announce)
        if effect.text == "1":
            driver.post(Reduced(0, 2))
        order.append(effect.text)

    driver = Driver("test", role, carry, lambda _: None)
    driver.post(Reduced(0, 1))
    assert order == ["1", "2"]


def test_a_broken_role_ends_the_node_with_the_story_and_handles_nothing_more() -> None:
    role = Echo()
    driver, _, broken = make(role)
    driver.post(Reduced(0, -1))
    driver.post(Reduced(0, 1))
    assert len(broken) == 1
    assert "planted" in broken[0].message
    assert role.seen == []


def test_settling_waits_for_an_event_that_another_thread_took_over() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(Echo):
        def handle(self, event: Event, now_ns: int) -> Sequence[Effect]:
            entered.set()
            assert leave.wait(10)
            return super().handle(event, now_ns)

    role = Slow()
    driver, _, _ = make(role)
    busy = threading.Thread(target=driver.post, args=(Reduced(0, 1),))
    busy.start()
    assert entered.wait(10)
    driver.post(Reduced(0, 2))
    assert role.seen == [] and not driver.settle(0.01)
    leave.set()
    assert driver.settle(10)
    assert [e.ticket for e in role.seen if isinstance(e, Reduced)] == [1, 2]
    busy.join()


class Interrupting(Echo):
    """A signal arrives while it handles an event."""

    number = signal.SIGCHLD

    def handle(self, event: Event, now_ns: int) -> Sequence[Effect]:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, self.number)
        return super().handle(event, now_ns)


class Handler:
    """Signal handlers of every shape that scripts use; all raise but the last."""

    def method(self, number: int, frame: object) -> None:
        raise RuntimeError(f"signal {number}")

    def __call__(self, number: int, frame: object) -> None:
        self.method(number, frame)

    def leave(self, number: int, frame: object) -> None:
        raise SystemExit(3)


def function(number: int, frame: object) -> None:
    raise RuntimeError(f"signal {number}")


SHAPES = {
    "function": function,
    "method": Handler().method,
    "object": Handler(),
    "partial": functools.partial(Handler.method, Handler()),
    "exit": Handler().leave,
    "keyboard": signal.default_int_handler,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_signal_handler_raises_reaches_the_script_and_ends_the_node(shape: str) -> None:
    driver, effects, broken = make(Interrupting())
    previous = signal.signal(signal.SIGCHLD, SHAPES[shape])
    try:
        with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
            driver.post(Reduced(0, 1))
        driver.post(Reduced(0, 2))
    finally:
        signal.signal(signal.SIGCHLD, previous)
    assert driver.interrupted and effects == []
    [error] = broken
    assert isinstance(error, StateError) and "set a flag" in error.message


def test_a_handler_that_raises_nothing_interrupts_nothing() -> None:
    driver, effects, broken = make(Interrupting())
    previous = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        driver.post(Reduced(0, 1))
        driver.post(Reduced(0, -1))
    finally:
        signal.signal(signal.SIGCHLD, previous)
    assert len(effects) == 1 and not driver.interrupted
    assert isinstance(broken[0], InternalError)


NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_handler_may_wait_for_what_the_events_bring(number: signal.Signals) -> None:
    """It saves a model, say: the parameters come by an event that the main thread has posted."""
    role = Interrupting()
    role.number = number
    come, waited = threading.Event(), threading.Event()
    driver = Driver("test", role, lambda _: come.set(), lambda _: None)

    def save(*_: object) -> None:
        assert come.wait(10.0)
        waited.set()

    previous = signal.signal(number, save)
    try:
        driver.post(Reduced(0, 1))
        # In short waits: a signal just before one begins is looked at when it has ended.
        assert any(waited.wait(0.05) for _ in range(200))
    finally:
        signal.signal(number, previous)
    assert not driver.interrupted
    driver.stop()


def test_timers_fire_by_name_and_a_later_one_replaces_an_earlier() -> None:
    role = Echo()
    fired = threading.Event()
    driver = Driver("test", role, lambda _: fired.set(), lambda _: None)
    driver.set_timer("a", 1 << 62)
    driver.set_timer("a", 0)
    assert fired.wait(10)
    driver.stop()
    assert [e.name for e in role.seen if isinstance(e, TimerFired)] == ["a"]


class Slow:
    """A role whose work takes until it is allowed to end."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.ended = False

    def handle(self, event: Event, now_ns: int) -> Sequence[Effect]:
        self.begun.set()
        assert self.go.wait(10.0)
        self.ended = True
        return []


def test_stop_returns_when_no_event_is_being_handled() -> None:
    """The interpreter may end after it, and aborts a thread that it finds inside torch."""
    role = Slow()
    driver = Driver("test", role, lambda _: None, lambda _: None)
    reader = threading.Thread(target=driver.post, args=(Reduced(0, 0),))
    reader.start()
    assert role.begun.wait(10.0)
    stopper = threading.Thread(target=driver.stop)
    stopper.start()
    stopper.join(0.05)
    assert stopper.is_alive() and not role.ended
    role.go.set()
    stopper.join(10.0)
    assert role.ended and not stopper.is_alive()
    reader.join(10.0)


def test_a_role_may_stop_its_own_driver() -> None:
    driver = Driver("test", Echo(), lambda _: driver.stop(), lambda _: None)
    driver.post(Reduced(0, 0))
    driver.stop()
