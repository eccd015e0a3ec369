"""The worker's requests beside the step: values, optimizer state, norms, snapshots.

Invariant: a request is repeated until it is answered, and an answer to an earlier request of the
same kind is known by its number.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paradis.core.codes import CodedSteps
from paradis.core.flow import ASSIGN
from paradis.ids import LEADER, NodeId, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker_pushes import WorkerPushes
from paradis.roles.worker_state import Assignment, Group, Shard
from paradis.wire import messages as msg

_COPIES_MAX = 8
"""Checkpoints remembered, so that one asked for twice at a step is not copied twice."""


class WorkerValues(WorkerPushes):
    """Everything that the script asks for and that is not a gradient."""

    def reads(self, group: int, shard: int, version: int) -> bool:
        """Return whether a value of what others train is newer than the one that is here."""
        raise AssertionError("subclass")  # pragma: no cover

    def _keep_early(self, group: Group, update: msg.Update, event: ev.Received) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _miss(self, group: Group, shard_id: int) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _spread(self, group: Group, update: msg.Update, lease: int) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    # ------------------------------------------------------------- assignments

    def _on_assign_asked(self, event: ev.AssignAsked) -> None:
        group = self.groups[event.group]
        group.assign_count += 1
        for shard_id, assignment in event.shards.items():
            self._queue_assign(group, group.shards[shard_id], assignment)
        group.assigning = dict.fromkeys(event.shards)
        self._pump(group)
        if not group.assigning:
            self._out.append(fx.Complete(group.index, "assign"))

    def _queue_changed(self, group: Group) -> None:
        """Values that the script changed: the lowest rank's go to the servers within the step."""
        assert group.commit is not None
        if min(self.members(group)) == self.config.rank:
            self._queue_changes(group)

    def _queue_changes(self, group: Group) -> None:
        assert group.commit is not None
        group.assign_count += 1
        for shard_id in group.commit.changed:
            self._queue_assign(group, group.shards[shard_id], (("value",), (), {}))

    def _queue_assign(self, group: Group, shard: Shard, assignment: Assignment) -> None:
        shard.assign = assignment
        self._begin(group, shard.server).lane_add(shard.plan.shard, shard.plan.priority, ASSIGN)

    def _send_assign(self, group: Group, shard: Shard) -> None:
        assert shard.assign is not None
        keys, dtypes, scalars = shard.assign
        message = msg.Assign(
            **self._head(group), shard=shard.plan.shard, step=group.step, version=group.step,
            revision=group.assign_count, keys=keys, dtypes=dtypes, scalars=scalars,
            at_step=group.committed,
        )  # fmt: skip
        self._send(shard.server, message, fx.Sections(group.index, shard.plan.shard, keys))

    def _on_assign_ack(self, group: Group, source: NodeId, ack: msg.AssignAck) -> None:
        shard = group.shards.get(ack.shard)
        box = self._boxes.get((source, group.index))
        if shard is None or box is None or shard.assign is None:
            return
        if ack.step != group.step or ack.revision != group.assign_count:
            return
        shard.assign = None
        box.lane_done(ack.shard, ASSIGN)
        asked = ack.shard in group.assigning
        group.assigning.pop(ack.shard, None)
        self._pump_boxes(group, (source,))
        if asked and not group.assigning:
            self._out.append(fx.Complete(group.index, "assign"))

    # ------------------------------------------------------------------- pulls

    def _on_pull_asked(self, event: ev.PullAsked) -> None:
        group = self.groups[event.group]
        group.waiting = dict.fromkeys(event.shards)
        group.pull_round += 1
        self._pull(group)
        if not group.waiting:
            self._out.append(fx.Complete(group.index, "pull", group.step))

    def _pull(self, group: Group, only: str = "", shards: Mapping[int, None] | None = None) -> None:
        version = group.step + (1 if group.committed else 0)
        for shard_id in group.waiting if shards is None else shards:
            server = group.shards[shard_id].server
            if server in self._up and (not only or only == server):
                self._send(server, msg.Pull(
                    **self._head(group), shard=shard_id, step=group.step, version=version,
                    sequence=group.pull_round,
                ))  # fmt: skip

    def wants(
        self, group_index: int, shard_id: int, version: int, sequence: int | None = None,
        step: int | None = None,
    ) -> bool:  # fmt: skip
        """Return whether an update would be installed (asked before it is received).

        Args:
            version: of the update.
            sequence: of the update: the number of the request that it answers, 0 if it comes by
                itself, None if the caller does not care. Within a step any update of the next
                version will do; a pull outside of one takes only its own answer, for the value may
                have been assigned anew at the same version.
            step: of the update. Where each worker has its own clock it tells whose step is
                answered; there the version may be any that is not older than ours.
        """
        group = self.groups.get(group_index)
        if group is None:
            return self.reads(group_index, shard_id, version)
        if self.takes_aside(group_index, version):
            return shard_id in group.shards and shard_id not in group.early
        if shard_id not in group.waiting:
            return False
        if group.clocked:
            answers = group.committed and step in (None, group.step) and sequence in (None, 0)
            asked = not group.committed and sequence in (None, group.pull_round)
            return (answers or asked) and version >= group.shards[shard_id].version
        if group.committed:
            return version == group.step + 1
        return version == group.step and sequence in (None, group.pull_round)

    def takes_aside(self, group_index: int, version: int) -> bool:
        """Return whether an update of this version comes ahead of ``step()``.

        Then the parameters' memory must stay as it is: backward may still read it. So it is with
        what other worker groups train.
        """
        group = self.groups.get(group_index)
        if group is None or group.begun is None:
            return group is None
        return version == group.step + 1 and not group.committed

    def _on_update(self, group: Group, update: msg.Update, event: ev.Received) -> None:
        wanted = self.wants(group.index, update.shard, update.version, update.sequence, update.step)
        if not wanted or (not update.unchanged and not event.lease):
            self._release(event)
            if wanted:
                self._miss(group, update.shard)
            return
        if self.takes_aside(group.index, update.version):
            self._keep_early(group, update, event)
            return
        self._spread(group, update, event.lease)
        if update.unchanged:
            self._release(event)
            self._out.append(fx.Keep(group.index, update.shard))
        else:
            self._out.append(self._install(group, update, event.lease))
        group.waiting.pop(update.shard)
        group.shards[update.shard].version = update.version
        if not group.committed:
            self._pulled(group, update)
            return
        group.found_inf |= update.found_inf
        heard = CodedSteps(update.coded_from, update.coded_until)
        group.coded_steps = group.coded_steps.later(heard)
        if not self.config.early_update:  # else one sent ahead does not know yet: `Confirmed` does
            group.shards[update.shard].next_priority = update.priority
        self._over(group, update.shard)
        if group.waiting:
            self._pump(group)
        else:
            self._finish_if_done(group)

    def _pulled(self, group: Group, update: msg.Update) -> None:
        """A value that was asked for outside of a step is in."""
        if not group.waiting:
            self._out.append(fx.Complete(group.index, "pull", group.step))

    def _over(self, group: Group, shard_id: int) -> None:
        """A shard has its update: nobody waits for its gradient any more."""
        box = self._begin(group, group.shards[shard_id].target)
        group.turns.received(shard_id)
        box.settle(shard_id)  # a skipped step may not need what is still to be sent
        box.returned(shard_id)
        box.lane_drop(shard_id)

    @staticmethod
    def _install(group: Group, update: msg.Update, lease: int) -> fx.Install:
        if not update.codec:
            return fx.Install(group.index, update.shard, update.version, lease)
        assert group.commit is not None  # a code comes within a step only
        plan = group.shards[update.shard].plan
        present = tuple(
            not update.present or bool(update.present[i >> 3] >> (i & 7) & 1)
            for i in range(len(plan.segments))
        )
        options = group.commit.options[plan.options_group]
        code = fx.Coding(options=options, present=present)
        return fx.Install(group.index, update.shard, update.version, lease, code)

    # ------------------------------------------------------------------- state

    def _on_state_asked(self, event: ev.StateAsked) -> None:
        group = self.groups[event.group]
        # Buffers and shards of empty tensors have no state, and nobody would answer for the latter.
        with_state = (n for n, s in group.shards.items() if s.plan.length and not s.plan.is_buffer)
        group.state_waiting = dict.fromkeys(event.shards or with_state)
        group.state_memories = event.memories
        group.state_round += 1
        self._pull_state(group)
        if not group.state_waiting:
            self._out.append(fx.Complete(group.index, "state", group.step))

    def _pull_state(self, group: Group, only: str = "") -> None:
        for shard_id in group.state_waiting:
            server = group.shards[shard_id].server
            if server in self._up and (not only or only == server):
                self._send(server, msg.PullState(
                    **self._head(group), shard=shard_id, version=group.step,
                    sequence=group.state_round, memories=group.state_memories,
                ))  # fmt: skip

    def _on_state(self, group: Group, state: msg.State, event: ev.Received) -> None:
        version = state.version if group.clocked else group.step
        if group.backup and not group.catching:  # others may have gone on
            version = max(state.version, group.step)
        expected = (version, group.state_round)
        if state.shard not in group.state_waiting or not event.lease or expected != (
            state.version, state.sequence,
        ):  # fmt: skip
            self._release(event)
            return
        group.state_waiting.pop(state.shard)
        self._take_state(group, state, event.lease)

    def _take_state(self, group: Group, state: msg.State, lease: int) -> None:
        self._out.append(
            fx.KeepState(group.index, state.shard, state.keys, state.dtypes, state.scalars, lease)
        )
        if not group.state_waiting:
            self._out.append(fx.Complete(group.index, "state", group.step))

    # ------------------------------------------------------------------- norms

    def _on_norms(self, group: Group, source: NodeId, norms: msg.Norms) -> None:
        if norms.step != group.step or norms.sequence != group.norm_round or group.committed:
            return
        if source not in group.norm_from:
            return
        group.norm_from.pop(source)
        group.squares.update(norms.squares)
        if not group.norm_from:
            self._out.append(fx.Complete(group.index, "norm", group.step, squares=group.squares))

    # --------------------------------------------------------------- snapshots

    def _on_snapshot_asked(self, event: ev.SnapshotAsked) -> None:
        group = self.groups[event.group]
        assert isinstance(event.info, msg.CheckpointInfo)
        if group.backup:
            self._ask_for_version(group, event.info)
            return
        self._snapshot(group, msgspec.structs.replace(event.info, version=group.step))

    def _ask_for_version(self, group: Group, info: msg.CheckpointInfo) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _snapshot(self, group: Group, info: msg.CheckpointInfo) -> None:
        """Tell the leader of a checkpoint, and let everybody copy."""
        group.snapshot = info
        group.snapshot_from = dict.fromkeys(s.server for s in group.shards.values())
        group.snapshot_from.update(dict.fromkeys(worker_id(r) for r in info.workers))
        self._send(LEADER, group.snapshot)
        self._send_snapshot(group)

    def _send_snapshot(self, group: Group, only: str = "") -> None:
        assert group.snapshot is not None
        for server in group.snapshot_from:
            if server in self._up and (not only or only == server):
                self._send(server, msg.Snapshot(
                    **self._head(group), step=group.step, version=max(0, group.snapshot.version),
                    checkpoint=group.snapshot.checkpoint, as_is=False,
                    sequence=int(group.snapshot.version < 0),
                ))  # fmt: skip

    def _on_snapshot_ack(self, group: Group, source: NodeId, ack: msg.SnapshotAck) -> None:
        if group.snapshot is None or ack.checkpoint != group.snapshot.checkpoint:
            return
        if ack.sequence:
            self._version_told(group, ack.version)
            return
        if group.snapshot.version >= 0:  # else the leader does not know of it yet
            self._snapshot_done(group, source)

    def _version_told(self, group: Group, version: int) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _snapshot_done(self, group: Group, source: NodeId) -> None:
        group.snapshot_from.pop(source, None)
        if not group.snapshot_from:
            group.snapshot = None
            self._out.append(fx.Complete(group.index, "snapshot", group.step))

    # ------------------------------------------------ this worker's part of a checkpoint

    def _on_copy(self, ask: msg.CopyMemories) -> None:
        """Copy what codes have left out, once this worker has done the step, too."""
        group = self.groups.get(ask.group)
        if group is None:
            return
        known = ask.checkpoint in group.copies
        group.copies = dict([*group.copies.items()][-_COPIES_MAX:])
        group.copies[ask.checkpoint] = ask.step
        if known:
            self._send(LEADER, msg.MemoriesCopied(
                rank=self.config.rank, checkpoint=ask.checkpoint, group=ask.group,
            ))  # fmt: skip
        elif group.step == ask.step:
            self._out.append(fx.Copy(group.index, ask.checkpoint, ask.step))

    def _on_copied_elsewhere(self, message: msg.MemoriesCopied) -> None:
        group = self.groups.get(message.group)
        if group is None or group.snapshot is None:
            return
        if group.snapshot.checkpoint == message.checkpoint:
            self._snapshot_done(group, worker_id(message.rank))

    def _on_written(self, event: ev.Written) -> None:
        if event.saved is not None:
            self._send(LEADER, event.saved)
        else:
            self._send(LEADER, msg.SaveFailed(node=self.node, checkpoint=event.checkpoint,
                                              text=event.error))  # fmt: skip

    def _release(self, event: ev.Received) -> None:
        if event.lease:
            self._out.append(fx.Release(event.lease))
