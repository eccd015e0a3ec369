"""The server's updates ahead of the commits (``training.early_update``).

A worker says with its first gradient of a step what the step's options are (`Begin`). When all
members have said so alike and all have pushed a shard, the update's outcome is known before
``step()`` is called: the shard is applied and sent while backward still runs. The commits confirm.

Invariants:
* what was applied early is what all commits name, or the job ends and says what differs;
* a group's next step begins when every shard has its next version and the commits are in, and a
  worker begins it when every server has told it so (`Confirmed`).
"""

from __future__ import annotations

from paradis.core.registration import compare_options
from paradis.ids import NodeId, worker_id
from paradis.roles import effects as fx
from paradis.roles import freezing, step_rules
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.server_values import ServerValues
from paradis.wire import messages as msg


class ServerEarly(ServerValues):
    """Everything that may happen to a step before all have committed it."""

    early_update = False
    check_finite = True

    def _on_begin(self, begin: msg.Begin) -> None:
        """A worker has begun the step. A lost one costs only time: the commit says the same."""
        group = self.groups.get(begin.group)
        generation = self.view.generation if self.view else 0
        if not self.early_update or group is None or begin.generation != generation:
            return
        if begin.step != group.step or begin.worker in group.ahead.begun:
            return
        group.ahead.said(begin.worker, begin.commit)
        if not group.verdict and self._begun_alike(group, self.members(group)):
            self._consider(group)

    def _begun_alike(self, group: HeldGroup, members: tuple[int, ...]) -> bool:
        """Whether all members have begun or committed, with nothing that stands against it."""
        if group.norms:
            return False
        if group.ahead.alike[0] != members:
            said = {r: c for r in members if (c := _ahead(group, r)) is not None}
            plain = all(c.clip == 1.0 and not c.found_inf for c in said.values())
            whole = plain and len(said) == len(members)
            alike = whole and not compare_options({r: c.options for r, c in said.items()})
            group.ahead.alike = (members, alike)
        return group.ahead.alike[1]

    def _apply_early(
        self, group: HeldGroup, shard: HeldShard, members: tuple[int, ...],
        expected: dict[int, int | None],
    ) -> None:  # fmt: skip
        """Apply a shard that some have not committed, if all that counts is known already.

        Args:
            expected: rank -> committed revision, of those who have committed.
        """
        if not self.early_update or group.verdict or not self._begun_alike(group, members):
            return
        shard_id = shard.plan.shard
        counted: dict[int, int | None] = {}
        for rank in members:
            said = _ahead(group, rank)
            if said is None or shard_id in said.changed:
                return
            if rank in group.commits:
                counted[rank] = expected.get(rank)
            elif rank in shard.whole:
                counted[rank] = 0
            else:
                return
        if shard.collection.summing or not shard.collection.is_good(counted):
            return
        first = _ahead(group, members[0])
        assert first is not None
        options = first.options[shard.plan.options_group]
        shard.early = (counted, options)
        shard.applying = True
        # Who has not committed has a gradient for every parameter in the shard.
        present = (True,) * len(shard.plan.segments)
        shard.note_present(present)
        self._out.append(fx.Apply(group.index, shard_id, group.step, options, present, 1.0,
                                  self.check_finite, self.coded(group, shard),
                                  self.measures(group, shard)))  # fmt: skip

    @staticmethod
    def measures(group: HeldGroup, shard: HeldShard) -> bool:
        """Whether the leader wants to know how large v is in a shard after its update."""
        return bool(shard.plan.codec) and freezing.measures(group)

    def _unconfirmed(self, group: HeldGroup, commits: dict[int, msg.StepCommit]) -> str:
        """Return why the commits do not confirm what was applied, or an empty text."""
        for shard in group.shards.values():
            if shard.early is not None:
                text = step_rules.contradiction(shard, group.specs, commits)
                if text:
                    return step_rules.early_refusal_text(group.step, text)
        return ""

    def _may_judge(self, group: HeldGroup) -> bool:
        """Whether all whose commits count have committed."""
        return self.everybody(group, group.commits) and bool(group.commits)

    # ----------------------------------------------------------------- its end

    def _end_step(self, group: HeldGroup) -> None:
        """Go on to the next step if every shard has its version and the commits are in."""
        if group.unfinished or group.verdict not in ("apply", "skip"):
            return
        if self.early_update:
            for rank in self.members(group):
                self._send_confirmed(worker_id(rank), group, group.step)
        measured = freezing.measures(group)
        group.next_step(group.step + 1)
        self.copy_as_is(group)
        if group.coded_steps.begin == group.step:
            self._out.append(fx.BeginCodes(group.index, group.options))
        if measured:  # also if nothing was updated here: the leader waits for all
            self._send("dispatcher-0", freezing.variance(self.node, group))
            group.norms_of_v = {}

    def _confirm_again(
        self, source: NodeId, message: msg.Commit | msg.NormRequest, group: HeldGroup
    ) -> None:
        """A commit of a finished step comes once more: its answer may have been lost."""
        if self.early_update and isinstance(message, msg.Commit) and message.step < group.step:
            self._send_confirmed(source, group, message.step)

    def _send_confirmed(self, target: NodeId, group: HeldGroup, step: int) -> None:
        order = {}
        if group.reordered == step:
            order = {s.plan.shard: s.plan.priority for s in group.shards.values() if not s.passive}
        self._send(target, msg.Confirmed(
            generation=self.view.generation if self.view else 0, group=group.index, step=step,
            version=step + 1, priorities=order, coded_from=group.coded_steps.begin,
            coded_until=group.coded_steps.end,
        ))  # fmt: skip


def _ahead(group: HeldGroup, rank: int) -> msg.StepCommit | None:
    """Return the rank's commit, or what it has said ahead of it."""
    return group.commits.get(rank) or group.ahead.begun.get(rank)
