"""What must hold where steps travel as codes, or change to that and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradis.roles import effects as fx
from paradis.sim.violation import demand
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.sim.agent import AgentNode
    from paradis.sim.nodes import ServerNode, SummingNode
    from paradis.sim.worker import SimWorker


class SameWay:
    """A step travels in one way, as codes or in full, on all servers and workers.

    And what a rack agent's code has left out counts only where the server's sum has that code.

    Attributes:
        ways: (group, step) -> whether it travels as codes.
        summed: (shard, step) -> rack agents whose sums are in the server's last sum.
        settled: how often a rack agent's code counted.
    """

    def __init__(self) -> None:
        self.ways: dict[tuple[int, int], bool] = {}
        self.summed: dict[tuple[int, int], list[int]] = {}
        self.settled = 0

    def summing(self, node: SummingNode, effect: fx.Reduce, pushers: list[int]) -> None:
        """A server makes a sum of what workers and, by their numbers, rack agents sent."""
        if node.node.startswith("server"):
            version = node.role._by_shard[effect.shard][1].version
            self.summed[effect.shard, version] = pushers

    def counted(self, node: AgentNode, effect: fx.SumCounted) -> None:
        """A rack agent takes its code for one that counts."""
        self.settled += 1
        pushers = self.summed.get((effect.shard, effect.step), [])
        demand(node.role.index in pushers, self, f"{node.node} counts its code of shard "
               f"{effect.shard} in step {effect.step}, which is made of {pushers}")  # fmt: skip

    def applying(self, node: ServerNode, effect: fx.Apply) -> None:
        """A server applies a step to a shard."""
        if node.plans[effect.shard].codec:
            self._note(node.node, effect.group, effect.step, coded=effect.coded)

    def pushing(self, worker: SimWorker, message: msg.DataMessage) -> None:
        """A worker pushes a gradient."""
        mine = worker.script.tensors[message.group]
        demand(message.shard not in mine.unmade, self, f"{worker.node} pushes shard "
               f"{message.shard} of step {message.step} before its code is made")  # fmt: skip
        if mine.plans[message.shard].codec:
            self._note(worker.node, message.group, message.step, coded=message.codec > 0)

    def stepped(self, worker: SimWorker, group: int, step: int) -> None:
        """A worker has done a step."""
        coded = step in worker.role.groups[group].coded_steps
        self._note(worker.node, group, step, coded=coded)

    def _note(self, node: str, group: int, step: int, *, coded: bool) -> None:
        demand(self.ways.setdefault((group, step), coded) == coded, self,
               f"step {step} of group {group} travels as codes: {coded} on {node}, "
               f"{not coded} elsewhere")  # fmt: skip

    def changes(self) -> int:
        """Return how often a group changed, from one step to the next."""
        return sum(
            coded != self.ways.get((group, step + 1), coded)
            for (group, step), coded in self.ways.items()
        )
