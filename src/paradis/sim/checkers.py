"""What must hold in every simulated run, one class each.

A checker raises `Violation` with its name; the driver adds seed and replay command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from paradis.core.flow import Outbox
from paradis.core.waits import find_cycle
from paradis.numerics.reduce import square_sum
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.rack_agent import RackAgentRole
from paradis.roles.server import ServerRole
from paradis.roles.worker import WorkerRole
from paradis.sim.code_checkers import SameWay
from paradis.sim.early_checkers import Ahead, Aside
from paradis.sim.memory import Story
from paradis.sim.nodes import ServerNode, SimNode, SummingNode
from paradis.sim.saving_checks import Saving
from paradis.sim.violation import Violation as Violation
from paradis.sim.violation import demand
from paradis.sim.workloads import Record, same_bits
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.sim.driver import Simulation
    from paradis.sim.worker import SimWorker


_JUDGED = ("apply", "skip")
"""A server's verdicts of a step that all have committed alike."""


class Versions:
    """A shard's version goes up by one and never back."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._applied: dict[int, int] = {}

    def look(self, role: ServerRole) -> None:
        """Compare a server's versions with the last look."""
        for shard_id, (_, shard) in role._by_shard.items():
            before = self._seen.get(shard_id, shard.version)
            allowed = shard.version == before or shard.version == before + 1
            demand(allowed or (shard.passive and shard.version > before), self,
                   f"shard {shard_id} went from version {before} to {shard.version}")  # fmt: skip
            self._seen[shard_id] = shard.version

    def applying(self, effect: fx.Apply) -> None:
        """A step is applied to a shard: a later one than ever before."""
        before = self._applied.get(effect.shard, -1)
        demand(effect.step > before, self,
               f"shard {effect.shard} applies step {effect.step} after {before}")  # fmt: skip
        self._applied[effect.shard] = effect.step


class CountedOnce:
    """A sum holds each member's committed revision once and nothing else."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def applying(self, effect: fx.Apply, story: Story) -> None:
        """A sum is about to be applied."""
        shard, step = effect.shard, effect.step
        group, _ = self._sim.reference.shards[shard]
        records = self._sim.reference.records.get((group, step), {})
        expected = {
            rank: (step, record.revisions.get(shard, 0))
            for rank, record in records.items()
            if shard in record.gradients
        }
        demand(story == expected, self, f"shard {shard} step {step} applies {story} "
               f"(rank -> step, revision), committed is {expected}")  # fmt: skip


class Exact:
    """Values everywhere are those of the reference, bit for bit."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def value(self, where: str, shard: int, version: int, value: torch.Tensor) -> None:
        """Compare a shard's value at a version."""
        expected = self._sim.reference.value(shard, version)
        if not same_bits(value, expected):
            demand(False, self, f"shard {shard} version {version} on {where} is "
                   f"{value.tolist()[:6]}, expected {expected.tolist()[:6]}")  # fmt: skip


class Revisions:
    """Bytes pushed after ``step()`` are those that the script committed, under that revision."""

    def pushing(
        self, where: str, message: msg.DataMessage, data: torch.Tensor, record: Record
    ) -> None:
        """A worker whose script waits in ``step()`` pushes."""
        expected = record.gradients.get(message.shard)
        if expected is not None:
            demand(same_bits(data, expected), self, f"{where} pushes other bytes of shard "
                   f"{message.shard} step {message.step} than it committed")  # fmt: skip


