"""Simulated nodes: they carry out effects with the real numerics, after a cost in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from paradis.ids import LEADER, NodeId, role_of
from paradis.numerics.finite import first_non_finite
from paradis.numerics.reduce import reduce_tree, square_sum
from paradis.numerics.shard_optimizer import ShardOptimizer
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.leader import LeaderRole
from paradis.roles.rack_agent import RackAgentRole
from paradis.roles.server import ServerRole
from paradis.sim.memory import Memory, Story
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.sim.driver import Simulation


class Role(Protocol):
    """What a node runs."""

    def handle(self, event: ev.Event, now_ns: int) -> list[fx.Effect]:
        """Take one event, return what to do about it."""
        ...

    def check(self) -> None:
        """Assert the invariants."""
        ...


Parcel = tuple[torch.Tensor, Story] | None
"""A payload, copied when it was sent, with the story of what is in it."""


class SimNode:
    """What all nodes share.

    Attributes:
        address: where its messages go; the leader and the rack agent of its process share one.
        ended: it handles nothing any more.
        counted: what the role has counted.
    """

    def __init__(self, sim: Simulation, node: NodeId, role: Role) -> None:
        self.sim = sim
        self.node = node
        self.address = node
        self.role = role
        self.memory = Memory()
        self.timers: dict[str, int] = {}
        self.paused_until_ns = 0
        self.ended = False
        self.counted: dict[str, int] = {}

    def carry(self, effect: fx.Effect) -> None:
        """Carry out an effect."""
        match effect:
            case fx.Send():
                self._send(effect)
            case fx.SetTimer():
                self._set_timer(effect.name, effect.at_ns)
            case fx.Release():
                self.memory.release(effect.lease)
            case fx.ReleaseSum():
                self.memory.release_sum(effect.shard)
            case fx.Connect():
                self.sim.connect(self, effect.addresses)
            case fx.Announce():
                pass
            case fx.Count():
                self.counted[effect.name] = self.counted.get(effect.name, 0) + effect.amount
            case fx.Fail():
                self.sim.failures.append(f"{self.node}: {effect.error}: {effect.text}")
                self.ended = True
            case fx.End():
                self.ended = True
            case _:
                self.carry_own(effect)

    def _set_timer(self, name: str, at_ns: int) -> None:
        self.timers[name] = at_ns

        def fire() -> ev.Event | None:
            if self.timers.get(name) != at_ns:
                return None  # a later one replaced it
            del self.timers[name]
            return ev.TimerFired(name)

        self.sim.at(at_ns, self, fire)

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out an effect that only this kind of node has."""
        raise AssertionError(f"{self.node} cannot carry out {effect!r}")

    def _send(self, effect: fx.Send) -> None:
        if isinstance(effect.message, msg.ControlMessage):
            self.sim.tell(self, effect.target, effect.message)
            return
        message, parcel = self.resolve(effect.message, effect.payload)
        self.sim.send(self, effect.target, message, parcel)

    def resolve(
        self, message: msg.DataMessage, payload: fx.Payload | None
    ) -> tuple[msg.DataMessage, Parcel]:
        """Return the message and a copy of its payload."""
        match payload:
            case None:
                return message, None
            case fx.Lease(lease=lease):
                held = self.memory.leases[lease]
                return message, (held.data.clone(), held.story)
            case fx.Sum(shard=shard):
                own = self.memory.accumulators[shard]
                assert own.summed, f"{self.node} sends a sum of shard {shard} that it gave up"
                return message, (own.data.clone(), own.story)
            case _:
                raise AssertionError(f"{self.node} holds no {payload!r}")

    def receive(self, source: NodeId, message: msg.DataMessage, parcel: Parcel) -> None:
        """A frame arrived: find memory for its payload, tell the role."""
        lease = 0
        if parcel is not None and not self.sim.network.no_memory(self.sim.now):
            lease = self.place(message, parcel)
        self.sim.handle(self, ev.Received(source, message, lease))

    def place(self, message: msg.DataMessage, parcel: tuple[torch.Tensor, Story]) -> int:
        """Return the lease of a payload."""
        return self.memory.place(*parcel)

    def later(self, job: Callable[[], ev.Event | None], on: SimNode | None = None) -> None:
        """Run a numeric job and hand its result over, after its cost in virtual time.

        Args:
            on: the node that gets it; None: this one.
        """
        factor = self.sim.job.slow.get(self.node, 1.0)
        cost_ns = int((20_000 + self.sim.source.random() * 300_000) * factor)
        self.sim.at(self.sim.now + cost_ns, on or self, job)

    def leased(self) -> list[int]:
        """Return the leases that the role, or a running job, has a right to hold."""
        return []


