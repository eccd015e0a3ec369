"""Placement: home, overflow, fixed and forced decisions, refusals."""

import pytest

from paradis.core.placement import Item, caps, loads, moves, place
from paradis.errors import ConfigError, LocalProtocolError

TWO = {"server-0": 1.0, "server-1": 1.0}


def test_cap_is_share_of_bytes_and_at_least_the_largest_item() -> None:
    items = [Item("a", 10), Item("b", 30)]
    assert caps(items, TWO) == {"server-0": 30, "server-1": 30}
    assert caps([Item("a", 50), Item("b", 50)], TWO) == {"server-0": 55, "server-1": 55}
    assert caps([], TWO) == {"server-0": 0, "server-1": 0}


def test_room_above_the_share_is_the_same_for_all_weights() -> None:
    items = [Item("a", 10), Item("b", 30)]
    assert caps(items, {"s": 3, "t": 1}) == {"s": 32, "t": 12}
    assert caps(items, {"s": 5, "t": 5, "u": 10}) == {"s": 20, "t": 20, "u": 30}


def test_what_fits_nowhere_goes_where_the_share_is_passed_least() -> None:
    items = [Item(f"k{i}", 10) for i in range(5)]
    weights = {"s": 3.2, "t": 1.0}  # shares of 38.1 and 11.9 bytes
    made = place(items, weights, epsilon=0.0)
    assert loads(items, made, weights) == {"s": 40, "t": 10}
    assert sum(d.forced for d in made.values()) == 1


def test_overflow_goes_to_the_next_with_room_and_says_so() -> None:
    items = [Item(f"k{i}", 4) for i in range(10)]
    made = place(items, TWO)
    assert set(loads(items, made, TWO).values()) == {20}
    away = [d for d in made.values() if "home on the ring" not in d.reason]
    assert away and all("next clockwise with room" in d.reason for d in away)
    assert all(d.server in d.reason for d in made.values())


def test_fixed_is_kept_even_over_the_cap() -> None:
    items = [Item(f"k{i}", 4) for i in range(10)]
    fixed = {f"k{i}": "server-1" for i in range(9)}
    made = place(items, TWO, fixed=fixed)
    assert all(made[key].server == "server-1" for key in fixed)
    assert made["k0"].reason == "server-1 has it already"
    assert made["k9"].server == "server-0"


def test_fixed_on_a_lost_server_is_placed_anew() -> None:
    made = place([Item("a", 4)], TWO, fixed={"a": "server-7"})
    assert made["a"].server in TWO
    assert made["a"].reason.startswith("server-7 is gone; server-")


def test_forced_when_sizes_do_not_pack() -> None:
    items = [Item(k, 20) for k in "abc"]
    made = place(items, TWO)
    assert sorted(d.forced for d in made.values()) == [False, False, True]
    assert sorted(loads(items, made, TWO).values()) == [20, 40]


def test_empty_shards_stay_at_home() -> None:
    made = place([Item("a", 0), Item("b", 0)], TWO)
    assert all("home" in d.reason for d in made.values())


def test_moves_lists_only_changes() -> None:
    items = [Item("a", 4), Item("b", 4)]
    old = place(items, TWO)
    new = place(items, {"server-9": 1})
    assert [(m.key, m.source, m.target) for m in moves(old, new)] == [
        ("a", old["a"].server, "server-9"),
        ("b", old["b"].server, "server-9"),
    ]
    assert moves(old, old) == ()


def test_refusals_name_the_thing() -> None:
    with pytest.raises(LocalProtocolError, match="'a' of 1 bytes is listed twice"):
        place([Item("a", 1), Item("a", 1)], TWO)
    with pytest.raises(LocalProtocolError, match="negative size"):
        place([Item("a", -1)], TWO)
    with pytest.raises(LocalProtocolError, match="'b' is fixed on server-0 but is no item"):
        place([Item("a", 1)], TWO, fixed={"b": "server-0"})
    with pytest.raises(ConfigError, match="no node"):
        place([Item("a", 1)], {})
    with pytest.raises(ConfigError, match="epsilon"):
        place([Item("a", 1)], TWO, epsilon=-0.1)
