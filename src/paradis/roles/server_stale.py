"""Steps of groups whose workers do not wait for each other: modes ``ssp`` and ``async``.

Each worker's gradient is an update by itself. When a worker has committed its step, each shard is
updated with that worker's gradient, once, and the new value goes to that worker as soon as it may
begin its next step: at once in ``async``; in ``ssp`` when the slowest member is no more than the
bound behind (`paradis.core.clocks`).

Invariants:
* of one worker and shard, each step is applied once or passed over, in order;
* a shard's version is the number of updates that it got, and never goes back.

Source: docs/design/0003-modes.md, and the papers named in `paradis.core.clocks`.
"""

from __future__ import annotations

from collections.abc import Iterable

from paradis.core.aggregation import Contribution
from paradis.core.clocks import NO_BOUND, Clocks, rate_divisor
from paradis.ids import NodeId, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles import step_rules
from paradis.roles.held import HeldGroup, HeldShard, parameter_present
from paradis.roles.server_stale_values import StaleValues
from paradis.roles.stale_state import Committed, StaleGroup, StaleShard
from paradis.wire import messages as msg


class StaleSteps(StaleValues):
    """Steps of such groups; `paradis.roles.server.ServerRole` is the whole role."""

    check_finite: bool
    warning_ns: int
    timeout_ns: int

    def open_stale(self, plan: msg.Plan) -> None:
        """A part of a group is registered: give its shards clocks if its mode needs them."""
        if plan.mode == "sync":
            return
        group = self.groups[plan.group]
        bound = plan.staleness if plan.mode == "ssp" else NO_BOUND
        if group.stale is None:
            group.stale = StaleGroup(plan.mode, bound, scaling=plan.scaling)
        for each in plan.shards:
            shard = group.shards.get(each.shard)
            if shard is not None:
                shard.stale = StaleShard(Clocks(start=plan.step, bound=bound), plan.step)

    def handle_stale(self, event: ev.Event, now_ns: int) -> bool:
        """Handle an event if it is about such a group; return whether it was."""
        group = self._stale_group_of(event)
        if group is None:
            return False
        match event:
            case ev.Received(message=msg.DataMessage()):
                self._on_stale_data(event, group, now_ns)
            case ev.Reduced():
                self._on_taken(event, group)
            case ev.Applied():
                self._on_updated(event, group)
            case ev.Stored():
                self._on_value_stored(event, group)
            case ev.Copied():
                self._on_stale_copied(event, group)
            case ev.TimerFired():
                self._on_stale_timer(event.name, group, now_ns)
        return True

    def _stale_group_of(self, event: ev.Event) -> HeldGroup | None:
        index = -1
        match event:
            case ev.Received(message=msg.DataMessage() as message):
                index = message.group
            case ev.Reduced() | ev.Applied() | ev.Stored():
                index = self._by_shard[event.shard][0].index
            case ev.Copied():
                index = event.group
            case ev.TimerFired() if event.name.startswith("stale:"):
                index = int(event.name.partition(":")[2])
        group = self.groups.get(index)
        return group if group is not None and group.stale is not None else None

    def _on_stale_data(self, event: ev.Received, group: HeldGroup, now_ns: int) -> None:
        message = event.message
        match message:
            case msg.Push():
                self._on_own_push(event, message, group)
            case msg.Commit():
                if self._in_view(event, message):
                    self._on_own_commit(event.source, message, group, now_ns)
            case msg.Assign():
                self._on_stale_assign(event, message, group)
            case msg.Pull():
                self._on_stale_pull(event.source, message, group)
            case msg.Read():
                self._on_read(event.source, message)
            case msg.PullState():
                self._on_stale_pull_state(event.source, message, group)
            case msg.Snapshot():
                self._on_stale_snapshot(message, group)
            case _:
                self._drop(event)

    # ------------------------------------------------------------ pushes, commits

    def _on_own_push(self, event: ev.Received, push: msg.Push, group: HeldGroup) -> None:
        """Take in a worker's gradient of its own step."""
        shard = group.shards.get(push.shard)
        if not self._in_view(event, push):
            return
        if shard is None or shard.stale is None or not event.lease:
            self._drop(event)  # not placed: the sender tries again
            return
        done = shard.stale.clocks.done(push.worker)
        if push.step < done or shard.stale.current == (push.worker, push.step):
            self._drop(event)
            self._ack(event.source, push, credit=True)
            return
        if push.step > done:
            self._drop(event)
            return
        ledger = self._ledger(event.source, group)
        added = shard.collection.add(
            {push.worker: push.revision}, lease=event.lease, nbytes=shard.nbytes, tag=push.revision
        )
        self._free(group, shard, added.dropped, push.step)
        if added.outcome != "held":
            self._drop(event)
            self._ack(event.source, push, credit=not ledger.owes(push.shard, push.revision))
            return
        shard.stale.read[push.worker] = push.version
        now = ledger.on_stored(push.shard, push.revision, shard.nbytes)
        self._ack(event.source, push, credit=now)
        self.go_on(group, shard)

    def _on_own_commit(
        self, source: NodeId, message: msg.Commit, group: HeldGroup, now_ns: int
    ) -> None:
        stale, rank = group.stale, message.worker
        assert stale is not None
        known = stale.commits.get(rank)
        if known is not None and message.step <= known.step:
            if message.step == known.step:
                self._repeat(source, rank, group, known)
            return
        mine = group.shards  # an empty tensor's value is never sent, so it always counts as changed
        changed = [s for s in message.commit.changed if s in mine and not mine[s].passive]
        if changed:
            name = step_rules.parameter_at(group.shards[changed[0]].plan, group.specs, 0)
            self._refuse_step(group, rank, message.step, "WorkersDisagree", f"step {message.step} "
                f"of worker {rank} refused: the script changed the value of {name}, or of a "
                f"parameter beside it; in mode {stale.mode} nobody can tell whose change counts; "
                "change values before paradis.wrap, or train in mode sync")  # fmt: skip
            return
        stale.commits[rank] = Committed(message.step, message.commit, now_ns)
        if stale.bound != NO_BOUND and not stale.timer:
            stale.timer = True
            self._out.append(fx.SetTimer(f"stale:{group.index}", now_ns + self.warning_ns))
        self.go_on_all(group)

    def _repeat(self, source: NodeId, rank: int, group: HeldGroup, known: Committed) -> None:
        """A commit came twice: say again what is held, and ask for what is not."""
        for shard in group.shards.values():
            if shard.stale is None or shard.stale.clocks.done(rank) != known.step:
                continue
            if shard.passive or shard.stale.current == (rank, known.step):
                continue
            number, held = shard.plan.shard, shard.collection.revision_of(rank)
            if held is not None:
                owed = self._ledger(source, group).owes(number, held)
                self._send_ack(group, shard, rank, known.step, held, credit=not owed)
            wanted = known.commit.revisions.get(number, 0)
            if held != wanted and shard.present_in(known.commit):
                self._send(source, msg.Resend(
                    generation=self.view.generation if self.view else 0, group=group.index,
                    shard=number, step=known.step,
                ))  # fmt: skip

    def _free(
        self, group: HeldGroup, shard: HeldShard, done: Iterable[Contribution], step: int
    ) -> None:
        """Give memory back, and the credit that was withheld for it."""
        for each in done:
            self._out.append(fx.Release(each.lease))
            rank = next(iter(each.ranks))
            ledger = self._ledger(worker_id(rank), group)
            if ledger.on_released(shard.plan.shard, each.tag, each.nbytes):
                self._send_ack(group, shard, rank, step, each.tag, credit=True)

    def _send_ack(
        self, group: HeldGroup, shard: HeldShard, rank: int, step: int, revision: int, *,
        credit: bool,
    ) -> None:  # fmt: skip
        self._send(worker_id(rank), msg.PushAck(
            generation=self.view.generation if self.view else 0, group=group.index,
            shard=shard.plan.shard, step=step, worker=rank, revision=revision,
            sequence=int(credit),
        ))  # fmt: skip

    # ------------------------------------------------------------------ updates

    def go_on_all(self, group: HeldGroup) -> None:
        members = self.present(group)
        for shard in sorted(group.shards.values(), key=lambda s: -s.plan.priority):
            if shard.stale is not None:
                self._forget_gone(group, shard, members)
            self.go_on(group, shard)

    def _forget_gone(self, group: HeldGroup, shard: HeldShard, members: tuple[int, ...]) -> None:
        """Nobody will commit what somebody pushed who has left."""
        assert group.stale is not None and shard.stale is not None
        for each in [c for c in shard.collection.held if next(iter(c.ranks)) not in members]:
            rank = next(iter(each.ranks))
            step = shard.stale.clocks.done(rank)
            known = group.stale.commits.get(rank)
            if known is None or known.step != step:
                shard.collection.held.remove(each)
                self._free(group, shard, [each], step)
        for rank in [r for r in shard.stale.owed if r not in members]:
            del shard.stale.owed[rank]

    def go_on(self, group: HeldGroup, shard: HeldShard) -> None:
        if self.view is None or not shard.initialized or self._busy(shard):
            return
        assert group.stale is not None and shard.stale is not None
        pulls, shard.pulls = shard.pulls, []
        for source, pull in pulls:
            self._on_stale_pull(source, pull, group)
        asked, shard.stale.asked = shard.stale.asked, {}
        for source, question in asked.items():
            self._on_stale_pull_state(source, question, group)
        self.answer_readers(group, shard)
        if not shard.passive:
            self._pass_over(group, shard)
            self._answer_owed(group, shard)
        if group.stale.saving is not None:
            return
        if shard.pending is not None:
            event, shard.pending = shard.pending, None
            assert isinstance(event.message, msg.Assign)
            self._store(group, shard, event, event.message)
        elif not shard.passive:
            self._begin_update(group, shard)

    def _pass_over(self, group: HeldGroup, shard: HeldShard) -> None:
        """Count the steps of which nothing is to be applied here."""
        assert group.stale is not None and shard.stale is not None
        for rank, known in group.stale.commits.items():
            if shard.stale.clocks.done(rank) != known.step:
                continue
            if known.commit.found_inf or not shard.present_in(known.commit):
                held = [c for c in shard.collection.held if rank in c.ranks]
                for each in held:
                    shard.collection.held.remove(each)
                self._free(group, shard, held, known.step)
                self._finish_step(group, shard, rank, known.step)

    def _finish_step(self, group: HeldGroup, shard: HeldShard, rank: int, step: int) -> None:
        assert shard.stale is not None
        shard.stale.clocks.finish(rank, step)
        if rank in self.present(group):
            shard.stale.owed[rank] = step

    def _answer_owed(self, group: HeldGroup, shard: HeldShard) -> None:
        assert shard.stale is not None
        stale = shard.stale
        members = self.present(group)
        for rank, step in list(stale.owed.items()):
            if stale.clocks.may_begin(rank, step + 1, members):
                del stale.owed[rank]
                same = stale.given.get(rank, stale.base) == shard.version
                stale.given[rank] = shard.version
                self._send_value(worker_id(rank), group, shard, step, unchanged=same)

    def _begin_update(self, group: HeldGroup, shard: HeldShard) -> None:
        """Take the first gradient that its worker has committed."""
        assert group.stale is not None and shard.stale is not None
        collection = shard.collection
        for each in list(collection.held):
            rank, revision = next(iter(each.ranks.items()))
            known = group.stale.commits.get(rank)
            if known is None or known.step != shard.stale.clocks.done(rank):
                continue  # tentative
            collection.held.remove(each)
            if revision != known.commit.revisions.get(shard.plan.shard, 0):
                self._free(group, shard, [each], known.step)
                continue
            collection.summing = [each]
            shard.stale.current = (rank, known.step)
            shard.ticket += 1
            self._out.append(
                fx.Reduce(shard.plan.shard, shard.ticket, ((each.lease,),), 1, missing=False)
            )
            return

    def _on_taken(self, event: ev.Reduced, group: HeldGroup) -> None:
        """The gradient is in the accumulator: run the optimizer with it."""
        shard = group.shards[event.shard]
        if event.ticket != shard.ticket or not shard.collection.summing:
            return
        assert shard.stale is not None and shard.stale.current is not None
        assert group.stale is not None
        rank, step = shard.stale.current
        done, shard.collection.summing = shard.collection.summing, []
        shard.applying = True
        self._free(group, shard, done, step)
        commit = group.stale.commits[rank].commit
        staleness = shard.version - shard.stale.read[rank]
        divisor = rate_divisor(
            members=len(self.present(group)), staleness=staleness, scaled=group.stale.scaling
        )
        present = tuple(parameter_present(commit, s.parameter) for s in shard.plan.segments)
        options = slowed(commit.options[shard.plan.options_group], divisor)
        self._out.append(fx.Apply(group.index, event.shard, step, options, present, commit.clip,
                                  self.check_finite, staleness=staleness))  # fmt: skip

    def _on_updated(self, event: ev.Applied, group: HeldGroup) -> None:
        shard = group.shards[event.shard]
        assert shard.stale is not None and shard.stale.current is not None
        rank, step = shard.stale.current
        if event.non_finite >= 0:  # not applied, and stays so: the job ends
            name = step_rules.parameter_at(shard.plan, group.specs, event.non_finite)
            self._refuse_step(group, rank, step, "NonFiniteGradient", f"step {step} of worker "
                              f"{rank}: its gradient of {name} holds NaN or infinity")  # fmt: skip
            return
        self._out.append(fx.ReleaseSum(event.shard))
        shard.applying = False
        shard.stale.current = None
        shard.version += 1
        self._finish_step(group, shard, rank, step)
        self.go_on(group, shard)
        self._copy_when_idle(group)

    def _refuse_step(self, group: HeldGroup, rank: int, step: int, error: str, text: str) -> None:
        self._send(worker_id(rank), msg.Refusal(group=group.index, step=step, error=error,
                                                text=text))  # fmt: skip
        self._fail_job(error, text)

    # ------------------------------------------------------------------- timers

    def _on_stale_timer(self, name: str, group: HeldGroup, now_ns: int) -> None:
        """Say who waits for whom within the bound; too long, and the job ends."""
        assert group.stale is not None
        waiting = self._waiting(group)
        group.stale.timer = bool(waiting)
        since_ns = {rank: group.stale.commits[rank].since_ns for rank in waiting}
        for rank, (step, slow) in waiting.items():
            waited_ns = now_ns - since_ns[rank]
            if waited_ns < self.warning_ns:
                continue
            text = step_rules.bound_timeout_text(
                self.node, group.index, (rank, step), slow, group.stale.bound, waited_ns
            )
            if waited_ns >= self.timeout_ns:
                self._refuse_step(group, rank, step, "DeadlineExceeded", text + "; giving up")
                return
            self._send("dispatcher-0", msg.Announcement(level="warning", text=text))
            break
        if waiting:
            due_ns = [
                t + self.warning_ns for t in since_ns.values() if t + self.warning_ns > now_ns
            ]
            self._out.append(fx.SetTimer(name, min(due_ns, default=now_ns + self.warning_ns)))

    def _waiting(self, group: HeldGroup) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Return rank -> (its step, who is too far behind), of workers that wait."""
        members = self.present(group)
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for shard in group.shards.values():
            if shard.stale is None:
                continue
            for rank, step in shard.stale.owed.items():
                slow = shard.stale.clocks.waits_for(step + 1, members)
                if slow:
                    found.setdefault(rank, (step, slow))
        return found

    def check(self) -> None:
        """Assert the invariants; called after every event in tests and simulation."""
        super().check()
        for _, shard in self._by_shard.values():
            if shard.stale is not None:
                shard.stale.check(shard.version)


def slowed(options: msg.Options, divisor: int) -> msg.Options:
    """Return the hyper-parameters with the learning rate divided."""
    rate = options.get("lr")
    if divisor == 1 or isinstance(rate, bool) or not isinstance(rate, int | float):
        return options
    return {**options, "lr": rate / divisor}
