"""The worker's part in steps that some workers are not waited for (``training.backup_workers``).

Invariants:
* a worker that makes a step carries the word of it to the servers that cannot know it;
* one that is late gives up its step, fetches a whole version that no server overwrites before, and
  goes on from there: its count of steps jumps;
* before that, everything it has sent is acknowledged, so its gradients' memory is free.
"""

from __future__ import annotations

import msgspec

from paradis.core.codes import CodedSteps
from paradis.core.quorum import lateness
from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles.worker_early import WorkerEarly
from paradis.roles.worker_state import Group
from paradis.wire import messages as msg


class WorkerQuorum(WorkerEarly):
    """What differs where the first n - b workers make a step."""

    # ------------------------------------------------------------------- words

    def _on_word(self, group: Group, source: NodeId, word: msg.Quorum) -> None:
        """Who makes a step is known; or a server asks whether we have its version."""
        rank = self.config.rank
        if word.step == group.step and group.committed and rank in word.members:
            first, group.word = group.word is None, word
            self._carry_word(group)
            if first and group.commit is not None and group.commit.changed:
                self._queue_changed(group)
                self._pump(group)
        elif rank in word.holders and word.step < group.step + (not group.catching):
            self._send_holding(group, source, word.step)

    def _carry_word(self, group: Group, only: str = "") -> None:
        """Tell the other servers who makes the step."""
        word = group.word
        if word is None:
            return
        for server in self._owners(group):
            if server in self._up and server != group.chooser and only in ("", server):
                self._send(server, msg.Quorum(
                    **self._head(group), step=word.step, members=word.members, holders=word.holders,
                    saving=word.saving,
                ))  # fmt: skip

    def _say_held(self, group: Group) -> None:
        """A whole version is here: the servers may overwrite it."""
        if group.backup:
            for server in self._owners(group):
                self._send_holding(group, server, group.step)

    def _send_holding(self, group: Group, server: str, version: int) -> None:
        if server in self._up:
            self._send(server, msg.Holding(**self._head(group), step=version, version=version))

    def _queue_changed(self, group: Group) -> None:
        """What the script changed is the lowest member's to send, once the members are known."""
        if not group.backup:
            super()._queue_changed(group)
        elif group.word is not None and group.word.members[0] == self.config.rank:
            self._queue_changes(group)

    # ------------------------------------------------------------- checkpoints

    def _ask_for_version(self, group: Group, info: msg.CheckpointInfo) -> None:
        """This worker may be late without knowing: the version is the choosing server's to say."""
        group.snapshot = msgspec.structs.replace(info, version=-1)
        group.snapshot_from = {group.chooser: None}
        self._send_snapshot(group)

    def _version_told(self, group: Group, version: int) -> None:
        """The checkpoint is of this version; its number of steps is counted from there."""
        if group.snapshot is not None and group.snapshot.version < 0:
            steps = group.snapshot.step + version - group.step
            info = msgspec.structs.replace(group.snapshot, version=version, step=steps)
            self._snapshot(group, info)

    # -------------------------------------------------------------------- late

    def _on_late(self, group: Group, late: msg.Late) -> None:
        """The step is made without this worker. What it has not sent yet need not go any more."""
        if late.step != group.step or not group.committed or group.let_in >= 0:
            return
        group.let_in = late.version
        self._acknowledged(group)

    def _acknowledged(self, group: Group) -> None:
        """Give up the step once nothing of its gradients is under way, and fetch the version."""
        if group.let_in < 0:
            return
        shards = [group.shards[s] for s in group.waiting]
        under_way = [s for s in shards if s.sent and s.present and not s.acked]
        for shard in shards:
            if shard not in under_way:  # nor does it keep others back in the lane
                self._over(group, shard.plan.shard)
        if under_way:
            self._pump(group)
            return
        group.late_steps += 1
        self._out.append(fx.Count("late_steps"))
        self._out.append(fx.Refund(group.index))
        if group.late_steps == 1:
            text = lateness(1, group.closed_steps, self.config.rank, group.backup)
            self._out.append(fx.Announce("warning", text, once=True))
        group.step, group.let_in = group.let_in - 1, -1
        group.next_step()
        group.catching = True
        group.waiting = {s.plan.shard: None for s in group.shards.values() if s.trainable}
        group.pull_round += 1
        self._pull(group)

    def _pulled(self, group: Group, update: msg.Update) -> None:
        """A value of the version that we go on with is in; with codes, more may be missing."""
        if not group.catching:
            super()._pulled(group, update)
            return
        told = CodedSteps(update.coded_from, update.coded_until)
        group.coded_steps = group.coded_steps.later(told)
        group.shards[update.shard].next_priority = update.priority
        if group.waiting:
            return
        group.resize()
        group.reorder()
        if group.coded:
            shared = (s for s in group.shards.values() if s.plan.codec.startswith("onebit"))
            group.state_waiting = {s.plan.shard: None for s in shared}
            group.state_memories = True
            group.state_round += 1
            self._pull_state(group)
        self._caught_up(group)

    def _take_state(self, group: Group, state: msg.State, lease: int) -> None:
        if not group.catching:
            super()._take_state(group, state, lease)
            return
        self._out.append(fx.TakeMemories(group.index, state.shard, state.keys, state.dtypes, lease))
        self._caught_up(group)

    def _caught_up(self, group: Group) -> None:
        """Go on with the version, if it is whole."""
        if group.state_waiting:
            return
        group.catching = False
        self._say_held(group)
        self._out.append(fx.Complete(group.index, "step", group.step, late=True))
