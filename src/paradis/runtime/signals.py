"""The launcher's signals as items of its one event queue; exceptions of a script's handlers.

Invariant: between entry and exit of ``SignalInbox`` no signal kills or interrupts the launcher:
each is an event that the main loop decides about.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, Final

_WAITED_IN: Final = (
    signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT,
)  # fmt: skip
"""Signals in whose handlers scripts save what they have; those of a data loader's SIGCHLD and of an
alarm only raise."""

_getsignal: Final = inspect.unwrap(signal.getsignal)  # without its enumerations: 20 times as fast

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Context in which signals are handed to ``put``, with their number; main thread only.

    Args:
        put: must be safe inside a signal handler, as ``queue.SimpleQueue.put`` is.
    """

    def __init__(self, put: Callable[[int], None]) -> None:
        self._put = put
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalInbox:
        for number in (*_STOPPING, signal.SIGCHLD):
            # nohup ignores SIGHUP on purpose; it stays ignored.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._put(number)


def handler_may_wait() -> bool:
    """Tell whether a handler of the script may run on this thread, at any place, and wait there."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = map(_getsignal, _WAITED_IN)
    return any(callable(h) and h is not signal.default_int_handler for h in handlers)


def raised_in_handler(error: BaseException) -> bool:
    """Tell whether an exception came out of a signal handler, and so out of nowhere.

    True for what a handler written in Python let through, and for ``KeyboardInterrupt`` and
    ``SystemExit``, which nothing of ours raises.
    """
    if not isinstance(error, Exception):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a handler: a function, a method, a partial or an object with a call."""
    if isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)
    if code is None:  # an object: its class says how it is called
        code = getattr(getattr(type(handler), "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None
