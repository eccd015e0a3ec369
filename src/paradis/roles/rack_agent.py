"""The rack agent's role: sum the rack's gradients, push one sum per shard, fan updates out.

It executes one group of the canonical tree and never shapes it, so the bits are those of direct
pushes. Its acknowledgement is a hop acknowledgement: workers keep their bytes until the update. If
it dies they push directly, and the servers refuse its sums for that step.

In a step that travels as codes the "sum" is what `rack_codes` makes of the workers' codes.

Invariant: a sum is sent only with the exact (rank, revision) list it was made of.
"""

from __future__ import annotations

from paradis.core.codes import NUMBERS
from paradis.core.flow import Outbox
from paradis.ids import NodeId, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.rack_codes import RackCodes
from paradis.roles.worker_state import largest_bundle
from paradis.wire import messages as msg


class RackAgentRole(RackCodes):
    """Pure state machine of the rack agent in a dispatcher.

    Args:
        node: own name.
        quota_bytes: what one worker may have unreturned here, and we at a server, per group.
        retry_ns: how long an unacknowledged sum waits before it is sent again.
    """

    def __init__(self, node: NodeId, *, quota_bytes: int, retry_ns: int) -> None:
        super().__init__(node, quota_bytes=quota_bytes)
        self.retry_ns = retry_ns
        self._boxes: dict[tuple[str, int], Outbox] = {}
        self._acked: dict[int, None] = {}
        self._over: dict[int, int] = {}
        self._armed = self._heard = False

    def handle(self, event: ev.Event, now_ns: int) -> list[fx.Effect]:
        """Take one event, return what to do about it."""
        self._out = []
        match event:
            case ev.Received(message=msg.ControlMessage()):
                self._on_control(event.message)
            case ev.Received():
                self._on_data(event, now_ns)
            case ev.Reduced():
                self.on_reduced(event)
                self._after_sum(event.shard)
                self._arm(now_ns)
            case ev.Stored():
                self.on_stored(event)
                self._arm(now_ns)
            case ev.PeerUp():
                self._up[event.peer] = None
                self._heal(event.peer)
            case ev.PeerLost():
                self._on_peer_lost(event)
            case ev.TimerFired(name="retry"):
                self._armed = False
                if not self._heard:  # else the link is only slow
                    self._heal("")
                self._heard = False
                self._arm(now_ns)
            case ev.EffectFailed():
                self._fail_job(event.error, f"{self.node}: {event.what}: {event.text}")
        return self._out

    # ---------------------------------------------------------------- control

    def _on_control(self, message: object) -> None:
        match message:
            case msg.Welcome():
                self.incarnation = message.incarnation
            case msg.View():
                self._on_view(message)
            case msg.Plan():
                self._on_plan(message)
            case msg.Shutdown():
                self._out.append(fx.End(message.reason))
            case msg.Failed():
                self._out.append(fx.Fail(message.error, message.text))

    def _on_view(self, view: msg.View) -> None:
        if self.adopt_view(view):
            servers = {NodeId(n): a for n, a in view.addresses.items() if n.startswith("server-")}
            if any(agent == self.node for agent, _ in view.racks.values()):
                self._out.append(fx.Connect(servers))
            self._send("dispatcher-0", msg.ViewReady(generation=view.generation))
            for group in self.groups.values():
                for shard in list(group.shards.values()):
                    self.advance(group, shard)
            self._heal("")

    def _on_plan(self, plan: msg.Plan) -> None:
        workers = len(self.ranks())
        mine = [s for s in plan.shards if not s.is_buffer and s.length]
        if self.adopt_plan(plan, [s for s in mine if workers <= largest_bundle(s)]):
            group = self.groups[plan.group]
            for shard in group.shards.values():
                self._next_version(group, shard, plan.step)
        self._send(
            "dispatcher-0",
            msg.PlanReady(generation=plan.generation, group=plan.group, part=plan.part),
        )
        self._begin_boxes(self.groups[plan.group], keep_lane=True)

    # ------------------------------------------------------------------- data

    def _on_data(self, event: ev.Received, now_ns: int) -> None:
        message = event.message
        match message:
            case msg.Push():
                if self.follow_push(message):
                    self._begin_boxes(self.groups[message.group], keep_lane=True)
                self._fast_forward(message)
                self.on_push(event, message)
            case msg.Commit() | msg.NormRequest():
                if self._in_view(event, message):
                    self._fast_forward(message)
                    self._on_commit(event.source, message)
            case msg.PushAck():
                self._on_ack(event.source, message)
            case msg.Update():
                self._on_update(event, message)
            case msg.State():
                self.on_state(event, message)
            case msg.Resend():
                self._on_resend(message)
            case msg.Stale():
                self._on_stale(event.source, message)
            case _:
                self._drop(event)
        self._arm(now_ns)

    def _fast_forward(self, message: msg.DataMessage) -> None:
        """A push or commit of a later step proves that the earlier one is finished."""
        group = self.groups.get(message.group)
        if group is None or message.step <= group.step or self.view is None:
            return
        if message.generation == self.view.generation:
            for shard in group.shards.values():
                self._next_version(group, shard, message.step)
            self._maybe_next(group)

    def _on_commit(self, source: NodeId, message: msg.Commit | msg.NormRequest) -> None:
        group = self.groups.get(message.group)
        if group is None or message.step != group.step:
            return
        if isinstance(message, msg.NormRequest):
            known = group.norms.get(message.worker)
            news = known is None or message.sequence > known.sequence
            if news:
                group.norms[message.worker] = message
        else:
            news = message.worker not in group.commits
            group.commits.setdefault(message.worker, message.commit)
        if not news:
            self.tell_state(source, message.worker, group)
            return
        for shard in list(group.shards.values()):
            self.advance(group, shard)

    def advance(self, group: HeldGroup, shard: HeldShard) -> None:
        """Sum when the rack is complete; hand a finished sum to the outbox."""
        if self.view is None:
            return
        if not self.can_sum(group, shard):
            return
        members = self.members(group)
        ranks = tuple(r for r in self.ranks() if r in members)
        expected = self.sum_if_complete(group, shard, (ranks,) if ranks else (), 1)
        if shard.version != group.step:
            return  # ahead of the others: its outbox begins with the next step
        box = self._box(group, shard)
        if ranks and all(expected.get(r, 0) is None for r in ranks):
            box.settle(shard.plan.shard)
        if shard.collection.summed is None:
            box.lane_drop(shard.plan.shard)  # what is under way is void and must not hold others up
        if shard.collection.summed is not None and shard.sent != shard.collection.summed:
            shard.sent = dict(shard.collection.summed)
            self._acked.pop(shard.plan.shard, None)
            if box.settled(shard.plan.shard):
                box.lane_add(shard.plan.shard, shard.plan.priority)
            else:
                box.ready(shard.plan.shard)
        self._pump(shard.plan.server, group, box)

    def _box(self, group: HeldGroup, shard: HeldShard) -> Outbox:
        server = shard.plan.server
        key = (server, group.index)
        if key not in self._boxes:
            largest = max(self.sum_bytes(group, s) for s in group.shards.values())
            self._boxes[key] = Outbox(quota=self.quota_bytes, reserve=largest)
            self._begin_box(group, self._boxes[key], server)
        return self._boxes[key]

    def _begin_boxes(self, group: HeldGroup, *, keep_lane: bool = False) -> None:
        for (server, index), box in self._boxes.items():
            if index == group.index:
                self._begin_box(group, box, server, keep_lane=keep_lane)

    def _begin_box(
        self, group: HeldGroup, box: Outbox, server: str, *, keep_lane: bool = False
    ) -> None:
        shards = [s for s in group.shards.values() if s.plan.server == server]
        shards.sort(key=lambda s: (s.plan.priority, s.plan.shard))
        sizes = {s.plan.shard: self.sum_bytes(group, s) for s in shards}
        box.grow(max(sizes.values(), default=0))
        box.begin(sizes, keep_lane=keep_lane)
        for shard in shards:
            if shard.sent is not None and shard.version == group.step:
                box.settle(shard.plan.shard)
                if shard.plan.shard not in box.holding and self._unacked(shard):
                    box.lane_add(shard.plan.shard, shard.plan.priority)

    def _pump(self, server: str, group: HeldGroup, box: Outbox) -> None:
        if server not in self._up:
            return
        while (entry := box.lane_next()) is not None:
            if not self._push(group, group.shards[entry[0]]):
                box.lane_done(entry[0])
        while (shard_id := box.next_push()) is not None:
            if not self._push(group, group.shards[shard_id]):
                box.returned(shard_id)

    def _push(self, group: HeldGroup, shard: HeldShard) -> bool:
        """Send the sum that is held; False if it was thrown away meanwhile.

        Its revision is the number of the sum, so that an answer to an earlier sum is known.
        """
        summed = shard.collection.summed
        if summed is None or self.view is None:
            return False
        coded = self.coded(group, shard)
        push = msg.RackPush(
            generation=self.view.generation, group=group.index, shard=shard.plan.shard,
            step=shard.version, version=shard.version, worker=self.index,
            incarnation=self.incarnation, revision=shard.ticket,
            codec=NUMBERS[shard.plan.codec] if coded else 0,
            sequence=self.codes_in(shard, len(summed)) if coded else 0,
            included=tuple((rank, summed[rank]) for rank in self.ranks() if rank in summed),
        )  # fmt: skip
        self._send(shard.plan.server, push, fx.Sum(shard.plan.shard))
        return True

    def _on_ack(self, source: NodeId, ack: msg.PushAck) -> None:
        self._heard = True
        found = self._by_shard.get(ack.shard)
        box = self._boxes.get((source, ack.group))
        if found is None or box is None or ack.step != found[1].version:
            return
        group, shard = found
        if shard.collection.summed is not None and ack.revision == shard.ticket:
            self._acked[ack.shard] = None
            if ack.credit:
                box.lane_done(ack.shard)
        if ack.credit:
            box.returned(ack.shard)
        self._pump(source, group, box)

    def _on_resend(self, resend: msg.Resend) -> None:
        found = self._by_shard.get(resend.shard)
        if found is None or resend.step != found[1].version:
            return
        group, shard = found
        self._acked.pop(resend.shard, None)
        if shard.sent is not None and shard.collection.summed is not None:
            box = self._box(group, shard)
            box.lane_add(resend.shard, shard.plan.priority)
            self._pump(shard.plan.server, group, box)

    def _on_stale(self, source: NodeId, stale: msg.Stale) -> None:
        box = self._boxes.get((source, stale.group))
        if box is not None:
            box.returned(stale.shard)
            box.lane_done(stale.shard)  # sent again with the next view, or by the timer

    # ---------------------------------------------------------------- updates

    def _on_update(self, event: ev.Received, update: msg.Update) -> None:
        """Fan an update out to the rack, then forget the step of that shard."""
        found = self._by_shard.get(update.shard)
        if found is None or (not update.unchanged and not event.lease):
            self._drop(event)
            return
        group, shard = found
        self.follow_update(group, shard, update)
        payload = fx.Lease(event.lease) if event.lease else None
        members = self.members(group)
        for rank in self.ranks():
            if rank in members:
                self._send(worker_id(rank), update, payload)
        self._drop(event)
        self._next_version(group, shard, update.version)
        self._maybe_next(group)

    def _next_version(self, group: HeldGroup, shard: HeldShard, version: int) -> None:
        """The shard has this version: forget the step, once no sum is being made."""
        if version <= shard.version:
            return
        if shard.collection.summing:
            self._over[shard.plan.shard] = max(version, self._over.get(shard.plan.shard, 0))
            return
        self.settle_codes(group, shard, acked=shard.plan.shard in self._acked)
        self._release_all(group, shard, shard.collection.clear())
        self._out.append(fx.ReleaseSum(shard.plan.shard))
        shard.version = version
        shard.sent = None
        self._acked.pop(shard.plan.shard, None)
        box = self._boxes.get((shard.plan.server, group.index))
        if box is not None:
            box.settle(shard.plan.shard)
            box.returned(shard.plan.shard)
            box.lane_drop(shard.plan.shard)

    def _after_sum(self, shard_id: int) -> None:
        """A sum is made whose step may be over."""
        version = self._over.pop(shard_id, None)
        if version is not None:
            group, shard = self._by_shard[shard_id]
            self._next_version(group, shard, version)
            self._maybe_next(group)

    def _maybe_next(self, group: HeldGroup) -> None:
        step = min((s.version for s in group.shards.values()), default=group.step)
        if step <= group.step:
            return
        group.next_step(step)
        self._begin_boxes(group)
        for shard in list(group.shards.values()):
            self.advance(group, shard)

    # ------------------------------------------------------------------ links

    def _heal(self, peer: str) -> None:
        """Send again what has no answer, sums and questions: over a new link, or on the timer."""
        self.ask_again(peer)
        for (server, index), box in self._boxes.items():
            if peer not in ("", server):
                continue
            group = self.groups[index]
            for shard in group.shards.values():
                if shard.plan.server != server or shard.version != group.step:
                    continue
                if self._unacked(shard):
                    if peer:
                        box.returned(shard.plan.shard)
                    if box.settled(shard.plan.shard):
                        box.lane_drop(shard.plan.shard)
                        box.lane_add(shard.plan.shard, shard.plan.priority)
            if not peer:
                self._probe(group, box)
            self._pump(server, group, box)

    def _probe(self, group: HeldGroup, box: Outbox) -> None:
        """Credit may have been lost with a link: push again what holds it, the server answers."""
        held = [s for s in box.holding if s in self._acked]
        if box.blocked and held:
            self._push(group, group.shards[held[0]])

    def _unacked(self, shard: HeldShard) -> bool:
        summed = shard.collection.summed is not None
        return shard.sent is not None and summed and shard.plan.shard not in self._acked

    def _on_peer_lost(self, event: ev.PeerLost) -> None:
        self._up.pop(event.peer, None)
        if event.control:
            text = f"the leading dispatcher is gone: {event.reason}"
            self._out.append(fx.Fail("PeerUnreachable", text))
        elif self.view is not None and event.peer in self.view.addresses:
            self._out.append(fx.Connect({event.peer: self.view.addresses[event.peer]}))

    def _arm(self, now_ns: int) -> None:
        if self._armed:
            return
        unacked = any(self._unacked(s) for _, s in self._by_shard.values())
        if unacked or self.asking or any(box.blocked for box in self._boxes.values()):
            self._armed = True
            self._out.append(fx.SetTimer("retry", now_ns + self.retry_ns))
