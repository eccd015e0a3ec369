"""The worker's role: push gradients as they appear, commit, take updates.

Invariants:
* a shard is pushed with the revision that the commit names, or not at all;
* ``step()`` completes when every shard of the group has the next version (and, where updates may go
  ahead of the commits, every server has confirmed it);
* what is not acknowledged is sent again by a timer; everything sent is idempotent.
"""

from __future__ import annotations

from paradis.core.benefit import StepMeter
from paradis.core.codes import CodedSteps
from paradis.core.flow import ASSIGN, Outbox
from paradis.ids import LEADER, NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker_quorum import WorkerQuorum
from paradis.roles.worker_reading import WorkerReading
from paradis.roles.worker_sharing import WorkerSharing
from paradis.roles.worker_state import (
    Group,
    Shard,
    WorkerConfig,
    choosing_server,
    largest_bundle,
)
from paradis.wire import messages as msg


class WorkerRole(WorkerSharing, WorkerReading, WorkerQuorum):
    """Pure state machine of one worker process.

    Args:
        config: rank and the settings that bound and time it.
    """

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.failed: tuple[str, str] | None = None
        self._closed: dict[int, ev.StepClosed] = {}
        self._left = False
        self._heard = False

    # ------------------------------------------------------------------ entry

    def handle(self, event: ev.Event, now_ns: int) -> list[fx.Effect]:
        """Take one event, return what to do about it."""
        self._out = []
        match event:
            case ev.ShardsReady():
                self._on_ready(event)
                return self._out
            case ev.Received(message=msg.ControlMessage()):
                self._on_control(event.message)
            case ev.Received():
                # Others' repeated commits bring requests, too: those are no answer to this worker.
                asks = isinstance(event.message, msg.Resend | msg.Quorum)
                self._heard = self._heard or not asks
                self._on_data(event)
            case ev.PeerUp():
                self._up[event.peer] = None
                self._heal(event.peer)
            case ev.PeerLost():
                self._on_peer_lost(event)
            case ev.TimerFired(name="retry"):
                self._retry()
            case ev.HostSummed():
                self._on_host_summed(event)
            case ev.HostGroupBroken():
                self._on_host_group_broken(event.reason)
            case _:
                self._on_script(event, now_ns)
        self._arm_retry(event, now_ns)
        return self._out

    def _on_script(self, event: ev.Event, now_ns: int) -> None:
        match event:
            case ev.StepBegun():
                self._on_begun(event)
            case ev.StepClosed() if event is self._closed.get(event.group):
                pass  # a signal handler of the script has committed it, too
            case ev.StepClosed():
                self._closed[event.group] = event
                self._take_time(self.groups[event.group], now_ns)
                self._close(event, commit=True)
            case ev.NormAsked():
                self._close(event, commit=False)
            case ev.AssignAsked():
                self._on_assign_asked(event)
            case ev.PullAsked():
                self._on_pull_asked(event)
            case ev.StateAsked():
                self._on_state_asked(event)
            case ev.ReadAsked():
                self._on_read_asked(event)
            case ev.SnapshotAsked() if event.group in self.readings:
                self._on_as_is_asked(event)
            case ev.SnapshotAsked():
                self._on_snapshot_asked(event)
            case ev.RegisterAsked():
                self._send(LEADER, event.registration)
            case ev.LeaveAsked():
                self._leave()
            case ev.Copied():
                self._send(LEADER, msg.MemoriesCopied(
                    rank=self.config.rank, checkpoint=event.checkpoint, group=event.group,
                ))  # fmt: skip
            case ev.Written():
                self._on_written(event)
            case ev.EffectFailed():
                text = f"{self.node}: {event.what}: {event.text}"
                self._send(LEADER, msg.Failed(error=event.error, text=text))

    def _take_time(self, group: Group, now_ns: int) -> None:
        """Tell the leader how long steps take, once for each way in which they travel."""
        times = group.meter.closed(now_ns, coded=group.coded) if group.meter is not None else ()
        if times:
            self._send(LEADER, msg.Pace(
                rank=self.config.rank, group=group.index, step=group.step, coded=group.coded,
                times_ns=times,
            ))  # fmt: skip

    # ---------------------------------------------------------------- control

    def _on_control(self, message: object) -> None:
        match message:
            case msg.Welcome():
                self.incarnation = message.incarnation
                self._out.append(fx.Complete(-1, "welcome"))
            case msg.View():
                self._on_view(message)
            case msg.Plan():
                self._on_plan(message)
            case msg.Freeze():
                if message.group in self.groups:
                    told = CodedSteps(message.step, message.until)
                    self.groups[message.group].told = told
            case msg.CopyMemories():
                self._on_copy(message)
            case msg.MemoriesCopied():
                self._on_copied_elsewhere(message)
            case msg.Failed() | msg.Refused():
                self._fail(message.error, message.text)
            case msg.CheckpointDone():
                self._out.append(
                    fx.Complete(
                        -1,
                        f"checkpoint {message.checkpoint}",
                        message.step,
                        "StateError" if message.error else "",
                        message.error,
                        path=message.path,
                    )  # fmt: skip
                )
            case msg.Announcement():
                self._out.append(fx.Announce(message.level, message.text, once=True))

    def _on_view(self, view: msg.View) -> None:
        if self.view is not None and view.generation <= self.view.generation:
            return
        before, self.view = self.view, view
        if self._left:
            return
        self._connect()
        self._reroute()
        self._follow_host_group()
        for group in self.groups.values():
            for shard in group.shards.values():
                if shard.stale:
                    shard.stale = False
                    self._push_again(group, shard)
            self._begin_again(group)
            if group.closed and group.busy:
                self._send_commit(group)
            if group.committed and before is not None and self._lowest_now(group, before):
                self._queue_changed(group)
            self._pump(group)

    def _lowest_now(self, group: Group, before: msg.View) -> bool:
        """Whether those below us have left: what the script changed is ours to send now."""
        earlier = group.among(before.members)
        return min(earlier) < self.config.rank == min(self.members(group))

    def _connect(self) -> None:
        assert self.view is not None
        agent = self._agent()
        wanted = {
            NodeId(n): a
            for n, a in self.view.addresses.items()
            if n.startswith("server-") or n == agent
        }
        self._out.append(fx.Connect(wanted))

    def _on_plan(self, plan: msg.Plan) -> None:
        if self._on_read_plan(plan):
            return
        group = self.groups.setdefault(plan.group, Group(plan.group, plan.step))
        if plan.part < group.parts:
            return
        group.parts = plan.part + 1
        group.ranks = plan.ranks
        group.step = plan.step
        group.clocked = plan.mode != "sync"
        agent = "" if group.clocked else self._agent()
        workers = self._rack_size(agent)
        if not plan.part:
            group.coded_steps = CodedSteps(plan.coded_from, plan.coded_until)
            if plan.window_steps:
                group.meter = StepMeter(plan.settle_steps, plan.window_steps)
            group.backup, group.chooser = plan.backup, choosing_server(plan)
        for shard in plan.shards:
            through = agent and not shard.is_buffer and workers <= largest_bundle(shard)
            group.shards[shard.shard] = Shard(shard, agent if through else shard.server)
            group.shards[shard.shard].version = plan.step
        group.resize()
        self._learn_owners(group, plan)
        self._out.append(fx.Complete(plan.group, "plan", plan.step, plan=plan))

    # ------------------------------------------------------------------- data

    def _on_data(self, event: ev.Received) -> None:
        message = event.message
        assert isinstance(message, msg.DataMessage)
        if message.group in self.readings:
            self._on_read_data(self.readings[message.group], event)
            return
        group = self.groups.get(message.group)
        if group is None:
            self._release(event)
            return
        match message:
            case msg.Update():
                self._on_update(group, message, event)
                return
            case msg.State():
                self._on_state(group, message, event)
                return
            case msg.PushAck():
                self._on_ack(group, event.source, message)
            case msg.Resend():
                self._on_resend(group, message)
            case msg.Stale():
                self._on_stale(group, event.source, message)
            case msg.AssignAck():
                self._on_assign_ack(group, event.source, message)
            case msg.Norms():
                self._on_norms(group, event.source, message)
            case msg.SnapshotAck():
                self._on_snapshot_ack(group, event.source, message)
            case msg.Refusal():
                self._on_refusal(group, message)
            case msg.Confirmed():
                self._on_confirmed(group, event.source, message)
            case msg.Quorum():
                self._on_word(group, event.source, message)
            case msg.Late():
                self._on_late(group, message)
        self._release(event)

    def _finish_if_done(self, group: Group) -> None:
        if group.waiting or group.confirming:
            return
        found_inf = group.found_inf
        group.next_step()
        self._say_held(group)
        for checkpoint, step in group.copies.items():
            if step == group.step:
                self._out.append(fx.Copy(group.index, checkpoint, step))
        self._out.append(fx.Complete(group.index, "step", group.step, found_inf=found_inf))

    def _pull_again(self, group: Group) -> None:
        self._pull(group)

    # ------------------------------------------------------------------- links

    def _heal(self, peer: str = "") -> None:
        """Send again what has no answer: to one peer over its new link, or to all on a timer."""
        for group in self.groups.values():
            if not peer and not group.busy:
                continue
            for (target, index), box in self._boxes.items():
                if index == group.index and peer in ("", target):
                    self._heal_box(group, target, box, new_link=bool(peer))
            if peer:
                self._begin_again(group, peer)
            if group.closed and group.busy:
                self._send_commit(group, only=peer)
                self._carry_word(group, only=peer)
            self._pull(group, only=peer)
            self._pull_state(group, only=peer)
            if group.snapshot is not None:
                self._send_snapshot(group, only=peer)
        self._read_again(peer)

    def _heal_box(self, group: Group, target: str, box: Outbox, *, new_link: bool) -> None:
        box.lane_again(ASSIGN)
        for shard in group.ordered():
            if shard.target == target and shard.sent and not shard.acked and shard.trainable:
                self._heal_shard(group, shard, box, new_link=new_link)
        self._pump_boxes(group, (target,))

    def _heal_shard(self, group: Group, shard: Shard, box: Outbox, *, new_link: bool) -> None:
        if new_link:
            # What was in flight is lost. On a timer it may still arrive, so it stays counted.
            box.returned(shard.plan.shard)
            group.turns.received(shard.plan.shard)
        if not group.closed and not shard.sum_held:
            shard.void = True  # the bytes may have moved on: push again when step() is called
        elif (shard.present or shard.sum_held) and (
            not group.committed or shard.plan.shard in group.waiting
        ):
            box.lane_add(shard.plan.shard, shard.plan.priority)

    def _on_peer_lost(self, event: ev.PeerLost) -> None:
        if event.control:
            if not self._left:
                self._fail("PeerUnreachable", f"the leading dispatcher is gone: {event.reason}; "
                           "the job cannot go on; see its log in the run directory")  # fmt: skip
            return
        peer = event.peer
        self._up.pop(peer, None)
        if peer and peer == self._agent():
            text = f"rack agent {peer} is gone ({event.reason}): {self.node} pushes directly"
            self._out.append(fx.Announce("warning", text))
            self._lost_agents[peer] = None
            self._reroute()
        elif self.view is not None and not self._left:
            self._connect()
        for group in self.groups.values():
            group.turns.lost(peer)
            self._pump(group)

    def _arm_retry(self, event: ev.Event, now_ns: int) -> None:
        groups_busy = any(g.busy for g in self.groups.values())
        if not groups_busy and not any(r.busy for r in self.readings.values()):
            return
        if isinstance(event, ev.TimerFired | ev.StepClosed | ev.NormAsked | ev.PullAsked
                      | ev.ReadAsked | ev.AssignAsked | ev.StateAsked
                      | ev.SnapshotAsked):  # fmt: skip
            self._out.append(fx.SetTimer("retry", now_ns + self.config.retry_ns))

    def _retry(self) -> None:
        """Send again what has no answer, unless answers still come: then the link is only slow."""
        if self.failed is None and not self._heard:
            self._heal()
        self._heard = False

    # -------------------------------------------------------------------- ends

    def _leave(self) -> None:
        self._left = True
        self._drop_early()
        self._drop_kept()
        steps = {g.index: g.step for g in self.groups.values()}
        self._send(LEADER, msg.Leave(node=self.node, steps=steps))

    def _fail(self, error: str, text: str) -> None:
        if self.failed is None:
            self.failed = (error, text)
            self._out.append(fx.Complete(-1, "failed", error=error, text=text))

    def missing(self, index: int) -> str:
        """Return a sentence that says what the group's wait is for."""
        if index in self.readings:
            return self._unread(self.readings[index])
        group = self.groups.get(index)
        if group is None:
            return "the leader has not published a plan"
        if group.norm_from:
            return f"step {group.step}: no norms from {', '.join(group.norm_from)}"
        if group.snapshot_from:
            return f"step {group.step}: no copies on {', '.join(group.snapshot_from)}"
        if group.confirming and not group.waiting:
            owners = ", ".join(group.confirming)
            return f"step {group.step}: not confirmed by {owners}: some worker has not committed"
        todo = group.waiting or group.assigning or group.state_waiting
        what = "update" if group.waiting else "answer"
        owners = ", ".join(f"shard {s} on {group.shards[s].server}" for s in list(todo)[:3])
        return f"step {group.step}: {len(todo)} shards without {what} ({owners})"

    def check(self) -> None:
        """Assert the invariants; called after every event in tests and simulation."""
        for box in self._boxes.values():
            box.check()
        for group in self.groups.values():
            group.turns.check()
            assert all(s in group.shards for s in group.waiting)
            assert not (group.committed and not group.closed)
            assert not (group.committed and group.early), "an early update outlives its step()"
