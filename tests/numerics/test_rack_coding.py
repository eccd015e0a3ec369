"""One code of a rack's codes: three error memories, and nothing is lost between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_coding import CUTS, LENGTHS, OPTIONS, UNUSED, Job, draw, present_in, spans, total_of

from paradis.errors import NonFiniteGradient
from paradis.numerics.rack_coding import RackCoder

RACKS = ((0, 1), (2, 3))
STEPS = 50


def make_racks(job: Job) -> list[list[RackCoder]]:
    """Return the coders by rack and shard, begun."""
    racks = []
    for _ in RACKS:
        coders = []
        for segments, server in zip(CUTS, job.servers, strict=True):
            places = spans(segments)
            length = places[-1][0] + places[-1][1] + 5
            coders.append(RackCoder(places, length, job.codec))
            coders[-1].begin(server.start())
        racks.append(coders)
    return racks


def step(job: Job, racks: list[list[RackCoder]], gradients: Any, direct: int = -1) -> None:
    """One step; the workers of one rack may push directly, although its agent has made a code."""
    for shard, segments in enumerate(job.cuts):
        sent = []
        for index, ranks in enumerate(RACKS):
            codes = [job.encode(rank, shard, gradients[rank]) for rank in ranks]
            made = torch.full_like(codes[0], 0xA5)
            racks[index][shard].combine(codes[::-1], made)  # a sum that was void
            racks[index][shard].combine(codes, made)
            sent += codes if index == direct else [made]
            if index != direct:
                racks[index][shard].counts()
        server = job.servers[shard]
        mean = total_of(server, sent, segments, job.dtype).div_(len(gradients))
        server.update(mean, UNUSED, present_in(gradients, segments), OPTIONS)
        for rank, coders in enumerate(job.workers):
            coders[shard].keep()
            mine = job.views(job.copies[rank], segments)
            coders[shard].install(server.code, mine, present_in(gradients, segments), OPTIONS)


def rack_errors(racks: list[list[RackCoder]]) -> list[np.ndarray[Any, Any]]:
    """Return the sum of the racks' error memories, whole, by parameter."""
    found = [np.zeros(n) for n in LENGTHS]
    for coders in racks:
        for coder, segments in zip(coders, CUTS, strict=True):
            for (p, a, b), piece in zip(segments, coder.errors(), strict=True):
                found[p][a:b] += piece.numpy()
    return found


@pytest.mark.parametrize("dead", [0, 5])
def test_nothing_is_lost_between_workers_racks_and_servers(dead: int) -> None:
    """sum of M + E + (sum of rack errors) / 4 + mean e = sum of mean u."""
    job = Job("onebit", dead=dead)
    racks = make_racks(job)
    sent, meant = [np.zeros(n) for n in LENGTHS], [np.zeros(n) for n in LENGTHS]
    for number in range(STEPS):
        gradients = draw(number)
        before = job.whole("momentum")
        step(job, racks, gradients, direct=1 if number % 7 == 3 else -1)
        for p, momentum in enumerate(job.whole("momentum")):
            mean = np.mean([mine[p].numpy() for mine in gradients], axis=0)
            meant[p] += 0.9 * before[p].numpy() + (1 - 0.9) * mean
            sent[p] += momentum.numpy()
    of_racks = rack_errors(racks)
    for p, error in enumerate(job.whole("server_error")):
        real = job.whole("inverse")[p].numpy() != 0
        mine = np.mean([job.whole("error", rank)[p].numpy() for rank in range(4)], axis=0)
        left = error.numpy() + mine + of_racks[p] / 4
        assert np.abs(sent[p] + left - meant[p])[real].max() <= 1e-12 * np.abs(meant[p]).max()
        assert np.abs(of_racks[p][real]).max() > 0.01 and not of_racks[p][~real].any()
    job.check_copies()


def test_a_parameter_without_gradients_in_the_rack_takes_nothing_from_memory() -> None:
    job = Job("onebit")
    racks = make_racks(job)
    step(job, racks, draw(0))
    gradients: Any = [[None, *mine[1:]] for mine in draw(1)]
    before = rack_errors(racks)
    step(job, racks, gradients)
    after = rack_errors(racks)
    assert (before[0] == after[0]).all() and (before[1] != after[1]).any()


def test_an_overflow_is_refused_and_changes_nothing() -> None:
    job = Job("onebit", dtype=torch.float32)
    racks = make_racks(job)
    step(job, racks, draw(0, dtype=torch.float32))
    before = rack_errors(racks)
    codes = [job.encode(rank, 1, draw(1, dtype=torch.float32)[rank]) for rank in (0, 1)]
    for code in codes:
        code[:4].view(torch.float32).fill_(3e38)
        code[4:].zero_()
    with pytest.raises(NonFiniteGradient, match="got inf"):
        racks[0][1].combine(codes, torch.empty_like(codes[0]))
    assert all((a == b).all() for a, b in zip(before, rack_errors(racks), strict=True))
