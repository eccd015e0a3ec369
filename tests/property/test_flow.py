"""Flow control: any schedule ends, memory is bounded, and a naive window locks up."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.core.flow import Ledger, Outbox
from paradis.core.waits import find_cycle

WORKERS = 3
LARGEST = 8
QUOTA = 2 * LARGEST


class NaiveOutbox(Outbox):
    """What we do not do: send whatever is ready while there is credit."""

    def may_push(self, rank: int, size: int) -> bool:
        return self.used + size <= self.quota


class Worker:
    """One pusher: a readiness order, an outbox, and two wires to the receiver."""

    def __init__(self, sizes: list[int], order: list[int], box: Outbox) -> None:
        self.sizes = sizes
        self.to_come = deque(order)
        self.box = box
        self.box.begin(dict(enumerate(sizes)))
        self.pushes: deque[int] = deque()
        self.credits: deque[int] = deque()

    def become_ready(self) -> bool:
        """Backward yields the next shard; the last ones are closed by ``step()`` all the same."""
        if not self.to_come:
            return False
        self.box.ready(self.to_come.popleft())
        return True

    def send(self) -> bool:
        shard = self.box.next_push()
        self.box.check()
        if shard is None:
            return False
        self.pushes.append(shard)
        return True

    def take_credit(self) -> bool:
        if not self.credits:
            return False
        self.box.returned(self.credits.popleft())
        return True


class Receiver:
    """Sums a shard when all have contributed; it never waits for a commit."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.ledgers = [Ledger(quota=QUOTA) for _ in workers]
        self.held: dict[int, set[int]] = {}
        self.summed: set[int] = set()

    def deliver(self, k: int) -> bool:
        worker = self.workers[k]
        if not worker.pushes:
            return False
        shard = worker.pushes.popleft()
        n = worker.sizes[shard]
        if self.ledgers[k].on_stored(shard, 0, n):
            worker.credits.append(shard)
        holders = self.held.setdefault(shard, set())
        assert k not in holders
        holders.add(k)
        # What is unreturned, and half a quota that was given back although it is held.
        assert self.ledgers[k].stored <= QUOTA + QUOTA // 2
        if len(holders) == len(self.workers):
            self.summed.add(shard)
            for each, ledger in enumerate(self.ledgers):
                if ledger.on_released(shard, 0, n):
                    self.workers[each].credits.append(shard)
                ledger.check()
        return True


def run(
    sizes: list[int], orders: list[list[int]], source: random.Random, *, naive: bool
) -> Receiver:
    """Run one random schedule until nothing can happen any more."""
    kind = NaiveOutbox if naive else Outbox
    workers = [Worker(sizes, order, kind(quota=QUOTA, reserve=LARGEST)) for order in orders]
    receiver = Receiver(workers)
    while True:
        actions = [
            action
            for k, w in enumerate(workers)
            for action in (w.become_ready, w.send, w.take_credit, lambda k=k: receiver.deliver(k))
        ]
        source.shuffle(actions)
        if not any(action() for action in actions):
            return receiver


SIZES = st.lists(st.integers(0, LARGEST), min_size=1, max_size=10)


@settings(max_examples=80, deadline=None)
@given(SIZES, st.data(), st.randoms(use_true_random=False))
def test_every_schedule_ends(sizes: list[int], data: st.DataObject, source: random.Random) -> None:
    shards = range(len(sizes))
    orders = [data.draw(st.permutations(shards)) for _ in range(WORKERS)]
    receiver = run(sizes, orders, source, naive=False)
    assert receiver.summed == set(shards)
    for worker, ledger in zip(receiver.workers, receiver.ledgers, strict=True):
        assert worker.box.used == ledger.stored == 0


def test_many_seeds_with_opposite_orders_end() -> None:
    for seed in range(300):
        source = random.Random(seed)
        sizes = [source.choice([1, LARGEST]) for _ in range(12)]
        orders = [list(range(12)), list(reversed(range(12))), source.sample(range(12), 12)]
        assert len(run(sizes, orders, source, naive=False).summed) == 12


def test_naive_window_locks_up_in_a_cycle_of_waits() -> None:
    sizes = [LARGEST] * 12
    orders = [list(range(12)), list(reversed(range(12))), list(range(12))]
    locked = None
    for seed in range(50):
        receiver = run(sizes, orders, random.Random(seed), naive=True)
        if len(receiver.summed) < 12:
            locked = receiver
    assert locked is not None
    edges: dict[str, set[str]] = {}
    for k, worker in enumerate(locked.workers):
        if worker.box.unsent:
            # Its turn needs credit, which is in the shards it has stored and others have not sent.
            stuck = [s for s in worker.box.holding if s not in locked.summed]
            edges[f"worker-{k}"] = {
                f"worker-{other}"
                for s in stuck
                for other in range(WORKERS)
                if other not in locked.held.get(s, set())
            }
    assert find_cycle(edges) is not None


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=12))
def test_outbox_equals_sorting_every_time(order: list[int], absent: list[int]) -> None:
    box = Outbox(quota=100, reserve=1)
    box.begin(dict.fromkeys(range(8), 1))
    unsent, ready = set(range(8)), []
    for shard in order:
        if shard in absent:
            box.settle(shard)
            unsent.discard(shard)
            continue
        box.ready(shard)
        ready.append(shard)
        if shard % 2:
            ready.remove(expected := min(ready))
            unsent.discard(expected)
            assert box.next_push() == expected
        assert box.unsent == tuple(sorted(unsent))
        assert box.blocked == tuple(sorted(ready))
        box.check()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "next", "done"]), st.integers(0, 5)), max_size=40)
)
def test_lane_never_holds_the_lowest_up(actions: list[tuple[str, int]]) -> None:
    box = Outbox(quota=4, reserve=2)
    waiting: set[int] = set()
    flying: set[int] = set()
    for what, shard in actions:
        if what == "add":
            box.lane_add(shard, shard)
            waiting.add(shard)
        elif what == "done":
            box.lane_done(shard)
            flying.discard(shard)
        else:
            entry = box.lane_next()
            lowest = min(waiting, default=None)
            if lowest is None or (flying and lowest > min(flying)):
                assert entry is None
            else:
                assert entry is not None and entry[0] == lowest
                waiting.discard(lowest)
                flying.add(lowest)
