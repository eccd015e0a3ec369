"""The canonical reduction tree."""

import pytest

from paradis.core.tree import default_tree, order, rack_group, restrict, validate_tree
from paradis.errors import ConfigError


def test_one_group_without_racks_or_with_one() -> None:
    assert default_tree([2, 0, 1], {}) == ((0, 1, 2),)
    assert default_tree([0, 1], {"r0": [1, 0]}) == ((0, 1),)
    assert default_tree([0, 1], {"r0": [1, 0], "empty": []}) == ((0, 1),)
    assert default_tree([], {}) == ()


def test_one_group_per_rack_by_lowest_rank() -> None:
    assert default_tree(range(5), {"z": [3, 0], "a": [4, 1]}) == ((0, 3), (1, 4), (2,))


def test_bad_ranks_refused() -> None:
    with pytest.raises(ConfigError, match="worker 1 is in 'a' and in 'b'"):
        default_tree([0, 1], {"a": [0, 1], "b": [1]})
    with pytest.raises(ConfigError, match="twice"):
        default_tree([0, 0], {})


@pytest.mark.parametrize("tree", [((0,),), ((0, 1), (1,)), ((0, 1, 2),), ((0, 1), ())])
def test_validate_refuses(tree: tuple[tuple[int, ...], ...]) -> None:
    validate_tree(((1,), (0,)), 2)
    with pytest.raises(ConfigError, match="reduction tree refused"):
        validate_tree(tree, 2)


def test_restrict_keeps_order_and_drops_empty_groups() -> None:
    tree = ((2, 0), (3,), (1, 4))
    assert restrict(tree, [0, 2, 4]) == ((2, 0), (4,))
    assert order(tree) == (2, 0, 3, 1, 4)
    assert restrict(tree, []) == ()


def test_rack_sums_only_a_whole_group_in_order() -> None:
    tree = ((0, 1), (2, 3))
    assert rack_group(tree, [2, 3]) == 1
    assert rack_group(tree, [3, 2]) is None
    assert rack_group(tree, [2]) is None
    assert rack_group(tree, [0, 1, 2, 3]) is None
    assert rack_group(tree, []) is None
