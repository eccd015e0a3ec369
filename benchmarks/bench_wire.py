"""How fast gradients travel: one worker to one server in another process, beside raw sockets.

``push``: a 64 MiB gradient handed over shard by shard until the server has acknowledged every
shard; raw sockets move the same bytes in the same chunks. ``applied``: the same until the server
has also taken its SGD step on every shard; it sends no values back (`silent_server.py`), and the
worker does not look for values that its script changed, which is no part of that way.
``step``: a whole step, the updated 64 MiB back in the parameter; raw sockets move the bytes there
and back. ``small``: messages of 64 KiB and 1 MiB, eight outstanding. Raw and ours take turns;
a ratio is the median over the rounds of (median raw / median ours). Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from launch_nodes import Nodes
from raw_wire import measure_raw, measure_raw_outstanding

import paradis
from paradis.frontend import session as sessions

MIB = 1 << 20
_SILENT = Path(__file__).with_name("silent_server.py")
_TURN = 5
"""Repetitions of one method before the other takes its turn."""

PS_LITE_GB_S = {64 << 10: 1.28, 1 << 20: 4.28}
"""ps-lite (C++, ZeroMQ van) on the same machine: pushes of this size, eight outstanding."""


class Bench:
    """One worker (this process) and one server, with a model of one parameter."""

    def __init__(
        self, family: str, total_bytes: int, shard_bytes: int, outstanding: int = 0,
        *, silent: bool = False,
    ) -> None:  # fmt: skip
        self.directory = tempfile.TemporaryDirectory(prefix="paradis-bench-")
        store = 256 * MIB if not outstanding else (outstanding * shard_bytes * 3) // 2
        store += 2 * shard_bytes
        settings = (
            f"communication.same_host={'unix' if family == 'unix' else 'tcp'}",
            f"communication.shard_size={shard_bytes}B",
            f"communication.bucket_size={min(shard_bytes, MIB)}B",
            f"communication.small_tensor={min(shard_bytes, 256 << 10)}B",
            f"communication.contribution_store={store}B",
            f"training.detect_value_changes={'false' if silent else 'true'}",
        )
        server = {"server": (str(_SILENT),)} if silent else {}
        self.nodes = Nodes(
            Path(self.directory.name), workers=1, servers=1, settings=settings, **server
        )
        os.environ.update(self.nodes.environment(0, 1))
        self.parameter = torch.nn.Parameter(torch.zeros(total_bytes // 4))
        self.gradient = torch.full_like(self.parameter, 1e-3)
        model = torch.nn.ParameterList([self.parameter])
        self.optimizer = paradis.wrap(model, torch.optim.SGD([self.parameter], lr=1e-3))
        binding = self.optimizer._bound
        self.group = binding.group
        self.node = sessions.current().node
        self.role_group = self.node.worker_role.groups[self.group]
        self.collector = binding.collector
        self.shards = sorted(binding.memory.shards)
        self._acknowledged = threading.Event()
        self._missing = 0
        self._watch_acknowledgements()

    def _watch_acknowledgements(self) -> None:
        role = self.node.worker_role
        on_ack = role._on_ack

        def watched(*args: Any) -> None:
            on_ack(*args)
            self._missing -= 1
            if not self._missing:
                self._acknowledged.set()

        role._on_ack = watched

    def push(self) -> float:
        """Hand every shard over; return the seconds until all are acknowledged."""
        self.parameter.grad = self.gradient
        self._missing = len(self.shards)
        self._acknowledged.clear()
        start = time.perf_counter()
        self.collector._hand_over(0)
        if not self._acknowledged.wait(60.0):
            raise TimeoutError("pushes were not acknowledged within 60 s")
        seconds = time.perf_counter() - start
        assert all(self.role_group.shards[s].acked for s in self.shards)
        return seconds

    def step(self, *, pushed: bool) -> float:
        """Finish the step; return the seconds from hand-over to updated parameter."""
        self.parameter.grad = self.gradient
        start = time.perf_counter()
        if not pushed:
            self.collector._hand_over(0)
        self.optimizer.step()
        return time.perf_counter() - start

    def server_cpu_s(self) -> float:
        """Return the processor seconds of the server process so far."""
        fields = Path(f"/proc/{self.nodes.servers[0].pid}/stat").read_text().split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the job."""
        paradis.close()
        self.nodes.close()
        self.directory.cleanup()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure_large(family: str, total: int, chunk: int, rounds: int) -> dict[str, Any]:
    """Compare pushes and whole steps with raw sockets, in turns."""
    bench = Bench(family, total, chunk)
    times: dict[str, list[float]] = {"raw": [], "push": [], "step": [], "applied": []}
    cpu = {"worker_cpu_s_per_gb": 0.0, "server_cpu_s_per_gb": 0.0}
    for turn in range(rounds + 1):  # the first one warms up
        raw = measure_raw(family, total, chunk, _TURN)
        worker, server = _cpu_s(), bench.server_cpu_s()
        push, step = [], []
        for _ in range(_TURN):
            push.append(bench.push())
            bench.step(pushed=True)
            step.append(bench.step(pushed=False))
        if turn:
            moved_gb = rounds * _TURN * 4 * total / 1e9
            cpu["worker_cpu_s_per_gb"] += (_cpu_s() - worker) / moved_gb
            cpu["server_cpu_s_per_gb"] += (bench.server_cpu_s() - server) / moved_gb
            times["raw"].append(statistics.median(raw))
            times["push"].append(statistics.median(push))
            times["step"].append(statistics.median(step))
    bench.close()
    bench = Bench(family, total, chunk, silent=True)
    raw_applied = []
    for turn in range(rounds + 1):
        raw = measure_raw(family, total, chunk, _TURN)
        applied = [bench.step(pushed=False) for _ in range(_TURN)]
        if turn:
            raw_applied.append(statistics.median(raw))
            times["applied"].append(statistics.median(applied))
    bench.close()
    hot = statistics.median(measure_raw(family, total, chunk, _TURN, hot=True))
    return {
        "family": family,
        "bytes": total,
        "chunk": chunk,
        "gb_s": {k: total / statistics.median(v) / 1e9 for k, v in times.items()},
        "raw_hot_gb_s": total / hot / 1e9,
        "ms": {k: [1e3 * f(v) for f in (min, statistics.median, max)] for k, v in times.items()},
        "push_over_raw": _ratio(times["raw"], times["push"]),
        "applied_over_raw": _ratio(raw_applied, times["applied"]),
        "step_over_raw_there_and_back": _ratio([2 * r for r in times["raw"]], times["step"]),
        **cpu,
    }


