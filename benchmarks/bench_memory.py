"""Peak memory of servers beside what the design promises.

    python benchmarks/bench_memory.py [--mebibytes 100] [--workers 2] [--servers 2]

A server may hold 1.1 x (values + optimizer state) + accumulators + contribution store. Prints JSON:
per optimizer and server the growth of its peak resident memory over what it had when the workers
had joined, the parts, and the peak of the contribution store (received and not yet summed) beside
its bound, which is what all credit together may reach. Medians of five jobs, with minimum and
maximum. Linux only (reads /proc).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

STORE_BYTES = 64 << 20
STATE_PER_VALUE = {"SGD": 1, "Adam": 2}
MEBIBYTE = 1 << 20

TRAIN = """
import json, os, sys, torch, paradis
name, mebibytes, steps = sys.argv[1], int(sys.argv[2]), 4
torch.manual_seed(0)
model = torch.nn.ParameterList(
    torch.nn.Parameter(torch.randn(5 << 18)) for _ in range(mebibytes // 5)
)
options = {"lr": 0.01, "momentum": 0.9} if name == "SGD" else {}
optimizer = getattr(torch.optim, name)(model.parameters(), **options)
print("before", flush=True)
optimizer = paradis.wrap(model, optimizer)
for step in range(steps):
    optimizer.zero_grad()
    sum((p * p).sum() for p in model).backward()
    optimizer.step()
print("after", flush=True)
binding = optimizer._binding
held = {}
for shard, memory in binding.memory.shards.items():
    size = memory.plan.length * memory.tensors[0].dtype.itemsize
    held[memory.plan.server] = held.get(memory.plan.server, 0) + size
if paradis.rank() == 0:
    print("values", json.dumps(held), flush=True)
    open(os.environ["GO"]).readline()
"""


def peak_bytes(pid: int, field: str) -> int:
    """Return a field of a process's memory, such as ``VmHWM`` (peak) or ``VmRSS`` (now)."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) << 10


def server_pids(launcher: int) -> dict[str, int]:
    """Return the servers that a launcher started."""
    found = {}
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in map(int, children):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "server" in words:
            found[f"server-{words[words.index('--index') + 1]}"] = pid
    return found


def measure(name: str, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run one job and return its figures."""
    directory = Path(tempfile.mkdtemp(dir=directory))
    script, go = directory / f"train_{name}.py", directory / f"go_{name}"
    script.write_text(TRAIN)
    os.mkfifo(go)
    command = [sys.executable, "-m", "paradis.cli.main", "run"]
    command += ["--workers", str(arguments.workers), "--servers", str(arguments.servers)]
    command += ["--set", f"communication.contribution_store={STORE_BYTES // MEBIBYTE}MiB"]
    command += [str(script), name, str(arguments.mebibytes)]
    environ = {**os.environ, "GO": str(go), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=directory, env=environ, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
        reader.start()
        base: dict[str, int] = {}
        values: dict[str, int] = {}
        peaks: dict[str, int] = {}
        for line in process.stdout or ():
            if line.startswith("before"):
                base = {n: peak_bytes(p, "VmRSS") for n, p in server_pids(process.pid).items()}
            elif line.startswith("values"):
                values = json.loads(line.partition(" ")[2])
                peaks = {n: peak_bytes(p, "VmHWM") for n, p in server_pids(process.pid).items()}
                go.write_text("\n")
        process.wait()
        reader.join()
        if process.returncode:
            raise SystemExit("".join(errors))
    (counters,) = directory.glob("paradis-runs/*/nodes.json")
    nodes = json.loads(counters.read_text())
    return {n: row(name, peaks[n] - base[n], values.get(n, 0), nodes[n]) for n in sorted(peaks)}


def row(name: str, grown: int, values: int, counters: dict[str, float]) -> dict[str, float]:
    """Return one server's figures; the ratio is of what it grew by to what is allowed."""
    held = values * (1 + STATE_PER_VALUE[name])
    allowed = 1.1 * held + values + STORE_BYTES
    return {
        "peak_growth_bytes": grown,
        "value_and_state_bytes": held,
        "accumulator_bytes": values,
        "store_bytes_peak": counters["store_bytes_peak"],
        "store_bytes_max": counters["store_bytes_max"],
        "ratio": round(grown / allowed, 3),
    }


def spread(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return minimum, median and maximum of every figure."""
    columns = {key: sorted(row[key] for row in rows) for key in rows[0]}
    return {key: [c[0], statistics.median(c), c[-1]] for key, c in columns.items()}


def main() -> None:
    """Measure SGD with momentum, and Adam."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result: dict[str, Any] = {"bench": "memory", "workers": arguments.workers}
        for name in STATE_PER_VALUE:
            jobs = [measure(name, arguments, Path(directory)) for _ in range(arguments.rounds)]
            result[name] = {server: spread([job[server] for job in jobs]) for server in jobs[0]}
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
