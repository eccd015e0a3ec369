"""Peak memory of workers and servers of 1-bit Adam: before, at and after its freeze.

    python benchmarks/bench_memory_onebit.py [--mebibytes 200] [--base 100] [--rounds 3]

Each figure is a difference between two jobs, one with a model of ``--base`` MiB and one that is
``--mebibytes`` larger, divided by the latter: so it is in *models*, and what every process holds
whatever it trains (torch, Numba, rooms of a few shards) is in neither. Prints JSON: per phase and
node ``peak`` (the highest resident set within the phase) and ``now`` (at its end, as the
proportional set where the kernel tells it); medians of ``--rounds`` pairs. Linux only: reads and
resets /proc/PID.

Phases: ``full``, steps in full before the freeze; ``freeze``, the last of them, the fetch of what
codes start from, and the first step that travels as codes; ``coded``, the steps after it. Gradients
are cleared before each backward, as scripts do.
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
import time
from pathlib import Path
from typing import Any

from bench_memory import server_pids

PHASES = ("full", "freeze", "coded")
MEBIBYTE = 1 << 20
STORE = "32MiB"
"""Small, so that both jobs fill it: it is in neither figure."""

_LOOK_S = 0.02
_DEADLINE_S = 600.0

TRAIN = """
import os, sys, time, torch, paradis, paradis.optim
mebibytes, directory, freeze = int(sys.argv[1]), sys.argv[2], 3
torch.manual_seed(0)
model = torch.nn.ParameterList(
    torch.nn.Parameter(torch.randn(5 << 18)) for _ in range(mebibytes // 5)
)
optimizer = paradis.wrap(
    model, paradis.optim.OneBitAdam(model.parameters(), lr=1e-4, freeze_step=freeze)
)
def phase(name):
    optimizer.wait()
    mark = os.path.join(directory, f"{name}.{paradis.rank()}")
    with open(mark + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(mark + ".part", mark)
    while not os.path.exists(os.path.join(directory, f"{name}.seen")):
        time.sleep(0.01)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        for p in model:
            (p * p).sum().backward()
        optimizer.step()
phase("begin")
train(freeze - 1)
phase("full")
train(2)
phase("freeze")
train(3)
phase("coded")
"""


def resident(pid: int) -> dict[str, int]:
    """Return a process's peak since the last reset, and what it holds now, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    share = re.search(
        r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
    )
    assert peak is not None and share is not None, status
    return {"peak": int(peak[1]) << 10, "now": int(share[1]) << 10}


def reset(pid: int) -> None:
    """Let a process's peak begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def wait_for(paths: list[Path], process: subprocess.Popen[str]) -> None:
    """Wait until all files are there.

    Raises:
        SystemExit: the job ended before, or it took too long.
    """
    limit = time.monotonic() + _DEADLINE_S
    while not all(path.exists() for path in paths):
        if process.poll() is not None or time.monotonic() > limit:
            process.terminate()
            _, errors = process.communicate()
            raise SystemExit(f"the job ended before {paths[0].name}\n{errors}")
        time.sleep(_LOOK_S)


def measure(mebibytes: int, arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, int]]]:
    """Run one job; return phase -> node -> bytes."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "train.py").write_text(TRAIN)
        command = [sys.executable, "-m", "paradis.cli.main", "run"]
        command += ["--workers", str(arguments.workers), "--servers", str(arguments.servers)]
        for setting in (f"communication.contribution_store={STORE}", *arguments.set):
            command += ["--set", setting]
        command += [str(directory / "train.py"), str(mebibytes), name]
        with subprocess.Popen(
            command, cwd=directory, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            found = {}
            for phase in ("begin", *PHASES):
                marks = [directory / f"{phase}.{rank}" for rank in range(arguments.workers)]
                wait_for(marks, process)
                pids = {f"worker-{i}": int(mark.read_text()) for i, mark in enumerate(marks)}
                pids |= server_pids(process.pid)
                found[phase] = {node: resident(pids[node]) for node in sorted(pids)}
                for pid in pids.values():
                    reset(pid)
                (directory / f"{phase}.seen").touch()
            _, errors = process.communicate()
            if process.returncode:
                raise SystemExit(errors)
    return {phase: found[phase] for phase in PHASES}


def in_models(small: Any, large: Any, arguments: argparse.Namespace) -> Any:
    """Return the difference of two jobs in models, all servers together."""
    size = arguments.mebibytes * MEBIBYTE
    result: dict[str, dict[str, dict[str, float]]] = {}
    for phase in PHASES:
        nodes: dict[str, dict[str, float]] = {}
        for node, figures in large[phase].items():
            name = "servers" if node.startswith("server") else node
            for key, value in figures.items():
                row = nodes.setdefault(name, {})
                row[key] = row.get(key, 0.0) + (value - small[phase][node][key]) / size
        result[phase] = nodes
    return result


def main() -> None:
    """Measure pairs of jobs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--mebibytes", type=int, default=200)
    parser.add_argument("--base", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    pairs = []
    fixed: Any = None
    for _ in range(arguments.rounds):
        fixed = measure(arguments.base, arguments)
        large = measure(arguments.base + arguments.mebibytes, arguments)
        pairs.append(in_models(fixed, large, arguments))
    models = {
        phase: {
            node: {
                key: round(statistics.median(pair[phase][node][key] for pair in pairs), 2)
                for key in pairs[0][phase][node]
            }
            for node in pairs[0][phase]
        }
        for phase in PHASES
    }
    base = {
        phase: {node: round(each["peak"] / MEBIBYTE) for node, each in fixed[phase].items()}
        for phase in PHASES
    }
    print(json.dumps(
        {"bench": "memory of 1-bit Adam", "mebibytes": arguments.mebibytes, "models": models,
         "peak_mebibytes_of_base": base}, indent=1,
    ))  # fmt: skip


if __name__ == "__main__":
    main()
