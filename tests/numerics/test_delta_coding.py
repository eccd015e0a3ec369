"""bf16 and int8 both ways: nothing is lost, workers agree with the server, skips leave no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.errors import NonFiniteGradient
from paradis.numerics.codecs.codec import Codec
from paradis.numerics.codecs.int8 import Int8
from paradis.numerics.codecs.plain import Bfloat16
from paradis.numerics.delta_coding import DeltaServer, DeltaWorker
from paradis.numerics.shard_optimizer import ShardOptimizer

LENGTHS = (300, 17)
SPANS = ((0, 300), (304, 17))
LR = {"lr": 0.1}


class Job:
    """Workers and a server of one shard, without anything between them."""

    def __init__(self, codec: Codec, workers: int, seed: int = 0) -> None:
        self.source = torch.Generator().manual_seed(seed)
        self.dtype = codec.dtype
        whole = self.noise(321)
        self.values = [whole[a : a + n] for a, n in SPANS]
        self.initial = [v.clone() for v in self.values]
        self.server = DeltaServer(codec, 321, SPANS, self.values)
        self.server.replaced()
        self.optimizer = ShardOptimizer("SGD", dict(LR), self.values)
        self.workers = [DeltaWorker(codec, LENGTHS) for _ in range(workers)]
        self.held = [[v.clone() for v in self.values] for _ in range(workers)]
        self.sent = [torch.zeros(n, dtype=self.dtype) for n in LENGTHS]

    def noise(self, count: int) -> torch.Tensor:
        return torch.randn(count, generator=self.source, dtype=torch.float64).to(self.dtype)

    def step_in_full(self, *, skip: bool = False, absent: frozenset[int] = frozenset()) -> None:
        """A step whose gradients and values travel as numbers; ``absent`` ranks lack segment 0."""
        total = torch.zeros(321, dtype=self.dtype)
        for rank, worker in enumerate(self.workers):
            parts = [torch.full((n,), 9.0, dtype=self.dtype) for n in LENGTHS]
            worker.encode_in_full([self.noise(n) for n in LENGTHS], parts)  # overtaken
            gradients: list[torch.Tensor | None] = [self.noise(n) for n in LENGTHS]
            if rank in absent:
                gradients[0] = None
            worker.encode_in_full(gradients, parts)
            for (start, n), part, sum_, own in zip(SPANS, parts, self.sent, gradients, strict=True):
                total[start : start + n] += part
                if not skip and own is not None:
                    sum_ += own / len(self.workers)
        if skip:
            for worker in self.workers:
                worker.forget()
            return
        total /= len(self.workers)
        self.optimizer.apply([total[start : start + n] for start, n in SPANS], dict(LR))
        self.server.replaced()
        for worker, held in zip(self.workers, self.held, strict=True):
            for own_value, value in zip(held, self.values, strict=True):
                own_value.copy_(value)
            worker.keep()

    def step(self, *, skip: bool = False) -> None:
        total = torch.zeros(321, dtype=self.dtype)
        for rank, worker in enumerate(self.workers):
            code = torch.empty(worker.code_bytes, dtype=torch.uint8)
            worker.encode([self.noise(n) for n in LENGTHS], code, dict(LR))  # overtaken
            gradients = [self.noise(n) for n in LENGTHS]
            worker.encode(list(gradients), code, dict(LR))
            self.server.add(code, total, first=not rank)
            if not skip:
                for sum_, gradient in zip(self.sent, gradients, strict=True):
                    sum_ += gradient / len(self.workers)
        if skip:
            for worker in self.workers:
                worker.forget()
            return
        total /= len(self.workers)
        self.server.update(total, self.optimizer, [True, True], dict(LR))
        for worker, held in zip(self.workers, self.held, strict=True):
            worker.install(self.server.code, held, [True, True], dict(LR))
            worker.keep()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), skips=st.sets(st.integers(0, 11)), workers=st.integers(1, 4))
def test_nothing_is_lost(seed: int, skips: set[int], workers: int) -> None:
    """What the server took plus what workers still hold is the sum of all gradients (float64)."""
    job = Job(Int8(dtype=torch.float64), workers, seed)
    for number in range(12):
        job.step(skip=number in skips)
    for index in range(2):
        errors = [w.memories()["error"][index] for w in job.workers]
        waits = sum(errors) / workers
        moved = (job.initial[index] - job.values[index]) / LR["lr"]
        torch.testing.assert_close(moved + waits, job.sent[index], rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000), ways=st.lists(st.booleans(), min_size=12, max_size=12),
    skips=st.sets(st.integers(0, 11)), workers=st.integers(1, 4),
)  # fmt: skip
def test_nothing_is_lost_between_codes_and_numbers(
    seed: int, ways: list[bool], skips: set[int], workers: int
) -> None:
    """However steps travel: what a code left out goes along with the next gradient in full."""
    job = Job(Int8(dtype=torch.float64), workers, seed)
    for number, coded in enumerate(ways):
        if coded:
            job.step(skip=number in skips)
        else:
            job.step_in_full(skip=number in skips, absent=frozenset({number % 4}))
    for index in range(2):
        errors = [w.memories()["error"][index] for w in job.workers]
        waits = sum(errors) / workers
        moved = (job.initial[index] - job.values[index]) / LR["lr"]
        torch.testing.assert_close(moved + waits, job.sent[index], rtol=1e-12, atol=1e-12)


def test_the_first_step_in_full_takes_along_what_codes_left_out() -> None:
    job = Job(Int8(), 2)
    job.step()
    assert all(w.carries for w in job.workers)
    job.step_in_full(skip=True)
    assert all(w.carries for w in job.workers), "a skipped step leaves no trace"
    job.step_in_full(absent=frozenset({1}))
    assert [w.carries for w in job.workers] == [False, True]
    assert [bool(e.any()) for e in job.workers[1].memories()["error"]] == [True, False]
    job.step_in_full()
    assert not any(w.carries for w in job.workers)
    # From here on a gradient is pushed from where it lies; nothing is added to it, not even zero.
    assert job.server.seen() is None
    other = DeltaWorker(Int8(), LENGTHS)
    other.load_memories(job.workers[0].memories())
    assert not other.carries


def test_codes_go_on_from_the_values_of_steps_in_full() -> None:
    job = Job(Int8(), 2)
    for coded in (True, False, False, True, True, False, True):
        job.step() if coded else job.step_in_full()
        seen = job.server.memories()["seen"]
        for held in job.held:
            assert all(torch.equal(h, s) for h, s in zip(held, seen, strict=True))


@pytest.mark.parametrize("codec", [Bfloat16(), Int8()])
def test_workers_hold_what_the_server_counts_as_theirs(codec: Codec) -> None:
    job = Job(codec, 3)
    for number in range(20):
        job.step(skip=number == 7)
        seen = job.server.seen()
        assert seen is not None
        for held in job.held:
            assert all(
                torch.equal(h, seen[a : a + n]) for h, (a, n) in zip(held, SPANS, strict=True)
            )
    # A change is coded to within half a level of its block, and what is left out travels later.
    for held, value in zip(job.held[0], job.values, strict=True):
        assert float((held - value).abs().max()) < 0.05


def test_nan_is_refused_and_changes_nothing() -> None:
    worker = DeltaWorker(Int8(), LENGTHS)
    code = torch.empty(worker.code_bytes, dtype=torch.uint8)
    good = [torch.randn(n) for n in LENGTHS]
    worker.encode(list(good), code, {})
    worker.keep()
    before = [e.clone() for e in worker.memories()["error"]]
    bad = [good[0], good[1].clone()]
    bad[1][5] = float("nan")
    with pytest.raises(NonFiniteGradient) as caught:
        worker.encode(list(bad), code, {})
    assert caught.value.fields["segment"] == 1
    worker.keep()
    after = worker.memories()["error"]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_absent_segments() -> None:
    """Zero bytes up, untouched on the server and the workers, and no error is lost."""
    job = Job(Int8(), 1)
    job.step()
    worker = job.workers[0]
    error = worker.memories()["error"][0].clone()
    code = torch.empty(worker.code_bytes, dtype=torch.uint8)
    worker.encode([None, torch.ones(17)], code, dict(LR))
    assert not code[: worker.sizes[0]].any()
    total = torch.zeros(321)
    job.server.add(code, total, first=True)
    before = job.values[0].clone()
    job.server.update(total, job.optimizer, [False, True], dict(LR))
    worker.install(job.server.code, job.held[0], [False, True], dict(LR))
    worker.keep()
    assert torch.equal(job.values[0], before)
    assert torch.equal(worker.memories()["error"][0], error)


def test_memories_travel() -> None:
    """A coder that takes over memories goes on with the same bits."""
    job = Job(Int8(), 1)
    job.step()
    job.step()
    other = DeltaWorker(Int8(), LENGTHS)
    other.load_memories(job.workers[0].memories())
    gradients = [torch.randn(n) for n in LENGTHS]
    codes = []
    for worker in (job.workers[0], other):
        code = torch.empty(worker.code_bytes, dtype=torch.uint8)
        worker.encode(list(gradients), code, {})
        codes.append(code)
    assert torch.equal(*codes)
    values = [v.clone() for v in job.values]
    server = DeltaServer(Int8(), 321, SPANS, values)
    server.load_memories(job.server.memories())
    first, second = job.server.seen(), server.seen()
    assert first is not None and second is not None
    assert torch.equal(first, second)
