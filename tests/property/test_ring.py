"""The ring against a linear scan, and what may move when nodes come and go."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.core.cityhash import hash64
from paradis.core.ring import Ring, difference, encode_key

NAMES = st.text("abc-01", min_size=1, max_size=6)
WEIGHTS = st.dictionaries(NAMES, st.floats(0.05, 4), min_size=1, max_size=6)
HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=20)


def scan_owners(ring: Ring, value: int) -> list[str]:
    """Slow twin: nodes by the clockwise distance from a hash to their nearest point."""
    best: dict[str, int] = {}
    for point, node in ring.points():
        best[node] = min(best.get(node, 2**64), (point - value) % 2**64)
    return sorted(best, key=lambda node: (best[node], node))


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.lists(st.tuples(st.text("xyz", max_size=4), st.integers(0, 9)), max_size=20))
def test_owners_equal_linear_scan(weights: dict[str, float], keys: list[tuple[str, int]]) -> None:
    ring = Ring(weights, virtual_nodes=8)
    ring.check()
    for name, chunk in keys:
        key = encode_key(name, chunk)
        expected = scan_owners(ring, hash64(key))
        assert list(ring.owners(key)) == expected
        assert ring.owner(key) == expected[0]


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, NAMES, HASHES)
def test_join_and_leave_move_only_keys_of_that_node(
    weights: dict[str, float], name: str, values: list[int]
) -> None:
    old = Ring({**{"z": 1.0}, **{k: v for k, v in weights.items() if k != name}}, 8)
    new = Ring({**old.weights, name: 1.0}, 8)
    for value in values:
        if old.owner_of_hash(value) != new.owner_of_hash(value):
            assert new.owner_of_hash(value) == name
    assert {arc.target for arc in difference(old, new)} <= {name}
    assert {arc.source for arc in difference(new, old)} <= {name}


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, WEIGHTS, HASHES)
def test_difference_is_exact(
    first: dict[str, float], second: dict[str, float], values: list[int]
) -> None:
    old, new = Ring(first, 4), Ring(second, 4)
    arcs = difference(old, new)
    assert all(a.upto <= b.after for a, b in zip(arcs, arcs[1:], strict=False))
    edges = [v for arc in arcs for v in (arc.after, arc.after + 1, arc.upto, arc.upto + 1)]
    for value in [*values, *(v for v in edges if 0 <= v < 2**64)]:
        found = [(a.source, a.target) for a in arcs if a.after < value <= a.upto]
        pair = (old.owner_of_hash(value), new.owner_of_hash(value))
        assert found == ([pair] if pair[0] != pair[1] else [])
