"""How fast gradients travel: one worker to one server in another process, beside raw sockets.

``push``: a 64 MiB gradient handed over shard by shard until the server has acknowledged every
shard; raw sockets move the same bytes in the same chunks. ``step``: the same with commit, SGD on
the server, and the updated 64 MiB back in the parameter; raw sockets move the bytes there and back.
``small``: messages of 64 KiB and 1 MiB, eight outstanding. Prints JSON; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from launch_nodes import Nodes
from raw_wire import measure_raw, measure_raw_outstanding

import paradis
from paradis.frontend import session as sessions

MIB = 1 << 20
PS_LITE_GB_S = {64 << 10: 1.28, 1 << 20: 4.28}
"""ps-lite (C++, ZeroMQ van) on the same machine: pushes of this size, eight outstanding."""


class Bench:
    """One worker (this process) and one server, with a model of one parameter."""

    def __init__(self, family: str, total_bytes: int, shard_bytes: int, outstanding: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="paradis-bench-")
        store = 256 * MIB if not outstanding else (outstanding * shard_bytes * 3) // 2
        store += 2 * shard_bytes
        settings = (
            f"communication.same_host={'unix' if family == 'unix' else 'tcp'}",
            f"communication.shard_size={shard_bytes}B",
            f"communication.bucket_size={min(shard_bytes, MIB)}B",
            f"communication.small_tensor={min(shard_bytes, 256 << 10)}B",
            f"communication.contribution_store={store}B",
        )
        self.nodes = Nodes(Path(self.directory.name), workers=1, servers=1, settings=settings)
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

    def push(self) -> float:
        """Hand every shard over; return the seconds until all are acknowledged."""
        self.parameter.grad = self.gradient
        start = time.perf_counter()
        self.collector._hand_over(0)
        pending = [self.role_group.shards[s] for s in self.shards]
        while pending:
            pending = [s for s in pending if not s.acked]
            time.sleep(2e-4)
        return time.perf_counter() - start

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
    """Compare pushes and whole steps with raw sockets, in alternating rounds."""
    bench = Bench(family, total, chunk, 0)
    ours_push, ours_step, raw_push = [], [], []
    for _ in range(2):
        bench.push()
        bench.step(pushed=True)
    worker_cpu, server_cpu = _cpu_s(), bench.server_cpu_s()
    for _ in range(rounds):
        ours_push.append(bench.push())
        bench.step(pushed=True)
        ours_step.append(bench.step(pushed=False))
    moved_gb = rounds * 4 * total / 1e9
    cpu = {
        "worker_cpu_s_per_gb": (_cpu_s() - worker_cpu) / moved_gb,
        "server_cpu_s_per_gb": (bench.server_cpu_s() - server_cpu) / moved_gb,
    }
    bench.close()
    raw_push = measure_raw(family, total, chunk, rounds)
    hot = total / statistics.median(measure_raw(family, total, chunk, rounds, hot=True)) / 1e9
    push, step = statistics.median(ours_push), statistics.median(ours_step)
    raw = statistics.median(raw_push)
    return {
        "family": family,
        "bytes": total,
        "chunk": chunk,
        "push_gb_s": total / push / 1e9,
        "raw_gb_s": total / raw / 1e9,
        "raw_hot_gb_s": hot,
        "push_over_raw": raw / push,
        "step_s": step,
        "step_over_raw_there_and_back": 2 * raw / step,
        "push_s": [min(ours_push), push, max(ours_push)],
        "raw_s": [min(raw_push), raw, max(raw_push)],
        **cpu,
    }


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
