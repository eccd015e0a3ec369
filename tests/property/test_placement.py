"""Placement under any items and servers: caps, order of input, balance, moves."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.core.placement import Item, caps, loads, moves, place

SERVERS = st.dictionaries(st.sampled_from("stuvw"), st.floats(0.1, 4), min_size=1)
ITEMS = st.lists(
    st.builds(Item, st.text("abc", min_size=1, max_size=4), st.integers(0, 1000)),
    max_size=30,
    unique_by=lambda item: item.key,
)


@settings(max_examples=100, deadline=None)
@given(ITEMS, SERVERS, st.sampled_from([0.0, 0.1, 0.5]))
def test_cap_holds_unless_forced_and_then_nobody_had_room(
    items: list[Item], servers: dict[str, float], epsilon: float
) -> None:
    made = place(items, servers, epsilon)
    bounds = caps(items, servers, epsilon)
    sizes = {item.key: item.bytes for item in items}
    load = dict.fromkeys(servers, 0)
    for key, decision in made.items():
        fits = [s for s in servers if load[s] + sizes[key] <= bounds[s]]
        assert decision.forced == (not fits)
        assert decision.forced or decision.server in fits
        load[decision.server] += sizes[key]
    assert load == loads(items, made, servers)
    assert made.keys() == sizes.keys()


@settings(max_examples=60, deadline=None)
@given(ITEMS, SERVERS, st.randoms(use_true_random=False), st.data())
def test_order_of_input_does_not_matter(
    items: list[Item], servers: dict[str, float], source: random.Random, data: st.DataObject
) -> None:
    keys = [item.key for item in items]
    fixed = data.draw(st.dictionaries(st.sampled_from(keys), st.sampled_from("sz"))) if keys else {}
    made = place(items, servers, fixed=fixed)
    shuffled = source.sample(items, len(items))
    names = source.sample(sorted(servers), len(servers))
    again = place(
        shuffled, {n: servers[n] for n in names}, fixed=dict(reversed(list(fixed.items())))
    )
    assert list(made.items()) == list(again.items())
    for key, server in fixed.items():
        assert server not in servers or made[key].server == server


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(0, 2**32))
def test_equal_servers_balance(count: int, seed: int) -> None:
    source = random.Random(seed)
    servers = {f"server-{i}": 1.0 for i in range(count)}
    items = [Item(f"g0/p0/l{i}/0", source.randint(1, 4 << 20)) for i in range(40 * count)]
    held = loads(items, place(items, servers), servers)
    mean = sum(held.values()) / count
    assert max(held.values()) <= 1.11 * mean


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(0, 2**32))
def test_a_new_server_takes_about_its_share(count: int, seed: int) -> None:
    source = random.Random(seed)
    servers = {f"server-{i}": 1.0 for i in range(count)}
    items = [Item(f"g0/p0/l{i}/0", source.randint(1, 4 << 20)) for i in range(40 * count)]
    sizes = {item.key: item.bytes for item in items}
    grown = {**servers, "server-99": 1.0}
    moved = moves(place(items, servers), place(items, grown))
    total = sum(sizes.values())
    to_new = sum(sizes[m.key] for m in moved if m.target == "server-99")
    others = sum(sizes[m.key] for m in moved) - to_new
    assert to_new <= 1.11 * total / (count + 1)
    # A bounded ring also moves keys between old servers, because every cap changes.
    assert others <= 0.25 * total
    kept = place(items, grown, fixed={k: d.server for k, d in place(items, servers).items()})
    assert moves(place(items, servers), kept) == ()
