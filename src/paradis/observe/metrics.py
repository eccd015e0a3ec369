"""Counters of one node. The names below are the whole vocabulary; reports carry nothing else."""

from __future__ import annotations

import os
import threading
import time
from typing import Final

NAMES: Final = {
    "data_bytes_out": "bytes sent on the data plane, headers included",
    "data_bytes_in": "bytes received on the data plane, headers included",
    "payload_bytes_out": "payload bytes sent",
    "payload_bytes_in": "payload bytes received",
    "push_bytes": "gradient bytes handed to the network (worker)",
    "pull_bytes": "updated value bytes installed (worker)",
    "steps": "steps finished (worker)",
    "wait_s": "seconds the script waited in step() (worker)",
    "late_steps": "steps that were made without this worker (worker)",
    "dropped_pushes": "pushes of workers that were too late for their step (server)",
    "updates": "shard updates applied (server)",
    "staleness_sum": "staleness of all updates in ssp and async; by updates: its mean (server)",
    "staleness_0": "updates that no other came before since their value was read (server)",
    "staleness_1": "updates with a staleness of 1 (server)",
    "staleness_2": "updates with a staleness of 2 or 3 (server)",
    "staleness_4": "updates with a staleness of 4 to 7 (server)",
    "staleness_8": "updates with a staleness of 8 to 15 (server)",
    "staleness_16": "updates with a staleness of 16 or more (server)",
    "store_bytes_peak": "largest contribution store, bytes (server, rack agent)",
    "store_bytes_max": "its bound, from which pushers' credit is cut (server, rack agent)",
    "rss_bytes": "resident memory, bytes",
    "cpu_s": "processor seconds used since the start",
    "wall_s": "seconds since the start",
}


def staleness_counts(staleness: int) -> dict[str, float]:
    """Return what one update adds to the counters of staleness."""
    step = 0 if staleness < 1 else min(16, 1 << (staleness.bit_length() - 1))
    return {"staleness_sum": staleness, f"staleness_{step}": 1}


class Counters:
    """Named numbers that only grow (or are replaced by `set`). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._start_ns = time.monotonic_ns()
        self._start_cpu_s = time.process_time()

    def add(self, **amounts: float) -> None:
        """Add to counters."""
        with self._lock:
            for name, amount in amounts.items():
                assert name in NAMES, name
                self._values[name] = self._values.get(name, 0) + amount

    def set(self, name: str, value: float) -> None:
        """Replace a counter's value."""
        assert name in NAMES, name
        with self._lock:
            self._values[name] = value

    def get(self, name: str) -> float:
        """Return a counter's value, 0 if never touched."""
        return self._values.get(name, 0.0)

    def snapshot(self) -> dict[str, float]:
        """Return all counters, with processor time, wall time and memory of the process."""
        with self._lock:
            values = dict(self._values)
        values["cpu_s"] = time.process_time() - self._start_cpu_s
        values["wall_s"] = (time.monotonic_ns() - self._start_ns) / 1e9
        values["rss_bytes"] = float(_resident_bytes())
        return values


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0
