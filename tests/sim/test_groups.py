"""Worker groups in virtual time: whole jobs under faults, and planted mistakes."""

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

from paradis.roles import effects as fx
from paradis.roles.receiver import Receiver
from paradis.roles.server_reading import ServerReading
from paradis.roles.worker_reading import Reading, ReadShard, WorkerReading
from paradis.sim.driver import Simulation
from paradis.sim.job import MS
from paradis.sim.scenario import GROUPS, run_seed, scenario

SRC = Path(__file__).parents[2] / "src"
SEEDS = 200
SEEDS_MAX = 200

RUN = """
import json, sys
import torch
from paradis.sim.scenario import run_many
torch.set_num_threads(1)
print(json.dumps(run_many(range(int(sys.argv[1]), int(sys.argv[2])), "groups")[1]))
"""

Patch = pytest.MonkeyPatch


@pytest.mark.timeout(600)
def test_hundreds_of_seeds() -> None:
    halves = ((0, SEEDS // 2), (SEEDS // 2, SEEDS))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(first), str(end)],
            env={**os.environ, "PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, text=True,
        )
        for first, end in halves
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
    jobs = [scenario(seed, GROUPS) for seed in range(SEEDS)]
    assert {j.mode for j in jobs} == {"sync", "ssp", "async"}
    assert {j.modes for j in jobs} == {
        (), ("sync", "ssp"), ("sync", "async"), ("sync", "ssp", "async"),
        ("sync", "async", "async"),
    }  # fmt: skip
    assert {len(j.groups) for j in jobs} == {2, 3}
    assert {b for j in jobs for b in j.bounds} == {0, 1, 2, 4}
    assert any(j.coded for j in jobs) and any(j.habits.snapshot for j in jobs)
    assert any(j.weather.loss and j.weather.repeat and j.weather.reorder for j in jobs)
    assert {f.kind for j in jobs for f in j.faults} == {"pause", "cut"}
    # A whole group that ends early, so that others read what nobody trains any more.
    assert any(all(r in j.leaves for r in j.ranks_of(1)) for j in jobs)


def run(seed: int) -> Simulation:
    sim = Simulation(replace(scenario(seed, GROUPS), liveness_ns=6500 * MS))
    sim.run()
    return sim


def test_readers_do_lag_and_go_on(monkeypatch: Patch) -> None:
    """Else the bound would hold for want of anything to miss, and of values that come late."""
    missed: list[int] = []
    kept: list[int] = []
    real, ask = WorkerReading._begin_if_read, WorkerReading._on_read_asked

    def begin(self: WorkerReading, reading: Reading) -> None:
        if reading.beginning and not reading.missing():
            missed.extend(s.needed + reading.bound - s.held for s in reading.shards.values())
        real(self, reading)

    def asked(self: WorkerReading, event: Any) -> None:
        kept.extend(s.lease for s in self.readings[event.group].shards.values() if s.lease)
        ask(self, event)

    monkeypatch.setattr(WorkerReading, "_begin_if_read", begin)
    monkeypatch.setattr(WorkerReading, "_on_read_asked", asked)
    for seed in range(20):
        run(seed)
    assert max(missed) >= 2 and kept


# ---------------------------------------------------------------------------------- mutants


def bound_off_by_one(patch: Patch) -> None:
    """A step begins with values that lack one update more than the bound says."""
    real = Reading.missing

    def missing(self: Reading) -> list[int]:
        shards = self.shards
        return [n for n in real(self) if n in self.asked or shards[n].needed > shards[n].held + 1]

    patch.setattr(Reading, "missing", missing)


def old_answer_taken(patch: Patch) -> None:
    """What a server said when an earlier step began counts for this one."""
    real = WorkerReading._on_versions

    def on_versions(self: WorkerReading, reading: Reading, told: Any) -> None:
        real(self, reading, type(told)(versions=told.versions, sequence=reading.round))

    patch.setattr(WorkerReading, "_on_versions", on_versions)


def written_while_read(patch: Patch) -> None:
    """What comes late goes into the parameters while the script computes with them."""
    real = WorkerReading._on_read_update

    def on_update(self: WorkerReading, reading: Reading, update: Any, event: Any) -> None:
        shard: ReadShard = reading.shards[update.shard]
        if not reading.beginning and event.lease and update.version > shard.held:
            shard.held = update.version
            install = fx.Install(reading.index, update.shard, update.version, event.lease)
            self._out.append(install)
            return
        real(self, reading, update, event)

    patch.setattr(WorkerReading, "_on_read_update", on_update)


def sent_counts_as_held(patch: Patch) -> None:
    """A server never sends a version twice to a reader, although it may be lost."""
    real = ServerReading._serve

    def serve(self: ServerReading, source: Any, read: Any, group: Any, shard: Any) -> int:
        known = max(read.held[shard.plan.shard], shard.given.get(source, -1))
        held = {**read.held, shard.plan.shard: known}
        again = type(read)(
            group=read.group, version=read.version, sequence=read.sequence, held=held
        )
        return real(self, source, again, group, shard)

    patch.setattr(ServerReading, "_serve", serve)


def sent_too_late(patch: Patch) -> None:
    """A value goes out only when it lacks two updates more than the reader may miss."""
    real = ServerReading._serve

    def serve(self: ServerReading, source: Any, read: Any, group: Any, shard: Any) -> int:
        less = type(read)(
            group=read.group, version=read.version + 2, sequence=read.sequence, held=read.held,
            revision=read.revision,
        )  # fmt: skip
        return real(self, source, less, group, shard)

    patch.setattr(ServerReading, "_serve", serve)


def asked_once(patch: Patch) -> None:
    """What the servers said at the start counts for every step."""
    real = WorkerReading._on_read_asked

    def asked(self: WorkerReading, event: Any) -> None:
        reading = self.readings[event.group]
        if reading.round:
            self._out.append(fx.Complete(reading.index, "read"))
            return
        real(self, event)

    patch.setattr(WorkerReading, "_on_read_asked", asked)


def all_are_waited_for(patch: Patch) -> None:
    """A step of a group waits for the workers of the others, too."""

    def present(self: Receiver, group: Any) -> Any:
        assert self.view is not None
        return self.view.members

    patch.setattr(Receiver, "present", present)


def half_written_sent(patch: Patch) -> None:
    """A reader is sent a value that a script has changed, under the version before."""
    patch.setattr(ServerReading, "_being_written", lambda self, group, shard: not shard.initialized)


def copied_mid_step(patch: Patch) -> None:
    """A copy for a checkpoint is made while a server's shards are a step apart."""

    def copy_as_is(self: ServerReading, group: Any) -> None:
        if group.saving == "asked":
            group.saving = "copying"
            copy = fx.Copy(group.index, group.copying, group.step, group.options)
            self._out.append(copy)

    patch.setattr(ServerReading, "copy_as_is", copy_as_is)


MUTANTS: tuple[tuple[Callable[[Patch], None], str, tuple[int, ...]], ...] = (
    (bound_off_by_one, "Bound", (51,)),
    (old_answer_taken, "Bound", (43,)),
    (written_while_read, "Aside", (3,)),
    (sent_counts_as_held, "Liveness", (51,)),
    (sent_too_late, "Liveness", (11,)),
    (asked_once, "Bound", (0,)),
    (all_are_waited_for, "Liveness", (1,)),
    (half_written_sent, "Exact", (19,)),
    (copied_mid_step, "Saving", (88,)),
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


def test_same_seed_same_trace() -> None:
    assert run_seed(5, GROUPS).trace == run_seed(5, GROUPS).trace
