"""The server's answers beside the step: pulls, assigned values, state, norms, copies.

Invariant: a value is sent or taken in only while nobody is about to change it.
"""

from __future__ import annotations

from paradis.core.codes import NUMBERS
from paradis.ids import NodeId, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.server_reading import ServerReading
from paradis.wire import messages as msg


class ServerValues(ServerReading):
    """Everything that a server is asked for and that is not a step."""

    # ------------------------------------------------------------------- pulls

    def _on_pull(self, source: NodeId, pull: msg.Pull) -> None:
        found = self._by_shard.get(pull.shard)
        if found is None:
            return
        group, shard = found
        group.catch_up(pull.step)
        if not shard.initialized:
            if all(s != source for s, _ in shard.pulls):
                shard.pulls.append((source, pull))  # bounded by the number of workers
            return
        if shard.version < pull.version or self._in_flux(group, shard):
            return  # the update comes by itself, or the worker asks again
        if pull.step < pull.version != shard.version:
            return  # late: the worker has done that step since
        # Within a step a worker has the version before, and a code says what comes of that.
        coded = bool(shard.plan.codec) and pull.version > pull.step and group.coded_at(pull.step)
        unchanged = coded and shard.kept == shard.version
        update = msg.Update(
            generation=self.view.generation if self.view else 0, group=group.index,
            shard=pull.shard, step=pull.step, version=shard.version, sequence=pull.sequence,
            found_inf=group.skipped == shard.version - 1, priority=shard.plan.priority,
            unchanged=unchanged, codec=NUMBERS[shard.plan.codec] if coded and not unchanged else 0,
            present=shard.present if coded else b"", coded_from=group.coded_steps.begin,
            coded_until=group.coded_steps.end,
        )  # fmt: skip
        # With backup workers others go on while an answer to a repeated question is on its way.
        payload: fx.Payload = fx.Sections(group.index, pull.shard, copied=group.quorum is not None)
        if coded:
            payload = fx.Code(pull.shard)
        self._send(source, update, None if unchanged else payload)

    def _in_flux(self, group: HeldGroup, shard: HeldShard) -> bool:
        """Whether the value is being changed: nobody needs it as it is, or may see it half done."""
        if shard.applying:
            return True
        return shard.version == group.step and bool(group.verdict) and not shard.passive

    # ------------------------------------------------------------------ values

    def _on_assign(self, event: ev.Received, message: msg.Assign) -> None:
        found = self._by_shard.get(message.shard)
        if found is None or not event.lease:
            self._drop(event)
            return
        group, shard = found
        group.catch_up(message.step)
        stamp = (message.step, message.revision) if not message.at_step else (message.step, 1 << 30)
        # A buffer is nobody's to update: the worker that gives it may be behind or ahead.
        free = group.quorum is not None and shard.passive
        if stamp <= shard.assigned or (message.step != group.step and not free):
            self._drop(event)
            if shard.assigning is None:
                self._send_assign_ack(event.source, message)
            return
        if shard.assigning is not None or shard.pending is not None or group.saving == "copying":
            self._drop(event)
        elif message.at_step and group.verdict not in ("apply", "skip"):
            shard.pending = event
        else:
            self._store(group, shard, event, message)

    def _store(
        self, group: HeldGroup, shard: HeldShard, event: ev.Received, message: msg.Assign
    ) -> None:
        shard.assigned = (message.step, 1 << 30 if message.at_step else message.revision)
        shard.assigning = (event.source, message)
        self._out.append(fx.Store(group.index, message.shard, message.revision, event.lease,
                                  message.keys, message.dtypes, message.scalars))  # fmt: skip

    def _send_assign_ack(self, target: NodeId, message: msg.Assign) -> None:
        self._send(target, msg.AssignAck(group=message.group, shard=message.shard,
                                         step=message.step, revision=message.revision))  # fmt: skip

    def _on_stored(self, event: ev.Stored) -> None:
        group, shard = self._by_shard[event.shard]
        shard.initialized = True
        if shard.assigning is not None:
            source, message = shard.assigning
            shard.assigning = None
            if message.at_step:
                shard.assign_step = message.step
            self._send_assign_ack(source, message)
        pulls, shard.pulls = shard.pulls, []
        for source, pull in pulls:
            self._on_pull(source, pull)
        self.answer_readers(group, shard)
        self.copy_as_is(group)
        self.advance(group, shard)

    def _on_pull_state(self, source: NodeId, pull: msg.PullState) -> None:
        found = self._by_shard.get(pull.shard)
        if found is not None:
            found[0].catch_up(pull.version)
        if found is None or found[1].version < pull.version or not found[1].initialized:
            return
        if self._in_flux(*found):
            return
        state = msg.State(
            generation=self.view.generation if self.view else 0, group=pull.group,
            shard=pull.shard, step=pull.step, version=found[1].version, sequence=pull.sequence,
        )  # fmt: skip
        keys = ("memories",) if pull.memories else ("*",)
        copied = found[0].quorum is not None
        self._send(source, state, fx.Sections(pull.group, pull.shard, keys, copied))

    # ------------------------------------------------------------ norms, saves

    def _measure(self, group: HeldGroup) -> None:
        """Answer norm requests when all have asked and every sum is made of what they named."""
        if not group.norms or group.commits or self.view is None:
            return
        if not self.everybody(group, group.norms):
            return
        rounds = {group.norms[r].sequence for r in self.members(group)}
        number = max(rounds)
        if len(rounds) > 1 or group.measuring == number:
            return
        ready = []
        for shard in group.shards.values():
            if shard.passive:
                continue
            expected = self.expected(group, shard)
            if all(v is None for v in expected.values()):
                continue
            if shard.collection.summing or not shard.collection.is_good(expected):
                return
            ready.append(shard.plan.shard)
        group.measuring = number
        self._out.append(fx.Measure(group.index, group.step, tuple(ready)))

    def _on_measured(self, event: ev.Measured) -> None:
        group = self.groups[event.group]
        if event.step != group.step or not group.measuring:
            return
        group.squares = {group.measuring: event.squares}
        for rank in self.members(group):
            self._send_norms(worker_id(rank), group, group.measuring)

    def _send_norms(self, target: NodeId, group: HeldGroup, number: int) -> None:
        self._send(target, msg.Norms(group=group.index, step=group.step, sequence=number,
                                     squares=group.squares[number]))  # fmt: skip

    def on_reduced(self, event: ev.Reduced) -> None:
        """A sum is ready; norm requests may have waited for it."""
        super().on_reduced(event)
        self._measure(self._by_shard[event.shard][0])

    def _on_snapshot(self, snapshot: msg.Snapshot) -> None:
        group = self.groups.get(snapshot.group)
        if group is not None and snapshot.as_is:
            self._ask_as_is(group, snapshot)
            return
        if group is not None:
            group.catch_up(snapshot.version)
        if group is None or group.step != snapshot.version:
            return
        if group.copying == snapshot.checkpoint:
            if group.copied == snapshot.checkpoint:
                self._send_snapshot_ack(group, snapshot.checkpoint)
            return
        group.copying = snapshot.checkpoint
        self._out.append(fx.Copy(group.index, snapshot.checkpoint, group.step))

    def _on_copied(self, event: ev.Copied) -> None:
        group = self.groups[event.group]
        group.copied = event.checkpoint
        if group.saving:
            self._copied_as_is(group)
            self._consider(group)
            return
        self._send_snapshot_ack(group, event.checkpoint)

    def _consider(self, group: HeldGroup) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _send_snapshot_ack(self, group: HeldGroup, checkpoint: str) -> None:
        self._send(worker_id(0), msg.SnapshotAck(group=group.index, step=group.step,
                                                 checkpoint=checkpoint))  # fmt: skip

    def _on_written(self, event: ev.Written) -> None:
        if event.saved is not None:
            self._send("dispatcher-0", event.saved)
        else:
            self._send("dispatcher-0", msg.SaveFailed(node=self.node, checkpoint=event.checkpoint,
                                                      text=event.error))  # fmt: skip
