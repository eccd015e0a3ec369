"""What simulated workers of one host exchange: gradients to the owners, updates from them.

As with real ones, messages between two workers about one shard keep their order and are not lost;
when a worker ends its part, or the host's workers are severed, all others learn of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from paradis.ids import worker_id
from paradis.numerics.reduce import reduce_tree
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.sim.memory import Story
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.sim.worker import SimWorker


class Part(NamedTuple):
    """A gradient that was handed over, or the word that there is none."""

    step: int
    shard: int
    revision: int
    data: torch.Tensor | None


class SimSharing:
    """One worker's exchange with the others of its host.

    Attributes:
        sums: shard -> sum and what is in it.
    """

    def __init__(self, worker: SimWorker, ranks: tuple[int, ...]) -> None:
        self.worker = worker
        self.ranks = ranks
        self.over = False
        self.sums: dict[int, tuple[torch.Tensor, Story]] = {}
        self._own: dict[int, deque[Part]] = defaultdict(deque)
        self._parts: dict[tuple[int, int], deque[Part]] = defaultdict(deque)
        self._gathered: dict[tuple[int, int], None] = {}
        self._expected: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._updates: dict[int, deque[tuple[int, msg.Update, torch.Tensor | None]]] = defaultdict(
            deque
        )
        self._last_ns: dict[tuple[int, int], int] = {}

    def _later(self, rank: int, shard: int, thing: Callable[[SimSharing], None]) -> None:
        """Let something happen at another worker, in order for each shard."""
        sim = self.worker.sim
        other = sim.nodes[worker_id(rank)]
        delay_ns = 20_000 + int(sim.source.random() * 150_000)
        at_ns = max(sim.now + delay_ns, self._last_ns.get((rank, shard), 0) + 1)
        self._last_ns[rank, shard] = at_ns

        def happen() -> None:
            sharing = other.sharing  # type: ignore[attr-defined]
            if sharing is None:  # its view has not come yet: what is sent waits for it
                sim.at(sim.now + 50_000, other, happen)
            elif not sharing.over:
                thing(sharing)

        sim.at(at_ns, other, happen)

    # ------------------------------------------------------------------ way up

    def gather(self, effect: fx.Gather) -> None:
        """See `effects.Gather`."""
        for shard in effect.shards:
            assert (effect.step, shard) not in self._gathered, f"shard {shard} is gathered twice"
            self._gathered[effect.step, shard] = None

    def hand_over(self, effect: fx.HandOver, data: torch.Tensor | None) -> None:
        """See `effects.HandOver`."""
        part = Part(effect.step, effect.shard, effect.revision, data)
        if effect.owner == self.worker.rank:
            self._own[effect.group].append(part)
            self._sum_what_is_there()
            return
        rank = self.worker.rank

        def arrive(owner: SimSharing) -> None:
            owner._parts[rank, part.shard].append(part)
            owner._sum_what_is_there()

        self._later(effect.owner, effect.shard, arrive)

    def _sum_what_is_there(self) -> None:
        others = [r for r in self.ranks if r != self.worker.rank]
        for group, own in self._own.items():
            while own and all(self._parts[r, own[0].shard] for r in others):
                self._sum(group, own.popleft())

    def _sum(self, group: int, own: Part) -> None:
        assert (own.step, own.shard) in self._gathered, f"shard {own.shard} is not gathered"
        parts = {r: own if r == self.worker.rank else self._parts[r, own.shard].popleft()
                 for r in self.ranks}  # fmt: skip
        assert all(p.step == own.step for p in parts.values()), f"steps differ: {parts}"
        present = {r: p for r, p in parts.items() if p.data is not None}
        tensors = [p.data for p in present.values() if p.data is not None]
        if tensors:
            total = torch.empty_like(tensors[0])
            reduce_tree([tensors], total, 1, len(tensors) < len(self.ranks))
            story: Story = {r: (p.step, p.revision) for r, p in present.items()}
            self.sums[own.shard] = (total, story)
        included = tuple((r, p.revision) for r, p in present.items())
        self.worker.later(lambda: ev.HostSummed(group, own.shard, own.step, included))

    # ---------------------------------------------------------------- way down

    def spread(self, update: msg.Update, data: torch.Tensor | None) -> None:
        """See `effects.Spread`."""
        sender = self.worker.rank

        def arrive(other: SimSharing) -> None:
            other._updates[update.shard].append((sender, update, data))
            other._take_what_is_there()

        for rank in self.ranks:
            if rank != sender:
                self._later(rank, -1 - update.shard, arrive)

    def expect(self, effect: fx.Expect) -> None:
        """See `effects.Expect`."""
        self._expected[effect.group].extend((effect.step, shard) for shard in effect.owners)
        self.worker.sim.at(self.worker.sim.now, self.worker, self._take_what_is_there)

    def _take_what_is_there(self) -> None:
        for expected in self._expected.values():
            while expected and self._updates[expected[0][1]]:
                step, shard = expected.popleft()
                sender, update, data = self._updates[shard].popleft()
                assert update.step == step, f"expected step {step}, got {update}"
                self._take(sender, update, data)

    def _take(self, sender: int, update: msg.Update, data: torch.Tensor | None) -> None:
        worker, lease = self.worker, 0
        if data is not None:
            if not worker.role.wants(update.group, update.shard, update.version):
                return
            lease = worker.memory.place(data.clone(), {})
        worker.sim.handle(worker, ev.Received(worker_id(sender), update, lease))

    # -------------------------------------------------------------------- ends

    def end(self) -> None:
        """This worker takes no part any more; the others notice."""
        if self.over:
            return
        self.over = True
        for rank in self.ranks:
            if rank != self.worker.rank:
                self._later(rank, -1 << 30, SimSharing._broken)

    def _broken(self) -> None:
        reason = "a worker of this host is gone"
        self.worker.sim.handle(self.worker, ev.HostGroupBroken(reason))
