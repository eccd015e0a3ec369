"""Signals of the launcher as items of its one event queue.

Invariant: between entry and exit no signal kills or interrupts the launcher: each is an event that
the main loop decides about.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

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