class LeaderNode(SimNode):
    """The leader's control duty, in the process of dispatcher-0."""

    role: LeaderRole

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out what the leader asks for; its store and files need no simulation."""
        match effect:
            case fx.Persist():
                pass
            case fx.WriteManifest():
                name = effect.info.checkpoint
                self.sim.checkers.manifest(effect)
                self.later(lambda: ev.ManifestWritten(name, f"/checkpoints/{name}"))
            case _:
                super().carry_own(effect)


class SummingNode(SimNode):
    """A node whose role collects contributions.

    Attributes:
        lengths: shard -> elements.
        pushers: lease of a sum -> who made it.
    """

    role: ServerRole | RackAgentRole

    def __init__(self, sim: Simulation, node: NodeId, role: ServerRole | RackAgentRole) -> None:
        super().__init__(sim, node, role)
        self.storing: dict[int, None] = {}
        self.lengths: dict[int, int] = {}
        self.pushers: dict[int, int] = {}

    def place(self, message: msg.DataMessage, parcel: tuple[torch.Tensor, Story]) -> int:
        """Receive the first contribution into the accumulator, others into the store."""
        shard = -1
        if isinstance(message, msg.Push | msg.RackPush) and not self.role.collecting(message.shard):
            shard = message.shard
        lease = self.memory.place(*parcel, accumulator_of=shard)
        if isinstance(message, msg.RackPush):
            self.pushers[lease] = message.worker
        return lease

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out sums."""
        match effect:
            case fx.OpenPlan():
                for shard in effect.shards:
                    zeros = torch.zeros(shard.length, dtype=self.sim.workload.dtype)
                    self.memory.open(shard.shard, zeros)
                    self.lengths[shard.shard] = shard.length
            case fx.Reduce():
                self._reduce(effect)
            case _:
                super().carry_own(effect)

    def forwards(self, effect: fx.Reduce) -> bool:
        """Whether codes are put one after the other, not summed."""
        return False

    def _reduce(self, effect: fx.Reduce) -> None:
        leases = self.memory.leases
        flat = [lease for group in effect.sources for lease in group]
        length = self.lengths[effect.shard]
        forwards = self.forwards(effect)
        if forwards:
            length *= sum(len(leases[x].story) for x in flat)
        target = self.memory.sum_target(effect.shard, flat, length)
        self.sim.checkers.codes.summing(self, effect, [self.pushers.get(x, -1) for x in flat])

        def job() -> ev.Event:
            story: Story = {}
            for lease in flat:
                twice = story.keys() & leases[lease].story.keys()
                assert not twice, f"shard {effect.shard}: ranks {sorted(twice)} are counted twice"
                story.update(leases[lease].story)
            groups = [[leases[x].data for x in group] for group in effect.sources]
            if forwards:
                target.data.copy_(torch.cat([code for group in groups for code in group]))
            else:
                groups = [[c for x in g for c in x.view(-1, length).unbind()] for g in groups]
                reduce_tree(groups, target.data, effect.divisor, effect.missing)
            target.story = story
            return ev.Reduced(effect.shard, effect.ticket)

        self.later(job)

    def leased(self) -> list[int]:
        """Return the leases in the role's collections and in running jobs."""
        held = list(self.storing)
        for _, shard in self.role._by_shard.values():
            held += [c.lease for c in (*shard.collection.held, *shard.collection.summing)]
            held += [shard.pending.lease] if shard.pending is not None else []
        return held


