"""Sharing out a plan, and summing over hosts first, against slow twins."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paradis.core.host_groups import share_out
from paradis.numerics.reduce import reduce_tree

SIZES = st.lists(st.integers(1, 1 << 20), max_size=40)


@given(SIZES, st.integers(2, 9))
def test_shares_differ_by_one_largest_shard_at_most(sizes: list[int], members: int) -> None:
    plan = dict(enumerate(sizes))
    places = share_out(plan, members)
    assert list(places) == list(plan)
    loads = [sum(plan[s] for s, p in places.items() if p == place) for place in range(members)]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    for shard, place in places.items():  # the twin: least loaded so far, the first of equals
        before = [
            sum(plan[s] for s in range(shard) if places[s] == other) for other in range(members)
        ]
        assert place == min(range(members), key=lambda p: (before[p], p))


@st.composite
def gradients(draw: st.DrawFn) -> tuple[list[list[torch.Tensor | None]], int]:
    """Groups of (5,) float32 gradients, some absent, at least one present."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    seed = draw(st.integers(0, 1 << 20))
    generator = torch.Generator().manual_seed(seed)
    groups: list[list[torch.Tensor | None]] = []
    for members in shape:
        group: list[torch.Tensor | None] = []
        for _ in range(members):
            scale = 10.0 ** draw(st.integers(-4, 4))
            value = torch.randn(5, generator=generator) * scale
            value[draw(st.integers(0, 4))] = -0.0
            group.append(None if draw(st.booleans()) else value)
        groups.append(group)
    if all(g is None for group in groups for g in group):
        groups[0][0] = torch.full((5,), -0.0)
    return groups, sum(shape)


@given(gradients())
def test_hosts_first_has_the_bits_of_direct_pushes(
    case: tuple[list[list[torch.Tensor | None]], int],
) -> None:
    groups, divisor = case
    direct = torch.empty(5)
    present = [[g for g in group if g is not None] for group in groups]
    missing = any(g is None for group in groups for g in group)
    reduce_tree(present, direct, divisor, missing)
    sums = []
    for group, members in zip(present, groups, strict=True):
        if group:
            total = torch.empty(5)
            reduce_tree([group], total, 1, len(group) < len(members))
            sums.append([total])
    hosts = torch.empty(5)
    reduce_tree(sums, hosts, divisor, missing)
    assert torch.equal(direct.view(torch.int32), hosts.view(torch.int32))
