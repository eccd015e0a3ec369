"""In what order contributions are summed: the canonical tree of logical groups of ranks.

Invariant: the tree is fixed at job start; racks and routes may execute it, never shape it. So a
sum is a function of the contributions alone: over each group in worker order, then over the groups
in order. A worker that left is dropped from its group, the others keep their places.

Source: floating-point addition does not associate (Goldberg, ACM Computing Surveys 23(1), 1991);
the remedy, one fixed order for every run, is that of reproducible collectives.

    >>> tree = default_tree([0, 1, 2, 3], {"r0": [0, 2], "r1": [1, 3]})
    >>> tree
    ((0, 2), (1, 3))
    >>> restrict(tree, {0, 1, 3})
    ((0,), (1, 3))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from paradis.errors import ConfigError

Tree = tuple[tuple[int, ...], ...]
"""Groups of ranks, both levels in summing order."""


def default_tree(ranks: Sequence[int], racks: Mapping[str, Sequence[int]]) -> Tree:
    """Return one group per rack that has workers, and one more of the workers in no rack.

    Args:
        ranks: the workers at job start.
        racks: rack -> its ranks; without racks all workers form one group.

    Returns:
        Ranks ascending within a group, groups by their lowest rank.

    Raises:
        ConfigError: a rank is named twice, in ``ranks`` or in two racks.
    """
    workers = sorted(set(ranks))
    if len(workers) != len(ranks):
        raise ConfigError(f"ranks refused: a rank is there twice in {sorted(ranks)[:16]}")
    rack_of: dict[int, str] = {}
    for rack in sorted(racks):
        for rank in racks[rack]:
            if rack_of.setdefault(rank, rack) != rack:
                raise ConfigError(
                    f"racks refused: worker {rank} is in {rack_of[rank]!r} and in {rack!r}; "
                    "name it in one"
                )
    groups: dict[str | None, list[int]] = {}
    for rank in workers:
        groups.setdefault(rack_of.get(rank), []).append(rank)
    return tuple(tuple(group) for group in groups.values())


def validate_tree(tree: Tree, world_size: int) -> None:
    """Check that each rank below ``world_size`` is in exactly one group and no group is empty.

    Raises:
        ConfigError: otherwise; the message names the ranks.
    """
    flat = order(tree)
    expected = set(range(world_size))
    missing, extra = sorted(expected - set(flat)), sorted(set(flat) - expected)
    twice = sorted(rank for rank, times in Counter(flat).items() if times > 1)
    if missing or extra or twice or not all(tree):
        raise ConfigError(
            f"reduction tree refused: of {world_size} workers {missing[:8]} are missing, "
            f"{twice[:8]} are there twice, {extra[:8]} do not exist, "
            f"{sum(not group for group in tree)} groups are empty; name each rank once"
        )


def restrict(tree: Tree, members: Collection[int]) -> Tree:
    """Return the tree without the ranks that are no members, and without empty groups."""
    wanted = frozenset(members)
    kept = (tuple(rank for rank in group if rank in wanted) for group in tree)
    return tuple(group for group in kept if group)


def rack_group(tree: Tree, rack_ranks: Sequence[int]) -> int | None:
    """Return the index of the group that a rack may sum, or None if it must not sum at all.

    Args:
        tree: the tree restricted to the members.
        rack_ranks: the members in the rack, in the order in which its agent sums.
    """
    wanted = tuple(rack_ranks)
    return next((index for index, group in enumerate(tree) if group == wanted and wanted), None)


def order(tree: Tree) -> tuple[int, ...]:
    """Return all ranks in summing order."""
    return tuple(rank for group in tree for rank in group)
