"""The ring: key bytes, lookup at the borders, weights, refusals."""

import subprocess
import sys

import pytest

from paradis.core.ring import Ring, difference, encode_key
from paradis.errors import ConfigError


def test_key_bytes_are_fixed() -> None:
    assert encode_key("fc.weight", 258) == b"fc.weight/\x02\x01\x00\x00"
    assert encode_key("π", 0) == b"\xcf\x80/\x00\x00\x00\x00"


@pytest.mark.parametrize("bad", [("a", -1), ("a", 1 << 32), ("\ud800", 0)])
def test_key_refused(bad: tuple[str, int]) -> None:
    with pytest.raises(ConfigError, match="ring key refused"):
        encode_key(*bad)


def test_point_owns_its_own_hash_and_what_lies_before_it() -> None:
    ring = Ring({"a": 1, "b": 1}, virtual_nodes=2)
    points = list(ring.points())
    for i, (value, node) in enumerate(points):
        assert ring.owner_of_hash(value) == node
        assert ring.owner_of_hash(value + 1) == points[(i + 1) % len(points)][1]
    assert ring.owner_of_hash(0) == points[0][1]
    assert ring.owner_of_hash((1 << 64) - 1) == points[0][1]


def test_weight_sets_virtual_nodes() -> None:
    nodes = [node for _, node in Ring({"a": 2, "b": 1, "c": 1e-9}).points()]
    assert [nodes.count(n) for n in "abc"] == [320, 160, 1]


def test_shares_of_equal_nodes() -> None:
    names = [f"server-{i}" for i in range(8)]
    ring = Ring(dict.fromkeys(names, 1))
    owners = [ring.owner(encode_key(f"p{i}", 0)) for i in range(4000)]
    assert max(owners.count(n) for n in names) < 1.35 * 500


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": -1}, {"a": float("nan")}])
def test_bad_weights_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="refused"):
        Ring(weights)
    with pytest.raises(ConfigError, match="virtual_nodes"):
        Ring({"a": 1}, virtual_nodes=0)


def test_same_ring_has_no_difference() -> None:
    assert difference(Ring({"a": 1, "b": 2}), Ring({"b": 2, "a": 1})) == ()


def test_hash_seed_of_python_does_not_matter() -> None:
    script = (
        "from paradis.core.ring import *;"
        "r = Ring({f'server-{i}': 1 for i in range(5)});"
        "print([r.owner(encode_key(f'p{i}', 0)) for i in range(50)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
