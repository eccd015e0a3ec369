"""Every planted mistake is caught, each by the check that is there for it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
SEEDS_MAX = 200


def load(name: str, path: Path) -> ModuleType:
    """Import a file that is no package member."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


mutants = load("paradis_sim_mutants", HERE / "mutants.py")


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_simulator_catches(mutant: mutants.Mutant) -> None:  # type: ignore[name-defined]
    for seed in (*mutant.seeds, *range(SEEDS_MAX)):
        with pytest.MonkeyPatch.context() as patch:
            mutant.plant(patch)
            try:
                mutants.run(seed, mutant.workload)
            except Exception as error:
                if mutant.by in f"{type(error).__name__}: {error}":
                    return
    pytest.fail(f"{mutant.name}: {SEEDS_MAX} seeds did not catch it")


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_its_seeds_pass_without_it(mutant: mutants.Mutant) -> None:  # type: ignore[name-defined]
    for seed in mutant.seeds:
        mutants.run(seed, mutant.workload)


TRACES = """
import importlib.util, sys
import pytest
spec = importlib.util.spec_from_file_location("mutants", sys.argv[1])
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants
spec.loader.exec_module(mutants)
with pytest.MonkeyPatch.context() as patch:
    if sys.argv[2] == "planted":
        mutants.set_order(patch)
    print([mutants.run(seed, workload) for seed in (3, 5) for workload in ("counting", "floats")])
"""


def traces(*, planted: bool) -> set[str]:
    """Return the different traces of a few seeds in three processes with their own hash seeds."""
    found = set()
    for hash_seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SRC)}
        done = subprocess.run(
            [sys.executable, "-c", TRACES, str(HERE / "mutants.py"), "planted" if planted else "-"],
            env=environment, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        found.add(done.stdout)
    return found


def test_same_seed_same_trace_whatever_the_hash_seed() -> None:
    assert len(traces(planted=False)) == 1


def test_replay_catches_a_set_that_decides_the_order() -> None:
    assert len(traces(planted=True)) > 1


def test_layers_catch_a_clock_in_a_role() -> None:
    layers = load("paradis_test_layers", HERE.parent / "repo" / "test_layers.py")
    source = (SRC / "paradis" / "roles" / "server.py").read_text()
    assert layers.breaches(source, "paradis.roles.server") == []
    clock = source.replace("from paradis.core.tree", "import time\nfrom paradis.core.tree", 1)
    (breach,) = layers.breaches(clock, "paradis.roles.server")
    assert "imports time" in breach
