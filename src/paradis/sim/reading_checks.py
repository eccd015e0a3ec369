"""What must hold where worker groups read what others train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paradis.roles import effects as fx
from paradis.sim.nodes import ServerNode
from paradis.sim.violation import demand

if TYPE_CHECKING:
    from paradis.sim.driver import Simulation
    from paradis.sim.worker import SimWorker


class Reading:
    """A step begins with values within the bound, each of one version, none older than before."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._held: dict[tuple[int, int], int] = {}
        self._there: dict[tuple[int, int], dict[int, int]] = {}

    def beginning(self, worker: SimWorker, group: int) -> None:
        """A step begins on a worker: what the servers have now counts."""
        self._there[worker.rank, group] = {
            shard: held.version
            for node in self._sim.nodes.values()
            if isinstance(node, ServerNode)
            for shard, (of, held) in node.role._by_shard.items()
            if of.index == group and held.plan.length and held.initialized
        }

    def installing(self, worker: SimWorker, effect: fx.Install, data: torch.Tensor) -> None:
        """A value comes into what a worker reads."""
        key = (worker.rank, effect.shard)
        self._sim.checkers.exact(worker.node, effect.shard, effect.version, data)
        demand((worker.rank, effect.group) in self._there, self, f"Aside: {worker.node} writes "
               f"shard {effect.shard} while its script reads it")  # fmt: skip
        before = self._held.get(key, -1)
        demand(effect.version > before, self, f"Monotone: {worker.node} reads version "
               f"{effect.version} of shard {effect.shard} after {before}")  # fmt: skip
        self._held[key] = effect.version

    def begun(self, worker: SimWorker, group: int) -> None:
        """The step has begun: the script goes on with what it has."""
        there = self._there.pop((worker.rank, group))
        bound = self._sim.job.bound_of(group)
        mine = worker.script.tensors[group]
        for shard, plan in mine.plans.items():
            if not plan.length:
                continue
            held = self._held.get((worker.rank, shard), -1)
            self._sim.checkers.exact(worker.node, shard, held, mine.values[shard])
            if not plan.is_buffer:
                least = there.get(shard, 0) - bound
                demand(held >= least, self, f"Bound: {worker.node} begins step "
                       f"{worker.script.step} with version {held} of shard {shard}, the server "
                       f"had {there.get(shard, 0)}, bound {bound}")  # fmt: skip
