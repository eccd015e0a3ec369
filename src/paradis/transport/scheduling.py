"""How threads that move bytes share cores with the thread that computes."""

from __future__ import annotations

import contextlib
import os


def yield_to_compute() -> None:
    """Let whoever runs go on when the calling thread wakes, instead of taking its core at once.

    Links wake their threads hundreds of times a step. Where one of them preempts the script's
    thread in the middle of an operation, backward is late by a turn, and so is everyone who waits
    for that worker; the link's own work bears a delay of a turn. On an idle core this changes
    nothing. Linux only (SCHED_BATCH); elsewhere, or where it is not allowed, nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
