"""Numeric jobs: small ones inline, others on threads of one intra-op thread each."""

from __future__ import annotations

import queue
import threading

import torch

from paradis.runtime.executor import Executor


def test_small_jobs_run_in_the_calling_thread() -> None:
    executor = Executor(1)
    seen: list[str] = []
    executor.submit(lambda: seen.append(threading.current_thread().name), small=True)
    executor.stop()
    assert seen == [threading.current_thread().name]


def test_other_jobs_run_on_single_threaded_threads_and_stop_finishes_them() -> None:
    executor = Executor(2)
    seen: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for _ in range(8):
        executor.submit(
            lambda: seen.put((threading.current_thread().name, torch.get_num_threads()))
        )
    executor.stop()
    found = [seen.get(timeout=10) for _ in range(8)]
    assert all(name.startswith("paradis-numerics") and threads == 1 for name, threads in found)
    executor.stop()
