"""What theory says about codecs: nothing is lost, errors contract, one element is exact."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from paradis.numerics.codecs import (
    FreezeRule,
    Int8,
    OneBit,
    bias_corrected,
    encode_momentum,
    freeze_variance,
    frozen_step,
    inverse_denominator,
    pack_mask,
    uncorrected_freeze_step,
    variance_ratio,
)

BETA = 0.9
DOUBLE = torch.float64


def gaussian(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def code_of(codec: OneBit | Int8, length: int) -> torch.Tensor:
    return torch.zeros(codec.encoded_bytes(length), dtype=torch.uint8)


class Job:
    """Workers and servers that exchange momentum as 1-bit Adam does, on flat tensors."""

    def __init__(self, codec: OneBit, *, workers: int, cuts: list[int], real: torch.Tensor) -> None:
        self.codec, self.real, length = codec, real, real.numel()
        edges = [0, *cuts, length]
        self.shards = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
        self.memories = [torch.zeros(length, dtype=codec.dtype) for _ in range(workers)]
        self.server_memory = torch.zeros(length, dtype=codec.dtype)
        self.updates = [code_of(codec, s.stop - s.start) for s in self.shards]
        self.momentum = torch.zeros(length, dtype=codec.dtype)

    def step(self, gradients: list[torch.Tensor], order: list[int] | None = None) -> None:
        """One exchange; pushes reach the servers in ``order``."""
        for shard, update in zip(self.shards, self.updates, strict=True):
            length, mask = shard.stop - shard.start, pack_mask(self.real[shard].clone())
            codes: dict[int, torch.Tensor] = {}
            for rank in order or range(len(gradients)):
                codes[rank] = code_of(self.codec, length)
                encode_momentum(
                    self.codec, gradients[rank][shard], update, self.memories[rank][shard],
                    codes[rank], beta=BETA, mask=mask,
                )  # fmt: skip
            mean = torch.empty(length, dtype=self.codec.dtype)
            self.codec.mean([codes[rank] for rank in sorted(codes)], mean, mask)
            self.codec.encode(mean, update, self.server_memory[shard], mask)
            self.codec.decode(update, self.momentum[shard], mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", [64, 100, None])
def test_nothing_is_lost_between_gradients_and_updates(block: int | None, masked: bool) -> None:
    """sum of updates + server's error + mean error = sum of mean momenta, over 200 steps."""
    length, workers = 1000, 4
    real = torch.arange(length) % 7 != 3 if masked else torch.ones(length, dtype=torch.bool)
    codec = OneBit(block_elements=block, dtype=DOUBLE)
    job = Job(codec, workers=workers, cuts=[300, 701], real=real)
    sent, meant = np.zeros(length), np.zeros(length)
    for step in range(200):
        gradients = [gaussian(length, seed=100 * step + rank) for rank in range(workers)]
        before = job.momentum.numpy().copy()
        meant += np.mean([BETA * before + (1 - BETA) * g.numpy() for g in gradients], axis=0)
        job.step(gradients)
        sent += job.momentum.numpy()
    memories = np.mean([memory.numpy() for memory in job.memories], axis=0)
    total = sent + job.server_memory.numpy() + memories
    difference = np.abs(total - meant)[real.numpy()].max()
    assert difference <= 1e-12 * np.abs(meant[real.numpy()]).max()
    assert np.abs(memories[real.numpy()]).max() > 0.01  # and there was something to lose
    assert not sent[~real.numpy()].any()


def test_int8_loses_nothing_either() -> None:
    codec, memory = Int8(dtype=DOUBLE), torch.zeros(700, dtype=DOUBLE)
    sent, meant = torch.zeros(700, dtype=DOUBLE), torch.zeros(700, dtype=DOUBLE)
    code = code_of(codec, 700)
    for step in range(200):
        meant += gaussian(700, seed=step)
        codec.encode(gaussian(700, seed=step), code, memory)
        codec.decode_add(code, sent)
    assert (sent + memory - meant).abs().max() <= 1e-12 * meant.abs().max()


