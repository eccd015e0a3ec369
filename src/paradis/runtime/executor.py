"""Runs numeric jobs on a few threads, each on one intra-op thread: bits never depend on cores."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

Job = Callable[[], None]
_START_S = 30.0
_STOP_S = 30.0
"""Deadline of what is queued at the end; the end of the interpreter aborts it in a job."""


class Executor:
    """A small pool of threads.

    Args:
        threads: number of threads; 0 runs every job in the calling thread.
    """

    def __init__(self, threads: int, name: str = "paradis-numerics") -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            start_on_one_thread(self._run, f"{name}-{number}") for number in range(threads)
        ]

    def submit(self, job: Job, *, small: bool = False) -> None:
        """Run a job, in the calling thread if it is small. A job reports by posting events.

        The queue is bounded by what jobs exist for: at most one per shard.
        """
        if small or not self._threads:
            _run_on_one_thread(job)
        else:
            self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        """Finish queued jobs and end the threads; idempotent."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_STOP_S)
        self._threads = []


def start_on_one_thread(run: Job, name: str) -> threading.Thread:
    """Start a daemon thread whose torch operations use one thread.

    What a thread sets for itself holds for all that start later, the script's among them: so it is
    set back when the thread has begun. A thread that has set it takes over what others have set
    since when it first looks: so it looks at once.
    """
    begun = threading.Event()

    def body() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()
        begun.set()
        run()

    threads = torch.get_num_threads()
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    begun.wait(_START_S)
    torch.set_num_threads(threads)
    return thread


def _run_on_one_thread(job: Job) -> None:
    """Run a job in the calling thread, which may be the script's own, without its OpenMP team."""
    threads = torch.get_num_threads()
    if threads == 1:
        job()
        return
    torch.set_num_threads(1)
    try:
        job()
    finally:
        torch.set_num_threads(threads)
