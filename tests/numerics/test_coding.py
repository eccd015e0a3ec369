"""Codes of a whole job in one process, against what theory says: workers, servers, shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.errors import LocalProtocolError, NonFiniteGradient, SnapshotCorrupt
from paradis.numerics.codecs import OneBit
from paradis.numerics.coders import server_coder, worker_coder
from paradis.numerics.coding import ServerCoder, State, WorkerCoder
from paradis.numerics.elementwise import Options
from paradis.numerics.lion_coding import LionServer, LionWorker
from paradis.numerics.onebit_coding import OneBitAdamServer, OneBitAdamWorker, onebit_codec

DOUBLE = torch.float64
OPTIONS: Options = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
LENGTHS = (1000, 37, 640)
"""Elements of three parameters."""

CUTS = (((0, 0, 448), (1, 0, 37)), ((0, 448, 1000),), ((2, 0, 640),))
"""Three servers' shards: segments as (parameter, start, stop)."""

Cuts = Sequence[Sequence[tuple[int, int, int]]]
Gradients = Sequence[torch.Tensor | None]


def gaussian(length: int, seed: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(
        dtype
    )


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def adam_states(dtype: torch.dtype, dead: int = 0) -> list[State]:
    """Adam's state of each parameter after 500 steps; every ``dead``th element never moved."""
    states: list[State] = []
    for index, length in enumerate(LENGTHS):
        m, v = gaussian(length, 70 + index, dtype), gaussian(length, 80 + index, dtype).square()
        if dead:
            m[::dead], v[::dead] = 0.0, 0.0
        states.append(({"exp_avg": m * 0.1, "exp_avg_sq": v}, {"step": 500.0}))
    return states


class Job:
    """Workers and servers that exchange codes; values are flat tensors per parameter."""

    def __init__(
        self, kind: str, *, workers: int = 4, cuts: Cuts = CUTS, dtype: torch.dtype = DOUBLE,
        codec: OneBit | None = None, dead: int = 0, at_once: bool = False,
    ) -> None:  # fmt: skip
        self.kind, self.cuts, self.dtype, self.at_once = kind, cuts, dtype, at_once
        self.given: dict[tuple[int, int], list[Any]] = {}
        self.codec = codec or OneBit(dtype=dtype)
        self.values = [gaussian(n, 90 + i, dtype) for i, n in enumerate(LENGTHS)]
        self.copies = [[value.clone() for value in self.values] for _ in range(workers)]
        self.servers = [self.server(segments) for segments in cuts]
        self.workers = [[self.worker(segments) for segments in cuts] for _ in range(workers)]
        states = adam_states(dtype, dead) if kind == "onebit" else [({}, {})] * len(LENGTHS)
        for index, segments in enumerate(cuts):
            given = [
                ({k: v[a:b].clone() for k, v in states[p][0].items()}, states[p][1])
                for p, a, b in segments
            ]
            for coder in (self.servers[index], *(shards[index] for shards in self.workers)):
                coder.begin(given, OPTIONS)

    def server(self, segments: Sequence[tuple[int, int, int]]) -> ServerCoder:
        values = self.views(self.values, segments)
        if self.kind == "onebit":
            return OneBitAdamServer(spans(segments), values, self.codec)
        return LionServer(spans(segments), values, [start for _, start, _ in segments])

    def worker(self, segments: Sequence[tuple[int, int, int]]) -> WorkerCoder:
        lengths = [stop - start for _, start, stop in segments]
        if self.kind == "onebit":
            return OneBitAdamWorker(lengths, self.codec)
        return LionWorker(lengths, self.dtype)

    @staticmethod
    def views(whole: Any, segments: Sequence[tuple[int, int, int]]) -> list[Any]:
        return [None if whole[p] is None else whole[p][a:b] for p, a, b in segments]

    def encode(self, rank: int, shard: int, gradients: Gradients) -> torch.Tensor:
        coder = self.workers[rank][shard]
        code = torch.full((coder.code_bytes,), 0xA5, dtype=torch.uint8)
        self.given[rank, shard] = self.views(gradients, self.cuts[shard])
        given = self.given[rank, shard]
        if self.at_once:
            given = [None if g is None else g.clone() for g in given]
            coder.encode_and_keep(given, code, OPTIONS)
            for gradient in given:  # it is not needed any more
                if gradient is not None:
                    gradient.fill_(math.nan)
        else:
            coder.encode(given, code, OPTIONS)
        return code

    def step(
        self, gradients: Sequence[Gradients], order: Sequence[int] | None = None,
        options: Options = OPTIONS,
    ) -> None:  # fmt: skip
        """One step; gradients[rank][parameter]; pushes are made and sent in ``order``."""
        for shard in range(len(self.cuts)):
            codes = {
                rank: self.encode(rank, shard, gradients[rank])
                for rank in order or range(len(gradients))
            }
            self.answer(shard, codes, present_in(gradients, self.cuts[shard]), options)

    def answer(
        self, shard: int, codes: dict[int, torch.Tensor], present: list[bool], options: Options
    ) -> None:
        segments, server = self.cuts[shard], self.servers[shard]
        mean = total_of(server, [codes[rank] for rank in sorted(codes)], segments, self.dtype)
        server.update(mean.div_(len(codes)), UNUSED, present, options)
        for rank, coders in enumerate(self.workers):
            if not self.at_once or self.kind == "onebit":  # there it has nothing left to do
                coders[shard].keep()
            mine = self.views(self.copies[rank], segments)
            coders[shard].install(server.code, mine, present, options)

    def check_copies(self) -> None:
        for shard, segments in enumerate(self.cuts):
            assert self.servers[shard].seen() is None  # workers hold the server's values
            values = self.views(self.values, segments)
            for copy in self.copies:
                for mine, theirs in zip(self.views(copy, segments), values, strict=True):
                    assert same_bits(mine, theirs)

    def whole(self, name: str, rank: int | None = None) -> list[torch.Tensor]:
        """A memory of the servers, or of one worker, put together per parameter."""
        coders: Sequence[Any] = self.servers if rank is None else self.workers[rank]
        found = [torch.empty(0)] * len(LENGTHS)
        for coder, segments in zip(coders, self.cuts, strict=True):
            for (p, a, b), piece in zip(segments, coder.memories()[name], strict=True):
                if not found[p].numel():
                    found[p] = torch.full((LENGTHS[p],), 7, dtype=piece.dtype)
                found[p][a:b] = piece
        return found

    def restore(self, other: Job) -> None:
        """Take over another job's values and memories, whatever its cuts."""
        for mine, theirs in zip(
            [self.values, *self.copies], [other.values, *other.copies], strict=True
        ):
            for value, source in zip(mine, theirs, strict=True):
                value.copy_(source)
        for rank in [None, *range(len(self.workers))]:
            coders: Sequence[Any] = self.servers if rank is None else self.workers[rank]
            theirs_: Sequence[Any] = other.servers if rank is None else other.workers[rank]
            names = list(theirs_[0].memories())
            whole = {name: other.whole(name, rank) for name in names}
            for coder, segments in zip(coders, self.cuts, strict=True):
                coder.load_memories({n: self.views(w, segments) for n, w in whole.items()})


UNUSED: Any = None
"""The shard's optimizer, which these coders do not step."""


def spans(segments: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Where segments lie in a shard: each from a multiple of 64 on."""
    found, start = [], 0
    for _, a, b in segments:
        found.append((start, b - a))
        start += -(-(b - a) // 64) * 64
    return found


def total_of(
    server: ServerCoder, codes: list[torch.Tensor], segments: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Sum codes; check that padding is left alone."""
    places = spans(segments)
    total = torch.full((places[-1][0] + places[-1][1] + 5,), 3.5, dtype=dtype)
    for index, code in enumerate(codes):
        server.add(code, total, first=index == 0)
    padding = torch.ones(total.numel(), dtype=torch.bool)
    for start, length in places:
        padding[start : start + length] = False
    assert (total[padding] == 3.5).all()
    return total


def present_in(gradients: Sequence[Gradients], segments: Any) -> list[bool]:
    return [any(mine[p] is not None for mine in gradients) for p, _, _ in segments]


def draw(step: int, workers: int = 4, dtype: torch.dtype = DOUBLE) -> list[list[torch.Tensor]]:
    return [
        [gaussian(n, 1000 * step + 10 * rank + p, dtype) for p, n in enumerate(LENGTHS)]
        for rank in range(workers)
    ]


# ------------------------------------------------------------------------ 1-bit Adam


@pytest.mark.parametrize(("dead", "at_once"), [(0, False), (5, False), (5, True)])
def test_nothing_is_lost_between_gradients_and_updates(dead: int, at_once: bool) -> None:
    """sum of M + E + mean e = sum of mean u, over 200 steps."""
    job = Job("onebit", dead=dead, at_once=at_once)
    sent, meant = [np.zeros(n) for n in LENGTHS], [np.zeros(n) for n in LENGTHS]
    for step in range(200):
        gradients = draw(step)
        before = job.whole("momentum")
        job.step(gradients)
        for p, momentum in enumerate(job.whole("momentum")):
            mean = np.mean([mine[p].numpy() for mine in gradients], axis=0)
            meant[p] += 0.9 * before[p].numpy() + (1 - 0.9) * mean
            sent[p] += momentum.numpy()
    for p, error in enumerate(job.whole("server_error")):
        real = job.whole("inverse")[p].numpy() != 0
        assert real.all() == (dead == 0)
        mine = np.mean([job.whole("error", rank)[p].numpy() for rank in range(4)], axis=0)
        difference = np.abs(sent[p] + error.numpy() + mine - meant[p])[real].max()
        assert difference <= 1e-12 * np.abs(meant[p]).max()
        assert np.abs(mine[real]).max() > 0.01
        assert not sent[p][~real].any() and not mine[~real].any() and not error[~real].any()
    job.check_copies()


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_with_one_element_per_block_it_is_adam_with_frozen_variance(dtype: torch.dtype) -> None:
    job = Job("onebit", dtype=dtype, codec=OneBit(block_elements=1, dtype=dtype))
    kind = np.float32 if dtype == torch.float32 else np.float64
    momenta = [m.numpy().copy() for m in job.whole("momentum")]
    values = [v.numpy().copy() for v in job.values]
    for step in range(20):
        gradients = draw(step, dtype=dtype)
        job.step(gradients)
        for p, inverse in enumerate(job.whole("inverse")):
            u = [kind(0.9) * momenta[p] + kind(1 - 0.9) * mine[p].numpy() for mine in gradients]
            momenta[p] = (((u[0] + u[1]) + u[2]) + u[3]) / kind(4)
            update = momenta[p] * inverse.to(dtype).numpy() + kind(0.1) * values[p]
            values[p] = values[p] - kind(0.01) * update
            assert values[p].tobytes() == job.values[p].numpy().tobytes()
    job.check_copies()
    assert not any(error.any() for error in job.whole("server_error"))


@pytest.mark.parametrize("kind", ["onebit", "lion"])
def test_order_of_arrival_and_cuts_at_blocks_change_no_bit(kind: str) -> None:
    codec = OneBit(block_elements=64)
    cuts: list[Cuts] = [CUTS, CUTS, (((0, 0, 1000), (1, 0, 37), (2, 0, 640)),)]
    if kind == "lion":  # ties go by the place in the parameter, wherever it is cut
        cuts[2] = (((0, 0, 63), (1, 0, 37)), ((0, 63, 1000), (2, 0, 640)))
    jobs = [Job(kind, cuts=each, dtype=torch.float32, codec=codec) for each in cuts]
    if kind == "onebit":  # the floor of the variance is a median over the segment
        jobs[2].restore(jobs[0])
    for step in range(5):
        for job, order in zip(jobs, (None, [2, 0, 3, 1], [3, 2, 1, 0]), strict=True):
            job.step(draw(step, dtype=torch.float32), order)
            job.check_copies()
    for job in jobs[1:]:
        assert all(same_bits(a, b) for a, b in zip(job.values, jobs[0].values, strict=True))


@pytest.mark.parametrize("kind", ["onebit", "lion", "int8", "bf16"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("absent", [0, 1])
def test_the_mean_in_one_pass_is_that_of_codes_added_one_by_one(
    kind: str, workers: int, absent: int
) -> None:
    """With masked elements, with a worker that has no gradient, and with one who sends nothing."""
    spans, total = [(0, 448), (448, 37)], 512
    values = [torch.zeros(n) for _, n in spans]
    server = server_coder(kind, total, spans, values, [0, 0])
    lengths = [n for _, n in spans]
    states = [({"exp_avg": gaussian(n, 5, torch.float32),
                "exp_avg_sq": gaussian(n, 6, torch.float32).relu()}, {"step": 9.0})
              for n in lengths]  # fmt: skip
    server.begin(states, OPTIONS)
    codes = []
    for rank in range(workers):
        coder = worker_coder(kind, lengths)
        coder.load_memories(server.start() or coder.memories())
        given: list[torch.Tensor | None] = [gaussian(n, rank, torch.float32) for n in lengths]
        if rank == workers - 1:
            given[1] = None
        codes.append(torch.empty(coder.code_bytes, dtype=torch.uint8))
        coder.encode(given, codes[-1], OPTIONS)
    expected, got = torch.zeros(total), torch.zeros(total)
    for place, code in enumerate(codes):
        server.add(code, expected, first=not place)
    expected.div_(workers + absent)
    server.mean(codes, got, workers + absent)
    assert same_bits(expected, got)


def test_elements_without_variance_move_by_weight_decay_alone() -> None:
    job = Job("onebit", dtype=torch.float32, dead=3)
    expected = [value.numpy().copy() for value in job.values]
    for step in range(10):
        job.step(draw(step, dtype=torch.float32))
        expected = [x - np.float32(0.01) * (np.float32(0.1) * x) for x in expected]
    for value, lone in zip(job.values, expected, strict=True):
        moved = value.numpy() != lone
        assert not moved[::3].any() and moved[1::3].all() and moved[2::3].all()


def test_hyper_parameters_count_with_their_step_and_eps_does_not() -> None:
    jobs = [Job("onebit", dtype=torch.float32) for _ in range(2)]
    jobs[0].step(draw(1, dtype=torch.float32))
    jobs[1].step(draw(1, dtype=torch.float32), options={**OPTIONS, "eps": 1.0})
    assert same_bits(jobs[0].values[0], jobs[1].values[0])
    before = jobs[0].values[0].clone()
    jobs[0].step(draw(2, dtype=torch.float32), options={**OPTIONS, "lr": 0.0})
    assert same_bits(jobs[0].values[0], before)


def test_the_parity_scale_has_one_scale_per_segment() -> None:
    codec = onebit_codec({"scale": "l2"}, DOUBLE)
    assert codec.norm == "l2" and OneBitAdamWorker([1000, 37], codec).sizes == (8 + 125, 8 + 5)
    assert onebit_codec({}) == OneBit() and OneBitAdamWorker([1025]).code_bytes == 8 + 129
    job = Job("onebit", codec=codec)
    for step in range(3):
        job.step(draw(step))
        job.check_copies()


def test_a_coder_must_begin() -> None:
    with pytest.raises(LocalProtocolError, match=r"expected begin\(\)"):
        OneBitAdamWorker([4]).encode([torch.ones(4)], torch.empty(5, dtype=torch.uint8), OPTIONS)


# --------------------------------------------------------------------- both optimizers

KINDS = ["onebit", "lion"]
NAMES = {"onebit": ["error", "momentum", "inverse"], "lion": ["momentum"]}


def memories(job: Job) -> list[torch.Tensor]:
    """Every memory of a job, copied."""
    coders = [*job.servers, *itertools.chain(*job.workers)]
    return [t.clone() for c in coders for ts in c.memories().values() for t in ts]


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_repeats_and_skipped_steps_leave_no_trace(kind: str, data: st.DataObject) -> None:
    """A job whose steps are encoded anew, skipped and acknowledged twice has the same bits."""
    calm, stormy = (Job(kind, workers=2, dtype=torch.float32) for _ in range(2))
    for step in range(data.draw(st.integers(1, 4))):
        gradients = draw(step, workers=2, dtype=torch.float32)
        for shard, rank in itertools.product(range(len(CUTS)), range(2)):
            coder = stormy.workers[rank][shard]
            for other in data.draw(st.lists(st.sampled_from(["encode", "forget", "keep"]))):
                if other == "encode":
                    stormy.encode(rank, shard, draw(777, workers=2, dtype=torch.float32)[rank])
                    kept = [t.clone() for ts in coder.memories().values() for t in ts]
                    before = [t for ts in calm.workers[rank][shard].memories().values() for t in ts]
                    assert all(same_bits(a, b) for a, b in zip(kept, before, strict=True))
                else:
                    coder.forget()
                if other == "keep":
                    coder.keep()  # again, after a skip
        for job in (calm, stormy):
            job.step(gradients)
            job.check_copies()
    for a, b in zip(memories(calm), memories(stormy), strict=True):
        assert same_bits(a, b)
    assert all(same_bits(a, b) for a, b in zip(calm.values, stormy.values, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", ["l1", "l2"])
@pytest.mark.parametrize("dead", [0, 5])
def test_what_counts_at_once_has_the_same_bits(kind: str, scale: str, dead: int) -> None:
    """With absent parameters, from the first code on; a restore finds the same memories."""
    codec = onebit_codec({"scale": scale})
    jobs = [Job(kind, dtype=torch.float32, codec=codec, dead=dead, at_once=at_once)
            for at_once in (False, True)]  # fmt: skip
    for step in range(6):
        gradients: list[Any] = draw(step, dtype=torch.float32)
        if step in (0, 3):
            gradients[1][0] = None
        if step == 2:
            gradients = [[mine[0], None, mine[2]] for mine in gradients]
        for job in jobs:
            job.step(gradients)
            job.check_copies()
        for a, b in zip(memories(jobs[0]), memories(jobs[1]), strict=True):
            assert same_bits(a, b)
    assert all(same_bits(a, b) for a, b in zip(jobs[0].values, jobs[1].values, strict=True))


def test_a_code_that_counted_at_once_comes_once() -> None:
    job = Job("onebit", at_once=True)
    job.encode(0, 0, draw(1)[0])
    with pytest.raises(AssertionError, match="move first"):
        job.encode(0, 0, draw(2)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_refusal_at_once_names_the_segment_and_moves_no_value(bad: float) -> None:
    job = Job("onebit", dtype=torch.float32, at_once=True)
    job.step(draw(1, dtype=torch.float32))
    values = [value.clone() for value in job.values]
    gradients = draw(2, dtype=torch.float32)[0]
    gradients[1][5] = bad
    with pytest.raises(NonFiniteGradient) as caught:
        job.encode(0, 0, gradients)
    assert caught.value.fields["segment"] == 1
    total = torch.zeros(448 + 37)
    total[448 + 3] = bad
    with pytest.raises(NonFiniteGradient) as caught:
        job.servers[0].update(total, UNUSED, [True, True], OPTIONS)
    assert caught.value.fields["segment"] == 1 and job.servers[0].refuses
    assert all(same_bits(a, b) for a, b in zip(values, job.values, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_and_changes_nothing(kind: str, bad: float) -> None:
    """On a server a refusal ends the job: of 1-bit Adam only the values are as they were."""
    job = Job(kind, dtype=torch.float32)
    job.step(draw(1, dtype=torch.float32))
    before, values = memories(job), [value.clone() for value in job.values]
    gradients = draw(2, dtype=torch.float32)[0]
    gradients[1][5] = bad
    with pytest.raises(NonFiniteGradient) as caught:
        job.encode(0, 0, gradients)
    assert caught.value.fields["segment"] == 1
    assert all(same_bits(a, b) for a, b in zip(before, memories(job), strict=True))
    total = torch.zeros(448 + 37)
    total[448 + 3] = bad
    server = job.servers[0] if kind == "lion" else Job(kind, dtype=torch.float32).servers[0]
    with pytest.raises(NonFiniteGradient) as caught:
        server.update(total, UNUSED, [True, True], OPTIONS)
    assert caught.value.fields["segment"] == 1
    assert all(same_bits(a, b) for a, b in zip(before, memories(job), strict=True))
    assert all(same_bits(a, b) for a, b in zip(values, job.values, strict=True))
    twin = Job(kind, dtype=torch.float32)
    twin.step(draw(1, dtype=torch.float32))
    for each in (job, twin):
        each.step(draw(3, dtype=torch.float32))
    assert all(same_bits(a, b) for a, b in zip(job.values, twin.values, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_absent_segments_are_left_alone(kind: str) -> None:
    job = Job(kind)
    before, values = memories(job), [value.clone() for value in job.values]
    job.step([[None] * 3] * 4)
    assert all(same_bits(a, b) for a, b in zip(before, memories(job), strict=True))
    assert all(same_bits(a, b) for a, b in zip(values, job.values, strict=True))
    assert not job.encode(0, 0, [None] * 3).any() and not job.servers[0].code.any()
    gradients: list[list[torch.Tensor | None]] = [[*mine] for mine in draw(1)]
    for mine in gradients:
        mine[1] = None  # nowhere
    gradients[2][0] = None  # on one worker only
    job.step(gradients)
    job.check_copies()
    assert same_bits(values[1], job.values[1]) and not torch.equal(values[0], job.values[0])
    for name in NAMES[kind]:
        index = NAMES[kind].index(name)
        fresh = list(Job(kind).workers[2][0].memories().values())[index][0]
        if name != "momentum" or kind == "lion":
            assert same_bits(job.workers[2][0].memories()[name][0], fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_memories_come_back_in_another_cut(kind: str) -> None:
    other: Cuts = (((0, 0, 64), (2, 0, 640)), ((0, 64, 1000), (1, 0, 37)))
    codec = OneBit(block_elements=8)  # so that blocks do not depend on the cut
    job = Job(kind, dtype=torch.float32, codec=codec)
    moved = Job(kind, dtype=torch.float32, codec=codec, cuts=other)
    for step in range(3):
        job.step(draw(step, dtype=torch.float32))
    moved.restore(job)
    for step in range(3, 6):
        for each in (job, moved):
            each.step(draw(step, dtype=torch.float32))
            each.check_copies()
    assert all(same_bits(a, b) for a, b in zip(job.values, moved.values, strict=True))
    for name in job.servers[0].memories():
        assert all(map(same_bits, job.whole(name), moved.whole(name)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: {},
        lambda m: {**m, "more": next(iter(m.values()))},
        lambda m: {k: [t[1:] for t in ts] for k, ts in m.items()},
        lambda m: {k: [t.to(torch.float16) for t in ts] for k, ts in m.items()},
        lambda m: {k: ts[1:] for k, ts in m.items()},
    ],
)
def test_memories_of_another_job_are_refused(kind: str, spoil: Callable[[Any], Any]) -> None:
    job = Job(kind)
    for coder in (job.servers[0], job.workers[0][0]):
        with pytest.raises(SnapshotCorrupt, match="memories refused"):
            coder.load_memories(spoil(coder.memories()))


def test_a_new_worker_has_no_error_yet() -> None:
    job = Job("onebit")
    job.step(draw(1))
    fresh = job.worker(CUTS[0])
    fresh.load_memories(job.servers[0].memories())
    assert not any(error.any() for error in fresh.memories()["error"])
    assert same_bits(fresh.memories()["momentum"][0], job.whole("momentum")[0][:448])


# ------------------------------------------------------------------------------- Lion


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_votes_are_counted_and_ties_alternate(workers: int) -> None:
    job = Job("lion", workers=workers)
    momenta = [[np.zeros(n) for n in LENGTHS] for _ in range(workers)]
    values = [value.numpy().copy() for value in job.values]
    ties = 0
    for step in range(6):
        gradients: list[list[torch.Tensor | None]] = [[*mine] for mine in draw(step, workers)]
        if step == 2:
            gradients[0][2] = None
        job.step(gradients)
        job.check_copies()
        for p, n in enumerate(LENGTHS):
            votes = np.zeros(n)
            for rank in range(workers):
                if gradients[rank][p] is None:
                    continue
                g, m = gradients[rank][p].numpy(), momenta[rank][p]
                votes += np.where(0.9 * m + (1 - 0.9) * g < 0, -1.0, 1.0)
                momenta[rank][p] = 0.999 * m + (1 - 0.999) * g
            if all(mine[p] is None for mine in gradients):
                continue
            updates = step - (1 if workers == 1 and p == 2 and step > 2 else 0)
            rule = np.where((updates + np.arange(n)) % 2 == 0, 1.0, -1.0)
            ties += int((votes == 0).sum())
            sign = np.where(votes == 0, rule, np.sign(votes))
            values[p] = values[p] - 0.01 * (sign + 0.1 * values[p])
            assert values[p].tobytes() == job.values[p].numpy().tobytes()
    assert (ties > 0) == (workers % 2 == 0 or workers == 3)