def test_arrival_does_not_matter_nor_does_a_cut_at_a_block() -> None:
    codec, length, real = OneBit(block_elements=64), 1024, torch.ones(1024, dtype=torch.bool)
    jobs = [Job(codec, workers=4, cuts=cuts, real=real) for cuts in ([], [], [256, 704])]
    for step in range(5):
        gradients = [gaussian(length, seed=10 * step + rank).float() for rank in range(4)]
        for job, order in zip(jobs, (None, [2, 0, 3, 1], [3, 2, 1, 0]), strict=True):
            job.step(gradients, order)
    for job in jobs[1:]:
        assert torch.equal(job.momentum.view(torch.uint8), jobs[0].momentum.view(torch.uint8))
        assert torch.equal(job.server_memory, jobs[0].server_memory)


def test_a_code_sent_again_decodes_to_the_same_bits() -> None:
    codec, memory = OneBit(), torch.zeros(5000)
    code = code_of(codec, 5000)
    codec.encode(gaussian(5000).float(), code, memory)
    results = []
    for copy in (code, code.clone(), torch.cat([code[:1], code])[1:]):  # the last one not aligned
        out = torch.empty(5000)
        codec.decode(copy, out)
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_with_one_element_per_block_it_is_adam_with_frozen_variance(dtype: torch.dtype) -> None:
    codec, length, workers = OneBit(block_elements=1, dtype=dtype), 333, 3
    kind = np.float32 if dtype == torch.float32 else np.float64
    lr, decay = 1e-2, 0.1
    real = torch.ones(length, dtype=torch.bool)
    job = Job(codec, workers=workers, cuts=[100], real=real)
    inverse = inverse_denominator(gaussian(length, seed=5).square().to(dtype), 1e-8)
    value = gaussian(length, seed=6).to(dtype)
    x, m, i = value.numpy().copy(), np.zeros(length, kind), inverse.to(dtype).numpy()
    for step in range(20):
        gradients = [gaussian(length, seed=50 * step + rank).to(dtype) for rank in range(workers)]
        if step == 7:
            gradients[1][:5] = torch.tensor([0.0, -0.0, 1e-30, -1e-45, 0.0])
        job.step(gradients)
        for shard, update in zip(job.shards, job.updates, strict=True):
            frozen_step(codec, update, value[shard], inverse[shard], lr=lr, weight_decay=decay)
        momenta = [kind(BETA) * m + kind(1 - BETA) * g.numpy() for g in gradients]
        m = (momenta[0] + momenta[1] + momenta[2]) / kind(workers)
        x = x - kind(lr) * (m * i + kind(decay) * x)
        assert np.array_equal(job.momentum.numpy(), m)
        assert value.numpy().tobytes() == x.tobytes()
    assert not any(memory.any() for memory in [*job.memories, job.server_memory])
    dense, packed = value.clone(), value.clone()
    frozen_step(codec, job.momentum, dense, inverse, lr=lr, weight_decay=decay)
    for shard, update in zip(job.shards, job.updates, strict=True):
        frozen_step(codec, update, packed[shard], inverse[shard], lr=lr, weight_decay=decay)
    assert torch.equal(dense, packed)


def test_a_constant_block_is_exact() -> None:
    value = torch.where(gaussian(1024) < 0, -0.75, 0.75).float()
    codec, memory, out = OneBit(), torch.zeros(1024), torch.empty(1024)
    code = code_of(codec, 1024)
    codec.encode(value, code, memory)
    codec.decode(code, out)
    assert torch.equal(out, value) and not memory.any()


def one_hot() -> torch.Tensor:
    value = torch.zeros(1000, dtype=DOUBLE)
    value[17] = -3.0
    return value


