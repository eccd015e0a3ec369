"""A thousand seeds of each workload: whole jobs under faults, exact to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
SEEDS = 1000
PROCESSES = 2

RUN = """
import json, sys
import torch
from paradis.sim.scenario import run_many
torch.set_num_threads(1)
workload, first, step, end = sys.argv[1], *map(int, sys.argv[2:])
print(json.dumps(run_many(range(first, end, step), workload)[1]))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workload", ["counting", "floats"])
def test_thousand_seeds(workload: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, workload, str(first), str(PROCESSES), str(SEEDS)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for first in range(PROCESSES)
    ]  # fmt: skip
    failures: list[str] = []
    try:
        for process in running:
            out, _ = process.communicate(timeout=590)
            assert process.returncode == 0
            failures += json.loads(out)
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert failures == [], "\n".join(failures[:10])
