"""Every planted mistake is caught, each by the check that is there for it."""

from __future__ import annotations

import importlib.util
import json
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
code_mutants = load("paradis_sim_code_mutants", HERE / "code_mutants.py")
MUTANTS = (*mutants.MUTANTS, *(mutants.Mutant(*planted) for planted in code_mutants.MUTANTS))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
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


def test_every_mutant_names_the_check_that_catches_it() -> None:
    assert [m.name for m in MUTANTS if not m.by] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_its_seeds_pass_without_it(mutant: mutants.Mutant) -> None:  # type: ignore[name-defined]
    for seed in mutant.seeds:
        mutants.run(seed, mutant.workload)


TRACES = """
import importlib.util, json, sys
import pytest
spec = importlib.util.spec_from_file_location("mutants", sys.argv[1])
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants
spec.loader.exec_module(mutants)
runs = [(seed, workload) for seed in (3, 5, 8) for workload in ("counting", "floats")]
plain = [mutants.run(*each) for each in runs]
with pytest.MonkeyPatch.context() as patch:
    mutants.set_order(patch)
    planted = [mutants.run(*each) for each in runs]
print(json.dumps([plain, planted]))
"""


@pytest.fixture(scope="module")
def traces() -> list[tuple[list[str], list[str]]]:
    """Return the traces of a few seeds, without and with the mutant, under three hash seeds."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRACES, str(HERE / "mutants.py")],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SRC)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("0", "1", "2")
    ]
    found = []
    try:
        for process in processes:
            out, _ = process.communicate(timeout=250)
            assert process.returncode == 0
            found.append(tuple(json.loads(out)))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


Traces = list[tuple[list[str], list[str]]]


@pytest.mark.timeout(300)
def test_same_seed_same_trace_whatever_the_hash_seed(traces: Traces) -> None:
    first = traces[0][0]
    assert all(plain == first for plain, _ in traces)
    assert len(set(first)) == len(first)


def test_replay_catches_a_set_that_decides_the_order(traces: Traces) -> None:
    assert any(planted != traces[0][1] for _, planted in traces)


def test_layers_catch_a_clock_in_a_role() -> None:
    layers = load("paradis_test_layers", HERE.parent / "repo" / "test_layers.py")
    source = (SRC / "paradis" / "roles" / "server.py").read_text()
    assert layers.breaches(source, "paradis.roles.server") == []
    clock = source.replace("import msgspec", "import time\n\nimport msgspec", 1)
    (breach,) = layers.breaches(clock, "paradis.roles.server")
    assert "imports time" in breach
