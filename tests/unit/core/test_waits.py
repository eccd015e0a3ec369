"""Cycles in wait-for graphs."""

import pytest

from paradis.core.waits import find_cycle


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({}, None),
        ({"a": []}, None),
        ({"a": ["b"], "b": ["c"]}, None),
        ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, None),
        ({"a": ["a"]}, ["a"]),
        ({"b": ["a"], "a": ["b"]}, ["a", "b"]),
        ({"a": ["c"], "c": ["d", "b"], "b": ["c"], "d": []}, ["b", "c"]),
        ({"x": ["y"], "a": ["b"], "b": ["a"], "y": ["x"]}, ["a", "b"]),
    ],
)
def test_cycles(edges: dict[str, list[str]], expected: list[str] | None) -> None:
    assert find_cycle(edges) == expected
    assert find_cycle({k: set(v) for k, v in reversed(edges.items())}) == expected


def test_long_chains_need_no_recursion() -> None:
    chain = {f"n{i:05}": [f"n{i + 1:05}"] for i in range(5000)}
    assert find_cycle(chain) is None
    chain["n05000"] = ["n00000"]
    cycle = find_cycle(chain)
    assert cycle is not None and len(cycle) == 5001 and cycle[0] == "n00000"
