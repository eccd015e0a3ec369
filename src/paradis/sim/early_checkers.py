"""What must hold where updates go ahead of the commits (``training.early_update``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paradis.roles import effects as fx
from paradis.sim.violation import demand

if TYPE_CHECKING:
    from paradis.sim.worker import SimWorker


class Ahead:
    """What is done ahead of the commits is compared with them when the first worker goes on.

    That worker has the servers' word that all have committed what was applied: if it is not so, a
    comparison fails then, and a job that has failed in the meantime compares nothing.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._confirmed: dict[tuple[int, int], None] = {}

    def compare(self, group: int, step: int, comparison: Callable[[], None]) -> None:
        """Run a comparison with the commits of a step, now or when they are in."""
        if (group, step) in self._confirmed:
            comparison()
        else:
            self._open.setdefault((group, step), []).append(comparison)

    def confirmed(self, group: int, step: int) -> None:
        """A worker has finished the step."""
        self._confirmed[group, step] = None
        for comparison in self._open.pop((group, step), []):
            comparison()

    def end(self) -> None:
        """The job is over: every step was confirmed."""
        demand(not self._open, self, f"applied, but never confirmed: {list(self._open)}")


class Aside:
    """A parameter keeps its value while backward may read it: until ``step()`` is called."""

    def installing(self, worker: SimWorker, effect: fx.Install) -> None:
        """A worker installs a value; between steps it may only be the present one."""
        step = worker.role.groups[effect.group].step
        demand(worker.closing is not None or effect.version <= step, self,
               f"{worker.node} installs version {effect.version} of shard {effect.shard} before it "
               f"has closed step {step}")  # fmt: skip
