"""What ``wrap`` adds to a step of a tiny model: one worker, one server, milliseconds per step.

Alternates plain torch with the wrapped optimizer on the same model. ``alone`` is the in-process
server, ``processes`` a server of its own. Prints JSON; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from launch_nodes import Nodes
from torch import nn

import paradis


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a model of 1,000 parameters and its optimizer."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def turn(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    """Return the milliseconds of each step."""
    x = torch.randn(8, 16)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(steps: int, rounds: int) -> dict[str, float]:
    """Alternate plain and wrapped turns."""
    plain = build()
    model, optimizer = build()
    wrapped = paradis.wrap(model, optimizer)
    turn(model, wrapped, 50)
    turn(*plain, 50)
    plain_ms, wrapped_ms = [], []
    for _ in range(rounds):
        plain_ms += turn(*plain, steps)
        wrapped_ms += turn(model, wrapped, steps)
    paradis.close()
    base, ours = statistics.median(plain_ms), statistics.median(wrapped_ms)
    return {"plain_ms": base, "wrapped_ms": ours, "overhead_ms": ours - base,
            "wrapped_p90_ms": sorted(wrapped_ms)[int(len(wrapped_ms) * 0.9)]}  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"bench": "overhead", "alone": measure(given.steps, given.rounds)}
    with tempfile.TemporaryDirectory(prefix="paradis-bench-") as directory:
        nodes = Nodes(Path(directory), workers=1, servers=1)
        os.environ.update(nodes.environment(0, 1))
        result["processes"] = measure(given.steps, given.rounds)
        nodes.close()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
