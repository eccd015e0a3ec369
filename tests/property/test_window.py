"""Flow control: any schedule ends, memory is bounded, and a naive window locks up."""

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.core.waits import find_cycle
from paradis.core.window import AdmissionQueue, ReceiveWindow, SendWindow

WORKERS = 3
LARGEST = 8


class NaiveWindow(SendWindow):
    """What we do not do: send whatever is ready while there is credit."""

    def may_send(self, n: int, *, lowest: bool) -> bool:
        return super().may_send(n, lowest=True)


class Worker:
    """One pusher: a readiness order, a queue, a window, and two wires to the receiver."""

    def __init__(self, sizes: list[int], order: list[int], window: SendWindow) -> None:
        self.sizes = sizes
        self.to_come = deque(order)
        self.window = window
        self.queue = AdmissionQueue({shard: shard for shard in range(len(sizes))})
        for shard in range(len(sizes)):
            self.queue.add(shard)
        self.pushes: deque[int] = deque()
        self.credits: deque[int] = deque()

    def become_ready(self) -> bool:
        """Backward yields the next shard; the last ones are closed by ``step()`` all the same."""
        if not self.to_come:
            return False
        shard = self.to_come.popleft()
        self.queue.mark_ready(shard, self.sizes[shard])
        return True

    def send(self) -> bool:
        shard = self.queue.next_sendable(self.window)
        self.window.check()
        self.queue.check()
        if shard is None:
            return False
        self.pushes.append(shard)
        return True

    def take_credit(self) -> bool:
        if not self.credits:
            return False
        self.window.on_credit(self.credits.popleft())
        return True


class Receiver:
    """Sums a shard when all have contributed; it never waits for a commit."""

    def __init__(self, workers: list[Worker], quota: int) -> None:
        self.workers = workers
        self.windows = [ReceiveWindow(quota) for _ in workers]
        self.held: dict[int, set[int]] = {}
        self.summed: set[int] = set()

    def deliver(self, k: int) -> bool:
        worker = self.workers[k]
        if not worker.pushes:
            return False
        shard = worker.pushes.popleft()
        n = worker.sizes[shard]
        self.credit(k, self.windows[k].on_received(n))
        holders = self.held.setdefault(shard, set())
        assert k not in holders
        holders.add(k)
        if len(holders) == len(self.workers):
            self.summed.add(shard)
            for each, window in enumerate(self.windows):
                self.credit(each, window.on_released(n))
        return True

    def credit(self, k: int, n: int) -> None:
        self.windows[k].check()
        if n:
            self.workers[k].credits.append(self.windows[k].credited)


def run(
    sizes: list[int], orders: list[list[int]], source: random.Random, *, naive: bool
) -> Receiver:
    """Run one random schedule until nothing can happen any more."""
    quota = 2 * LARGEST
    kind = NaiveWindow if naive else SendWindow
    workers = [Worker(sizes, order, kind(quota, LARGEST)) for order in orders]
    receiver = Receiver(workers, quota)
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
    for worker, window in zip(receiver.workers, receiver.windows, strict=True):
        assert worker.window.unreturned == window.withheld == window.stored == 0


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
        lowest = worker.queue.lowest_unsent()
        if lowest is not None:
            # Its turn needs credit, which is in the shards it has stored and others have not sent.
            stuck = [s for s, holders in locked.held.items() if k in holders - locked.summed]
            edges[f"worker-{k}"] = {
                f"worker-{other}"
                for s in stuck
                if s not in locked.summed
                for other in range(WORKERS)
                if other not in locked.held[s]
            }
    assert find_cycle(edges) is not None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, LARGEST), max_size=40), st.randoms(use_true_random=False))
def test_lost_and_repeated_credit_does_no_harm(ns: list[int], source: random.Random) -> None:
    sender, receiver = SendWindow(2 * LARGEST, LARGEST), ReceiveWindow(2 * LARGEST)
    stored: list[int] = []
    seen = [0]
    for n in ns:
        if sender.may_send(n, lowest=True):
            sender.on_sent(n)
            receiver.on_received(n)
            stored.append(n)
        elif stored:
            receiver.on_released(stored.pop(source.randrange(len(stored))))
        seen.append(receiver.credited)
        if source.random() < 0.5:
            sender.on_credit(source.choice(seen))
        receiver.check()
        sender.check()
        assert sender.unreturned >= receiver.withheld
    sender.on_credit(receiver.credited)
    assert sender.unreturned == receiver.withheld


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=12))
def test_queue_equals_sorting_every_time(order: list[int], taken: list[int]) -> None:
    queue = AdmissionQueue({shard: shard for shard in range(8)})
    window = SendWindow(1, 1)
    unsent: set[int] = set(range(8))
    ready: list[int] = []
    for shard in unsent:
        queue.add(shard)
    for shard in order:
        if shard in taken:
            queue.discard(shard)
            unsent.discard(shard)
            continue
        queue.mark_ready(shard, 0)
        ready.append(shard)
        if shard % 2:
            expected = min(ready)
            ready.remove(expected)
            unsent.discard(expected)
            assert queue.next_sendable(window) == expected
        assert queue.lowest_unsent() == min(unsent, default=None)
        queue.check()
