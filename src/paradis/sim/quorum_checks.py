"""What must hold where a step does without some workers, beside what holds in every step.

The reference is folded from the servers' log of who made a step, and from the scripts' records: so
the choice is the servers', the numbers are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradis.core.quorum import quorum_size
from paradis.roles import effects as fx
from paradis.roles.worker import WorkerRole
from paradis.sim.checkers import Checkers
from paradis.sim.memory import Story
from paradis.sim.nodes import ServerNode, SimNode
from paradis.sim.violation import demand
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paradis.roles import events as ev
    from paradis.sim.driver import Simulation
    from paradis.sim.worker import SimWorker


class QuorumCheckers(Checkers):
    """All of them, with backup workers."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(sim)
        self.made: dict[tuple[int, int], tuple[int, ...]] = {}
        self.late: dict[tuple[int, int, int], None] = {}
        sim.reference.made = self.made

    def after(self, node: SimNode, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """A node has handled an event: a server may have learnt who makes its step."""
        if isinstance(node, ServerNode):
            self._learn(node)
        super().after(node, event, effects)

    def _learn(self, node: ServerNode) -> None:
        """Look at who makes the present step on a server, and who made the one before."""
        for index, group in node.role.groups.items():
            for step in (group.step - 1, group.step):
                members = group.quorum.made(step) if group.quorum is not None else ()
                if members:
                    self._look_at(node, index, step, members)

    def serving(self, node: ServerNode, message: msg.DataMessage) -> None:
        """A server sends a value."""
        self._learn(node)
        super().serving(node, message)

    def _look_at(self, node: ServerNode, group: int, step: int, members: tuple[int, ...]) -> None:
        """All servers have the same members, as many as the job wants; all have committed."""
        job = self._sim.job
        first = (group, step) not in self.made
        known = self.made.setdefault((group, step), members)
        demand(known == members, self, f"Members: {node.node} makes step {step} of {members}, "
               f"another server of {known}")  # fmt: skip
        if not first:
            return
        least = quorum_size(job.workers - len(job.leaves), job.backup) if step else job.workers
        most = quorum_size(job.workers, job.backup) if step else job.workers
        demand(least <= len(members) <= most, self, f"Members: step {step} is made of {members}, "
               f"expected {least} to {most}")  # fmt: skip
        records = self._sim.reference.records.get((group, step), {})
        demand(all(r in records for r in members), self, f"Members: {members} make step {step}, "
               f"committed is {sorted(records)}")  # fmt: skip

    def applying(self, node: ServerNode, effect: fx.Apply, story: Story) -> None:
        """A server applies a sum: of the members' committed revisions, each once."""
        self._learn(node)
        self._versions.applying(effect)
        records = self._sim.reference.committed(effect.group, effect.step)
        shard, step = effect.shard, effect.step
        expected = {
            rank: (step, record.revisions.get(shard, 0))
            for rank, record in records.items()
            if shard in record.gradients
        }
        demand(story == expected, self, f"CountedOnce: shard {shard} step {step} applies {story}, "
               f"its members have committed {expected}")  # fmt: skip
        self._look_around(node, effect)

    def _look_around(self, node: ServerNode, effect: fx.Apply) -> None:
        """Nobody who fetches the version that is about to go lacks the shard."""
        for other in self._sim.nodes.values():
            state = (
                other.role.groups.get(effect.group) if isinstance(other.role, WorkerRole) else None
            )
            if state is None or not state.catching or other.ended:
                continue
            lacks = effect.shard in state.waiting and state.step == effect.step
            demand(not lacks, self, f"Whole: {node.node} overwrites version {effect.step} of shard "
                   f"{effect.shard}, which {other.node} still fetches")  # fmt: skip

    def refunding(self, worker: SimWorker, effect: fx.Refund) -> None:
        """A worker takes back a step that was made without it."""
        key = (effect.group, worker.script.step, worker.rank)
        made = self.made.get(key[:2], (worker.rank,))
        demand(worker.rank not in made, self, f"Refund: {worker.node} takes step {key[1]} back, "
               f"which it has made with {made}")  # fmt: skip
        demand(key not in self.late, self, f"Refund: {worker.node} takes step {key[1]} back twice")
        self.late[key] = None

    def stepped(self, worker: SimWorker, group: int, step: int, done: fx.Complete) -> None:
        """A worker's ``step()`` returned: with the next version, or late, with a later one."""
        made = self.made[group, step]
        late = worker.rank not in made
        what = f"step {step} of {worker.node}, made by {made}"
        demand(done.late == late, self, f"Late: {what}, returns with late={done.late}")
        demand(((group, step, worker.rank) in self.late) == late, self, f"Refund: {what}")
        demand(done.step == step + 1 or (late and done.step > step), self,
               f"Late: {what}, goes on with version {done.step}")  # fmt: skip
        records = self._sim.reference.committed(group, step)
        overflow = not late and any(r.found_inf for r in records.values())
        demand(done.found_inf == overflow, self, f"{worker.node} was told found_inf="
               f"{done.found_inf} for step {step}, expected {overflow}")  # fmt: skip

    def end(self) -> None:
        """The job is over: every step that somebody finished is in, on all servers."""
        for node in self._sim.nodes.values():
            self._leases.look(node)
            if isinstance(node, ServerNode):
                for shard, value in node.values.items():
                    group, plan = self._sim.reference.shards[shard]
                    if plan.is_buffer or not plan.length:
                        continue
                    last = max(s for g, s in self.made if g == group)
                    version = node.role._by_shard[shard][1].version
                    demand(version == last + 1, self, f"shard {shard} ends at {version}")
                    self._exact.value(node.node, shard, version, value)
