"""What must hold where steps travel as codes, or change to that and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradis.roles import effects as fx
from paradis.sim.violation import demand
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.sim.nodes import ServerNode
    from paradis.sim.worker import SimWorker


class SameWay:
    """A step travels in one way, as codes or in full, on all servers and workers.

    Attributes:
        ways: (group, step) -> whether it travels as codes.
    """

    def __init__(self) -> None:
        self.ways: dict[tuple[int, int], bool] = {}

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
