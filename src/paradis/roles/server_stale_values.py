"""Values of groups whose workers do not wait for each other: sent, asked for, given, saved.

Invariant: a value is sent, copied or taken in only while nothing changes it, and what is sent is a
copy: another worker's update need not wait until it is on its way.
"""

from __future__ import annotations

from paradis.ids import NodeId, index_of
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.server_values import ServerValues
from paradis.wire import messages as msg


class StaleValues(ServerValues):
    """Everything that such a group's server is asked for and that is not a step."""

    # --------------------------------------------------------- subclass duties

    def go_on(self, group: HeldGroup, shard: HeldShard) -> None:
        """Answer whoever may go on with the value as it is, then begin the next update."""
        raise AssertionError("subclass")  # pragma: no cover

    def go_on_all(self, group: HeldGroup) -> None:
        """A commit or a view came: go on with every shard, as in sync the first needed first."""
        raise AssertionError("subclass")  # pragma: no cover

    def _busy(self, shard: HeldShard) -> bool:
        """Whether the shard's value is being changed, or about to be."""
        return bool(shard.applying or shard.assigning is not None or shard.collection.summing)

    # ------------------------------------------------------------------- values

    def _send_value(
        self, target: NodeId, group: HeldGroup, shard: HeldShard, step: int, *,
        sequence: int = 0, unchanged: bool = False,
    ) -> None:  # fmt: skip
        """Send the value as it is: in answer to the worker's ``step``, or to a request."""
        assert group.stale is not None
        known = group.stale.commits.get(index_of(target))
        update = msg.Update(
            generation=self.view.generation if self.view else 0, group=group.index,
            shard=shard.plan.shard, step=step, version=shard.version, sequence=sequence,
            unchanged=unchanged, priority=shard.plan.priority,
            found_inf=known is not None and known.step == step and known.commit.found_inf,
        )  # fmt: skip
        payload = None if unchanged else fx.Sections(group.index, shard.plan.shard, copied=True)
        self._send(target, update, payload)

    def _on_stale_pull(self, source: NodeId, pull: msg.Pull, group: HeldGroup) -> None:
        """Answer a worker that waits in ``step()`` and asks again, or that looks between steps."""
        shard = group.shards.get(pull.shard)
        if shard is None or shard.stale is None or self.view is None:
            return
        within, stale = pull.version > pull.step, shard.stale
        if within and (
            pull.worker in stale.owed
            or not stale.clocks.may_begin(pull.worker, pull.step + 1, self.present(group))
        ):
            return  # it comes by itself
        if not shard.initialized or self._busy(shard):
            shard.pulls = [p for p in shard.pulls if p[0] != source]  # one from each worker
            shard.pulls.append((source, pull))
            return
        sequence = 0 if within else pull.sequence
        self._send_value(source, group, shard, pull.step, sequence=sequence)

    def _on_stale_pull_state(self, source: NodeId, pull: msg.PullState, group: HeldGroup) -> None:
        shard = group.shards.get(pull.shard)
        if shard is None or shard.stale is None:
            return
        if not shard.initialized or self._busy(shard):
            shard.stale.asked[source] = pull
            return
        state = msg.State(
            generation=self.view.generation if self.view else 0, group=pull.group,
            shard=pull.shard, step=pull.step, version=shard.version, sequence=pull.sequence,
        )  # fmt: skip
        self._send(source, state, fx.Sections(pull.group, pull.shard, ("*",), copied=True))

    def _on_stale_assign(self, event: ev.Received, message: msg.Assign, group: HeldGroup) -> None:
        shard = group.shards.get(message.shard)
        if shard is None or shard.stale is None or not event.lease or message.at_step:
            self._drop(event)
            return
        stamp = (message.worker, message.step, message.revision)
        if stamp <= shard.stale.assigned:
            self._drop(event)
            if shard.assigning is None:
                self._send_assign_ack(event.source, message)
        elif shard.assigning is not None or shard.pending is not None:
            self._drop(event)
        elif not shard.initialized:
            self._store(group, shard, event, message)
        else:
            shard.pending = event
            self.go_on(group, shard)

    def _on_value_stored(self, event: ev.Stored, group: HeldGroup) -> None:
        shard = group.shards[event.shard]
        assert shard.stale is not None
        if shard.initialized:
            shard.stale.reassigned()
        shard.initialized = True
        if shard.assigning is not None:
            source, message = shard.assigning
            shard.assigning = None
            shard.stale.assigned = (message.worker, message.step, message.revision)
            self._send_assign_ack(source, message)
        self.go_on(group, shard)
        self._copy_when_idle(group)

    # -------------------------------------------------------------------- saves

    def _on_stale_snapshot(self, snapshot: msg.Snapshot, group: HeldGroup) -> None:
        """Copy all shards here as they are, of whatever versions, when nothing changes any."""
        assert group.stale is not None
        if group.copying == snapshot.checkpoint:
            if group.copied == snapshot.checkpoint:
                self._send_snapshot_ack(group, snapshot.checkpoint)
            return
        group.copying = snapshot.checkpoint
        group.stale.saving = self._own_step(group) if snapshot.as_is else snapshot.version
        group.saving = "asked" if snapshot.as_is else ""
        self._copy_when_idle(group)

    def _copy_when_idle(self, group: HeldGroup) -> None:
        stale = group.stale
        assert stale is not None
        if stale.saving is None or stale.copying or any(map(self._busy, group.shards.values())):
            return
        stale.copying = True
        known = stale.commits.get(min(group.ranks, default=0))
        options = (known.commit.options if known else group.options) if group.saving else []
        self._out.append(fx.Copy(group.index, group.copying, stale.saving, options))

    def _own_step(self, group: HeldGroup) -> int:
        """Return how many steps of the group's lowest worker all shards here hold."""
        active = [s for s in group.shards.values() if s.stale is not None and not s.passive]
        done = [s.stale.clocks.done(min(group.ranks)) for s in active if s.stale is not None]
        return min(done, default=group.step)

    def _on_stale_copied(self, event: ev.Copied, group: HeldGroup) -> None:
        assert group.stale is not None
        group.stale.saving, group.stale.copying, group.saving = None, False, ""
        group.copied = event.checkpoint
        self._send_snapshot_ack(group, event.checkpoint)
        self.go_on_all(group)
