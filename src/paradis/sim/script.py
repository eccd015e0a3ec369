"""The virtual training script of one worker: a generator that yields what it waits for.

It does what users' scripts do, also the rare things: gradients that are absent, changed after
backward, or thrown away; norms before ``step()``; values changed by hand; overflows; leaving early.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash

from paradis.core.codes import CodedSteps
from paradis.ids import LEADER
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker_state import Assignment
from paradis.sim.job import MS
from paradis.sim.tensors import Tensors, specs
from paradis.sim.workloads import RATE, Record
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.sim.worker import SimWorker

Wait = tuple[int, str] | int
"""What a script yields: (group, what) to wait for a completion, or nanoseconds to sleep."""

Steps = Generator[Wait, fx.Complete | None, None]


class Script:
    """One worker's script.

    Args:
        worker: the node it runs on.
        source: randomness of this worker; ``shared`` gives all workers the same answers.
    """

    def __init__(self, worker: SimWorker, source: random.Random) -> None:
        self.worker = worker
        self.rank = worker.rank
        self.job = worker.sim.job
        self.habits = self.job.habits
        self.source = source
        self.step = 0
        self.steps: dict[int, int] = {}
        self.tensors: dict[int, Tensors] = {}
        self.options: list[msg.Options] = [{"lr": RATE}]

    def shared(self, *key: object) -> random.Random:
        """Return a source that is the same on all workers for the same key."""
        return random.Random(xxhash.xxh3_64_intdigest(repr((self.job.seed, key)).encode()))

    def chance(self, probability: float) -> bool:
        """Whether something with this probability happens."""
        return probability > 0 and self.source.random() < probability

    def think(self) -> int:
        """Return a time that the script's own work takes, in nanoseconds."""
        slow = self.job.slow.get(self.worker.node, 1.0)
        return int(self.source.random() * 150_000 * slow)

    def run(self) -> Steps:
        """Train."""
        for group, _ in enumerate(self.job.models):
            yield from self._register(group, 0)
        yield from self._read()
        if self.job.backup:
            yield from self._run_by_group()
            return
        end = self.job.leaves.get(self.rank, self.job.steps)
        for step in range(self.job.steps):
            self.step = step
            if step == end:
                break
            self._hear()
            for group, model in enumerate(self.job.models):
                if not self.job.trains(self.rank, group):
                    continue
                if step == 1:
                    for part in range(1, len(model.parts)):
                        yield from self._register(group, part)
                yield from self._iterate(group)
                yield from self._read()
        else:
            end = self.job.steps
        if end < self.job.steps and self.chance(0.5):
            group = next(g for g, _ in enumerate(self.job.models) if self.job.trains(self.rank, g))
            self.tensors[group].handed = {}
            yield from self._backward(group, attempt=0)
            self._excuse()
        self.worker.tell(ev.LeaveAsked())

    def _read(self) -> Steps:
        """A step begins: bring in what other worker groups train."""
        checks = self.worker.sim.reading
        for group, _ in enumerate(self.job.models):
            if not self.job.trains(self.rank, group):
                checks.beginning(self.worker, group)
                self.worker.tell(ev.ReadAsked(group))
                yield (group, "read")
                checks.begun(self.worker, group)

    def _hear(self) -> None:
        """The leader may say how groups are to travel, at some moment of this step."""
        sim = self.worker.sim
        for number, change in enumerate(self.job.changes):
            if change.heard[self.rank] == self.step:
                at = sim.now + int(self.shared("heard", number, self.rank).random() * MS)
                for group in range(len(self.job.models)):
                    told = msg.Freeze(group=group, step=change.step, until=change.until)
                    sim.at(at, self.worker, ev.Received(LEADER, told))

    def _run_by_group(self) -> Steps:
        """Train where a late step makes the count of a group's steps jump."""
        end = self.job.leaves.get(self.rank, self.job.steps)
        groups = range(len(self.job.models))
        while any(self.steps.get(g, 0) < end for g in groups):
            for group in groups:
                self.step = self.steps.get(group, 0)
                if self.step < end:
                    yield from self._iterate(group)
        self.worker.tell(ev.LeaveAsked())

    def _register(self, group: int, part: int) -> Steps:
        """Register a part; the lowest worker there assigns its values, the others pull them."""
        workload = self.worker.sim.workload
        parameters = specs(self.job.models[group], part, workload.dtype_name)
        yield self.think()
        coded = CodedSteps(-1 if self.job.coded_late else 0)
        if part:
            coded = self.worker.role.groups[group].coded_steps
        self.worker.tell(ev.RegisterAsked(msg.Register(
            rank=self.rank, group=group, part=part, parameters=parameters, optimizer="SGD",
            options=self.options, step=self.step, coded_from=coded.begin, coded_until=coded.end,
        )))  # fmt: skip
        done = yield (group, "plan")
        assert done is not None and done.plan is not None
        plan = done.plan
        self.worker.sim.reference.plan(plan)
        mine = self.tensors.setdefault(group, Tensors())
        for shard in plan.shards:
            mine.plans[shard.shard] = shard
            mine.values[shard.shard] = self._initial(shard)
            mine.gradients[shard.shard] = torch.zeros(shard.length, dtype=workload.dtype)
            mine.changes[shard.shard] = 0
        if not self.job.trains(self.rank, group):
            return
        new = tuple(s.shard for s in plan.shards if s.length)
        leaves = self.job.leaves
        if self.rank == min(
            r for r in self.job.ranks_of(group) if leaves.get(r, self.job.steps) > self.step
        ):
            for shard in plan.shards:
                value = mine.values[shard.shard]
                self.worker.sim.reference.start(shard.shard, self.step, value)
            keys: Assignment = (("value",), (workload.dtype_name,), {})
            self.worker.tell(ev.AssignAsked(group, dict.fromkeys(new, keys)))
            yield (group, "assign")
        else:
            for shard_id in new:
                mine.values[shard_id].fill_(-1.0)
            self.worker.tell(ev.PullAsked(group, new))
            yield (group, "pull")
            self.worker.check_values(group, self.step)

    def _initial(self, shard: msg.ShardPlan) -> torch.Tensor:
        workload = self.worker.sim.workload
        value = torch.zeros(shard.length, dtype=workload.dtype)
        for s in shard.segments:
            value[s.start : s.start + s.length] = workload.initial(s.parameter, s.length)
        return value

    # -------------------------------------------------------------- one step

    def _iterate(self, group: int) -> Steps:
        mine = self.tensors[group]
        mine.handed = {}
        changed = self._change_values(group) if self.job.early else {}
        attempt = 0
        while self.chance(self.habits.drop) and attempt < 2:
            yield from self._backward(group, attempt=attempt, changed=changed)
            attempt += 1
        yield from self._backward(group, attempt=attempt, changed=changed)
        if self.chance(self.habits.revise):
            self._revise(group)
        clip = 1.0
        if self.shared("norm", group, self.step).random() < self.habits.norm:
            clip = yield from self._norms(group)
        yield from self._step(group, clip, changed)
        yield from self._between(group)

    def _absent(self, group: int, parameter: int) -> bool:
        """Whether a parameter has no gradient: on all workers, or on this one."""
        if not self.habits.absent:
            return False
        if self.shared("absent", group, self.step, parameter).random() < self.habits.absent / 2:
            return True
        return self.chance(self.habits.absent)

    def _begin(self, group: int, changed: Mapping[int, float]) -> None:
        """Say with the first gradient what will be committed."""
        commit = msg.StepCommit(
            revisions={}, present=b"", options=self.options,
            changed={s: [int(by)] for s, by in changed.items()},
        )  # fmt: skip
        self.worker.tell(ev.StepBegun(group, commit))

    def _excuse(self) -> None:
        """This script does what a commit cannot confirm: the job may fail, naming it."""
        self.worker.sim.excuses.append((str(self.step), f"worker {self.rank} "))

    def _backward(
        self, group: int, *, attempt: int, changed: Mapping[int, float] = MappingProxyType({})
    ) -> Steps:
        """Fill gradients in nearly reverse order of registration and hand whole shards over."""
        mine = self.tensors[group]
        for plan in mine.active():
            if mine.holds(plan):
                mine.gradients[plan.shard].zero_()
                mine.changes[plan.shard] += 1
        mine.present = {}
        deferred = self.job.early and self.chance(0.1)
        order = mine.active()
        for i in range(len(order) - 1):
            if self.chance(0.3):
                order[i], order[i + 1] = order[i + 1], order[i]
        for plan in order:
            yield self.think()
            self._fill(group, plan, attempt)
            whole = all(s.parameter in mine.present for s in plan.segments)
            if whole and not deferred and not self.chance(self.habits.late):
                if self.job.early:
                    self._begin(group, changed)
                mine.handed.setdefault(plan.shard, mine.changes[plan.shard])
                self.worker.tell(ev.ShardsReady(group, (plan.shard,)))

    def _fill(self, group: int, plan: msg.ShardPlan, attempt: int) -> None:
        mine = self.tensors[group]
        for s in plan.segments:
            if not self._absent(group, s.parameter):
                mine.gradients[plan.shard][s.start : s.start + s.length] = (
                    self.worker.sim.workload.gradient(
                        self.rank, self.step, s.parameter, attempt, s.length
                    )
                )
                mine.present[s.parameter] = None
        mine.changes[plan.shard] += 1

    def _revise(self, group: int) -> None:
        """Change gradients in place, of all shards or of some."""
        mine = self.tensors[group]
        everything = self.chance(0.4)
        for plan in mine.active():
            if not mine.holds(plan) or not (everything or self.chance(0.4)):
                continue
            attempt = 3 + int(self.source.random() * 3)
            for s in plan.segments:
                if s.parameter in mine.present:
                    mine.gradients[plan.shard][s.start : s.start + s.length] = (
                        self.worker.sim.workload.gradient(
                            self.rank, self.step, s.parameter, attempt, s.length
                        )
                    )
            mine.changes[plan.shard] += 1
        for plan in mine.active():
            if not mine.holds(plan) and self.chance(0.1):
                self._fill(group, plan, 1)

    def _closing(self, group: int) -> tuple[tuple[int, ...], tuple[int, ...], Record, bytes]:
        """Return present and revised shards, a record, and the presence bits."""
        mine = self.tensors[group]
        present = tuple(p.shard for p in mine.active() if mine.holds(p))
        revised = tuple(
            s for s in present if s in mine.handed and mine.handed[s] != mine.changes[s]
        )
        gone = [s for s in mine.handed if s not in present]
        if self.job.early and (revised or gone):
            self._excuse()
        record = Record({s: mine.gradients[s].clone() for s in present}, frozenset(mine.present))
        bits = 0
        for parameter in mine.present:
            bits |= 1 << parameter
        mine.handed.update({s: mine.changes[s] for s in present})
        return present, revised, record, struct.pack("<Q", bits)

    def _norms(self, group: int) -> Generator[Wait, fx.Complete | None, float]:
        """Ask for the norm, once or twice; return the factor that ``clip_grad_norm_`` computes."""
        shared = self.shared("norms", group, self.step)
        clip = 1.0
        for number in range(1 + (shared.random() < 0.25)):
            yield self.think()
            present, revised, record, bits = self._closing(group)
            key = (group, self.step, number)
            self.worker.sim.reference.norms.setdefault(key, {})[self.rank] = record
            commit = msg.StepCommit(revisions={}, present=bits, options=self.options)
            self.worker.tell(ev.NormAsked(group, commit, present, revised))
            done = yield (group, "norm")
            assert done is not None
            self.worker.sim.checkers.norms(key, done.squares)
            clip = 0.5 if sum(done.squares[s] for s in sorted(done.squares)) > 4.0 else 1.0
            if self.chance(self.habits.revise):
                self._revise(group)
        return clip

    def _step(self, group: int, clip: float, changed: dict[int, float]) -> Steps:
        mine = self.tensors[group]
        yield self.think()
        if not self.job.early:
            changed = self._change_values(group)
        overflow = self.chance(self.habits.found_inf)
        if overflow and clip == 1.0 and mine.present and not self.job.early:
            plan = next(p for p in mine.active() if mine.holds(p))
            mine.gradients[plan.shard][plan.segments[0].start] = float("inf")
            mine.changes[plan.shard] += 1
        if overflow and self.job.early:
            self._excuse()
        handed = dict(mine.handed)
        present, revised, record, bits = self._closing(group)
        record.clip, record.found_inf, record.changed = clip, overflow, changed
        self.worker.sim.reference.record(group, self.step, self.rank, record)
        commit = msg.StepCommit(
            revisions={}, present=bits, options=self.options, found_inf=overflow, clip=clip,
            changed={s: [int(by)] for s, by in changed.items()}, order=self._order(group),
        )  # fmt: skip
        self.worker.closing = record
        step = self.worker.role.groups[group].step
        late = mine.late(present, handed, self.chance) if self.job.needs_all(group) else ()
        self.worker.tell(ev.StepClosed(group, commit, present, revised, late))
        for shard in late:
            yield self.think()
            self.worker.tell(mine.make(group, shard, step))
        done = yield (group, "step")
        assert done is not None
        self.worker.closing = None
        self.worker.sim.checkers.stepped(self.worker, group, self.step, done)
        self.steps[group] = done.step
        self.worker.check_values(group, done.step)

    def _order(self, group: int) -> tuple[int, ...]:
        """Sometimes the lowest rank has learnt another admission order in its first step."""
        source = self.shared("order", group)
        if self.step or self.rank != self.job.ranks_of(group)[0] or source.random() < 0.5:
            return ()
        order = [plan.shard for plan in self.tensors[group].active()]
        source.shuffle(order)
        return tuple(order)

    def _change_values(self, group: int) -> dict[int, float]:
        shared = self.shared("change", group, self.step)
        changed: dict[int, float] = {}
        if shared.random() < self.habits.change:
            for plan in self.tensors[group].active():
                if shared.random() < 0.5:
                    changed[plan.shard] = float(shared.randint(1, 9))
                    self.tensors[group].values[plan.shard] += changed[plan.shard]
        return changed

    def _between(self, group: int) -> Steps:
        """Look at values or state between steps; worker 0 may save."""
        mine = self.tensors[group]
        version = self.steps[group]
        if self.chance(self.habits.look):
            whole = self.chance(0.5)
            asked = [p for p in mine.plans.values() if p.length] if whole else mine.active()
            for plan in asked:
                mine.values[plan.shard].fill_(-2.0)
            if whole:
                self.worker.tell(ev.PullAsked(group, tuple(p.shard for p in asked)))
                yield (group, "pull")
            else:
                self.worker.tell(ev.StateAsked(group))
                yield (group, "state")
            self.worker.check_values(group, version)
        if self.rank == 0 and self.chance(self.habits.snapshot):
            name = f"step-{version}-group-{group}"
            savers = self.job.coded and not self.job.backup
            info = msg.CheckpointInfo(
                checkpoint=name, group=group, step=version, options=self.options, extra={},
                workers=self.worker.members(group) if savers else (),
            )  # fmt: skip
            self.worker.sim.checkers.saving(name)
            self.worker.tell(ev.SnapshotAsked(group, info))
            yield (group, "snapshot")
            for other, _ in enumerate(self.job.models):
                if not self.job.trains(self.rank, other):
                    name = f"step-{version}-group-{other}"
                    info = msgspec.structs.replace(
                        info, checkpoint=name, group=other, workers=(), as_is=True
                    )
                    self.worker.sim.checkers.saving(name)
                    self.worker.tell(ev.SnapshotAsked(other, info))
                    yield (other, "snapshot")
