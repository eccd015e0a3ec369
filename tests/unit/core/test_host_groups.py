"""Host groups: who owns which shard, which groups are legal, on which route a gradient goes."""

from __future__ import annotations

import pytest

from paradis.core.host_groups import (
    Routes,
    host_route,
    obstacle,
    owner_on,
    route_end,
    share_out,
)


def test_owners_alternate_over_equal_shards() -> None:
    assert list(share_out(dict.fromkeys(range(8), 4), 4).values()) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_whoever_has_least_takes_the_next() -> None:
    assert share_out({5: 10, 6: 1, 7: 1, 8: 9, 9: 2}, 2) == {5: 0, 6: 1, 7: 1, 8: 1, 9: 0}


@pytest.mark.parametrize(
    ("tree", "ranks", "why"),
    [
        (((0, 1, 2, 3),), [0, 1, 2, 3], ""),
        (((0, 1), (2, 3)), [2, 3], ""),
        (((0, 1), (2, 3)), [0, 1, 2, 3], "name [0, 1, 2, 3] as a group"),
        (((0, 1, 2, 3),), [0, 1], "are not one group"),
        (((1, 0), (2, 3)), [0, 1], "are not one group"),
        (((0,), (1,)), [0], "it has one worker"),
    ],
)
def test_only_a_whole_group_of_the_tree_may_reduce_first(
    tree: tuple[tuple[int, ...], ...], ranks: list[int], why: str
) -> None:
    found = obstacle(tree, ranks)
    assert (found == "") if not why else (why in found)


def test_routes_name_the_node_at_their_end() -> None:
    assert (owner_on(host_route(3)), owner_on(3), owner_on(-1)) == (3, -1, -1)
    assert route_end(host_route(3)) == "worker-3" and route_end(2) == "dispatcher-2"


def test_routes_follow_views_and_plans() -> None:
    routes = Routes()
    routes.follow({4: 1, 5: 1}, [(0, 1), (2, 3)])
    routes.add({10: 4, 11: 4})
    first, second = host_route(0), host_route(2)
    assert routes.of(10) == {4: 1, 5: 1, 0: first, 1: first, 2: second, 3: second}
    assert routes.owner(11, 0) == 1 and routes.owner(11, 3) == 3 and routes.owner(11, 4) == -1
    assert routes.of(12) == {4: 1, 5: 1}  # a shard without gradients
    routes.add({12: 4})  # a later part starts anew
    assert routes.owner(12, 3) == 2
    routes.follow({4: 1, 5: 1}, [(2, 3)])
    assert routes.of(10) == {4: 1, 5: 1, 2: second, 3: second}
    assert routes.racks == {4: 1, 5: 1}


def test_a_group_that_is_known_after_the_plan() -> None:
    routes = Routes()
    routes.add({10: 4})
    assert routes.of(10) == {}
    routes.follow({}, [(0, 1)])
    assert routes.owner(10, 1) == 0


def test_a_rack_that_is_too_large_has_no_route_for_codes() -> None:
    routes = Routes()
    routes.follow({0: 1, 1: 1, 2: 1, 3: 2}, [])
    routes.add({}, {7: 2, 8: 3})
    assert routes.of(7) == {3: 2}
    assert routes.of(8) == routes.of(9) == {0: 1, 1: 1, 2: 1, 3: 2}
    routes.follow({3: 2}, [])
    assert routes.of(7) == {3: 2}
