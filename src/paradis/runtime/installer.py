"""Brings updates into parameters, on a thread of its own while the script computes.

A value that came before ``step()``, or of another worker group, has to be copied, and a code has to
be made a step of the parameters: a millisecond for each shard, which neither ``step()`` nor the
thread of a link should spend. Invariant: jobs are done one at a time, in the order in which they
were given; so whoever hears that a step is over, through `after`, finds all of it in the
parameters. After a job that failed nothing is done any more: nobody hears of such a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paradis.runtime.executor import Executor, Job
from paradis.transport.scheduling import yield_to_compute


class Installer:
    """The installing thread of one worker.

    Made on the script's thread, whose number of torch threads stays as it is, and before the end of
    the interpreter, when no thread can be started. `install` and `after` are called by one thread
    at a time, under the node's lock.

    Args:
        failed: called with what a job raised.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._left = 0
        self._broken = False
        self._executor = Executor(1, "paradis-install")
        self._executor.submit(yield_to_compute)

    def install(self, job: Job) -> None:
        """Do a job after those before it.

        There is one for each shard of a step, or of a question, that is not over: the queue is
        bounded by them.
        """
        with self._lock:
            self._left += 1
        self._executor.submit(lambda: self._do(job))

    def after(self, job: Job) -> None:
        """Do something that takes no time when all jobs given before are done: now, if they are."""
        with self._lock:
            idle = not self._left and not self._broken
        if idle:
            job()
        else:
            self.install(job)

    def _do(self, job: Job) -> None:
        try:
            if not self._broken:
                job()
        except Exception as error:  # a bug, or memory that gave out: the job must end
            self._broken = True
            self._failed(error)
        with self._lock:
            self._left -= 1

    def stop(self) -> None:
        """Finish what is queued and end the thread; idempotent."""
        self._executor.stop()
