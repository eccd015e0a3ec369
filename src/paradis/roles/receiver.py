"""What the server and the rack agent share: receiving pushes into collections, and credit.

Invariant: every lease that a push brought is either held by exactly one collection or released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paradis.core.aggregation import Contribution
from paradis.core.codes import CodedSteps
from paradis.core.flow import Ledger
from paradis.core.host_groups import Routes, host_route, owner_on, route_end
from paradis.core.tree import Tree, order, restrict
from paradis.ids import LEADER, NodeId, index_of, role_of, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.worker_state import largest_bundle, push_bytes, shard_sizes
from paradis.wire import messages as msg


class Receiver:
    """Base of the roles that collect contributions; subclasses say what to do with a sum.

    Args:
        node: own name.
        quota_bytes: what one pusher may have unreturned here, per group.
    """

    def __init__(self, node: NodeId, *, quota_bytes: int) -> None:
        self.node = node
        self.quota_bytes = quota_bytes
        self.incarnation = 0
        self.view: msg.View | None = None
        self.groups: dict[int, HeldGroup] = {}
        self._by_shard: dict[int, tuple[HeldGroup, HeldShard]] = {}
        self._ledgers: dict[tuple[str, int], Ledger] = {}
        self.routes = Routes()
        self._restricted: tuple[tuple[int, tuple[int, ...]], Tree] = ((-1, ()), ())
        self._out: list[fx.Effect] = []

    # ------------------------------------------------------------- membership

    def present(self, group: HeldGroup) -> tuple[int, ...]:
        """Return the ranks that train the group and have not left."""
        assert self.view is not None
        if not group.ranks:
            return self.view.members
        return tuple(r for r in self.view.members if r in group.ranks)

    def members(self, group: HeldGroup) -> tuple[int, ...]:
        """Return the ranks that take part in the group's present step, in order.

        A rank that left takes part in the steps it finished; where it did not say how many (it
        ended without a word), in those it has committed here.
        """
        assert self.view is not None
        if not self.view.left:
            return self.present(group)
        ranks = dict.fromkeys(self.present(group))
        for rank, steps in self.view.left.items():
            if group.ranks and rank not in group.ranks:
                continue
            finished = steps.get(group.index, 0)
            if finished > group.step or (finished < 0 and rank in group.commits):
                ranks[rank] = None
        return tuple(sorted(ranks))

    def tree(self, members: tuple[int, ...]) -> Tree:
        """Return the job's tree without those who are no members."""
        assert self.view is not None
        key = (self.view.generation, members)
        if self._restricted[0] != key:
            self._restricted = (key, restrict(self.view.tree, members))
        return self._restricted[1]

    def expected(self, group: HeldGroup, shard: HeldShard) -> dict[int, int | None]:
        """Return rank -> revision that counts, None for absent; undecided ranks are missing."""
        assert self.view is not None
        if shard.version != group.step or not self._decided(group):
            return {}
        members = self.members(group)
        result: dict[int, int | None] = {
            r: None for g in self.view.tree for r in g if r not in members
        }
        for rank in members:
            commit = group.said(rank)
            if commit is None:
                continue
            present = shard.present_in(commit)
            result[rank] = commit.revisions.get(shard.plan.shard, 0) if present else None
        return result

    def everybody(self, group: HeldGroup, table: Mapping[int, object]) -> bool:
        """Whether every member of the step is in ``table``."""
        return all(r in table for r in self.members(group))

    # ----------------------------------------------------------------- pushes

    def on_push(self, event: ev.Received, push: msg.Push | msg.RackPush) -> None:
        """Take a push in, answer it, and go on with its shard."""
        found = self._by_shard.get(push.shard)
        if not self._in_view(event, push):
            return
        if found is None:
            self._drop(event)
            return
        group, shard = found
        if push.step < shard.version or (shard.applying and push.step == shard.version):
            self._drop(event)
            self._ack(event.source, push, credit=True)
        elif push.step > shard.version or not event.lease:
            self._drop(event)  # there was no memory for it: the sender tries again
        else:
            self._collect(event, push, group, shard)

    def _collect(
        self, event: ev.Received, push: msg.Push | msg.RackPush, group: HeldGroup, shard: HeldShard
    ) -> None:
        """Take in a push of the step that the shard collects for."""
        if isinstance(push, msg.Push):
            ranks, rack = {push.worker: push.revision}, -1
            if push.whole:
                shard.whole[push.worker] = None
        else:
            ranks, rack = dict(push.included), push.worker
            if role_of(event.source) == "worker":
                rack = host_route(push.worker)
        nbytes = shard.nbytes * (push.codes if isinstance(push, msg.RackPush) else 1)
        added = shard.collection.add(
            ranks, lease=event.lease, nbytes=nbytes, rack=rack, tag=push.revision,
            rack_of=self.routes.of(shard.plan.shard) if self._serves_racks else None,
        )  # fmt: skip
        self._release_all(group, shard, added.dropped)
        ledger = self._ledger(event.source, group)
        if added.outcome in ("duplicate", "refused"):
            self._drop(event)
            credit = not ledger.owes(push.shard, push.revision)
            self._ack(event.source, push, credit=credit)
        else:
            if added.outcome == "void" and not shard.collection.summing:
                self._out.append(fx.ReleaseSum(push.shard))
            now = ledger.on_stored(push.shard, push.revision, nbytes)
            self._ack(event.source, push, credit=now)
        self._ask(group, shard, added.ask)
        if added.outcome != "held" or not self._waits_for_more(group, shard):
            self.advance(group, shard)

    def _waits_for_more(self, group: HeldGroup, shard: HeldShard) -> bool:
        """Whether nothing can be decided yet: contributions are missing and nobody has committed.

        That is so after most pushes, hence worth a look before everything is looked at.
        """
        return not self._decided(group) and shard.collection.ranks_held < self._contributors(group)

    def _decided(self, group: HeldGroup) -> bool:
        """Whether somebody has committed, asked for a norm, or left."""
        assert self.view is not None
        return bool(group.commits or group.norms or self.view.left)

    def _contributors(self, group: HeldGroup) -> int:
        """Return how many ranks a sum is made of while nobody has left."""
        return len(self.present(group))

    def _in_view(self, event: ev.Received, message: msg.DataMessage) -> bool:
        """Refuse frames of another generation: the fence of the data plane."""
        generation = self.view.generation if self.view else 0
        if message.generation == generation:
            return True
        self._drop(event)
        stale = msg.Stale(
            generation=generation, group=message.group, shard=message.shard, step=message.step,
            version=generation, revision=message.revision,
        )  # fmt: skip
        self._send(event.source, stale)
        return False

    def _ledger(self, source: NodeId, group: HeldGroup) -> Ledger:
        key = (source, group.index)
        if key not in self._ledgers:
            self._ledgers[key] = Ledger(quota=self._quota(group))
        return self._ledgers[key]

    def _quota(self, group: HeldGroup) -> int:
        # In full, as the next steps may be whose gradients travel as codes now.
        largest = max((push_bytes(s.plan, coded=False) for s in group.shards.values()), default=0)
        return max(self.quota_bytes, 2 * largest)

    def _ack(self, target: NodeId, push: msg.DataMessage, *, credit: bool) -> None:
        ack = msg.PushAck(
            generation=push.generation, group=push.group, shard=push.shard, step=push.step,
            worker=push.worker, revision=push.revision, sequence=int(credit),
        )  # fmt: skip
        self._send(target, ack)

    def _pusher(self, contribution: Contribution) -> NodeId:
        rack, ranks = contribution.rack, contribution.ranks
        return route_end(rack) if rack >= 0 else worker_id(next(iter(ranks)))

    def _release_all(
        self, group: HeldGroup, shard: HeldShard, contributions: Iterable[Contribution]
    ) -> None:
        """Give memory back, and the credit that was withheld for it."""
        for contribution in contributions:
            self._out.append(fx.Release(contribution.lease))
            pusher = self._pusher(contribution)
            ledger = self._ledger(pusher, group)
            if ledger.on_released(shard.plan.shard, contribution.tag, contribution.nbytes):
                self._send(pusher, msg.PushAck(
                    generation=self.view.generation if self.view else 0, group=group.index,
                    shard=shard.plan.shard, step=shard.version, revision=contribution.tag,
                    sequence=1,
                ))  # fmt: skip

    def _ask(self, group: HeldGroup, shard: HeldShard, ranks: Iterable[int]) -> None:
        """Ask for gradients whose sum was thrown away; a rack's sum is asked of its agent."""
        routes = self.routes.of(shard.plan.shard)
        targets: dict[tuple[str, bool], None] = {}
        for rank in ranks:
            route = routes.get(rank, -1)
            if route >= 0 and route not in shard.collection.direct and self._serves_racks:
                targets[(route_end(route), False)] = None
            else:
                targets[(worker_id(rank), self._serves_racks)] = None
        for target, direct in targets:
            self._send(target, msg.Resend(
                generation=self.view.generation if self.view else 0, group=group.index,
                shard=shard.plan.shard, step=shard.version, direct=direct,
            ))  # fmt: skip

    _serves_racks = False
    """Whether contributions may come from rack agents (true on servers)."""

    # ------------------------------------------------------------------- sums

    def advance(self, group: HeldGroup, shard: HeldShard) -> None:
        """Go on with a shard after anything about it or its step's commits changed."""
        raise AssertionError("subclass")  # pragma: no cover

    def sum_if_complete(
        self, group: HeldGroup, shard: HeldShard, tree: Tree, divisor: int
    ) -> dict[int, int | None]:
        """Drop what commits rule out, start a sum when everybody needed is here.

        Returns:
            rank -> committed revision (see `expected`).
        """
        expected = self.expected(group, shard)
        collection = shard.collection
        members = order(tree)
        absent: list[int] = []
        if self._decided(group):
            self._drop_ruled_out(group, shard, expected, members)
            absent = [r for r, v in expected.items() if v is None]
        sources = collection.plan_sum(tree, absent)
        if sources is not None:
            missing = any(r in absent for r in members)
            collection.start_sum()
            shard.members = members
            shard.ticket += 1
            self._out.append(fx.Reduce(shard.plan.shard, shard.ticket, sources, divisor, missing,
                                       self.coded(group, shard)))  # fmt: skip
        return expected

    def _drop_ruled_out(
        self, group: HeldGroup, shard: HeldShard, expected: Mapping[int, int | None],
        members: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Drop contributions and a sum that the commits rule out; ask anew for what was right."""
        collection = shard.collection
        wrong = collection.drop_wrong(expected)
        self._release_all(group, shard, wrong)
        self._give_up_hosts(group, shard, wrong, expected)
        ask = collection.void_sum(expected, members)
        if ask is None and collection.summed is not None and shard.members != members:
            ask = [r for r in collection.summed if r in members]
            collection.summed = None  # its divisor counts somebody who has left
        if ask is not None:
            self._out.append(fx.ReleaseSum(shard.plan.shard))
            self._ask(group, shard, ask)

    def on_reduced(self, event: ev.Reduced) -> None:
        """A sum is ready: release what went into it and go on."""
        group, shard = self._by_shard[event.shard]
        if event.ticket != shard.ticket or not shard.collection.summing:
            return
        done, ask = shard.collection.finish_sum()
        self._release_all(group, shard, done)
        if shard.collection.summed is None:
            self._out.append(fx.ReleaseSum(event.shard))
            self._ask(group, shard, ask)
        elif self._serves_racks and not self._decided(group) and not group.ahead.begun:
            return  # a server's sum waits for the commits; a rack agent sends its own on
        self.advance(group, shard)

    def payload_bytes(self, shard_id: int, *, codec: int, codes: int) -> int:
        """Return the bytes a push must have; -1: the step does not travel so, or has no such shard.

        Args:
            codec: number of the codec that the push names, 0 for none.
            codes: how many codes it says it has.
        """
        found = self._by_shard.get(shard_id)
        if found is None or self.coded(*found) != bool(codec):
            return -1
        return found[1].nbytes * codes

    @staticmethod
    def coded(group: HeldGroup, shard: HeldShard) -> bool:
        """Whether the shard's gradients and update travel as codes in the group's step."""
        return bool(shard.plan.codec) and group.coded_at(group.step)

    def collecting(self, shard_id: int) -> bool:
        """Whether the shard's accumulator is spoken for (asked by the driver before a receive)."""
        found = self._by_shard.get(shard_id)
        if found is None or self.coded(*found):  # a code is no part of a sum before it is decoded
            return True
        return not found[1].collection.empty or found[1].applying

    # ------------------------------------------------------------------ plumbing

    def tell_state(self, source: NodeId, rank: int, group: HeldGroup) -> None:
        """A commit came twice: repeat the answers that may have been lost, by shard."""
        commit = group.said(rank)
        for shard in group.shards.values():
            if shard.version != group.step or shard.passive or commit is None:
                continue
            counted = shard.collection.revision_of(rank)
            if counted is not None:
                owed = self._ledger(source, group).owes(shard.plan.shard, counted)
                self._send(source, msg.PushAck(
                    generation=self.view.generation if self.view else 0, group=group.index,
                    shard=shard.plan.shard, step=shard.version, revision=counted,
                    sequence=0 if owed else 1,
                ))  # fmt: skip
            wanted = commit.revisions.get(shard.plan.shard, 0)
            if shard.present_in(commit) and counted != wanted:
                self._give_up_rack(group, shard, rank)
                self._ask(group, shard, [rank])

    def _give_up_rack(self, group: HeldGroup, shard: HeldShard, rank: int) -> None:
        """All of a rack have committed and its sum does not come: its workers push directly.

        So it is when a worker has lost the agent and has nothing to push: the agent waits for it.
        """
        rack_of = self.routes.of(shard.plan.shard)
        owner = rack_of.get(rank, -1)
        if self._serves_racks and owner >= 0:
            members = self.members(group)
            mates = [r for r, o in rack_of.items() if o == owner and r in members]
            if all(group.said(r) is not None for r in mates):
                shard.collection.direct[owner] = None

    def _give_up_hosts(
        self, group: HeldGroup, shard: HeldShard, wrong: Iterable[Contribution],
        expected: Mapping[int, int | None],
    ) -> None:  # fmt: skip
        """A host's sum holds what does not count; nobody makes it anew: its workers push directly.

        A rack agent hears of the commits and sums again.
        """
        for contribution in wrong:
            if owner_on(contribution.rack) >= 0:
                shard.collection.direct[contribution.rack] = None
                ranks = contribution.ranks.items()
                self._ask(group, shard, [r for r, v in ranks if expected.get(r, v) == v])

    def adopt_view(self, view: msg.View) -> bool:
        """Take a newer view over; return whether it was newer."""
        if self.view is not None and view.generation < self.view.generation:
            return False
        self.view = view
        racks = {r: index_of(NodeId(a)) for a, ranks in view.racks.values() if a for r in ranks}
        self.routes.follow(racks, view.host_groups.values())
        return True

    def adopt_plan(self, plan: msg.Plan, shards: Iterable[msg.ShardPlan]) -> bool:
        """Take a plan over; return whether it was new."""
        group = self.groups.setdefault(plan.group, HeldGroup(plan.group, plan.step))
        if plan.part < group.parts:
            return False
        group.parts = plan.part + 1
        group.optimizer = plan.optimizer
        group.options = plan.options
        group.ranks = plan.ranks
        group.specs.extend(plan.parameters)
        mine = tuple(shards)
        # Of a later part, too: its servers may have owned nothing so far.
        group.coded_steps = CodedSteps(plan.coded_from, plan.coded_until)
        for shard_plan in mine:
            shard = HeldShard(shard_plan, plan.step)
            group.shards[shard_plan.shard] = shard
            self._by_shard[shard_plan.shard] = (group, shard)
        bundles = {s.shard: largest_bundle(s) for s in plan.shards if s.codec}
        self.routes.add(shard_sizes(plan), bundles)
        group.next_step(plan.step)
        for (_, index), ledger in self._ledgers.items():
            if index == plan.group:
                ledger.quota = self._quota(group)
        self._out.append(fx.OpenPlan(plan, mine))
        return True

    def _drop(self, event: ev.Received) -> None:
        if event.lease:
            self._out.append(fx.Release(event.lease))

    def _send(
        self, target: str, message: msg.DataMessage | msg.ControlMessage,
        payload: fx.Payload | None = None,
    ) -> None:  # fmt: skip
        self._out.append(fx.Send(NodeId(target), message, payload))

    def _fail_job(self, error: str, text: str) -> None:
        self._send(LEADER, msg.Failed(error=error, text=text))

    def check(self) -> None:
        """Assert the invariants; called after every event in tests and simulation."""
        for group, shard in self._by_shard.values():
            shard.collection.check()
            assert group.stale or shard.version >= group.step, (shard.version, group.step)
        for ledger in self._ledgers.values():
            ledger.check()