class Bounds:
    """Credit keeps what a receiver stores for one pusher within one and a half quotas."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def look(self, node: SummingNode) -> None:
        """Compare what is stored with the bound; to the letter only if nothing fails."""
        if not self._sim.job.clean:
            return
        for (pusher, index), ledger in node.role._ledgers.items():
            shards = node.role.groups[index].shards.values()
            largest = max((s.nbytes for s in shards), default=0)
            bound = ledger.quota + ledger.quota // 2 + 2 * largest
            demand(ledger.stored <= bound, self, f"{node.node} stores {ledger.stored} bytes of "
                   f"{pusher}, bound {bound}")  # fmt: skip


class Leases:
    """Every lease is held by a collection or a running job; workers keep none."""

    def look(self, node: SimNode) -> None:
        """Compare the leases of a node with what may hold them."""
        held, right = sorted(node.memory.leases), sorted(node.leased())
        demand(held == right, self, f"{node.node} has leases {held}, in use are {right}")


class Fence:
    """Nothing of another generation gets in."""

    def look(self, node: SummingNode, event: ev.Received, effects: Sequence[fx.Effect]) -> None:
        """A push or commit of another generation must have been refused."""
        message, view = event.message, node.role.view
        if not isinstance(message, msg.Push | msg.RackPush | msg.Commit) or view is None:
            return
        if message.generation == view.generation:
            return
        refused = any(isinstance(e, fx.Send) and isinstance(e.message, msg.Stale) for e in effects)
        demand(refused and event.lease not in node.leased(), self,
               f"{node.node} of generation {view.generation} took {message}")  # fmt: skip


class Waits:
    """Nobody waits for credit in a circle.

    The state is reduced as in Holt's test: whoever can push his next shard does, complete shards
    give their credit back, until nothing moves. What is left over waits for itself.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def look(self) -> None:
        """Reduce the pushes to every receiver."""
        pushers: dict[tuple[str, int], dict[str, Outbox]] = {}
        for node in self._sim.nodes.values():
            if isinstance(node.role, WorkerRole | RackAgentRole):
                for (target, group), box in node.role._boxes.items():
                    pushers.setdefault((target, group), {})[node.node] = box
        for (target, _), boxes in pushers.items():
            if any(box.blocked for box in boxes.values()):
                self._reduce(target, boxes)

    def _reduce(self, target: str, boxes: dict[str, Outbox]) -> None:
        unsent = {name: list(box.unsent) for name, box in boxes.items()}
        holding = {name: {s: box.size_of(s) for s in box.holding} for name, box in boxes.items()}
        moved = True
        while moved:
            moved = False
            for name, box in boxes.items():
                waits = {s for shards in unsent.values() for s in shards}
                holding[name] = {s: n for s, n in holding[name].items() if s in waits}
                if not unsent[name]:
                    continue
                lowest = unsent[name][0]
                size = box.size_of(lowest)
                if sum(holding[name].values()) + size <= box.quota:
                    unsent[name].remove(lowest)
                    holding[name][lowest] = size
                    moved = True
        stuck = {name: shards for name, shards in unsent.items() if shards}
        if stuck:
            edges = {
                name: [o for o in stuck if any(s in stuck[o] for s in holding[name])]
                for name in stuck
            }
            demand(False, self, f"pushes to {target} wait in a circle: {find_cycle(edges)}; "
                   f"unsent {stuck}, credit is in {holding}")  # fmt: skip


class Norms:
    """All workers get the same norm, and it is that of the mean of what they named."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._answers: dict[tuple[int, int, int], dict[int, float]] = {}

    def answer(self, key: tuple[int, int, int], squares: dict[int, float]) -> None:
        """A worker's script got square sums."""
        demand(self._answers.setdefault(key, squares) == squares, self,
               f"workers got different norms for {key}")  # fmt: skip
        records = self._sim.reference.norms[key]
        for shard, square in squares.items():
            mean = self._sim.reference.mean(shard, records)
            demand(square_sum(mean) == square, self, f"norm of shard {shard} at {key} is "
                   f"{square}, expected {square_sum(mean)}")  # fmt: skip
        wanted = {s for r in records.values() for s in r.gradients}
        demand(set(squares) == wanted, self, f"norms of shards {sorted(squares)} at {key}, "
               f"expected {sorted(wanted)}")  # fmt: skip


