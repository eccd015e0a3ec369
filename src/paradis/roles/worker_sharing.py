"""The worker's part in local reduction: the workers of a host sum first, one of them pushes.

A shard's gradient goes to its owner on the host; the owner pushes the sum and sends the update on.
What the sum cannot be made of in a step (a gradient that changed after it was handed over) each
worker pushes itself, *alone*, and the servers refuse the host's sum of that shard for that step.

Invariants:
* in every step each worker hands every shard to its owner once, the gradient or the word that
  there is none, and each owner sends every update on once: so nobody waits for what never comes;
* a sum is pushed only with the exact (rank, revision) list it was made of;
* once the host's workers have lost each other they push directly until the job ends.
"""

from __future__ import annotations

from paradis.core.host_groups import share_out
from paradis.ids import LEADER
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker_pushes import WorkerPushes
from paradis.roles.worker_state import SUM_TAG, Group, Shard, WorkerConfig, shard_sizes
from paradis.wire import messages as msg


class WorkerSharing(WorkerPushes):
    """Local reduction; `paradis.roles.worker.WorkerRole` is the whole role."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._host: tuple[int, ...] = ()
        self._host_over = self._view_due = False
        self._gathering: dict[int, tuple[int, int]] = {}

    # -------------------------------------------------------------- membership

    def _follow_host_group(self) -> None:
        """A view came: find the others of this host, or go on without them."""
        assert self.view is not None
        rank = self.config.rank
        groups = self.view.host_groups.items()
        name, ranks = next(((n, g) for n, g in groups if rank in g), ("", ()))
        if ranks and not self._host and not self._host_over:
            self._host = ranks
            self._out.append(fx.OpenHostGroup(name, ranks))
        elif not ranks and (self._host or self._view_due):
            self._view_due = False
            if self._host:
                self._end_host_group()
            for group in self.groups.values():
                if group.committed:
                    self._pull_again(group)  # what the owners hold does not come any more

    def _pull_again(self, group: Group) -> None:
        raise AssertionError("subclass")  # pragma: no cover

    def _learn_owners(self, group: Group, plan: msg.Plan) -> None:
        if not self._host:
            return
        for shard_id, place in share_out(shard_sizes(plan), len(self._host)).items():
            shard = group.shards[shard_id]
            shard.owner = self._host[place]
            shard.mine = shard.owner == self.config.rank

    def _on_host_group_broken(self, reason: str) -> None:
        if not self._host:
            return
        text = (f"no local reduction any more on the host of {self.node}: {reason}; "
                "its workers push directly to the servers")  # fmt: skip
        self._send(LEADER, msg.HostGroupLost(node=self.node, text=text))
        self._view_due = True  # until then servers may send an update to its owner alone
        self._end_host_group()
        for group in self.groups.values():
            self._pump(group)

    def _end_host_group(self) -> None:
        """Push what was handed over, or would be, to the servers."""
        self._host, self._host_over = (), True
        self._out.append(fx.CloseHostGroup())
        for group in self.groups.values():
            done = self._done_by_who_left(group)
            for shard in group.ordered():
                if shard.shares and not done:
                    self._go_alone(group, shard)
                shard.owner = -1
                shard.mine = False

    def _done_by_who_left(self, group: Group) -> bool:
        """Whether somebody has left after this step: then the servers have all of its updates."""
        assert self.view is not None
        return any(steps.get(group.index, 0) > group.step for steps in self.view.left.values())

    def _go_alone(self, group: Group, shard: Shard) -> None:
        """In this step the own gradient goes to the server by itself."""
        shard.alone = shard.detour = True
        shard.included = ()
        box = self._begin(group, shard.target)
        box.settle(shard.plan.shard)
        box.lane_drop(shard.plan.shard)
        shard.acked = False
        shard.sent = shard.ready  # the owner has it: as if it were sent and lost
        if shard.sent:
            self._push_again(group, shard)

    # ------------------------------------------------------------------ way up

    def _hand_over(self, group: Group, shard: Shard) -> bool:
        """The gradient exists: give it to the owner, if it goes there; return whether it does."""
        if shard.shares and shard.handed:
            self._go_alone(group, shard)  # the owner was told that there is none
            return True
        if shard.owner >= 0 and not shard.handed:
            self._tell_owner(group, shard, present=not shard.alone)
        return shard.shares

    def _tell_owner(self, group: Group, shard: Shard, *, present: bool) -> None:
        """Give the owner the gradient, or the word that there is none."""
        if self._gathering.get(group.index) != (group.step, group.parts):
            self._gathering[group.index] = (group.step, group.parts)
            mine = [s for s in group.ordered() if s.mine and not s.gathered]
            for each in mine:
                each.gathered = True
            shards = tuple(s.plan.shard for s in mine)
            self._out.append(fx.Gather(group.index, group.step, shards, self._host))
        shard.handed = True
        self._out.append(fx.HandOver(group.index, shard.plan.shard, group.step, shard.revision,
                                     present, shard.owner))  # fmt: skip

    def _close_with_host(self, group: Group, shard: Shard, *, revised: bool) -> bool:
        """``step()`` (or a norm) was called; return whether that is all for this shard."""
        if shard.owner < 0:
            return False
        if not shard.present:
            if not shard.handed:
                self._tell_owner(group, shard, present=False)
            return shard.shares  # the sum of the others may still be ours to push
        if revised:
            shard.revision += 1
            shard.acked = False
        if shard.shares and revised and shard.handed:
            self._go_alone(group, shard)
        elif shard.alone and shard.sent and (revised or shard.void):
            self._push_again(group, shard)
        if not shard.ready:
            self._make_ready(group, shard)
        shard.void = False
        return True

    def _closed_to_host(self, group: Group, *, commit: bool) -> None:
        """All shards are closed: updates will come."""
        if commit and self._host:
            owners = {s.plan.shard: s.owner for s in reversed(group.ordered())
                      if s.owner >= 0 and not s.mine}  # fmt: skip
            self._out.append(fx.Expect(group.index, group.step, owners))

    def _on_host_summed(self, event: ev.HostSummed) -> None:
        group = self.groups[event.group]
        shard = group.shards[event.shard]
        if event.step != group.step or not shard.shares or not shard.mine:
            return
        if group.committed and event.shard not in group.waiting:
            return
        shard.included = event.included
        box = self._begin(group, shard.target)
        if not event.included:
            box.settle(event.shard)
        elif box.settled(event.shard):
            shard.detour = True
            box.lane_add(event.shard, shard.plan.priority)
        else:
            box.ready(event.shard)
        self._pump_boxes(group, (shard.target,))

    def _send_host_sum(self, group: Group, shard: Shard) -> None:
        shard.sent = True
        push = msg.RackPush(
            **self._head(group), shard=shard.plan.shard, step=group.step, version=group.step,
            revision=SUM_TAG, included=shard.included,
        )  # fmt: skip
        self._send(shard.target, push, fx.HostSum(group.index, shard.plan.shard))

    # ---------------------------------------------------------------- way down

    def _spread(self, group: Group, update: msg.Update, lease: int) -> None:
        """An update of a step is about to be installed: the others of this host need it, too."""
        if group.committed and group.shards[update.shard].mine:
            self._out.append(fx.Spread(update, lease))
