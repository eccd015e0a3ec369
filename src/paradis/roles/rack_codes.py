"""The rack agent's part in codes: it forwards its workers' codes together, or makes one of them.

*Forwarded*, the payload of its push is the workers' codes one after the other, in summing order:
servers decode them, so the bits are those of direct pushes, and one frame and one acknowledgement
cross the rack's link for all. *Recompressed*, it is one code of their sum and of what earlier codes
of this agent have left out, its error memory, which counts once a server says that the sum did.

Invariant: what an agent's code leaves out replaces its error memory only where the step's update
has that code in it; an agent that was left out in a step has changed nothing.
"""

from __future__ import annotations

from paradis.core.codes import NUMBERS, CodedSteps
from paradis.ids import NodeId, index_of
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.receiver import Receiver
from paradis.roles.worker_state import push_bytes
from paradis.wire import messages as msg


class RackCodes(Receiver):
    """Codes in a rack; `paradis.roles.rack_agent.RackAgentRole` is the whole role.

    Args:
        node: own name.
        quota_bytes: as of `Receiver`.
    """

    def __init__(self, node: NodeId, *, quota_bytes: int) -> None:
        super().__init__(node, quota_bytes=quota_bytes)
        self.index = index_of(node)
        self._up: dict[str, None] = {}
        self._started: dict[int, bool] = {}  # shard -> its coder knows what codes start from
        self._wanted: dict[int, None] = {}
        self._asked = -1
        self._counted: dict[int, bool] = {}

    # ------------------------------------------------------------- membership

    def ranks(self) -> tuple[int, ...]:
        """Return the workers of this rack, in summing order."""
        for agent, ranks in self.view.racks.values() if self.view is not None else ():
            if agent == self.node:
                return ranks
        return ()

    def _contributors(self, group: HeldGroup) -> int:
        return len(self.ranks())

    # ------------------------------------------------------------ how steps travel

    def follow_push(self, push: msg.Push) -> bool:
        """Learn from a push whether its step travels as codes: workers know before they push.

        The updates that said so may have been lost on the way here, or their payload had no room.

        Returns:
            Whether that changes how large the present step's sums are.
        """
        group, shard = self._by_shard.get(push.shard, (None, None))
        if group is None or shard is None or self.view is None or not shard.plan.codec:
            return False
        coded, step = push.codec > 0, push.step
        if push.generation != self.view.generation or step < group.step:
            return False
        if group.coded_at(step) == coded:
            return False
        known = group.coded_steps
        group.coded_steps = known.later(CodedSteps(step) if coded else CodedSteps(-1, step))
        if step == group.step:
            group.resize()
        return step == group.step

    def follow_update(self, group: HeldGroup, shard: HeldShard, update: msg.Update) -> None:
        """Learn from an update how later steps travel, and whether our sum is in it."""
        told = CodedSteps(update.coded_from, update.coded_until)
        group.coded_steps = group.coded_steps.later(told)
        if update.version == shard.version + 1:
            self._counted[shard.plan.shard] = update.counted

    def payload_bytes(self, shard_id: int, *, codec: int, codes: int) -> int:
        """Return the bytes a push must have: as it says that it travels (see `follow_push`)."""
        found = self._by_shard.get(shard_id)
        if found is None or (codec and NUMBERS[found[1].plan.codec] != codec):
            return -1
        return push_bytes(found[1].plan, coded=codec > 0)

    @staticmethod
    def codes_in(shard: HeldShard, workers: int) -> int:
        """Return how many codes a push has that stands for so many workers."""
        return 1 if shard.plan.recompressed else workers

    def sum_bytes(self, group: HeldGroup, shard: HeldShard) -> int:
        """Return the bytes that the shard takes at its server, with all workers' gradients."""
        coded = self.coded(group, shard)
        return shard.nbytes * (self.codes_in(shard, len(self.ranks())) if coded else 1)

    # --------------------------------------------------------------- one code of all

    @property
    def asking(self) -> bool:
        """Whether a server has to say what codes start from."""
        return bool(self._wanted)

    def can_sum(self, group: HeldGroup, shard: HeldShard) -> bool:
        """Whether what a sum is made with is here; else it is asked for, and the sum waits."""
        shard_id = shard.plan.shard
        if not shard.plan.recompressed or not self.coded(group, shard):
            return True
        if shard_id not in self._started:
            self._wanted[shard_id] = None
            self._ask_start()
        return self._started.get(shard_id, False)

    def _ask_start(self) -> None:
        """Ask what codes start from, for one shard at a time: it is larger than the shard."""
        if self._asked in self._wanted or self.view is None:
            return
        for shard_id in self._wanted:
            group, shard = self._by_shard[shard_id]
            if shard.plan.server in self._up:
                self._asked = shard_id
                self._send(shard.plan.server, msg.PullState(
                    generation=self.view.generation, group=group.index, shard=shard_id,
                    version=shard.version, worker=self.index, incarnation=self.incarnation,
                    memories=True,
                ))  # fmt: skip
                return

    def ask_again(self, peer: str) -> None:
        """There was no answer in time, or there is a new link to a server; empty: all of them."""
        if self._asked in self._wanted:
            server = self._by_shard[self._asked][1].plan.server
            if peer not in ("", server):
                return
        self._asked = -1
        self._ask_start()

    def on_state(self, event: ev.Received, state: msg.State) -> None:
        """A server says what a shard's codes start from."""
        if state.shard not in self._wanted or not event.lease:
            self._drop(event)
            return
        del self._wanted[state.shard]
        self._started[state.shard] = False
        self._out.append(
            fx.TakeMemories(state.group, state.shard, state.keys, state.dtypes, event.lease)
        )
        self._ask_start()

    def on_stored(self, event: ev.Stored) -> None:
        """The shard's coder has it: sum what has waited."""
        self._started[event.shard] = True
        group, shard = self._by_shard[event.shard]
        self.advance(group, shard)

    def settle_codes(self, group: HeldGroup, shard: HeldShard, *, acked: bool) -> None:
        """The shard's step is over: if our code is in its update, what it left out counts.

        Args:
            acked: the server holds our sum. That decides where the update itself was lost.
        """
        held = shard.collection.summed is not None
        counted = self._counted.pop(shard.plan.shard, acked) and held
        if shard.plan.recompressed and counted and self.coded(group, shard):
            self._out.append(fx.SumCounted(shard.plan.shard, shard.version))
