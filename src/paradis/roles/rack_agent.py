"""The rack agent's role: sum the rack's gradients, push one sum per shard, fan updates out.

It executes one group of the canonical tree and never shapes it, so the bits are those of direct pushes.
Its acknowledgement is a hop acknowledgement: workers keep their bytes until the update. If it dies they
push directly, and the servers refuse its sums for that step.

Invariant: a sum is sent only with the exact (rank, revision) list it was made of.
"""

from __future__ import annotations

from paradis.core.flow import Outbox
from paradis.ids import NodeId, index_of, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.receiver import HeldGroup, HeldShard, Receiver
from paradis.wire import messages as msg


class RackAgentRole(Receiver):
    """Pure state machine of the rack agent in a dispatcher.

    Args:
        node: own name.
        quota_bytes: what one worker may have unreturned here, and we at a server, per group.
        retry_ns: how long an unacknowledged sum waits before it is sent again.
    """

    def __init__(self, node: NodeId, *, quota_bytes: int, retry_ns: int) -> None:
        super().__init__(node, quota_bytes=quota_bytes, check_finite=False)
        self.index = index_of(node)
        self.retry_ns = retry_ns
        self._boxes: dict[tuple[str, int], Outbox] = {}
        self._up: dict[str, None] = {}
        self._acked: dict[int, None] = {}
        self._armed = False

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
                self._arm(now_ns)
            case ev.PeerUp():
                self._up[event.peer] = None
                self._heal(event.peer)
            case ev.PeerLost():
                self._on_peer_lost(event)
            case ev.TimerFired(name="retry"):
                self._armed = False
                self._heal("")
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

    def _on_plan(self, plan: msg.Plan) -> None:
        self.adopt_plan(plan, [s for s in plan.shards if not s.is_buffer and s.length])
        self._send(
            "dispatcher-0",
            msg.PlanReady(generation=plan.generation, group=plan.group, part=plan.part),
        )
        for (_, index), box in self._boxes.items():
            if index == plan.group:
                self._begin_box(self.groups[index], box, _)

    def _ranks(self) -> tuple[int, ...]:
        assert self.view is not None
        for agent, ranks in self.view.racks.values():
            if agent == self.node:
                return ranks
        return ()

    # ------------------------------------------------------------------- data

    def _on_data(self, event: ev.Received, now_ns: int) -> None:
        message = event.message
        match message:
            case msg.Push():
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
        if group is not None and message.step > group.step and self.view is not None:
            if message.generation == self.view.generation:
                for shard in group.shards.values():
                    if shard.version < message.step and not shard.collection.summing:
                        self._next_version(group, shard, message.step)
                self._maybe_next(group)

    def _on_commit(self, source: NodeId, message: msg.Commit | msg.NormRequest) -> None:
        group = self.groups.get(message.group)
        if group is None or message.step != group.step:
            return
        table = group.commits if isinstance(message, msg.Commit) else group.norms
        if message.worker in table:
            self.tell_state(source, message.worker, group)
            return
        table[message.worker] = message.commit
        for shard in list(group.shards.values()):
            self.advance(group, shard)

    def advance(self, group: HeldGroup, shard: HeldShard) -> None:
        """Sum when the rack is complete; hand a finished sum to the outbox."""
        if self.view is None:
            return
        members = self.members(group)
        ranks = tuple(r for r in self._ranks() if r in members)
        expected = self.sum_if_complete(group, shard, (ranks,), 1)
        box = self._box(group, shard)
        if ranks and all(expected.get(r, 0) is None for r in ranks):
            box.settle(shard.plan.shard)
        if shard.collection.summed is not None and shard.sent != shard.collection.summed:
            first = shard.sent is None
            shard.sent = dict(shard.collection.summed)
            self._acked.pop(shard.plan.shard, None)
            if first:
                box.ready(shard.plan.shard)
            else:
                box.lane_add(shard.plan.shard)
        self._pump(shard.plan.server, group, box)

    def _box(self, group: HeldGroup, shard: HeldShard) -> Outbox:
        server = shard.plan.server
        key = (server, group.index)
        if key not in self._boxes:
            largest = max(s.nbytes for s in group.shards.values())
            self._boxes[key] = Outbox(quota=self.quota_bytes, reserve=largest)
            self._begin_box(group, self._boxes[key], server)
        return self._boxes[key]

    def _begin_box(self, group: HeldGroup, box: Outbox, server: str) -> None:
        shards = [s for s in group.shards.values() if s.plan.server == server]
        shards.sort(key=lambda s: (s.plan.priority, s.plan.shard))
        box.begin({s.plan.shard: s.nbytes for s in shards})

    def _pump(self, server: str, group: HeldGroup, box: Outbox) -> None:
        if server not in self._up:
            return
        while (shard_id := box.lane_next()) is not None:
            if not self._push(group, group.shards[shard_id]):
                box.lane_done(shard_id)
        while (shard_id := box.next_push()) is not None:
            if not self._push(group, group.shards[shard_id]):
                box.returned(shard_id)

    def _push(self, group: HeldGroup, shard: HeldShard) -> bool:
        """Send the sum that is held; False if it was thrown away meanwhile."""
        if shard.collection.summed is None or self.view is None:
            return False
        included = tuple(shard.collection.summed.items())
        push = msg.RackPush(
            generation=self.view.generation, group=group.index, shard=shard.plan.shard,
            step=shard.version, version=shard.version, worker=self.index,
            incarnation=self.incarnation, revision=max(v for _, v in included), included=included,
        )  # fmt: skip
        self._send(shard.plan.server, push, fx.Sum(shard.plan.shard))
        return True

    def _on_ack(self, source: NodeId, ack: msg.PushAck) -> None:
        found = self._by_shard.get(ack.shard)
        box = self._boxes.get((source, ack.group))
        if found is None or box is None or ack.step != found[1].version:
            return
        group, shard = found
        summed = shard.collection.summed
        if summed is not None and ack.revision == max(summed.values()):
            self._acked[ack.shard] = None
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
            box.lane_add(resend.shard)
            self._pump(shard.plan.server, group, box)

    def _on_stale(self, source: NodeId, stale: msg.Stale) -> None:
        box = self._boxes.get((source, stale.group))
        if box is not None:
            box.returned(stale.shard)
            box.lane_done(stale.shard)  # sent again when the timer finds it unacknowledged

    # ---------------------------------------------------------------- updates

    def _on_update(self, event: ev.Received, update: msg.Update) -> None:
        """Fan an update out to the rack, then forget the step of that shard."""
        found = self._by_shard.get(update.shard)
        if found is None or (not update.unchanged and not event.lease):
            self._drop(event)
            return
        group, shard = found
        payload = fx.Lease(event.lease) if event.lease else None
        for rank in self._ranks():
            self._send(worker_id(rank), update, payload)
        self._drop(event)
        if update.version > shard.version and not shard.collection.summing:
            self._next_version(group, shard, update.version)
            self._maybe_next(group)

    def _next_version(self, group: HeldGroup, shard: HeldShard, version: int) -> None:
        self._release_all(group, shard, shard.collection.clear())
        self._out.append(fx.ReleaseSum(shard.plan.shard))
        shard.version = version
        shard.sent = None
        self._acked.pop(shard.plan.shard, None)
        box = self._boxes.get((shard.plan.server, group.index))
        if box is not None:
            box.settle(shard.plan.shard)
            box.returned(shard.plan.shard)
            box.lane_done(shard.plan.shard)

    def _maybe_next(self, group: HeldGroup) -> None:
        if all(s.version > group.step for s in group.shards.values()):
            group.next_step(group.step + 1)
            for (server, index), box in self._boxes.items():
                if index == group.index:
                    self._begin_box(group, box, server)

    # ------------------------------------------------------------------ links

    def _heal(self, peer: str) -> None:
        """Send unacknowledged sums again: over a new link, or on the timer."""
        for (server, index), box in self._boxes.items():
            if peer not in ("", server):
                continue
            group = self.groups[index]
            lane, box.in_lane = box.in_lane, None
            if lane is not None:
                box.lane_add(lane)
            for shard in group.shards.values():
                if shard.plan.server == server and self._unacked(shard):
                    if peer:
                        box.returned(shard.plan.shard)
                    if shard.plan.shard in box.holding or peer:
                        box.lane_add(shard.plan.shard)
            self._pump(server, group, box)

    def _unacked(self, shard: HeldShard) -> bool:
        return shard.sent is not None and shard.plan.shard not in self._acked

    def _on_peer_lost(self, event: ev.PeerLost) -> None:
        self._up.pop(event.peer, None)
        if event.peer == "dispatcher-0":
            self._out.append(fx.End(f"the leading dispatcher is gone: {event.reason}"))
        elif self.view is not None and event.peer in self.view.addresses:
            self._out.append(fx.Connect({event.peer: self.view.addresses[event.peer]}))

    def _arm(self, now_ns: int) -> None:
        if not self._armed and any(self._unacked(s) for _, s in self._by_shard.values()):
            self._armed = True
            self._out.append(fx.SetTimer("retry", now_ns + self.retry_ns))
