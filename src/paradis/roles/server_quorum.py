"""The server's part in steps that some workers are not waited for (``training.backup_workers``).

The server with the group's first shard chooses who makes a step, and tells those; they tell the
other servers. Whoever commits too late is let in at the next version that is not chosen for.

Invariants:
* a step is applied with the chosen members on every server, or not at all;
* a version is overwritten when all its holders have said that they have it: a wait for a transfer,
  never for a batch;
* a late push is acknowledged, and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from paradis.core.quorum import Choice, Quorum, Word, dropped
from paradis.ids import NodeId, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.server_early import ServerEarly
from paradis.roles.worker_state import choosing_server
from paradis.wire import messages as msg


class ServerQuorum(ServerEarly):
    """What differs where the first n - b workers make a step."""

    _save_asked: msg.Snapshot | None = None
    """A checkpoint that waits for the next version; worker 0 asks for one at a time."""

    def __init__(self, node: NodeId, *, quota_bytes: int) -> None:
        super().__init__(node, quota_bytes=quota_bytes)
        self._state_pulls: dict[tuple[NodeId, int], msg.PullState] = {}

    def open_quorum(self, plan: msg.Plan) -> None:
        """A plan came: note whether all of the group's workers are waited for."""
        group = self.groups[plan.group]
        if plan.backup and group.quorum is None:
            chooses = choosing_server(plan) == self.node
            group.quorum = Quorum(Choice(plan.backup, plan.step) if chooses else None)

    # -------------------------------------------------------------- membership

    def members(self, group: HeldGroup) -> tuple[int, ...]:
        """Return who takes part in the group's present step: who was chosen, once that is known."""
        if group.quorum is None:
            return super().members(group)
        assert self.view is not None
        return group.quorum.word.members if group.quorum.word is not None else self.view.members

    def _decided(self, group: HeldGroup) -> bool:
        """Whether it is known whose contributions count: nothing is summed before."""
        if group.quorum is None:
            return super()._decided(group)
        return group.quorum.word is not None

    def _may_judge(self, group: HeldGroup) -> bool:
        """Whether the chosen have committed, and nobody needs the present version any more."""
        quorum = group.quorum
        if quorum is None:
            return super()._may_judge(group)
        assert self.view is not None
        if quorum.word is None and quorum.choice is not None:
            word = quorum.choice.choose(group.step, group.commits, self.view.members)
            if word is not None:
                quorum.told(word)
                for rank in word.members:
                    self._send_word(worker_id(rank), group, word)
        if quorum.word is None or not super()._may_judge(group):
            return False
        return self._copied_first(group) and not self.lacking(group)

    def lacking(self, group: HeldGroup) -> list[int]:
        """Return who keeps the present version from being overwritten."""
        assert self.view is not None
        return group.quorum.lacking(group.step, self.view.members) if group.quorum else []

    # ------------------------------------------------------------------- words

    def _send_word(self, target: NodeId, group: HeldGroup, word: Word) -> None:
        self._send(target, msg.Quorum(
            generation=self.view.generation if self.view else 0, group=group.index, step=word.step,
            members=word.members, holders=word.holders, saving=word.saving,
        ))  # fmt: skip

    def _send_late(self, rank: int, group: HeldGroup, step: int, version: int) -> None:
        self._send(worker_id(rank), msg.Late(
            generation=self.view.generation if self.view else 0, group=group.index, step=step,
            version=version,
        ))  # fmt: skip

    def _on_word(self, message: msg.Quorum) -> None:
        """A member says who makes the step. Its view may be another: the word is the same."""
        group = self.groups.get(message.group)
        if group is None or group.quorum is None or message.step != group.step:
            return
        word = Word(message.step, message.members, message.holders, message.saving)
        if group.quorum.told(word):
            self._consider(group)

    def _on_holding(self, message: msg.Holding) -> None:
        """A worker has this server's shards at a version."""
        group = self.groups.get(message.group)
        if group is not None and group.quorum is not None:
            group.quorum.holds(message.worker, message.version)
            if message.version >= group.step:
                self._consider(group)

    def _late_or_again(self, source: NodeId, commit: msg.Commit, group: HeldGroup | None) -> bool:
        """Look at a commit first; return whether that was all: it does not count any more."""
        if group is None or group.quorum is None or commit.step > group.step:
            return False
        quorum, rank, step = group.quorum, commit.worker, commit.step
        quorum.holds(rank, step)  # whoever commits a step has the whole version before it
        word = quorum.word
        here = step == group.step
        member = word is None or rank in word.members
        if here and member and (word is None or rank not in group.commits):
            return False
        if quorum.choice is not None:
            answer = quorum.choice.asked(rank, step, group.step)
            if isinstance(answer, Word):
                self._send_word(source, group, answer)
            elif answer is not None:
                self._send_late(rank, group, step, answer)
        if here and word is not None:
            self._ask_holders(group, word)
            self._consider(group)
        return not here or not member

    def _ask_holders(self, group: HeldGroup, word: Word) -> None:
        """A member asks again: perhaps the word of somebody who has the version was lost."""
        for rank in self.lacking(group):
            self._send_word(worker_id(rank), group, word)

    def _end_step(self, group: HeldGroup) -> None:
        """Go on to the next step if this one is over, and let in those who were late for it."""
        before = group.step
        super()._end_step(group)
        if group.quorum is None:
            return
        for (source, shard_id), asked in [*self._state_pulls.items()]:
            if shard_id in group.shards:
                del self._state_pulls[source, shard_id]  # it may be kept for later again
                self._on_pull_state(source, asked)
        for shard in group.shards.values():
            ready = [p for p in shard.pulls if p[1].version <= shard.version]
            shard.pulls = [p for p in shard.pulls if p[1].version > shard.version]
            for source, pull in ready:
                self._on_pull(source, pull)
        if group.step != before and group.quorum.choice is not None:
            for rank, step in group.quorum.choice.next_step(group.step).items():
                self._send_late(rank, group, step, group.step)
            if self._save_asked is not None:
                self._on_snapshot(self._save_asked)

    # ------------------------------------------------------------------- pulls

    def _on_pull(self, source: NodeId, pull: msg.Pull) -> None:
        """Answer within a step only who makes it, and outside of one at that very version.

        Who is let in at a version may ask before it is there.
        """
        found = self._by_shard.get(pull.shard)
        if found is None or found[0].quorum is None or found[1].passive:
            super()._on_pull(source, pull)
            return
        group, shard = found
        assert group.quorum is not None
        if pull.version > pull.step:
            if pull.worker in group.quorum.made(pull.step):
                super()._on_pull(source, pull)
        elif shard.initialized and shard.version < pull.version:
            shard.pulls = [p for p in shard.pulls if p[0] != source]  # bounded by the workers
            shard.pulls.append((source, pull))
        elif not shard.initialized or shard.version == pull.version:
            super()._on_pull(source, pull)

    def _on_pull_state(self, source: NodeId, pull: msg.PullState) -> None:
        """Others may be changing the state that a worker asks for: it gets the next one then.

        A shard may have its version before the step ends, and only its end begins the codes.
        """
        found = self._by_shard.get(pull.shard)
        if found is None or found[0].quorum is None or found[1].passive:
            super()._on_pull_state(source, pull)
        elif self._in_flux(*found) or found[0].step < pull.version:
            self._state_pulls[source, pull.shard] = pull  # one for each worker and shard
        else:
            super()._on_pull_state(source, pull)

    # ------------------------------------------------------------- checkpoints

    def _copied_first(self, group: HeldGroup) -> bool:
        """Copy the present version for a checkpoint that is of it; True when that is done."""
        assert group.quorum is not None and group.quorum.word is not None
        name = group.quorum.word.saving
        if name and group.copying != name:
            group.copying = name
            self._out.append(fx.Copy(group.index, name, group.step))
        return not name or group.copied == name

    def _on_snapshot(self, snapshot: msg.Snapshot) -> None:
        """Worker 0 may be late: the choosing server says of which version a checkpoint is."""
        group = self.groups.get(snapshot.group)
        if group is None or group.quorum is None:
            super()._on_snapshot(snapshot)
        elif not snapshot.sequence:
            if group.copied == snapshot.checkpoint:
                self._send_snapshot_ack(group, snapshot.checkpoint)
            else:
                super()._on_snapshot(snapshot)
        elif group.quorum.choice is not None:
            version = group.quorum.choice.save(snapshot.checkpoint, group.step)
            self._save_asked = None if version >= 0 else snapshot
            if version >= 0:
                self._send(worker_id(0), msg.SnapshotAck(
                    group=group.index, step=snapshot.step, version=version, sequence=1,
                    checkpoint=snapshot.checkpoint,
                ))  # fmt: skip

    def _on_copied(self, event: ev.Copied) -> None:
        super()._on_copied(event)
        group = self.groups[event.group]
        if group.quorum is not None:
            self._consider(group)

    # ------------------------------------------------------------------ pushes

    def on_push(self, event: ev.Received, push: msg.Push | msg.RackPush) -> None:
        """Take a push in, and count it if it is too late."""
        found = self._by_shard.get(push.shard)
        if found is not None and found[0].quorum is not None:
            members = found[0].quorum.made(push.step)
            over = push.step < found[1].version + found[1].applying
            if over and push.worker not in members:
                self._out.append(fx.Count("dropped_pushes"))
        super().on_push(event, push)

    def _drop_ruled_out(
        self, group: HeldGroup, shard: HeldShard, expected: Mapping[int, int | None],
        members: tuple[int, ...],
    ) -> None:  # fmt: skip
        if group.quorum is not None:
            late = dropped((c.ranks for c in shard.collection.held), members)
            if late:
                self._out.append(fx.Count("dropped_pushes", late))
        super()._drop_ruled_out(group, shard, expected, members)
