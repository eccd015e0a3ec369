"""Backup workers in virtual time: whole jobs under faults, and planted mistakes."""

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

from paradis.core import quorum
from paradis.core.quorum import Choice, Quorum, Word
from paradis.roles.server_early import ServerEarly
from paradis.roles.server_quorum import ServerQuorum
from paradis.roles.worker import WorkerRole
from paradis.roles.worker_quorum import WorkerQuorum
from paradis.sim.driver import Simulation
from paradis.sim.job import MS
from paradis.sim.quorum_checks import QuorumCheckers
from paradis.sim.scenario import QUORUM, run_seed, scenario

SRC = Path(__file__).parents[2] / "src"
SEEDS = 300
SEEDS_MAX = 200
PROCESSES = 2

RUN = """
import json, sys
import torch
from paradis.sim.scenario import run_many
torch.set_num_threads(1)
first, step, end = map(int, sys.argv[1:])
print(json.dumps(run_many(range(first, end, step), "quorum")[1]))
"""

Patch = pytest.MonkeyPatch


@pytest.mark.timeout(600)
def test_hundreds_of_seeds() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(first), str(PROCESSES), str(SEEDS)],
            env={**os.environ, "PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, text=True,
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


def test_scenarios_cover_what_they_should() -> None:
    jobs = [scenario(seed, QUORUM) for seed in range(150)]
    assert {j.workers for j in jobs} == {2, 3, 4} and {j.backup for j in jobs} == {1, 2, 3}
    assert {j.servers for j in jobs} == {1, 2, 3}
    assert any(j.leaves for j in jobs) and any(j.habits.found_inf for j in jobs)
    assert any(j.habits.snapshot for j in jobs) and any(j.habits.change for j in jobs)
    assert any(j.coded for j in jobs) and any(j.coded and j.changes for j in jobs)
    assert any(j.weather.loss and j.weather.repeat and j.weather.reorder for j in jobs)
    assert {f.kind for j in jobs for f in j.faults} == {"pause", "cut"}


def test_workers_are_late_and_in_time_in_the_runs() -> None:
    """That they are of different speed does not mean that anybody is late, or ever comes back."""
    late = back = dropped = 0
    for seed in range(12):
        sim = Simulation(scenario(seed, QUORUM))
        sim.run()
        checkers = sim.checkers
        assert isinstance(checkers, QuorumCheckers)
        late += len(checkers.late)
        for group, step, rank in checkers.late:
            later = (m for (g, s), m in checkers.made.items() if g == group and s > step)
            back += any(rank in members for members in later)
        dropped += sum(n.counted.get("dropped_pushes", 0) for n in sim.nodes.values())
    assert late > 40 and back > 20 and dropped > 40, (late, back, dropped)


def run(seed: int) -> Simulation:
    sim = Simulation(replace(scenario(seed, QUORUM), liveness_ns=6500 * MS))
    sim.run()
    return sim


def test_same_seed_same_trace() -> None:
    assert run_seed(5, QUORUM).trace == run_seed(5, QUORUM).trace


# ---------------------------------------------------------------------------------- mutants


def each_server_chooses(patch: Patch) -> None:
    """Every server takes the first that have committed to itself."""
    real = ServerQuorum.open_quorum

    def open_quorum(self: ServerQuorum, plan: Any) -> None:
        real(self, plan)
        group = self.groups[plan.group]
        if group.quorum is not None and group.quorum.choice is None:
            group.quorum.choice = Choice(plan.backup, plan.step)

    patch.setattr(ServerQuorum, "open_quorum", open_quorum)


def one_too_few(patch: Patch) -> None:
    """A step does without one worker more."""
    patch.setattr(quorum, "quorum_size", lambda workers, backup: max(1, workers - backup - 1))


def everybody_each_time(patch: Patch) -> None:
    """All are waited for."""
    patch.setattr(quorum, "quorum_size", lambda workers, backup: workers)


def overwritten_too_early(patch: Patch) -> None:
    """Nobody waits until those who need a version have it."""
    patch.setattr(Quorum, "lacking", lambda self, step, workers: [])


def let_in_no_holder(patch: Patch) -> None:
    """Who is let in at a version is not said to need it."""
    real = Choice.choose

    def choose(self: Choice, *args: Any) -> Word | None:
        word = real(self, *args)
        if word is not None and word.step > self._first:
            self.word = word = replace(word, holders=word.members)
        return word

    patch.setattr(Choice, "choose", choose)


def word_misread(patch: Patch) -> None:
    """A server takes all who have the version for those who make the step."""
    real = Quorum.told

    def told(self: Quorum, word: Word) -> bool:
        return real(self, word if self.choice else replace(word, members=word.holders))

    patch.setattr(Quorum, "told", told)


def word_not_carried(patch: Patch) -> None:
    """Workers keep the word to themselves."""
    patch.setattr(WorkerQuorum, "_carry_word", lambda self, group, only="": None)


def questions_count_as_answers(patch: Patch) -> None:
    """Who is asked whether it has a version does not send again what has no answer."""
    real = WorkerRole.handle

    def handle(self: WorkerRole, event: Any, now_ns: int) -> Any:
        effects = real(self, event, now_ns)
        if type(getattr(event, "message", None)).__name__ == "Quorum":
            self._heard = True
        return effects

    patch.setattr(WorkerRole, "handle", handle)


def late_forgotten(patch: Patch) -> None:
    """Who commits while a step is being made is not let in when it is over."""
    real = Choice.next_step

    def next_step(self: Choice, step: int) -> dict[int, int]:
        self._asking = {}
        return real(self, step)

    patch.setattr(Choice, "next_step", next_step)
    patch.setattr(Choice, "asked", lambda self, rank, step, now: None)


def let_in_at_a_chosen_step(patch: Patch) -> None:
    """Who is late is let in at the present version, though it may be gone elsewhere."""
    real = Choice.asked

    def asked(self: Choice, rank: int, step: int, now: int) -> Word | int | None:
        answer = real(self, rank, step, now)
        return now if answer is None and step < now else answer

    patch.setattr(Choice, "asked", asked)


def late_takes_what_comes(patch: Patch) -> None:
    """Servers answer within a step whoever asks."""
    patch.setattr(ServerQuorum, "_on_pull", ServerEarly._on_pull)


def no_refund(patch: Patch) -> None:
    """A late worker's codes stay noted."""
    real = WorkerQuorum._acknowledged

    def acknowledged(self: WorkerQuorum, group: Any) -> None:
        before = len(self._out)
        real(self, group)
        kept = [e for e in self._out[before:] if type(e).__name__ != "Refund"]
        self._out[before:] = kept

    patch.setattr(WorkerQuorum, "_acknowledged", acknowledged)


def copied_later(patch: Patch) -> None:
    """A version that a checkpoint is of is overwritten before it is copied."""
    patch.setattr(ServerQuorum, "_copied_first", lambda self, group: True)


MUTANTS: tuple[tuple[Callable[[Patch], None], str, tuple[int, ...]], ...] = (
    (each_server_chooses, "Members", (5,)),
    (one_too_few, "Members", (4,)),
    (everybody_each_time, "Members", (0,)),
    (overwritten_too_early, "Whole", (2,)),
    (let_in_no_holder, "Whole", (2,)),
    (word_misread, "Members", (0,)),
    (word_not_carried, "Liveness", (0,)),
    (questions_count_as_answers, "Liveness", (37,)),
    (late_forgotten, "Liveness", (0,)),
    (let_in_at_a_chosen_step, "Whole", (6,)),
    (late_takes_what_comes, "Late", (11,)),
    (no_refund, "Refund", (0,)),
    (copied_later, "Saving", (3,)),
)
"""Mistake, a word of the message that tells it, seeds where it shows first."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m[0].__name__)
def test_simulator_catches(mutant: tuple[Callable[[Patch], None], str, Any]) -> None:
    plant, by, seeds = mutant
    for seed in (*seeds, *range(SEEDS_MAX)):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            try:
                run(seed)
            except Exception as error:
                if by in f"{type(error).__name__}: {error}":
                    return
    pytest.fail(f"{plant.__name__}: {SEEDS_MAX} seeds did not catch it")
