"""What must hold of the copies that checkpoints are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradis.ids import worker_id
from paradis.roles import effects as fx
from paradis.sim.nodes import ServerNode
from paradis.sim.violation import demand
from paradis.sim.workloads import same_bits

if TYPE_CHECKING:
    from paradis.sim.driver import Simulation
    from paradis.sim.worker import SimWorker


class Saving:
    """Copies for a checkpoint are of one version on all servers; each asked one is completed."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.asked: dict[str, None] = {}
        self.done: dict[str, None] = {}

    def copying_memories(self, worker: SimWorker, effect: fx.Copy) -> None:
        """A worker copies its part: it has done just the steps that the checkpoint is of."""
        step = worker.role.groups[effect.group].step
        demand(step == effect.step, self, f"{worker.node} copies after {step} steps for a "
               f"checkpoint of {effect.step}")  # fmt: skip

    def copying(self, node: ServerNode, effect: fx.Copy) -> None:
        """A server copies its shards of a group."""
        for shard, plan in node.plans.items():
            if self._sim.reference.shards[shard][0] == effect.group and plan.length:
                expected = self._sim.reference.value(shard, effect.step)
                demand(same_bits(node.values[shard], expected), self,
                       f"{node.node} copies another value of shard {shard} than that of version "
                       f"{effect.step}")  # fmt: skip

    def manifest(self, effect: fx.WriteManifest) -> None:
        """The leader writes a manifest: all owners have written, of one step."""
        owners = {s.server for plan in effect.plans for s in plan.shards}
        workers = {worker_id(r) for r in effect.info.workers}
        gone = {n for n in workers if getattr(self._sim.nodes[n], "finished", False)}
        nodes = {p.node for p in effect.parts}
        demand(owners | workers - gone <= nodes <= owners | workers, self,
               f"{effect.info} has the parts of {sorted(nodes)}")  # fmt: skip
        if not effect.info.as_is:  # else each server's part is of the step that it was at
            demand(all(p.step == effect.info.step for p in effect.parts), self, "two steps")
