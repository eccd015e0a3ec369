"""What must always hold where workers do not wait for each other, and what must come of it.

The reference is the log of what servers applied: it is checked against what the scripts committed,
then folded anew, one torch addition at a time. So the order is the servers', the numbers are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paradis.roles import effects as fx
from paradis.sim.checkers import Checkers
from paradis.sim.memory import Story
from paradis.sim.nodes import ServerNode
from paradis.sim.violation import demand
from paradis.sim.workloads import RATE, Record, same_bits
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.sim.driver import Simulation
    from paradis.sim.worker import SimWorker


class Applied:
    """The updates of one shard.

    Attributes:
        start: version before the first.
        values: by number of updates.
        at: (rank, step) -> its place among the updates.
    """

    def __init__(self, start: int, value: torch.Tensor) -> None:
        self.start = start
        self.values = [value]
        self.at: dict[tuple[int, int], int] = {}

    @property
    def version(self) -> int:
        """The version after the last one."""
        return self.start + len(self.at)


class StaleCheckers(Checkers):
    """All of them, for modes ``ssp`` and ``async``."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(sim)
        self._applied: dict[int, Applied] = {}
        self._read: dict[tuple[int, int], int] = {}
        self._seen: dict[tuple[int, int], int] = {}

    def _of(self, shard: int) -> Applied:
        if shard not in self._applied:
            starts = self._sim.reference._values
            (version,) = [v for s, v in starts if s == shard]
            self._applied[shard] = Applied(version, starts[shard, version])
        return self._applied[shard]

    def _record(self, shard: int, rank: int, step: int) -> Record | None:
        """Return what a worker's script committed in a step, None if it has not."""
        group, _ = self._sim.reference.shards[shard]
        return self._sim.reference.records.get((group, step), {}).get(rank)

    # ---------------------------------------------------------------- servers

    def applying(self, node: ServerNode, effect: fx.Apply, story: Story) -> None:
        """A server applies one worker's gradient: committed, in this revision, never before."""
        shard, step = effect.shard, effect.step
        done = self._of(shard)
        (rank,) = story
        record = self._record(shard, rank, step)
        demand(record is not None and not record.found_inf and shard in record.gradients, self,
               f"shard {shard} applies step {step} of worker {rank}, not committed")  # fmt: skip
        assert record is not None
        expected = {rank: (step, record.revisions.get(shard, 0))}
        demand(story == expected, self, f"CountedOnce: shard {shard} applies {story}, committed is "
               f"{expected}")  # fmt: skip
        what = f"shard {shard} applies step {step} of worker {rank}"
        demand((rank, step) not in done.at, self, f"CountedOnce: {what} twice")
        demand(all(s < step for r, s in done.at if r == rank), self, f"{what} late")
        self._check_rate(node, effect, done, rank)
        self._fold(done, effect, record)
        done.at[rank, step] = len(done.at)

    def _check_rate(self, node: ServerNode, effect: fx.Apply, done: Applied, rank: int) -> None:
        read = self._read.get((rank, effect.shard), done.start)
        demand(effect.staleness == done.version - read, self, f"shard {effect.shard} has staleness "
               f"{effect.staleness}, worker {rank} read version {read}")  # fmt: skip
        members = len(node.role.present(node.role.groups[effect.group]))
        divisor = max(1, effect.staleness) if self._sim.job.scaling else members
        demand(effect.options["lr"] == RATE / divisor, self, f"rate is {effect.options['lr']}")

    def _fold(self, done: Applied, effect: fx.Apply, record: Record) -> None:
        value = done.values[-1].clone()
        for s in self._sim.reference.shards[effect.shard][1].segments:
            if s.parameter in record.present:
                span = slice(s.start, s.start + s.length)
                gradient = record.gradients[effect.shard][span]
                value[span].add_(gradient, alpha=-float(effect.options["lr"]))  # type: ignore[arg-type]
        done.values.append(value)

    def exact(self, where: str, shard: int, version: int, value: torch.Tensor) -> None:
        """A value is the one that its version means."""
        self._demand_value(where, shard, version, value)

    def _demand_value(self, where: str, shard: int, version: int, value: torch.Tensor) -> None:
        done = self._of(shard)
        plan = self._sim.reference.shards[shard][1]
        place = 0 if plan.is_buffer else version - done.start
        demand(0 <= place < len(done.values), self, f"{where} has version {version} of {shard}")
        demand(same_bits(value, done.values[place]), self, f"Exact: shard {shard} version {version}"
               f" on {where} is {value.tolist()[:6]}, expected "
               f"{done.values[place].tolist()[:6]}")  # fmt: skip

    def serving(self, node: ServerNode, message: msg.DataMessage) -> None:
        """A server sends a value."""
        if message.shard in self._sim.reference.shards:
            self._demand_value(node.node, message.shard, message.version,
                               node.values[message.shard])  # fmt: skip

    def copying(self, node: ServerNode, effect: fx.Copy) -> None:
        """A server copies its shards, each at the version that it has."""
        for shard, plan in node.plans.items():
            group = self._sim.reference.shards[shard][0]
            if group == effect.group and plan.length and shard in self._applied:
                self._demand_value(f"a copy by {node.node}", shard,
                                   node.role._by_shard[shard][1].version,
                                   node.values[shard])  # fmt: skip

    # ---------------------------------------------------------------- workers

    def installing(self, worker: SimWorker, effect: fx.Install, data: torch.Tensor) -> None:
        """A worker installs a value: no older than any before, and within the bound."""
        key = (worker.rank, effect.shard)
        self._demand_value(worker.node, effect.shard, effect.version, data)
        before = self._seen.get(key, 0)
        demand(effect.version >= before, self, f"Monotone: {worker.node} installs version "
               f"{effect.version} of shard {effect.shard} after {before}")  # fmt: skip
        self._seen[key] = self._read[key] = effect.version
        self._look_back(worker, effect.shard, effect.version)

    def keeping(self, worker: SimWorker, effect: fx.Keep) -> None:
        """A worker is told that its value is the newest that it needs."""
        version = self._read.get((worker.rank, effect.shard), self._of(effect.shard).start)
        self._look_back(worker, effect.shard, version)

    def _look_back(self, worker: SimWorker, shard: int, version: int) -> None:
        """What a worker goes on with holds all its steps, and all that are older than the bound."""
        if worker.closing is None:
            return  # it only looks
        job, step = self._sim.job, worker.script.step
        group = self._sim.reference.shards[shard][0]
        for rank in job.ranks_of(group):
            last = job.leaves.get(rank, job.steps) - 1
            if rank == worker.rank:
                last = step
            elif job.mode_of(group) == "ssp":
                last = min(last, step - job.bound_of(group))
            else:
                continue
            for each in range(self._of(shard).start, last + 1):
                self._demand_included(worker, shard, version, (rank, each))

    def _demand_included(
        self, worker: SimWorker, shard: int, version: int, of: tuple[int, int]
    ) -> None:
        record = self._record(shard, *of)
        demand(record is not None, self, f"Bound: {worker.node} goes on from step "
               f"{worker.script.step} before step {of[1]} of worker {of[0]}")  # fmt: skip
        assert record is not None
        if shard in record.gradients and not record.found_inf:
            done = self._of(shard)
            there = of in done.at and done.at[of] < version - done.start
            demand(there, self, f"Bound: {worker.node} goes on from step {worker.script.step} with "
                   f"version {version} of shard {shard} without step {of[1]} of worker "
                   f"{of[0]}")  # fmt: skip

    def value(self, worker: SimWorker, shard: int, version: int, value: torch.Tensor) -> None:
        """A script looks at a value: some version, none older than what it has seen."""
        done, key = self._of(shard), (worker.rank, shard)
        buffer = self._sim.reference.shards[shard][1].is_buffer
        least = 0 if buffer else max(0, self._seen.get(key, 0) - done.start)
        places = [i for i in range(least, len(done.values)) if same_bits(value, done.values[i])]
        demand(bool(places), self, f"Exact: {worker.node} has {value.tolist()[:6]} in shard "
               f"{shard}, no version since {least + done.start}")  # fmt: skip
        if not buffer:
            self._seen[key] = done.start + places[0]

    def stepped(self, worker: SimWorker, group: int, step: int, done: fx.Complete) -> None:
        """A worker's ``step()`` returned: only its own overflow counts."""
        overflow = self._sim.reference.records[group, step][worker.rank].found_inf
        demand(done.found_inf == overflow, self, f"{worker.node} was told found_inf="
               f"{done.found_inf} for step {step}, expected {overflow}")  # fmt: skip

    def end(self) -> None:
        """The job is over: everything that was committed is applied, once."""
        for node in self._sim.nodes.values():
            self._leases.look(node)
            for shard, value in node.values.items() if isinstance(node, ServerNode) else ():
                group, plan = self._sim.reference.shards[shard]
                if not plan.length or not self.covers(group):
                    continue
                assert isinstance(node, ServerNode)
                version = node.role._by_shard[shard][1].version
                self._demand_value(node.node, shard, version, value)
                expected = {
                    (rank, step)
                    for (g, step), records in self._sim.reference.records.items()
                    for rank, record in records.items()
                    if g == group and shard in record.gradients and not record.found_inf
                }
                demand(self._of(shard).at.keys() == expected, self, f"shard {shard} misses "
                       f"{sorted(expected - self._of(shard).at.keys())}")  # fmt: skip
