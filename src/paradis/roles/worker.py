"""The worker's role: push gradients as they appear, commit, take updates.

Invariants:
* a shard is pushed with the revision that the commit names, or not at all;
* ``step()`` completes when every shard of the group has the next version;
* what is not acknowledged is sent again by a timer; everything sent is idempotent.
"""

from __future__ import annotations

from paradis.core.flow import Outbox
from paradis.ids import LEADER, NodeId, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker_state import Group, Shard, WorkerConfig, commit_with_revisions
from paradis.wire import messages as msg


class WorkerRole:
    """Pure state machine of one worker process.

    Args:
        config: rank and the settings that bound and time it.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.node = worker_id(config.rank)
        self.incarnation = 0
        self.view: msg.View | None = None
        self.groups: dict[int, Group] = {}
        self.failed: tuple[str, str] | None = None
        self._boxes: dict[tuple[str, int], Outbox] = {}
        self._up: dict[str, None] = {}
        self._out: list[fx.Effect] = []
        self._left = False

    # ------------------------------------------------------------------ entry

    def handle(self, event: ev.Event, now_ns: int) -> list[fx.Effect]:
        """Take one event, return what to do about it."""
        self._out = []
        match event:
            case ev.Received(message=msg.ControlMessage()):
                self._on_control(event.message, now_ns)
            case ev.Received():
                self._on_data(event)
            case ev.ShardReady():
                self._on_ready(event.group, event.shard)
            case ev.StepClosed():
                self._close(event, commit=True, now_ns=now_ns)
            case ev.NormAsked():
                self._close(event, commit=False, now_ns=now_ns)
            case ev.AssignAsked():
                self._on_assign_asked(event)
            case ev.PullAsked():
                self._on_pull_asked(event)
            case ev.StateAsked():
                self._on_state_asked(event.group)
            case ev.SnapshotAsked():
                self._on_snapshot_asked(event)
            case ev.RegisterAsked():
                self._send(LEADER, event.registration)
            case ev.LeaveAsked():
                self._leave()
            case ev.PeerUp():
                self._on_peer_up(event.peer)
            case ev.PeerLost():
                self._on_peer_lost(event.peer, event.reason)
            case ev.TimerFired(name="retry"):
                self._retry()
        if not isinstance(event, ev.ShardReady):
            self._arm_retry(event, now_ns)
        return self._out

    # ---------------------------------------------------------------- control

    def _on_control(self, message: object, now_ns: int) -> None:
        match message:
            case msg.Welcome():
                self.incarnation = message.incarnation
                self._out.append(fx.Complete(-1, "welcome"))
            case msg.View():
                self._on_view(message)
            case msg.Plan():
                self._on_plan(message)
            case msg.Failed() | msg.Refused():
                self._fail(message.error, message.text)
            case msg.CheckpointDone():
                self._out.append(
                    fx.Complete(
                        -1,
                        "checkpoint",
                        message.step,
                        "StateError" if message.error else "",
                        message.error,
                        path=message.path,
                    )  # fmt: skip
                )
            case msg.Announcement():
                self._out.append(fx.Announce(message.level, message.text))

    def _on_view(self, view: msg.View) -> None:
        if self.view is not None and view.generation <= self.view.generation:
            return
        self.view = view
        self._connect()
        self._reroute()
        for group in self.groups.values():
            for shard in group.shards.values():
                if shard.stale:
                    shard.stale = False
                    self._push_again(group, shard)
            self._recommit(group)
            self._pump(group)

    def _connect(self) -> None:
        assert self.view is not None
        agent = self._agent()
        wanted = {
            NodeId(n): a
            for n, a in self.view.addresses.items()
            if n.startswith("server-") or n == agent
        }
        self._out.append(fx.Connect(wanted))

    def _agent(self) -> str:
        """Return the rack agent that this worker goes through, or an empty name."""
        assert self.view is not None
        for agent, ranks in self.view.racks.values():
            if self.config.rank in ranks:
                return agent
        return ""

    def _reroute(self) -> None:
        agent = self._agent()
        for group in self.groups.values():
            for shard in group.shards.values():
                if shard.target != shard.server and shard.target != agent:
                    self._go_direct(group, shard)

    def _on_plan(self, plan: msg.Plan) -> None:
        group = self.groups.setdefault(plan.group, Group(plan.group, plan.step))
        if plan.part < group.parts:
            return
        group.parts = plan.part + 1
        group.step = plan.step
        agent = self._agent() if self.view else ""
        for shard in plan.shards:
            target = agent if agent and not shard.is_buffer else shard.server
            group.shards[shard.shard] = Shard(shard, target)
        self._out.append(fx.Complete(plan.group, "plan", plan.step, plan=plan))

    # ----------------------------------------------------------------- pushes

    def _on_ready(self, index: int, shard_id: int) -> None:
        group = self.groups[index]
        shard = group.shards[shard_id]
        if shard.ready:
            return
        shard.ready = True
        box = self._begin(group, shard.target)
        box.ready(shard_id)
        self._pump_box(group, shard.target, box)

    def _begin(self, group: Group, target: str) -> Outbox:
        """Return the outbox to a receiver, started for the group's present step."""
        key = (target, group.index)
        box = self._boxes.get(key)
        if box is None:
            largest = max(s.nbytes for s in group.shards.values())
            box = self._boxes[key] = Outbox(quota=self.config.quota_bytes, reserve=largest)
        if group.started.get(target) != (group.step, group.parts):
            group.started[target] = (group.step, group.parts)
            box.begin({s.plan.shard: s.nbytes for s in group.ordered() if s.target == target})
        return box

    def _close(self, event: ev.StepClosed | ev.NormAsked, *, commit: bool, now_ns: int) -> None:
        group = self.groups[event.group]
        present = dict.fromkeys(event.present)
        revised = dict.fromkeys(event.revised)
        group.closed = True
        for shard in group.ordered():
            self._close_shard(group, shard, shard.plan.shard in present,
                              shard.plan.shard in revised)  # fmt: skip
        group.commit = commit_with_revisions(event.commit, group)
        group.committed = commit
        if commit:
            group.waiting = {s.plan.shard: None for s in group.shards.values() if s.trainable}
            group.found_inf = False
        else:
            group.squares = {}
            group.norm_from = dict.fromkeys(s.server for s in group.shards.values() if s.trainable)
        self._send_commit(group)
        if commit and group.commit.changed and self._lowest() == self.config.rank:
            for shard_id in group.commit.changed:
                self._queue_assign(group, group.shards[shard_id], ("value",), (), {})
        self._pump(group)
        if commit and not group.waiting:
            self._finish(group)

    def _close_shard(self, group: Group, shard: Shard, present: bool, revised: bool) -> None:
        shard.present = present
        if not present or not shard.trainable:
            if shard.trainable:
                self._begin(group, shard.target).settle(shard.plan.shard)
            return
        if revised:
            shard.revision += 1
            shard.acked = False
        if shard.sent and (revised or shard.void):
            self._push_again(group, shard)
        elif not shard.ready:
            shard.ready = True
            self._begin(group, shard.target).ready(shard.plan.shard)
        shard.void = False

    def _lowest(self) -> int:
        assert self.view is not None
        return min(self.view.members)

    def _push_again(self, group: Group, shard: Shard) -> None:
        """Send the shard's gradient again: now if ``step()`` was called, else when it is."""
        shard.acked = False
        if group.closed and shard.present:
            box = self._begin(group, shard.target)
            if shard.ready and not shard.sent:
                return  # still queued in the window: it will go out with its present revision
            box.settle(shard.plan.shard)
            box.lane_add(shard.plan.shard)
        elif shard.sent:
            shard.void = True

    def _go_direct(self, group: Group, shard: Shard) -> None:
        """Leave the rack agent out for this shard."""
        if shard.target == shard.server:
            return
        shard.target = shard.server
        # The new receiver's admission order must contain the shard: start its outbox afresh.
        group.started.pop(shard.server, None)
        box = self._begin(group, shard.server)
        for other in group.ordered():
            if other.target == shard.server and other.plan.shard != shard.plan.shard:
                if other.sent or not other.trainable:
                    box.settle(other.plan.shard)
                elif other.ready:
                    box.ready(other.plan.shard)
        if shard.sent:
            box.settle(shard.plan.shard)
            self._push_again(group, shard)
        elif shard.ready:
            box.ready(shard.plan.shard)

    def _pump(self, group: Group) -> None:
        for (target, index), box in self._boxes.items():
            if index == group.index:
                self._pump_box(group, target, box)

    def _pump_box(self, group: Group, target: str, box: Outbox) -> None:
        if target not in self._up:
            return
        while (shard_id := box.lane_next()) is not None:
            shard = group.shards[shard_id]
            if shard.assign is not None:
                self._send_assign(group, shard)
            else:
                self._send_push(group, shard, target)
        while (shard_id := box.next_push()) is not None:
            self._send_push(group, group.shards[shard_id], target)

    def _send_push(self, group: Group, shard: Shard, target: str) -> None:
        shard.sent = True
        push = msg.Push(
            **self._head(group), shard=shard.plan.shard, step=group.step, version=group.step,
            revision=shard.revision,
        )  # fmt: skip
        self._send(target, push, fx.Gradient(group.index, shard.plan.shard))

    def _head(self, group: Group) -> dict[str, int]:
        assert self.view is not None
        return {
            "generation": self.view.generation,
            "group": group.index,
            "worker": self.config.rank,
            "incarnation": self.incarnation,
        }

    def _send_commit(self, group: Group, only: str = "") -> None:
        assert group.commit is not None
        targets = dict.fromkeys(s.server for s in group.shards.values() if s.trainable)
        targets.update(dict.fromkeys(s.target for s in group.shards.values() if s.trainable))
        for target in targets:
            if target not in self._up or (only and target != only):
                continue
            cls = msg.Commit if group.committed else msg.NormRequest
            self._send(target, cls(**self._head(group), step=group.step, version=group.step,
                                   commit=group.commit))  # fmt: skip

    def _recommit(self, group: Group) -> None:
        if group.closed and group.busy:
            self._send_commit(group)

    # ------------------------------------------------------------------- data

    def _on_data(self, event: ev.Received) -> None:
        message = event.message
        group = self.groups.get(message.group)  # type: ignore[union-attr]
        if group is None:
            self._release(event)
            return
        match message:
            case msg.PushAck():
                self._on_ack(group, event.source, message)
            case msg.Update():
                self._on_update(group, message, event)
            case msg.Resend():
                self._on_resend(group, message)
            case msg.Stale():
                self._on_stale(group, event.source, message)
            case msg.AssignAck():
                self._on_assign_ack(group, event.source, message)
            case msg.State():
                self._on_state(group, message, event)
            case msg.Norms():
                self._on_norms(group, event.source, message)
            case msg.SnapshotAck():
                self._on_snapshot_ack(group, event.source, message)
            case msg.Refusal():
                self._on_refusal(group, message)
        if not isinstance(message, msg.Update | msg.State):
            self._release(event)

    def _on_ack(self, group: Group, source: NodeId, ack: msg.PushAck) -> None:
        box = self._boxes.get((source, group.index))
        shard = group.shards.get(ack.shard)
        if box is None or shard is None:
            return
        if ack.step == group.step:
            if ack.revision == shard.revision and not shard.void:
                shard.acked = True
                box.lane_done(ack.shard)
            if ack.credit:
                box.returned(ack.shard)
        self._pump_box(group, source, box)

    def _on_update(self, group: Group, update: msg.Update, event: ev.Received) -> None:
        shard = group.shards.get(update.shard)
        wanted = shard is not None and self.wants(group.index, update.shard, update.version)
        if not wanted or (not update.unchanged and not event.lease):
            self._release(event)
            return
        assert shard is not None
        if not update.unchanged:
            self._out.append(fx.Install(group.index, update.shard, update.version, event.lease))
        group.waiting.pop(update.shard)
        group.found_inf |= update.found_inf
        if group.closed:
            box = self._begin(group, shard.target)
            box.returned(update.shard)
            box.lane_done(update.shard)
        if not group.waiting:
            if group.closed:
                self._finish(group)
            else:
                self._out.append(fx.Complete(group.index, "pull", group.step))

    def wants(self, group_index: int, shard_id: int, version: int) -> bool:
        """Return whether an update of this version would be installed (asked before it is received)."""
        group = self.groups.get(group_index)
        if group is None or shard_id not in group.waiting:
            return False
        return version == group.step + (1 if group.closed else 0)

    def _finish(self, group: Group) -> None:
        found_inf = group.found_inf
        group.next_step()
        self._out.append(fx.Complete(group.index, "step", group.step, found_inf=found_inf))

    def _on_resend(self, group: Group, resend: msg.Resend) -> None:
        shard = group.shards.get(resend.shard)
        if shard is None or resend.step != group.step:
            return
        if group.committed and resend.shard not in group.waiting:
            return
        if resend.direct and shard.target != shard.server:
            self._go_direct(group, shard)
        else:
            self._push_again(group, shard)
        self._pump(group)

    def _on_stale(self, group: Group, source: NodeId, stale: msg.Stale) -> None:
        shard = group.shards.get(stale.shard)
        if shard is None or stale.step != group.step:
            return
        box = self._boxes.get((source, group.index))
        if box is not None:
            box.returned(stale.shard)
            box.lane_done(stale.shard)
        if self.view is not None and stale.version <= self.view.generation:
            self._push_again(group, shard)
            self._pump(group)
        else:
            shard.stale = True

    def _on_refusal(self, group: Group, refusal: msg.Refusal) -> None:
        if refusal.step == group.step and group.closed:
            self._fail(refusal.error, refusal.text)
            self._send(LEADER, msg.Failed(error=refusal.error, text=refusal.text))

    def _on_norms(self, group: Group, source: NodeId, norms: msg.Norms) -> None:
        if norms.step != group.step or source not in group.norm_from or group.committed:
            return
        group.norm_from.pop(source)
        group.squares.update(norms.squares)
        if not group.norm_from:
            self._out.append(fx.Complete(group.index, "norm", group.step, squares=group.squares))

    # ----------------------------------------------------- values, state, saves

    def _on_assign_asked(self, event: ev.AssignAsked) -> None:
        group = self.groups[event.group]
        group.assign_count += 1
        for shard_id, (keys, dtypes, scalars) in event.shards.items():
            self._queue_assign(group, group.shards[shard_id], keys, dtypes, scalars)
        group.assigning = dict.fromkeys(event.shards)
        self._pump(group)
        if not group.assigning:
            self._out.append(fx.Complete(group.index, "assign"))

    def _queue_assign(
        self, group: Group, shard: Shard, keys: tuple[str, ...], dtypes: tuple[str, ...],
        scalars: dict[int, dict[str, float]],
    ) -> None:  # fmt: skip
        shard.assign = (keys, dtypes, scalars)
        self._begin(group, shard.server).lane_add(shard.plan.shard)

    def _send_assign(self, group: Group, shard: Shard) -> None:
        assert shard.assign is not None
        keys, dtypes, scalars = shard.assign
        message = msg.Assign(
            **self._head(group), shard=shard.plan.shard, step=group.step, version=group.step,
            revision=group.assign_count, keys=keys, dtypes=dtypes, scalars=scalars,
            at_step=group.closed,
        )  # fmt: skip
        self._send(shard.server, message, fx.Sections(group.index, shard.plan.shard, keys))

    def _on_assign_ack(self, group: Group, source: NodeId, ack: msg.AssignAck) -> None:
        shard = group.shards.get(ack.shard)
        box = self._boxes.get((source, group.index))
        if shard is None or box is None or shard.assign is None or ack.step != group.step:
            return
        shard.assign = None
        box.lane_done(ack.shard)
        if group.closed and shard.present and not shard.acked and shard.sent:
            box.lane_add(ack.shard)  # a revised push had to wait for the lane
        group.assigning.pop(ack.shard, None)
        self._pump_box(group, source, box)
        if not group.assigning and not group.closed:
            self._out.append(fx.Complete(group.index, "assign"))

    def _on_pull_asked(self, event: ev.PullAsked) -> None:
        group = self.groups[event.group]
        group.waiting = dict.fromkeys(event.shards)
        self._pull(group)
        if not group.waiting:
            self._out.append(fx.Complete(group.index, "pull", group.step))

    def _pull(self, group: Group, only: str = "") -> None:
        version = group.step + (1 if group.closed else 0)
        for shard_id in group.waiting:
            server = group.shards[shard_id].server
            if server in self._up and (not only or only == server):
                self._send(server, msg.Pull(**self._head(group), shard=shard_id, step=group.step,
                                            version=version))  # fmt: skip

    def _on_state_asked(self, index: int) -> None:
        group = self.groups[index]
        group.state_waiting = dict.fromkeys(group.shards)
        self._pull_state(group)

    def _pull_state(self, group: Group) -> None:
        for shard_id in group.state_waiting:
            shard = group.shards[shard_id]
            if shard.server in self._up:
                self._send(shard.server, msg.PullState(**self._head(group), shard=shard_id,
                                                       version=group.step))  # fmt: skip

    def _on_state(self, group: Group, state: msg.State, event: ev.Received) -> None:
        if state.shard not in group.state_waiting or state.version != group.step:
            self._release(event)
            return
        group.state_waiting.pop(state.shard)
        self._out.append(
            fx.KeepState(
                group.index, state.shard, state.keys, state.dtypes, state.scalars, event.lease
            )  # fmt: skip
        )
        if not group.state_waiting:
            self._out.append(fx.Complete(group.index, "state", group.step))

    def _on_snapshot_asked(self, event: ev.SnapshotAsked) -> None:
        group = self.groups[event.group]
        assert isinstance(event.info, msg.CheckpointInfo)
        group.snapshot = event.info
        group.snapshot_from = dict.fromkeys(s.server for s in group.shards.values())
        self._send(LEADER, event.info)
        self._send_snapshot(group)

    def _send_snapshot(self, group: Group) -> None:
        assert group.snapshot is not None
        for server in group.snapshot_from:
            if server in self._up:
                self._send(server, msg.Snapshot(**self._head(group), step=group.step,
                           version=group.step, checkpoint=group.snapshot.checkpoint))  # fmt: skip

    def _on_snapshot_ack(self, group: Group, source: NodeId, ack: msg.SnapshotAck) -> None:
        if group.snapshot is None or ack.checkpoint != group.snapshot.checkpoint:
            return
        group.snapshot_from.pop(source, None)
        if not group.snapshot_from:
            group.snapshot = None
            self._out.append(fx.Complete(group.index, "snapshot", group.step))

    # ------------------------------------------------------------------- links

    def _on_peer_up(self, peer: NodeId) -> None:
        self._up[peer] = None
        self._heal(peer)

    def _heal(self, peer: str = "") -> None:
        """Send again whatever has no answer: to one peer over its new link, or to all on a timer."""
        for group in self.groups.values():
            if not peer and not group.busy:
                continue
            for (target, index), box in self._boxes.items():
                if index == group.index and peer in ("", target):
                    self._heal_box(group, target, box, new_link=bool(peer))
            if group.closed and group.busy:
                self._send_commit(group, only=peer)
            self._pull(group, only=peer)
            if group.state_waiting:
                self._pull_state(group)
            if group.snapshot is not None:
                self._send_snapshot(group)

    def _heal_box(self, group: Group, target: str, box: Outbox, *, new_link: bool) -> None:
        lane, box.in_lane = box.in_lane, None
        if lane is not None:
            box.lane_add(lane)
        for shard in group.ordered():
            if shard.target != target or not shard.sent or shard.acked or not shard.trainable:
                continue
            if new_link:
                # What was in flight is lost. On a timer it may still arrive, so it stays counted.
                box.returned(shard.plan.shard)
            if not group.closed:
                shard.void = True  # the bytes may have moved on: push again when step() is called
            elif shard.present and (not group.committed or shard.plan.shard in group.waiting):
                box.lane_add(shard.plan.shard)
        self._pump_box(group, target, box)

    def _on_peer_lost(self, peer: NodeId, reason: str) -> None:
        self._up.pop(peer, None)
        if peer == LEADER and not self._left:
            self._fail("PeerUnreachable", f"the leading dispatcher is gone: {reason}; the job "
                       "cannot go on; see its log in the run directory")  # fmt: skip
            return
        agent = self._agent() if self.view else ""
        if peer == agent and agent:
            self._out.append(fx.Announce("warning", f"rack agent {peer} is gone ({reason}): "
                                         f"{self.node} pushes directly to the servers"))  # fmt: skip
            for group in self.groups.values():
                for shard in group.ordered():
                    if shard.target == peer:
                        self._go_direct(group, shard)
                self._pump(group)
        elif self.view is not None and not self._left:
            self._connect()

    def _arm_retry(self, event: ev.Event, now_ns: int) -> None:
        if not any(g.busy for g in self.groups.values()):
            return
        if isinstance(event, ev.TimerFired | ev.StepClosed | ev.NormAsked | ev.PullAsked
                      | ev.AssignAsked | ev.StateAsked | ev.SnapshotAsked):  # fmt: skip
            self._out.append(fx.SetTimer("retry", now_ns + self.config.retry_ns))

    def _retry(self) -> None:
        if self.failed is None:
            self._heal()

    # -------------------------------------------------------------------- ends

    def _leave(self) -> None:
        self._left = True
        steps = {g.index: g.step for g in self.groups.values()}
        self._send(LEADER, msg.Leave(node=self.node, steps=steps))

    def _fail(self, error: str, text: str) -> None:
        if self.failed is None:
            self.failed = (error, text)
            self._out.append(fx.Complete(-1, "failed", error=error, text=text))

    def _send(
        self, target: str, message: msg.DataMessage | msg.ControlMessage,
        payload: fx.Payload | None = None,
    ) -> None:  # fmt: skip
        self._out.append(fx.Send(NodeId(target), message, payload))

    def _release(self, event: ev.Received) -> None:
        if event.lease:
            self._out.append(fx.Release(event.lease))

    def missing(self, index: int) -> str:
        """Return a sentence that says what the group's wait is for."""
        group = self.groups.get(index)
        if group is None:
            return "the leader has not published a plan"
        shards = list(group.waiting)[:3]
        owners = ", ".join(f"shard {s} on {group.shards[s].server}" for s in shards)
        return f"step {group.step}: {len(group.waiting)} shards without update ({owners})"

    def check(self) -> None:
        """Assert the invariants; called after every event in tests and simulation."""
        for box in self._boxes.values():
            box.check()
        for group in self.groups.values():
            assert all(s in group.shards for s in group.waiting)
            assert not (group.committed and not group.closed)
