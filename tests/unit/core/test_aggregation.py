"""Who is counted in a sum: once, by one route, in the committed revision."""

from __future__ import annotations

from paradis.core.aggregation import Added, Collection

RACK_OF = {0: 0, 1: 0, 2: 1}


def push(c: Collection, rank: int, revision: int = 0, *, lease: int) -> Added:
    """A direct push."""
    added = c.add({rank: revision}, lease=lease, nbytes=8, tag=revision, rack_of=RACK_OF)
    c.check()
    return added


def rack_sum(c: Collection, ranks: dict[int, int], rack: int = 0, *, lease: int) -> Added:
    """A rack's sum."""
    added = c.add(ranks, lease=lease, nbytes=8, rack=rack, tag=9, rack_of=RACK_OF)
    c.check()
    return added


def test_sum_is_planned_in_tree_order_when_all_are_there() -> None:
    c = Collection()
    push(c, 2, lease=12)
    push(c, 1, lease=11)
    assert c.plan_sum(((0, 1), (2,)), []) is None
    push(c, 0, lease=10)
    assert c.plan_sum(((0, 1), (2,)), []) == ((10, 11), (12,))
    c.start_sum()
    assert c.plan_sum(((0, 1), (2,)), []) is None
    done, ask = c.finish_sum()
    assert sorted(d.lease for d in done) == [10, 11, 12] and ask == []
    assert c.is_good({0: 0, 1: 0, 2: 0}) and not c.is_good({0: 0, 1: 1, 2: 0})
    assert c.clear() == [] and c.empty


def test_absent_ranks_are_left_out_and_nobody_is_no_sum() -> None:
    c = Collection()
    assert c.plan_sum(((0, 1),), [0, 1]) is None
    push(c, 1, lease=11)
    assert c.plan_sum(((0, 1), (2,)), [0, 2]) == ((11,), ())


def test_repeats_and_older_revisions_are_duplicates() -> None:
    c = Collection()
    assert push(c, 0, 1, lease=1).outcome == "held"
    assert push(c, 0, 1, lease=2).outcome == "duplicate"
    assert push(c, 0, 0, lease=3).outcome == "duplicate"
    assert c.revision_of(0) == 1 and c.revision_of(1) is None


def test_newer_revision_replaces_a_held_one() -> None:
    c = Collection()
    push(c, 0, lease=1)
    added = push(c, 0, 1, lease=2)
    assert added.outcome == "held" and [d.lease for d in added.dropped] == [1]


def test_newer_revision_voids_a_sum_and_asks_the_others() -> None:
    c = Collection()
    for rank in (0, 1):
        push(c, rank, lease=rank + 1)
    c.start_sum()
    c.finish_sum()
    added = push(c, 0, 1, lease=5)
    assert (added.outcome, added.ask) == ("void", [1])
    assert c.summed is None


def test_newer_revision_during_a_sum_poisons_it() -> None:
    c = Collection()
    for rank in (0, 1):
        push(c, rank, lease=rank + 1)
    c.start_sum()
    assert push(c, 1, 1, lease=5).outcome == "void"
    assert push(c, 1, 1, lease=6).outcome == "duplicate"
    _, ask = c.finish_sum()
    assert ask == [0] and c.summed is None and not c.empty


def test_direct_push_makes_the_rack_direct() -> None:
    c = Collection()
    rack_sum(c, {0: 0, 1: 0}, lease=1)
    added = push(c, 0, 1, lease=2)
    assert [d.lease for d in added.dropped] == [1] and added.ask == [1]
    refused = rack_sum(c, {0: 1, 1: 0}, lease=3)
    assert (refused.outcome, refused.ask) == ("refused", [1])
    push(c, 1, lease=4)
    assert rack_sum(c, {2: 0}, rack=1, lease=5).outcome == "held"
    assert c.plan_sum(((0, 1), (2,)), []) == ((2, 4), (5,))


def test_direct_push_of_what_the_rack_has_summed_is_a_duplicate() -> None:
    c = Collection()
    rack_sum(c, {0: 0, 1: 0}, lease=1)
    assert push(c, 0, lease=2).outcome == "duplicate"
    assert c.direct == {}


def test_rack_sum_with_an_older_part_is_refused() -> None:
    c = Collection()
    rack_sum(c, {0: 1, 1: 0}, lease=1)
    assert rack_sum(c, {0: 0, 1: 1}, lease=2).outcome == "refused"


def test_commits_drop_what_they_rule_out() -> None:
    c = Collection()
    push(c, 0, lease=1)
    push(c, 1, lease=2)
    assert [d.lease for d in c.drop_wrong({0: 1})] == [1]
    assert [d.lease for d in c.drop_wrong({1: None})] == [2]
    assert c.empty


def test_commits_void_a_sum() -> None:
    c = Collection()
    for rank in (0, 1):
        push(c, rank, lease=rank + 1)
    c.start_sum()
    c.finish_sum()
    assert c.void_sum({}, (0, 1)) is None
    assert c.void_sum({0: 0, 1: 0}, (0, 1)) is None
    assert c.void_sum({0: 0, 1: 1}, (0, 1)) == [0]
    assert c.void_sum({0: 0}, (0, 1)) is None  # there is none any more


def test_a_sum_that_lacks_somebody_is_void() -> None:
    c = Collection()
    push(c, 0, lease=1)
    assert c.plan_sum(((0, 1),), [1]) == ((1,),)
    c.start_sum()
    c.finish_sum()
    assert c.void_sum({0: 0, 1: 0, 2: 0}, (0, 1)) == [0]
