"""The server's role: fence, collect, sum, apply when all committed, send the update at once.

Invariants:
* an update is applied only when every member of the step has committed it, from exactly the
  committed revisions; or ahead of that, and then the commits confirm it (`server_early`);
* a shard's version goes up by one per step and never back;
* credit never waits for an update to be applied, only for a sum.
"""

from __future__ import annotations

import msgspec

from paradis.core.codes import NUMBERS, CodedSteps
from paradis.core.host_groups import route_end
from paradis.ids import NodeId, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles import step_rules
from paradis.roles.held import HeldGroup, HeldShard, parameter_present
from paradis.roles.server_quorum import ServerQuorum
from paradis.roles.server_stale import StaleSteps
from paradis.wire import messages as msg


class ServerRole(ServerQuorum, StaleSteps):
    """Pure state machine of one server.

    Args:
        node: own name.
        quota_bytes: what one pusher may have unreturned here, per group.
        warning_ns: how long a step may wait for workers before a warning names them.
        timeout_ns: how long before the job fails with ``Gradient sync timeout``.
        check_finite: refuse sums with NaN or infinity.
        early_finish_fails: a step without a worker that left early ends the job.
        early_update: apply a shard that all have pushed before all have committed.
    """

    _serves_racks = True

    def __init__(
        self, node: NodeId, *, quota_bytes: int, warning_ns: int, timeout_ns: int,
        check_finite: bool = True,
        early_finish_fails: bool = False, early_update: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(node, quota_bytes=quota_bytes)
        self.check_finite = check_finite
        self.warning_ns = warning_ns
        self.early_finish_fails = early_finish_fails
        self.early_update = early_update
        self.timeout_ns = timeout_ns

    def handle(self, event: ev.Event, now_ns: int) -> list[fx.Effect]:
        """Take one event, return what to do about it."""
        self._out = []
        if self.handle_stale(event, now_ns):
            return self._out
        match event:
            case ev.Received(message=msg.ControlMessage()):
                self._on_control(event.message)
            case ev.Received():
                self._on_data(event, now_ns)
            case ev.Reduced():
                self.on_reduced(event)
            case ev.Applied():
                self._on_applied(event)
            case ev.Stored():
                self._on_stored(event)
            case ev.Measured():
                self._on_measured(event)
            case ev.Copied():
                self._on_copied(event)
            case ev.Written():
                self._on_written(event)
            case ev.TimerFired():
                self._on_timer(event.name, now_ns)
            case ev.PeerLost(control=True):
                text = f"the leading dispatcher is gone: {event.reason}"
                self._out.append(fx.Fail("PeerUnreachable", text))
            case ev.EffectFailed():
                self._fail_job(event.error, f"{self.node}: {event.what}: {event.text}")
        return self._out

    # ---------------------------------------------------------------- control

    def _on_control(self, message: object) -> None:
        match message:
            case msg.Welcome():
                self.incarnation = message.incarnation
            case msg.View():
                if self.adopt_view(message):
                    self._send("dispatcher-0", msg.ViewReady(generation=message.generation))
                    for group in self.groups.values():
                        self._consider(group)
            case msg.Plan():
                self._on_plan(message)
            case msg.Shutdown():
                self._out.append(fx.End(message.reason))
            case msg.Failed() | msg.Refused():
                self._out.append(fx.Fail(message.error, message.text))

    def _on_plan(self, plan: msg.Plan) -> None:
        mine = [s for s in plan.shards if s.server == self.node]
        if self.adopt_plan(plan, mine):
            self.open_stale(plan)
            self.open_quorum(plan)
            if plan.coded_from == plan.step:
                self._out.append(fx.BeginCodes(plan.group, plan.options))
            for shard in mine if plan.restore else ():
                self._out.append(fx.Load(plan.group, shard.shard, 1, plan.restore))
        self._send(
            "dispatcher-0",
            msg.PlanReady(generation=plan.generation, group=plan.group, part=plan.part),
        )

    # ------------------------------------------------------------------- data

    def _on_data(self, event: ev.Received, now_ns: int) -> None:
        message = event.message
        match message:
            case msg.Push() | msg.RackPush():
                self.on_push(event, message)
            case msg.Commit() | msg.NormRequest():
                if self._in_view(event, message):
                    self._on_commit(event.source, message, now_ns)
            case msg.Begin():
                self._on_begin(message)
            case msg.Quorum():
                self._on_word(message)
            case msg.Holding():
                self._on_holding(message)
            case msg.Assign():
                self._on_assign(event, message)
            case msg.Pull():
                self._on_pull(event.source, message)
            case msg.Read():
                self._on_read(event.source, message)
            case msg.PullState():
                self._on_pull_state(event.source, message)
            case msg.Snapshot():
                self._on_snapshot(message)
            case msg.Resend():
                pass
            case _:
                self._drop(event)

    def _on_commit(
        self, source: NodeId, message: msg.Commit | msg.NormRequest, now_ns: int
    ) -> None:
        group = self.groups.get(message.group)
        if isinstance(message, msg.Commit) and self._late_or_again(source, message, group):
            return
        if group is None or message.step != group.step:
            if group is not None:
                self._confirm_again(source, message, group)
            return  # an older step's updates are pulled, a newer one cannot be
        if not group.commits and not group.norms:
            group.since_ns = now_ns
            self._out.append(fx.SetTimer(f"sync:{group.index}", now_ns + self.warning_ns))
        if isinstance(message, msg.NormRequest):
            self._on_norm_request(source, message, group)
        elif message.worker in group.commits:
            self.tell_state(source, message.worker, group)
        else:
            group.commits[message.worker] = message.commit
            group.ahead.renew()
            self._consider(group)

    def _on_norm_request(self, source: NodeId, message: msg.NormRequest, group: HeldGroup) -> None:
        """Note a norm request; a repeated one gets the very answer that the others got."""
        known = group.norms.get(message.worker)
        if known is None or message.sequence > known.sequence:
            group.norms[message.worker] = message
            self._consider(group)
        elif message.sequence in group.squares:
            self._send_norms(source, group, message.sequence)
        elif message.sequence == known.sequence:
            self.tell_state(source, message.worker, group)

    def _consider(self, group: HeldGroup) -> None:
        """Commits or members changed: judge the step when all are in, then go on with shards."""
        if self.view is None:
            return
        if group.stale is not None:
            self.go_on_all(group)
            return
        if not group.verdict and self._may_judge(group):
            self._judge(group)
        # Backwards through the admission order: backward ends where the next forward begins.
        for shard in sorted(group.shards.values(), key=lambda s: -s.plan.priority):
            self.advance(group, shard)
        self._end_step(group)
        self._measure(group)

    def _judge(self, group: HeldGroup) -> None:
        members = self.members(group)
        commits = {r: group.commits[r] for r in members}
        refusal = step_rules.disagreement(commits, group.specs, group.shards, group.step)
        if refusal:
            self._refuse(group, "WorkersDisagree", refusal)
            return
        refusal = self._unconfirmed(group, commits)
        if refusal:
            self._refuse(group, "StateError", refusal)
            return
        if not self._tell_early_finish(group, members):
            return
        group.verdict = "skip" if any(c.found_inf for c in commits.values()) else "apply"
        if group.verdict == "skip":
            group.skipped = group.step
        group.options = commits[members[0]].options
        told = [CodedSteps(c.coded_from, c.coded_until) for c in commits.values()]
        group.coded_steps = group.coded_steps.agreed(told, group.step)  # on all servers alike
        self._adopt_order(group, commits[members[0]].order)

    def _adopt_order(self, group: HeldGroup, order: tuple[int, ...]) -> None:
        """Take over the learnt admission order. It reaches every worker with this step's updates.

        All pushers to a receiver must keep to one order. Workers cannot start the next step without
        every update; a rack agent might miss one, so with rack agents the planned order stays.
        """
        if not order or self.routes.racks:
            return
        for place, shard_id in enumerate(order):
            shard = group.shards.get(shard_id)
            if shard is not None:
                shard.plan = msgspec.structs.replace(shard.plan, priority=place)
        group.reordered = group.step

    def _tell_early_finish(self, group: HeldGroup, members: tuple[int, ...]) -> bool:
        """The first step without a worker that left: say so; False if that ends the job."""
        assert self.view is not None
        for rank, steps in sorted(self.view.left.items()):
            if rank in members or rank in group.gone or (group.ranks and rank not in group.ranks):
                continue
            group.gone[rank] = None
            text = step_rules.early_finish_text(rank, steps.get(group.index, 0), members)
            if self.early_finish_fails:
                self._refuse(group, "WorkersDisagree", f"step {group.step} refused: {text}; give "
                             "all workers the same number of batches, or set "
                             "training.on_early_finish: continue")  # fmt: skip
                return False
            self._send("dispatcher-0", msg.Announcement(level="warning", text=text))
        return True

    def _refuse(self, group: HeldGroup, error: str, text: str) -> None:
        group.verdict = "refused"
        for rank in self.members(group):
            self._send(worker_id(rank), msg.Refusal(group=group.index, step=group.step,
                                                    error=error, text=text))  # fmt: skip
        self._fail_job(error, text)

    # ------------------------------------------------------------------ shards

    def advance(self, group: HeldGroup, shard: HeldShard) -> None:
        """Sum, apply or finish a shard as far as it can go."""
        if shard.passive or shard.applying or self.view is None or not shard.initialized:
            return
        if group.quorum is not None and group.quorum.word is None:
            return  # it is not known whose gradients count
        current = shard.version == group.step
        members = self.members(group) if current else self.present(group)
        if not members or group.saving == "copying":
            return
        expected = self.sum_if_complete(group, shard, self.tree(members), len(members))
        if not current or group.verdict not in ("apply", "skip"):
            if current:
                self._apply_early(group, shard, members, expected)
            return
        commit = group.commits[members[0]]
        # Before the sum is looked at: what it lacks may wait in the lane behind the assignment.
        assigned = self._assign_first(group, shard, commit)
        if not assigned or shard.collection.summing:
            return
        if group.verdict == "skip" or all(v is None for v in expected.values()):
            # What the script changed everywhere alike is sent once more; there is no code of it.
            unchanged = self.coded(group, shard) or shard.plan.shard not in commit.changed
            self._finish(group, shard, unchanged=unchanged)
            return
        if not shard.collection.is_good(expected):
            return
        shard.applying = True
        present = tuple(
            any(parameter_present(group.commits[r], s.parameter) for r in members)
            for s in shard.plan.segments
        )
        shard.note_present(present)
        options = group.options[shard.plan.options_group]
        self._out.append(fx.Apply(group.index, shard.plan.shard, group.step, options, present,
                                  commit.clip, self.check_finite, self.coded(group, shard),
                                  self.measures(group, shard)))  # fmt: skip

    def _assign_first(self, group: HeldGroup, shard: HeldShard, commit: msg.StepCommit) -> bool:
        """Values that all workers changed alike go in before the update; True when they are in."""
        if shard.plan.shard not in commit.changed or shard.assign_step == group.step:
            return True
        event, shard.pending = shard.pending, None
        if event is not None and isinstance(event.message, msg.Assign):
            self._store(group, shard, event, event.message)
        return False

    def _on_applied(self, event: ev.Applied) -> None:
        group, shard = self._by_shard[event.shard]
        if event.non_finite >= 0:  # not applied, and stays so: the job ends
            name = step_rules.parameter_at(shard.plan, group.specs, event.non_finite)
            self._refuse(group, "NonFiniteGradient", f"step {group.step}: the mean gradient of "
                         f"{name} holds NaN or infinity")  # fmt: skip
            return
        shard.applying = False
        if event.norms:
            group.norms_of_v[event.shard] = event.norms
        self._finish(group, shard, unchanged=False)

    def _finish(self, group: HeldGroup, shard: HeldShard, *, unchanged: bool) -> None:
        """The shard has its next version: free the sum, send the update.

        A rack whose workers pushed directly may have lost its agent: they get the update directly,
        and the agent, if it lives, learns that the step is over.
        """
        direct, summed = dict(shard.collection.direct), shard.collection.summed or {}
        if shard.pending is not None:
            self._drop(shard.pending)
            shard.pending = None
        self._release_all(group, shard, shard.collection.clear())
        self._out.append(fx.ReleaseSum(shard.plan.shard))
        shard.version += 1
        shard.whole = {}
        if unchanged:
            shard.kept = shard.version
        ends: dict[NodeId, bool] = {}  # whether its sum is in the update
        targets: dict[NodeId, None] = {}
        routes = self.routes.of(shard.plan.shard)
        for rank in self.members(group):
            route = routes.get(rank, -1)
            if route >= 0:
                end = route_end(route)
                ends[end] = ends.get(end, False) or (rank in summed and route not in direct)
            if route < 0 or route in direct:
                targets[worker_id(rank)] = None
        for target in {**targets, **ends}:
            self._send_update(
                target, group, shard, unchanged=unchanged, counted=ends.get(target, False)
            )
        self.answer_readers(group, shard)
        group.unfinished -= 1
        self._end_step(group)

    def _send_update(
        self, target: NodeId, group: HeldGroup, shard: HeldShard, *, unchanged: bool,
        counted: bool,
    ) -> None:  # fmt: skip
        assert self.view is not None
        coded = bool(shard.plan.codec) and group.coded_at(shard.version - 1) and not unchanged
        update = msg.Update(
            generation=self.view.generation, group=group.index, shard=shard.plan.shard,
            step=shard.version - 1, version=shard.version, unchanged=unchanged,
            revision=int(counted and not unchanged), found_inf=group.verdict == "skip",
            priority=shard.plan.priority,
            codec=NUMBERS[shard.plan.codec] if coded else 0,
            present=shard.present if coded else b"",
            coded_from=group.coded_steps.begin, coded_until=group.coded_steps.end,
        )  # fmt: skip
        payload: fx.Payload | None = fx.Sections(group.index, shard.plan.shard)
        if coded:
            payload = fx.Code(shard.plan.shard)
        self._send(target, update, None if unchanged else payload)

    # ------------------------------------------------------------------ timers

    def _on_timer(self, name: str, now_ns: int) -> None:
        kind, _, index = name.partition(":")
        group = self.groups.get(int(index)) if kind == "sync" else None
        if group is None or (not group.commits and not group.norms):
            return
        table = group.commits or group.norms
        missing = [r for r in self.members(group) if r not in table]
        waited_ns = now_ns - group.since_ns
        text = ""
        if missing:
            text = step_rules.sync_timeout_text(self.node, group, missing, waited_ns)
        elif lacking := self.lacking(group):
            text = step_rules.transfer_timeout_text(self.node, group, lacking, waited_ns)
        if text and waited_ns >= self.warning_ns:
            if waited_ns >= self.timeout_ns:
                self._refuse(group, "DeadlineExceeded", text + "; giving up")
                return
            self._send("dispatcher-0", msg.Announcement(level="warning", text=text))
        self._out.append(fx.SetTimer(name, now_ns + self.warning_ns))
