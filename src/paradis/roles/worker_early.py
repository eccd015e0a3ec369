"""The worker's side of updates ahead of the commits (``training.early_update``).

Invariants:
* an update that comes before ``step()`` is kept beside the parameters, which backward may still
  read, and installed by ``step()``;
* ``step()`` is done when every update is in and every server has confirmed the step, so that no
  worker is ever in a step that a server has not begun.
"""

from __future__ import annotations

from paradis.core.codes import CodedSteps
from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker_state import Group
from paradis.roles.worker_values import WorkerValues
from paradis.wire import messages as msg


class WorkerEarly(WorkerValues):
    """What a worker says and takes in between its first gradient and its commit."""

    def _on_begun(self, event: ev.StepBegun) -> None:
        group = self.groups[event.group]
        if self.config.early_update and not group.closed and group.begun is None:
            group.begun = event.commit
            self._send_begin(group)

    def _send_begin(self, group: Group, only: str = "") -> None:
        """Tell the servers; nobody repeats it on a timer, for the commit says the same."""
        assert group.begun is not None
        for target in self._owners(group):
            if target in self._up and (not only or target == only):
                self._send(target, msg.Begin(
                    **self._head(group), step=group.step, version=group.step, commit=group.begun
                ))  # fmt: skip

    @staticmethod
    def _owners(group: Group) -> dict[str, None]:
        return dict.fromkeys(s.server for s in group.shards.values() if s.trainable)

    def _begin_again(self, group: Group, peer: str = "") -> None:
        """The link to a server is new, or the view: what was under way may be lost."""
        if group.begun is None or group.closed:
            return
        self._send_begin(group, only=peer)
        for shard in group.ordered():
            if shard.sent and peer in ("", shard.server) and shard.plan.shard not in group.early:
                group.missed[shard.plan.shard] = None

    # ----------------------------------------------------------------- updates

    def _keep_early(self, group: Group, update: msg.Update, event: ev.Received) -> None:
        """Keep an update until ``step()``; that it came shows that the server has the gradient."""
        shard = group.shards[update.shard]
        group.early[update.shard] = (update, event.lease)
        group.missed.pop(update.shard, None)
        shard.acked = True
        shard.void = shard.stale = False
        self._over(group, update.shard)
        self._pump_boxes(group, (shard.target,))

    def _miss(self, group: Group, shard_id: int) -> None:
        """An update found no memory: it is asked for, at once where a parameter may receive it."""
        if not self.config.early_update:
            return  # the retry timer asks
        if group.committed:
            self._pull(group, shards={shard_id: None})
        else:
            group.missed[shard_id] = None

    def _install_early(self, group: Group) -> None:
        """``step()`` is called: the kept updates become the parameters' values."""
        for shard in reversed(group.ordered()):  # the layer that is read first comes first
            if shard.plan.shard in group.early:
                update, lease = group.early[shard.plan.shard]
                self._out.append(self._install(group, update, lease))
        group.early = {}
        missed, group.missed = group.missed, {}
        self._pull(group, shards={s: None for s in missed if s in group.waiting})

    def _drop_early(self) -> None:
        """The script has ended: what came for a step that it has not closed is not needed."""
        for group in self.groups.values():
            self._out.extend(fx.Release(lease) for _, lease in group.early.values())
            group.early = {}
            group.begun = None

    # ------------------------------------------------------------ confirmation

    def _on_confirmed(self, group: Group, source: NodeId, confirmed: msg.Confirmed) -> None:
        if confirmed.step != group.step or not group.committed:
            return
        group.confirming.pop(source, None)
        heard = CodedSteps(confirmed.coded_from, confirmed.coded_until)
        group.coded_steps = group.coded_steps.later(heard)
        for shard_id, place in confirmed.priorities.items():
            group.shards[shard_id].next_priority = place
        self._finish_if_done(group)
