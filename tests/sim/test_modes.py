"""Modes ``ssp`` and ``async`` in virtual time: whole jobs under faults, and planted mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paradis.core.clocks import Clocks
from paradis.roles import server_stale
from paradis.roles.server import ServerRole
from paradis.roles.server_stale import StaleSteps
from paradis.roles.worker import WorkerRole
from paradis.sim.driver import Simulation
from paradis.sim.job import MS
from paradis.sim.scenario import MODES, run_seed, scenario

SRC = Path(__file__).parents[2] / "src"
SEEDS = 200
SEEDS_MAX = 200

RUN = """
import json, sys
import torch
from paradis.sim.scenario import run_many
torch.set_num_threads(1)
print(json.dumps(run_many(range(int(sys.argv[2])), sys.argv[1])[1]))
"""

Patch = pytest.MonkeyPatch


@pytest.mark.timeout(600)
def test_hundreds_of_seeds() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, mode, str(SEEDS)],
            env={**os.environ, "PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, text=True,
        )
        for mode in MODES
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


def test_scenarios_cover_what_they_should() -> None:
    jobs = [scenario(seed, mode) for seed in range(100) for mode in MODES]
    assert {j.mode for j in jobs} == set(MODES) and {j.workload for j in jobs} == {
        "counting", "floats",
    }  # fmt: skip
    assert {j.staleness for j in jobs} == {1, 2, 3}
    assert any(j.scaling for j in jobs) and not any(j.scaling for j in jobs if j.mode == "ssp")
    assert any(j.leaves for j in jobs) and any(j.habits.found_inf for j in jobs)
    assert any(j.weather.loss and j.weather.repeat and j.weather.reorder for j in jobs)
    assert {f.kind for j in jobs for f in j.faults} == {"pause", "cut", "crash"}


def run(seed: int, mode: str) -> Simulation:
    sim = Simulation(replace(scenario(seed, mode), liveness_ns=6500 * MS))
    sim.run()
    return sim


@pytest.mark.parametrize("mode", MODES)
def test_workers_do_run_ahead(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the bound would hold for want of anybody to hold it against."""
    ahead: list[int] = []
    real = Clocks.finish

    def finish(self: Clocks, rank: int, step: int) -> None:
        real(self, rank, step)
        ahead.append(step + 1 - min(self._done.values()))

    monkeypatch.setattr(Clocks, "finish", finish)
    for seed in range(20):
        run(seed, mode)
    assert max(ahead) >= 2


# ---------------------------------------------------------------------------------- mutants


def bound_off_by_one(patch: Patch) -> None:
    """A worker may be one step more ahead than the bound says."""
    real = Clocks.waits_for
    patch.setattr(Clocks, "waits_for", lambda self, step, members: real(self, step - 1, members))


def gone_workers_count(patch: Patch) -> None:
    """Who has left keeps the others back."""
    real = Clocks.waits_for

    def waits_for(self: Clocks, step: int, members: Any) -> Any:
        return real(self, step, sorted({*members, *self._done}))

    patch.setattr(Clocks, "waits_for", waits_for)


def repeat_counted(patch: Patch) -> None:
    """A repeated push of a step that is in the value is applied once more."""
    real = StaleSteps._on_own_push

    def on_push(self: StaleSteps, event: Any, push: Any, group: Any) -> None:
        shard = group.shards[push.shard]
        if push.step < shard.stale.clocks.done(push.worker) and not self._busy(shard):
            shard.stale.clocks._done[push.worker] = push.step
            shard.stale.owed.pop(push.worker, None)
        real(self, event, push, group)

    patch.setattr(StaleSteps, "_on_own_push", on_push)


def old_answer_taken(patch: Patch) -> None:
    """A worker takes any value that comes while it waits for one."""

    def wants(self: WorkerRole, group: int, shard: int, *_: Any) -> bool:
        return group in self.groups and shard in self.groups[group].waiting

    patch.setattr(WorkerRole, "wants", wants)


def whole_rate(patch: Patch) -> None:
    """Each worker's gradient counts as much as the mean of all does in sync."""
    patch.setattr(server_stale, "slowed", lambda options, divisor: options)


def sent_while_changing(patch: Patch) -> None:
    """A value goes out under the version that it is about to lose."""
    real = StaleSteps._on_taken

    def on_taken(self: StaleSteps, event: Any, group: Any) -> None:
        real(self, event, group)
        shard = group.shards[event.shard]
        if shard.stale.current is not None:
            self._finish_step(group, shard, *shard.stale.current)
            self._answer_owed(group, shard)

    patch.setattr(StaleSteps, "_on_taken", on_taken)


def own_step_not_waited_for(patch: Patch) -> None:
    """Who may go on by the bound goes on without its own update."""

    def may_begin(self: Clocks, rank: int, step: int, members: Any) -> bool:
        return not self.waits_for(step, members)

    patch.setattr(Clocks, "may_begin", may_begin)


def commit_not_repeated(patch: Patch) -> None:
    """A commit that comes again is not answered."""
    patch.setattr(ServerRole, "_repeat", lambda self, source, rank, group, known: None)
    patch.setattr(WorkerRole, "_heal_box", lambda self, *args, **names: None)


MUTANTS: tuple[tuple[Callable[[Patch], None], str, str, tuple[int, ...]], ...] = (
    (bound_off_by_one, "Bound", "ssp", (0,)),
    (gone_workers_count, "Liveness", "ssp", (5,)),
    (repeat_counted, "twice", "async", (1,)),
    (old_answer_taken, "Bound", "async", (7,)),
    (whole_rate, "rate is", "async", (1,)),
    (sent_while_changing, "Bound", "async", (3,)),
    (own_step_not_waited_for, "Bound", "async", (1,)),
    (commit_not_repeated, "Liveness", "async", (0,)),
)
"""Mistake, a word of the message that tells it, mode, seeds where it shows first."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m[0].__name__)
def test_simulator_catches(mutant: tuple[Callable[[Patch], None], str, str, Any]) -> None:
    plant, by, mode, seeds = mutant
    for seed in (*seeds, *range(SEEDS_MAX)):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            try:
                run(seed, mode)
            except Exception as error:
                if by in f"{type(error).__name__}: {error}":
                    return
    pytest.fail(f"{plant.__name__}: {SEEDS_MAX} seeds did not catch it")


@pytest.mark.parametrize("mode", MODES)
def test_same_seed_same_trace(mode: str) -> None:
    assert run_seed(5, mode).trace == run_seed(5, mode).trace