class Checkers:
    """All of them, by what they look at.

    Attributes:
        covers: whether a group is looked at, at the end.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.covers: Callable[[int], bool] = lambda group: True
        self._versions = Versions()
        self._counted = CountedOnce(sim)
        self._exact = Exact(sim)
        self._revisions = Revisions()
        self._bounds = Bounds(sim)
        self._leases = Leases()
        self._fence = Fence()
        self._waits = Waits(sim)
        self._norms = Norms(sim)
        self._saving = Saving(sim)
        self._ahead = Ahead()
        self._aside = Aside()
        self.codes = SameWay()
        self._events = 0

    def after(self, node: SimNode, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """A node has handled an event and its effects are carried out."""
        node.role.check()
        if isinstance(node, SummingNode) and isinstance(event, ev.Received):
            self._fence.look(node, event, effects)
        if isinstance(node.role, WorkerRole):
            self._leases.look(node)
        elif isinstance(node.role, ServerRole):
            self._versions.look(node.role)
        if isinstance(node, SummingNode):
            self._bounds.look(node)
        self._events += 1
        if self._events % 32 == 0:
            if self._sim.job.clean:
                self._waits.look()
            self._leases.look(node)

    def applying(self, node: ServerNode, effect: fx.Apply, story: Story) -> None:
        """A server applies a sum."""
        self._versions.applying(effect)
        self.codes.applying(node, effect)
        if node.role.groups[effect.group].verdict in _JUDGED:
            self._counted.applying(effect, story)
        else:
            self._ahead.compare(
                effect.group, effect.step, partial(self._counted.applying, effect, dict(story))
            )

    def serving(self, node: ServerNode, message: msg.DataMessage) -> None:
        """A server sends a value."""
        if message.shard not in self._sim.reference.shards:
            return
        group = node.role.groups[message.group]
        value = node.values[message.shard]
        if message.version > group.step and group.verdict not in _JUDGED:
            self._exact_later(node, message.group, message.shard, message.version, value)
        else:
            self._exact.value(node.node, message.shard, message.version, value)

    def exact(self, where: str, shard: int, version: int, value: torch.Tensor) -> None:
        """A value is the one that its version means."""
        self._exact.value(where, shard, version, value)

    def _exact_later(
        self, node: SimNode, group: int, shard: int, version: int, value: torch.Tensor
    ) -> None:
        look = partial(self._exact.value, node.node, shard, version, value.clone())
        self._ahead.compare(group, version - 1, look)

    def installing(self, worker: SimWorker, effect: fx.Install, data: torch.Tensor) -> None:
        """A worker installs a value."""
        self._aside.installing(worker, effect)
        if self._sim.job.early and worker.closing is not None:
            self._exact_later(worker, effect.group, effect.shard, effect.version, data)
            return
        self._exact.value(worker.node, effect.shard, effect.version, data)

    def coded(
        self, worker: SimWorker, shard: int, before: torch.Tensor, value: torch.Tensor
    ) -> None:
        """A worker is about to apply a code: it is about the value that the worker has."""
        demand(same_bits(before, value), self, f"{worker.node} applies a code of shard {shard} to "
               f"{value.tolist()[:6]}, made for {before.tolist()[:6]}")  # fmt: skip

    def keeping(self, worker: SimWorker, effect: fx.Keep) -> None:
        """A worker keeps its value, which is the next one, too."""

    def value(self, worker: SimWorker, shard: int, version: int, value: torch.Tensor) -> None:
        """A script goes on with this value."""
        self._exact.value(worker.node, shard, version, value)

    def pushing(
        self, worker: SimWorker, message: msg.DataMessage, data: torch.Tensor, record: Record
    ) -> None:
        """A worker pushes while its script waits in ``step()``."""
        self._revisions.pushing(worker.node, message, data, record)

    def stepped(self, worker: SimWorker, group: int, step: int, done: fx.Complete) -> None:
        """A worker's ``step()`` returned."""
        records = self._sim.reference.committed(group, step)
        overflow = any(r.found_inf for r in records.values())
        demand(done.found_inf == overflow, self, f"{worker.node} was told found_inf="
               f"{done.found_inf} for step {step}, expected {overflow}")  # fmt: skip
        self._ahead.confirmed(group, step)
        self.codes.stepped(worker, group, step)

    def refunding(self, worker: SimWorker, effect: fx.Refund) -> None:
        """A worker takes a step back that was made without it."""
        demand(False, self, f"{worker.node} was late where everybody is waited for")

    def norms(self, key: tuple[int, int, int], squares: dict[int, float]) -> None:
        """A worker got a norm."""
        self._norms.answer(key, squares)

    def saving(self, name: str) -> None:
        """A script asked for a checkpoint."""
        self._saving.asked[name] = None

    def copying(self, node: ServerNode, effect: fx.Copy) -> None:
        """A server copies for a checkpoint."""
        self._saving.copying(node, effect)

    def copying_memories(self, worker: SimWorker, effect: fx.Copy) -> None:
        """A worker copies its part of a checkpoint."""
        self._saving.copying_memories(worker, effect)

    def manifest(self, effect: fx.WriteManifest) -> None:
        """The leader writes a manifest."""
        self._saving.manifest(effect)

    def saved(self, done: fx.Complete) -> None:
        """A checkpoint is complete."""
        self._saving.done[done.path.rpartition("/")[2]] = None

    def end(self) -> None:
        """The job is over: nothing leaks, everything asked for is done, all agree."""
        self._ahead.end()
        for node in self._sim.nodes.values():
            self._leases.look(node)
            if isinstance(node, ServerNode):
                for shard, value in node.values.items():
                    version = node.role._by_shard[shard][1].version
                    group, plan = self._sim.reference.shards[shard]
                    if not plan.is_buffer and plan.length and self.covers(group):
                        last = max(s for g, s in self._sim.reference.records if g == group)
                        demand(version == last + 1, self, f"shard {shard} ends at {version}")
                        self._exact.value(node.node, shard, version, value)