class ServerNode(SummingNode):
    """A server, with its shards' values and optimizers.

    Attributes:
        values: shard -> (length,), updated in place.
        codes: shard -> (2 * length,), the code of its last update: the value before and after it.
    """

    role: ServerRole

    def __init__(self, sim: Simulation, node: NodeId, role: ServerRole) -> None:
        super().__init__(sim, node, role)
        self.values: dict[int, torch.Tensor] = {}
        self.plans: dict[int, msg.ShardPlan] = {}
        self.codes: dict[int, torch.Tensor] = {}
        self._optimizers: dict[int, ShardOptimizer] = {}

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out what a server's role asks for."""
        match effect:
            case fx.OpenPlan():
                super().carry_own(effect)
                self._open(effect)
            case fx.Apply():
                self._apply(effect)
            case fx.BeginCodes():
                pass  # a code is the two values
            case fx.Store():
                self._store(effect)
            case fx.Measure():
                self.later(lambda: self._measured(effect))
            case fx.Copy():
                self.later(lambda: self._copied(effect))
            case _:
                super().carry_own(effect)

    def resolve(
        self, message: msg.DataMessage, payload: fx.Payload | None
    ) -> tuple[msg.DataMessage, Parcel]:
        """Return the message and a copy of a shard's value."""
        if isinstance(payload, fx.Code):
            self.sim.checkers.serving(self, message)
            return message, (self.codes[payload.shard].clone(), {})
        if not isinstance(payload, fx.Sections):
            return super().resolve(message, payload)
        if isinstance(message, msg.State):
            message = msgspec.structs.replace(
                message, keys=("value",), dtypes=(self.sim.workload.dtype_name,)
            )
        self.sim.checkers.serving(self, message)
        return message, (self.values[payload.shard].clone(), {})

    def _open(self, effect: fx.OpenPlan) -> None:
        for shard in effect.shards:
            value = torch.full((shard.length,), -3.0, dtype=self.sim.workload.dtype)
            self.values[shard.shard] = value
            self.plans[shard.shard] = shard
            if not shard.is_buffer:
                pieces = [value[s.start : s.start + s.length] for s in shard.segments]
                options = effect.plan.options[shard.options_group]
                self._optimizers[shard.shard] = ShardOptimizer("SGD", options, pieces)

    def _apply(self, effect: fx.Apply) -> None:
        total = self.memory.accumulators[effect.shard]
        self.sim.checkers.applying(self, effect, total.story)

        def job() -> ev.Event:
            bad = first_non_finite(total.data) if effect.check else None
            if bad is not None:
                return ev.Applied(effect.shard, effect.step, bad)
            if effect.clip != 1.0:
                total.data.mul_(effect.clip)
            segments = self.plans[effect.shard].segments
            gradients = [
                total.data[s.start : s.start + s.length] if here else None
                for s, here in zip(segments, effect.present, strict=True)
            ]
            before = self.values[effect.shard].clone()
            self._optimizers[effect.shard].apply(gradients, effect.options)
            if effect.coded:
                self.codes[effect.shard] = torch.cat([before, self.values[effect.shard]])
            return ev.Applied(effect.shard, effect.step)

        self.later(job)

    def _store(self, effect: fx.Store) -> None:
        self.storing[effect.lease] = None

        def job() -> ev.Event:
            self.values[effect.shard].copy_(self.memory.leases[effect.lease].data)
            self.storing.pop(effect.lease)
            self.memory.release(effect.lease)
            return ev.Stored(effect.shard, effect.ticket)

        self.later(job)

    def _measured(self, effect: fx.Measure) -> ev.Event:
        squares = {s: square_sum(self.memory.accumulators[s].data) for s in effect.shards}
        return ev.Measured(effect.group, effect.step, squares)

    def _copied(self, effect: fx.Copy) -> ev.Event:
        self.sim.checkers.copying(self, effect)
        saved = msg.Saved(
            node=self.node, checkpoint=effect.checkpoint, group=effect.group, step=effect.step,
            pieces=(), scalars={},
        )  # fmt: skip
        self.later(lambda: ev.Written(effect.checkpoint, saved))
        return ev.Copied(effect.group, effect.checkpoint)


def inbox(sender: SimNode, target: NodeId, message: msg.ControlMessage) -> str:
    """Return the key of the node that a control message is for: dispatcher-0 hosts two."""
    if target == LEADER and not isinstance(sender, LeaderNode):
        return "leader"
    assert role_of(target) in ("worker", "server", "dispatcher"), (target, message)
    return target
