"""The only loop of a real node: event -> ``role.handle`` -> carry out effects -> events.

As a rule there is no dispatching thread: whoever posts an event runs the role under the node's
lock, unless another thread is running it, who then takes the event over. So events are handled one
at a time, in posting order, and a lone event costs no hop to another thread.

On the script's main thread a signal handler of the script may run in the middle of a role. One that
saves a model waits there for parameters, which cannot come before it returns: so where there are
such handlers a thread takes the main thread's events over. What else raises in the middle of a role
(a data loader's handler, a keyboard interrupt) ends the node, for the role cannot go on; the script
gets its own exception, not one of ours.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from paradis.errors import InternalError, ParadisError, StateError
from paradis.roles.effects import Effect
from paradis.roles.events import Event, TimerFired
from paradis.runtime.signals import handler_may_wait, raised_in_handler

_log = logging.getLogger("paradis.driver")
_STORY = 32
_STOP_S = 10.0
"""How long `Driver.stop` waits for the thread that runs the role: a numeric job, at most."""


class Role(Protocol):
    """What a driver runs."""

    def handle(self, event: Event, now_ns: int) -> Sequence[Effect]:
        """Take one event, return what to do about it."""
        ...


class Driver:
    """Runs one role.

    Args:
        name: for log records.
        role: the pure state machine.
        carry: carries an effect out; called under the node's lock, must not block.
        broken: called once if the role raises: with ``InternalError`` where that is a bug of ours,
            with ``StateError`` where a signal handler of the script raised in it.

    Attributes:
        interrupted: whether a signal handler of the script ended it.
        watch: sees each event just before the role does, under the node's lock; None for nobody.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        carry: Callable[[Effect], None],
        broken: Callable[[ParadisError], None],
    ) -> None:
        self.name = name
        self.interrupted = False
        self.watch: Callable[[Event], None] | None = None
        self.role = role
        self._carry = carry
        self._broken = broken
        self._lock = threading.Lock()
        self._runner = 0  # the thread that runs the role
        self._queue: deque[Event] = deque()
        self._story: deque[Event] = deque(maxlen=_STORY)
        self._stopped = False
        self._timers = Timers(self.post)
        # Not an event: a signal handler may post while the main thread posts.
        self._given = queue.SimpleQueue[bool]()
        self._taker: threading.Thread | None = None

    def post(self, event: Event) -> None:
        """Handle an event, now or, if another thread is handling one, by that thread."""
        if self._stopped:
            return
        self._queue.append(event)
        if handler_may_wait():
            self._give()
        else:
            self._work_off()

    def _give(self) -> None:
        """Let another thread handle what is queued."""
        if self._taker is None:
            self._taker = threading.Thread(target=self._take, name="paradis-events", daemon=True)
            self._taker.start()
        if self._given.empty():  # else who takes what is there finds this event, too
            self._given.put(True)

    def _take(self) -> None:
        while self._given.get():
            self._work_off()

    def _work_off(self) -> None:
        while self._queue and not self._stopped:
            if not self._lock.acquire(blocking=False):
                return  # the holder looks at the queue again after it lets go
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        self._runner = threading.get_ident()
        try:
            while self._queue and not self._stopped:
                self._handle(self._queue.popleft())
        finally:
            self._runner = 0

    def _handle(self, event: Event) -> None:
        self._story.append(event)
        try:
            if self.watch is not None:
                self.watch(event)
            for effect in self.role.handle(event, time.monotonic_ns()):
                self._carry(effect)
        except BaseException as error:
            self._stopped = True
            if raised_in_handler(error):
                self._interrupt(error)
                raise
            self._break(event, error)

    def _interrupt(self, error: BaseException) -> None:
        self.interrupted = True
        self._broken(
            StateError(
                f"{self.name} cannot go on: a signal handler of the script raised "
                f"{type(error).__name__} in the middle of its work; let the handler set a flag "
                "that the loop looks at between steps"
            )
        )

    def _break(self, event: Event, error: BaseException) -> None:
        story = "\n  ".join(repr(e)[:200] for e in self._story)
        _log.error("role of %s broke; last events:\n  %s", self.name, story, exc_info=error)
        self._broken(
            InternalError(
                f"{self.name} broke on {type(event).__name__}: {error!r}; please report it "
                "with the node's log"
            )
        )

    def settle(self, timeout_s: float) -> bool:
        """Return when every event posted before is handled; False if that takes too long.

        Not for the thread that is running the role.
        """
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            self._drain()
        finally:
            self._lock.release()
        return True

    def set_timer(self, name: str, at_ns: int) -> None:
        """Post ``TimerFired(name)`` at ``at_ns`` (monotonic); a later one replaces it."""
        self._timers.set(name, at_ns)

    def stop(self) -> None:
        """Handle no further events, and return when none is being handled; idempotent.

        The process may end after this: a thread that the end of the interpreter finds inside torch
        aborts it.
        """
        self._stopped = True
        self._timers.stop()
        self._given.put(False)
        if self._runner == threading.get_ident():
            return  # called by the role's own work
        if self._lock.acquire(timeout=_STOP_S):
            self._lock.release()
        else:
            _log.warning("%s is stopped, but still handles %r", self.name, self._story[-1])


class Timers:
    """Named timers of one node on one thread, started when the first is set."""

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._changed = threading.Condition()
        self._heap: list[tuple[int, str]] = []
        self._due: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False

    def set(self, name: str, at_ns: int) -> None:
        """Set a timer, or move one that is set."""
        with self._changed:
            if self._stopped:
                return
            self._due[name] = at_ns
            heapq.heappush(self._heap, (at_ns, name))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="paradis-timers", daemon=True
                )
                self._thread.start()
            if self._heap[0][0] == at_ns:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                now = time.monotonic_ns()
                due: list[str] = []
                while self._heap and self._heap[0][0] <= now:
                    at_ns, name = heapq.heappop(self._heap)
                    if self._due.get(name) == at_ns:
                        del self._due[name]
                        due.append(name)
                if not due:
                    wait_s = (self._heap[0][0] - now) / 1e9 if self._heap else 60.0
                    self._changed.wait(min(wait_s, 60.0))
                    continue
            for name in due:
                self._post(TimerFired(name))

    def stop(self) -> None:
        """End the thread; idempotent, callable from the thread itself."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
