"""Shares of dedicated and co-located servers, against links loaded transfer by transfer."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.core.colocation import EPSILON_MAX, split
from paradis.core.placement import Item, caps, loads, place
from paradis.roles.planning import weigh_servers

GRID = [(workers, dedicated) for workers in range(1, 10) for dedicated in range(workers)]


def busiest_link(workers: int, dedicated: list[float], colocated: list[float]) -> float:
    """Return the most bytes a host's link carries in one direction in a step, in model copies."""
    owners = [(f"s{i}", share) for i, share in enumerate(dedicated)]
    owners += [(f"w{rank}", share) for rank, share in enumerate(colocated)]
    carried: dict[tuple[str, str], float] = {}
    for rank in range(workers):
        for host, share in owners:
            if host == f"w{rank}":
                continue
            for source, target in ((f"w{rank}", host), (host, f"w{rank}")):  # gradient, update
                for end in ((source, "out"), (target, "in")):
                    carried[end] = carried.get(end, 0.0) + share
    return max(carried.values(), default=0.0)


def alike(workers: int, dedicated: int, each: float) -> float:
    """Return the busiest link's bytes where each co-located server owns ``each``."""
    rest = [(1 - workers * each) / dedicated] * dedicated if dedicated else []
    return busiest_link(workers, rest, [each] * workers)


@pytest.mark.parametrize(("workers", "dedicated"), GRID)
def test_the_shares_are_those_that_a_search_finds(workers: int, dedicated: int) -> None:
    made = split(workers, dedicated)
    assert dedicated * made.dedicated + workers * made.colocated == pytest.approx(1.0)
    own = busiest_link(workers, [made.dedicated] * dedicated, [made.colocated] * workers)
    assert own == pytest.approx(made.busiest)
    low, high = (0.0, 1 / workers) if dedicated else (1 / workers, 1 / workers)
    for _ in range(60):  # the load is convex in the share
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if alike(workers, dedicated, left) <= alike(workers, dedicated, right):
            high = right
        else:
            low = left
    assert made.busiest == pytest.approx(alike(workers, dedicated, low), abs=1e-9)
    if workers > 2 and dedicated:
        assert made.colocated == pytest.approx(low, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(GRID), st.data())
def test_no_other_shares_are_better(shape: tuple[int, int], data: st.DataObject) -> None:
    workers, dedicated = shape
    count = workers + dedicated
    drawn = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    drawn[0] += 0.01  # so that there is something to share out
    shares = [each / sum(drawn) for each in drawn]
    other = busiest_link(workers, shares[:dedicated], shares[dedicated:])
    assert split(workers, dedicated).busiest <= other + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([s for s in GRID if s[0] > 1]), st.integers(0, 2**32))
def test_loads_follow_the_weights(shape: tuple[int, int], seed: int) -> None:
    """With many shards the busiest link carries little more than the shares promise."""
    workers, dedicated = shape
    source = random.Random(seed)
    names = [f"server-{i}" for i in range(dedicated + workers)]
    weights = weigh_servers(names, workers)
    assert sum(weights.values()) == pytest.approx(len(names))
    items = [Item(f"g0/p0/l{i}/0", source.randint(1, 4 << 20)) for i in range(60 * len(names))]
    total = sum(item.bytes for item in items)
    held = loads(items, place(items, weights, EPSILON_MAX), weights)
    shares = [held[name] / total for name in names]
    busiest = busiest_link(workers, shares[:dedicated], shares[dedicated:])
    assert busiest <= 1.03 * split(workers, dedicated).busiest


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([s for s in GRID if s[0] > 2]), st.integers(1, 40))
def test_few_shards_leave_everybody_about_a_shard_from_its_share(
    shape: tuple[int, int], count: int
) -> None:
    workers, dedicated = shape
    names = [f"server-{i}" for i in range(dedicated + workers)]
    weights = weigh_servers(names, workers)
    items = [Item(f"k{i}", 4 << 20) for i in range(count)]
    held = loads(items, place(items, weights, EPSILON_MAX), weights)
    bounds = caps(items, weights, EPSILON_MAX)
    for name in names:
        share = weights[name] / len(names) * count * (4 << 20)
        assert held[name] <= max(bounds[name], share + (4 << 20))