def _ratio(yardstick: list[float], ours: list[float]) -> list[float]:
    """Return minimum, median and maximum of the rounds' ratios."""
    ratios = [a / b for a, b in zip(yardstick, ours, strict=True)]
    return [min(ratios), statistics.median(ratios), max(ratios)]


def measure_small(family: str, message: int, rounds: int) -> dict[str, Any]:
    """Measure messages of one size with eight outstanding."""
    total = 512 * message if message < MIB else 128 * message
    bench = Bench(family, total, message, 8)
    rates = []
    for index in range(rounds + 1):
        seconds = bench.push()
        bench.step(pushed=True)
        if index:
            rates.append(total / seconds / 1e9)
    bench.close()
    raw = [r / 1e9 for r in measure_raw_outstanding(family, message, 8, total // message)]
    return {
        "family": family,
        "message": message,
        "outstanding": 8,
        "gb_s": statistics.median(rates),
        "raw_gb_s": statistics.median(raw),
        "over_raw": statistics.median(rates) / statistics.median(raw),
        "ps_lite_gb_s": PS_LITE_GB_S[message],
        "over_ps_lite": statistics.median(rates) / PS_LITE_GB_S[message],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total", type=int, default=64 * MIB)
    parser.add_argument("--chunk", type=int, default=4 * MIB)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "bench": "wire",
        "large": [
            measure_large(f, given.total, given.chunk, given.rounds) for f in ("unix", "tcp")
        ],
        "small": [
            measure_small(f, m, given.rounds) for f in ("unix", "tcp") for m in (64 << 10, MIB)
        ],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
