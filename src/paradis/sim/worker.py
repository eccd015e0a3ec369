"""A simulated worker: its role, its tensors, and the script that runs on it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from paradis.ids import LEADER, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker import WorkerRole
from paradis.roles.worker_state import WorkerConfig
from paradis.sim.nodes import Parcel, SimNode
from paradis.sim.script import Script, Steps
from paradis.sim.sharing import SimSharing
from paradis.sim.workloads import Record
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.sim.driver import Simulation


class SimWorker(SimNode):
    """One worker.

    Attributes:
        closing: what the script said when it called ``step()`` and is not answered.
    """

    role: WorkerRole

    def __init__(self, sim: Simulation, rank: int) -> None:
        config = WorkerConfig(
            rank=rank, quota_bytes=sim.job.quota_bytes, retry_ns=sim.job.retry_ns,
            early_update=sim.job.early, room_bytes=1,
        )  # fmt: skip
        super().__init__(sim, worker_id(rank), WorkerRole(config))
        self.rank = rank
        self.script = Script(self, random.Random(sim.job.seed * 1009 + rank))
        self.closing: Record | None = None
        self.sharing: SimSharing | None = None
        self.finished = False
        self._steps: Steps = self.script.run()
        self._done: dict[tuple[int, str], fx.Complete] = {}
        self._waits: tuple[int, str] | None = (-1, "welcome")

    def tell(self, event: ev.Event) -> None:
        """The script tells the role something."""
        self.sim.handle(self, event)
        if isinstance(event, ev.LeaveAsked):
            self.finished = True
            if self.sharing is not None:
                self.sharing.end()
            self.sim.end(self)

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out what a worker's role asks for."""
        match effect:
            case fx.Complete():
                self._complete(effect)
            case fx.Copy():
                self._copy(effect)
            case fx.Keep():
                self.sim.checkers.keeping(self, effect)
            case fx.Install():
                data = self.memory.leases[effect.lease].data
                value = self.script.tensors[effect.group].values[effect.shard]
                if effect.code is not None:
                    before, data = data.chunk(2)
                    self.sim.checkers.coded(self, effect.shard, before, value)
                if effect.group in self.role.readings:
                    self.sim.reading.installing(self, effect, data)
                else:
                    self.sim.checkers.installing(self, effect, data)
                value.copy_(data)
                self.memory.release(effect.lease)
            case fx.Refund():
                self.sim.checkers.refunding(self, effect)
            case fx.TakeMemories():
                self.memory.release(effect.lease)
            case fx.OpenHostGroup():
                self.sharing = SimSharing(self, effect.ranks)
            case fx.CloseHostGroup() | fx.Gather() | fx.HandOver() | fx.Spread() | fx.Expect():
                self._share(effect)
            case fx.KeepState():
                data = self.memory.leases[effect.lease].data
                self.script.tensors[effect.group].values[effect.shard].copy_(data)
                self.memory.release(effect.lease)
            case _:
                super().carry_own(effect)

    def _copy(self, effect: fx.Copy) -> None:
        self.sim.checkers.copying_memories(self, effect)
        saved = msg.Saved(
            node=self.node, checkpoint=effect.checkpoint, group=effect.group, step=effect.step,
            pieces=(), scalars={},
        )  # fmt: skip

        def written() -> ev.Event | None:
            if self.ended:  # its writer comes to an end after the script
                return ev.Received(self.node, saved)
            self.sim.handle(self, ev.Written(effect.checkpoint, saved))
            return None

        self.later(written, on=self.sim.nodes["leader"])
        self.later(lambda: ev.Copied(effect.group, effect.checkpoint))

    def _share(self, effect: fx.Effect) -> None:
        assert self.sharing is not None
        match effect:
            case fx.CloseHostGroup():
                self.sharing.end()
            case fx.Gather():
                self.sharing.gather(effect)
            case fx.HandOver(group=group, shard=shard, present=present):
                own = self.script.tensors[group].gradients[shard].clone() if present else None
                self.sharing.hand_over(effect, own)
            case fx.Spread(update=update, lease=lease):
                self.sharing.spread(update, self.memory.leases[lease].data if lease else None)
            case fx.Expect():
                self.sharing.expect(effect)

    def resolve(
        self, message: msg.DataMessage, payload: fx.Payload | None
    ) -> tuple[msg.DataMessage, Parcel]:
        """Return the message and a copy of a gradient or of values."""
        match payload:
            case fx.Gradient(group=group, shard=shard):
                data = self.script.tensors[group].gradients[shard].clone()
                self.sim.checkers.codes.pushing(self, message)
                if self.closing is not None:
                    self.sim.checkers.pushing(self, message, data, self.closing)
                return message, (data, {self.rank: (message.step, message.revision)})
            case fx.HostSum(shard=shard):
                assert self.sharing is not None
                total, story = self.sharing.sums[shard]
                return message, (total.clone(), story)
            case fx.Sections(group=group, shard=shard):
                return message, (self.script.tensors[group].values[shard].clone(), {})
            case _:
                return super().resolve(message, payload)

    def members(self, group: int) -> tuple[int, ...]:
        """Return the ranks that train a group and have not left."""
        return self.role.members(self.role.groups[group])

    def leased(self) -> list[int]:
        """Return the leases of updates that wait for ``step()``, or for a step to begin."""
        early = [lease for g in self.role.groups.values() for _, lease in g.early.values()]
        readings = self.role.readings.values()
        return early + [s.lease for r in readings for s in r.shards.values() if s.lease]

    def check_values(self, group: int, version: int) -> None:
        """Compare all values of a group with the reference."""
        for shard, value in self.script.tensors[group].values.items():
            self.sim.checkers.value(self, shard, version, value)

    def _complete(self, effect: fx.Complete) -> None:
        if effect.what == "failed":
            self.sim.failures.append(f"{self.node}: {effect.error}: {effect.text}")
            return
        if effect.what == "checkpoint":
            self.sim.checkers.saved(effect)
            return
        self._done[effect.group, effect.what] = effect
        self._wake()

    def _wake(self) -> None:
        if self._waits is not None and self._waits in self._done:
            done = self._done.pop(self._waits)
            self._waits = None
            delay_ns = 1000 + int(self.sim.source.random() * 50_000)
            self.sim.at(self.sim.now + delay_ns, self, lambda: self._resume(done))

    def _resume(self, done: fx.Complete | None) -> None:
        """Let the script run until it waits again."""
        try:
            wait = self._steps.send(None if done is not None and done.group < 0 else done)
        except StopIteration:
            return
        if isinstance(wait, int):
            self.sim.at(self.sim.now + wait, self, lambda: self._resume(None))
        else:
            self._waits = wait
            self._wake()

    def waiting_for(self) -> str:
        """Return a sentence that says where the script stands."""
        if self.finished:
            return f"{self.node} has finished"
        if self._waits is None:
            return f"{self.node} computes"
        group, what = self._waits
        return f"{self.node} waits for {what}: {self.role.missing(group)}"


def register_worker(worker: SimWorker) -> None:
    """Join the job."""
    job = worker.sim.job
    rack = f"rack-{job.racks[worker.rank]}"
    host = f"host-{job.hosts[worker.rank]}" if job.hosts else "sim"
    worker.sim.tell(worker, LEADER, msg.Join(
        node=worker.node, role="worker", host=host, pid=worker.rank, rack=rack,
    ))  # fmt: skip
