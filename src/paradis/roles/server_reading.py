"""What a server tells workers of other worker groups, which read its shards and do not train them.

A reader asks when a step of its own begins. Each shard is answered by itself, at once or when what
is being written into it is in: so an answer waits for one update at most, and no update waits for a
reader. Of a group that has ended there is the last value, for as long as the job lasts.

Invariants:
* a value is sent under the version that it has;
* whoever asked has been sent, of every shard, a value that lacks no more than the bound says of the
  updates in it when it was answered.

Source: docs/design/0004-worker-groups.md.
"""

from __future__ import annotations

from paradis.ids import NodeId, index_of
from paradis.roles import effects as fx
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.receiver import Receiver
from paradis.wire import messages as msg


class ServerReading(Receiver):
    """Readers, and copies of groups that worker 0 does not train."""

    # ------------------------------------------------------------------- reads

    def _on_read(self, source: NodeId, read: msg.Read) -> None:
        group = self.groups.get(read.group)
        if group is None:
            return  # not planned here yet: the reader asks again
        versions: dict[int, int] = {}
        for shard_id in read.held:
            shard = group.shards.get(shard_id)
            if shard is None:
                continue
            if self._being_written(group, shard):
                shard.readers[source] = read  # the last question of each reader
            else:
                versions[shard_id] = self._serve(source, read, group, shard)
        self._tell(source, read, versions)

    @staticmethod
    def _being_written(group: HeldGroup, shard: HeldShard) -> bool:
        """Whether the value is not there yet, or not the one that its version means."""
        if not shard.initialized or shard.applying or shard.assigning is not None:
            return True
        # What all scripts changed alike is in, and the update that counts it is not.
        return group.stale is None and shard.assign_step == group.step == shard.version

    def _serve(self, source: NodeId, read: msg.Read, group: HeldGroup, shard: HeldShard) -> int:
        """Send the value where it is wanted; return its version."""
        shard_id, version = shard.plan.shard, shard.version
        known = read.held[shard_id]
        if not read.revision:
            known = max(known, shard.given.get(source, -1))
        # Of a group that has ended there is no next value to wait for.
        enough = max(1, read.version) if self.view is None or self.present(group) else 1
        if known < 0 or version - known >= enough:
            shard.given[source] = version
            update = msg.Update(
                generation=self.view.generation if self.view else 0, group=group.index,
                shard=shard_id, step=version, version=version, sequence=read.sequence,
            )  # fmt: skip
            self._send(source, update, fx.Sections(group.index, shard_id, copied=True))
        return version

    def _tell(self, source: NodeId, read: msg.Read, versions: dict[int, int]) -> None:
        if versions:
            self._send(source, msg.Versions(
                generation=self.view.generation if self.view else 0, group=read.group,
                sequence=read.sequence, versions=versions,
            ))  # fmt: skip

    def answer_readers(self, group: HeldGroup, shard: HeldShard) -> None:
        """Something was written: answer who asked meanwhile."""
        if not shard.readers or self._being_written(group, shard):
            return
        readers, shard.readers = shard.readers, {}
        for source, read in readers.items():
            if self.view is not None and index_of(source) not in self.view.members:
                continue  # it has left
            self._tell(source, read, {shard.plan.shard: self._serve(source, read, group, shard)})

    # -------------------------------------------------------------------- saves

    def _ask_as_is(self, group: HeldGroup, snapshot: msg.Snapshot) -> None:
        """Copy all shards here as they are; with a common step, between two of them."""
        if group.copying == snapshot.checkpoint:
            if group.copied == snapshot.checkpoint:
                self._acknowledge(group, snapshot.checkpoint)
            return
        group.copying = snapshot.checkpoint
        group.saving = "asked"
        self.copy_as_is(group)

    def copy_as_is(self, group: HeldGroup) -> None:
        """Begin a copy that is asked for, if nothing is being written; until it is made nothing
        will be."""
        if group.saving != "asked" or group.verdict in ("apply", "skip"):
            return
        if any(s.applying or s.assigning is not None for s in group.shards.values()):
            return
        group.saving = "copying"
        self._out.append(fx.Copy(group.index, group.copying, group.step, group.options))

    def _copied_as_is(self, group: HeldGroup) -> None:
        group.saving = ""
        self._acknowledge(group, group.copied)

    def _acknowledge(self, group: HeldGroup, checkpoint: str) -> None:
        self._send("worker-0", msg.SnapshotAck(group=group.index, step=group.step,
                                               checkpoint=checkpoint))  # fmt: skip