@pytest.mark.parametrize(
    ("draw", "spread"),
    [
        (lambda: gaussian(4096), 0.798),
        (lambda: gaussian(4096) * gaussian(4096, seed=2).abs(), None),
        (lambda: (2 * gaussian(4096)).exp() * gaussian(4096, seed=3).sign(), 0.15),
        (one_hot, 0.0316),
    ],
)
def test_contraction_identities(draw: Callable[[], torch.Tensor], spread: float | None) -> None:
    value = draw()
    r = value.abs().sum() / (math.sqrt(value.numel()) * value.norm())
    assert spread is None or abs(r.item() - spread) < 0.1
    for norm, wanted in (("l1", 1 - r**2), ("l2", 2 * (1 - r))):
        codec = OneBit(norm=norm, block_elements=None, dtype=DOUBLE)  # type: ignore[arg-type]
        memory = torch.zeros_like(value)
        codec.encode(value, code_of(codec, value.numel()), memory)
        assert abs((memory.norm() / value.norm()) ** 2 - wanted) < 1e-12
    if draw is one_hot:
        assert 2 * (1 - r) > 1 > 1 - r**2  # the l2 scale makes a spike's error grow


def test_elements_without_gradient_move_by_weight_decay_alone() -> None:
    length, lr, decay = 2000, 0.1, 0.01
    variance = gaussian(length).square().float()
    variance[::3] = 0.0
    frozen, real = freeze_variance(variance, step=5000, beta2=0.999)
    assert torch.equal(real, variance > 0)
    kept = frozen[real]
    assert kept.min() == pytest.approx(1e-3 * kept.median().item(), rel=1e-6)
    assert kept.max() == pytest.approx(variance.max().item() / (1 - 0.999**5000), rel=1e-6)
    inverse = inverse_denominator(frozen, 1e-8, real)
    value = gaussian(length, seed=2).float()
    expected = value.numpy().copy()
    job = Job(OneBit(), workers=2, cuts=[], real=real)
    for step in range(10):
        gradients = [gaussian(length, seed=9 * step + rank).float() for rank in range(2)]
        for gradient in gradients:
            gradient[~real] = 0.0
        job.step(gradients)
        frozen_step(OneBit(), job.updates[0], value, inverse, lr=lr, weight_decay=decay)
        expected = expected - np.float32(lr) * (np.float32(decay) * expected)
    moved = value.numpy() != expected
    assert not moved[~real.numpy()].any() and moved[real.numpy()].all()


def test_the_published_freeze_test_is_late_and_the_corrected_one_is_not() -> None:
    """Steady gradients: v_t = (1 - b2^t) sigma^2."""
    beta2, rule = 0.999, FreezeRule()
    window = rule.window
    assert window == 1000
    norms = [1 - beta2**step for step in range(5000)]
    first = next(t for t in range(window + 1, 5000) if norms[t - window] / norms[t] >= 0.96)
    assert uncorrected_freeze_step(beta2) == pytest.approx(3782, abs=0.1)
    assert first == math.ceil(uncorrected_freeze_step(beta2))
    for step in (1004, 2000, 4000):
        assert bias_corrected(norms[step], step, beta2) == pytest.approx(1.0, rel=1e-12)
        ratio = variance_ratio((norms[step], step), (norms[step - window], step - window), beta2)
        assert ratio == pytest.approx(1.0, rel=1e-12)


def test_a_variance_that_grows_or_shrinks_is_not_steady() -> None:
    late = 100_000
    for now, before in ((1.05, 1.0), (1.0, 1.05)):
        assert variance_ratio((now, late), (before, late - 1000), 0.999) < 0.96
    assert variance_ratio((0.0, late), (0.0, late), 0.999) == 1.0
    assert variance_ratio((0.0, late), (1.0, late), 0.999) == 0.0
    assert variance_ratio((math.inf, late), (1.0, late), 0.999) == 0.0


def test_the_freeze_rule_waits_for_most_elements_and_several_checks() -> None:
    rule = FreezeRule()
    assert not rule.due(1950, 0) and rule.due(2000, 0)
    assert not rule.due(2001, 0) and not rule.due(2000, 3000)
    assert rule.steady([0.97, 0.5], [95, 5]) and not rule.steady([0.97, 0.5], [94, 6])
    assert not rule.steady([], [])
    passed = 0
    for steady in (True, True, False, True, True, True):
        passed = rule.advance(passed, steady)
    assert passed == rule.checks == 3
