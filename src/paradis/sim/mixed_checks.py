"""What must hold where worker groups differ in mode: of each shard what holds in its group's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.sim.checkers import Checkers
from paradis.sim.memory import Story
from paradis.sim.nodes import ServerNode, SimNode
from paradis.sim.stale_checks import StaleCheckers
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.sim.driver import Simulation
    from paradis.sim.worker import SimWorker


class MixedCheckers(Checkers):
    """Those of ``sync`` and those of the other modes, each asked about its groups."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(sim)
        self._of_mode = {True: Checkers(sim), False: StaleCheckers(sim)}
        for synchronous, each in self._of_mode.items():
            each.covers = partial(self._is, synchronous)
        self._saving = self._of_mode[True]._saving

    def _is(self, synchronous: bool, group: int) -> bool:
        return self._sync(group) == synchronous

    def _sync(self, group: int) -> bool:
        return self._sim.job.mode_of(group) == "sync"

    def _for(self, group: int) -> Checkers:
        return self._of_mode[self._sync(group)]

    def _for_shard(self, shard: int) -> Checkers:
        return self._for(self._sim.reference.shards[shard][0])

    def after(self, node: SimNode, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """A node has handled an event: what is looked at then is the same in all modes."""
        self._of_mode[True].after(node, event, effects)

    def applying(self, node: ServerNode, effect: fx.Apply, story: Story) -> None:
        """A server applies a sum, or one worker's gradient."""
        self._for(effect.group).applying(node, effect, story)

    def serving(self, node: ServerNode, message: msg.DataMessage) -> None:
        """A server sends a value."""
        self._for(message.group).serving(node, message)

    def exact(self, where: str, shard: int, version: int, value: torch.Tensor) -> None:
        """A value is the one that its version means."""
        self._for_shard(shard).exact(where, shard, version, value)

    def installing(self, worker: SimWorker, effect: fx.Install, data: torch.Tensor) -> None:
        """A worker installs a value of what it trains."""
        self._for(effect.group).installing(worker, effect, data)

    def keeping(self, worker: SimWorker, effect: fx.Keep) -> None:
        """A worker keeps its value."""
        self._for(effect.group).keeping(worker, effect)

    def value(self, worker: SimWorker, shard: int, version: int, value: torch.Tensor) -> None:
        """A script goes on with this value."""
        self._for_shard(shard).value(worker, shard, version, value)

    def stepped(self, worker: SimWorker, group: int, step: int, done: fx.Complete) -> None:
        """A worker's ``step()`` returned."""
        self._for(group).stepped(worker, group, step, done)

    def copying(self, node: ServerNode, effect: fx.Copy) -> None:
        """A server copies for a checkpoint."""
        self._for(effect.group).copying(node, effect)

    def end(self) -> None:
        """The job is over."""
        for each in self._of_mode.values():
            each.end()
