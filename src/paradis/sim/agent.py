"""A simulated rack agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.rack_agent import RackAgentRole
from paradis.sim.nodes import SummingNode

if TYPE_CHECKING:
    from paradis.sim.driver import Simulation


class AgentNode(SummingNode):
    """A rack agent. A code that it makes of several is their sum, so that the bits can be checked.

    Attributes:
        recompressed: shards of which it makes one code.
        started: those whose coder knows what codes start from.
    """

    role: RackAgentRole

    def __init__(self, sim: Simulation, node: NodeId, role: RackAgentRole) -> None:
        super().__init__(sim, node, role)
        self.recompressed: dict[int, None] = {}
        self.started: dict[int, None] = {}

    def forwards(self, effect: fx.Reduce) -> bool:
        own = effect.shard in self.recompressed
        assert not (own and effect.coded) or effect.shard in self.started, "codes of nothing"
        return effect.coded and not own

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out what a rack agent's role asks for."""
        match effect:
            case fx.OpenPlan():
                super().carry_own(effect)
                self.recompressed.update((s.shard, None) for s in effect.shards if s.recompressed)
            case fx.TakeMemories(shard=shard):
                self.storing[effect.lease] = None
                self.later(lambda: self._started(shard, effect.lease))
            case fx.SumCounted():
                self.sim.checkers.codes.counted(self, effect)
            case _:
                super().carry_own(effect)

    def _started(self, shard: int, lease: int) -> ev.Event:
        self.storing.pop(lease)
        self.memory.release(lease)
        self.started[shard] = None
        return ev.Stored(shard, 0)
