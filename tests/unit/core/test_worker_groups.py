"""Which worker is in which group, and which group trains what."""

from __future__ import annotations

import pytest

from paradis.core.worker_groups import (
    Membership,
    WorkerGroup,
    assign,
    decode,
    encode,
    group_of,
    membership,
    ranks_of,
)
from paradis.errors import ConfigError

BACKBONE = WorkerGroup(name="backbone", workers=3, parameters=("backbone.*", "stem.?"))
HEAD = WorkerGroup(name="head", workers=2, parameters=("head.*",), mode="ssp", staleness=2)
GROUPS = (BACKBONE, HEAD)


def test_groups_take_consecutive_ranks() -> None:
    assert [ranks_of(GROUPS, i) for i in range(2)] == [(0, 1, 2), (3, 4)]
    assert [group_of(GROUPS, rank) for rank in range(5)] == [0, 0, 0, 1, 1]


def test_groups_travel_as_text() -> None:
    assert decode(encode(GROUPS), 5) == GROUPS
    assert encode(()) == "" and decode("", 7) == ()
    assert decode(encode([WorkerGroup(name="all")]), 4)[0].workers == 4
    with pytest.raises(ConfigError, match=r"expected 5 workers, .*backbone \(3\), head \(2\)"):
        decode(encode(GROUPS), 6)


def test_membership() -> None:
    assert membership(encode(GROUPS), 4, 5) == Membership(GROUPS, 1, HEAD, (3, 4))
    alone = membership("", 1, 3)
    assert (alone.groups, alone.index, alone.own.name, alone.ranks) == ((), 0, "", (0, 1, 2))


@pytest.mark.parametrize(
    ("groups", "said"), [(GROUPS, r"backbone \[0, 1, 2\], head \[3, 4\]"), ((), "there are none")]
)
def test_a_worker_started_for_another_group_is_refused(
    groups: tuple[WorkerGroup, ...], said: str
) -> None:
    assert groups == () or membership(encode(groups), 0, 5, wanted="backbone").index == 0
    with pytest.raises(ConfigError, match=f"'head' refused on worker 0: .*{said}"):
        membership(encode(groups), 0, 5, wanted="head")


def test_each_parameter_has_one_group() -> None:
    names = {"head.weight": (), "backbone.0.weight": (), "stem.w": ("backbone.tied",)}
    assert assign(names, GROUPS) == {"head.weight": 1, "backbone.0.weight": 0, "stem.w": 0}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"head.w": (), "stem.ww": ()}, "stem.ww matches no group"),
        ({"backbone.w": (), "Head.w": ()}, "Head.w matches no group"),
        (
            {"backbone.w": ("head.w",), "head.b": ()},
            r"backbone.w \(tied to head.w\) matches backbone and head",
        ),
        ({"backbone.w": ()}, "no parameter matches head; names begin as in backbone.w"),
        ({f"x.{i}": () for i in range(20)}, "x.7 matches no group; and 12 more"),
    ],
)
def test_what_no_group_or_two_would_train_is_refused_by_name(
    names: dict[str, tuple[str, ...]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        assign(names, GROUPS)
