"""Which workers of a host reduce first, who of them sums which shard, and on which route it goes.

A *host group* is the set of a host's workers that reduce among themselves before anything leaves
the host. Each shard has one *owner* among them: the others hand it their gradients, it sums and
pushes the sum. So each member sends and receives (n - 1)/n of the model, as in a reduce-scatter.

Invariants:
* a host group is one whole logical group of the canonical tree, so its sum is a node of the tree
  and the bits of the mean are those of direct pushes;
* the owner of a shard is a function of the plan and of the number of members alone: every node
  computes it for itself.

Source: reduce-scatter and all-gather as the halves of an all-reduce (Rabenseifner, "Optimization of
Collective Reduction Operations", ICCS 2004); between hosts then goes what BytePS sends (Jiang et
al., "A Unified Architecture for Accelerating Distributed DNN Training", OSDI 2020, section 4.2).
Differs from both: the unit is the shard, summed in one fixed order, not a slice in ring order.

    >>> share_out({10: 4, 11: 4, 12: 8, 13: 4}, 2)
    {10: 0, 11: 1, 12: 0, 13: 1}
    >>> obstacle(((0, 1), (2, 3)), [2, 3])
    ''
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from paradis.core.tree import Tree, rack_group
from paradis.ids import NodeId, dispatcher_id, worker_id

HOST_ROUTES = 1 << 20
"""Routes from here on name a worker that sums for its host, those below a rack agent."""


def host_route(owner: int) -> int:
    """Return the route of sums that the worker of this rank makes for its host."""
    return HOST_ROUTES + owner


def owner_on(route: int) -> int:
    """Return the rank that sums on a host's route, -1 for a rack agent's or no route."""
    return route - HOST_ROUTES if route >= HOST_ROUTES else -1


def route_end(route: int) -> NodeId:
    """Return the node that pushes the sums of a route."""
    owner = owner_on(route)
    return dispatcher_id(route) if owner < 0 else worker_id(owner)


def share_out(sizes: Mapping[int, int], members: int) -> dict[int, int]:
    """Return shard -> place of its owner among the members.

    Args:
        sizes: shard -> bytes, in admission order: whoever has least so far takes the next, so
            owners alternate and loads differ by one largest shard at most.
        members: of the host group.
    """
    loads = [0] * members
    places: dict[int, int] = {}
    for shard, nbytes in sizes.items():
        place = loads.index(min(loads))
        places[shard] = place
        loads[place] += nbytes
    return places


def obstacle(tree: Tree, ranks: Sequence[int]) -> str:
    """Return why these workers of one host may not reduce first, or an empty text.

    Args:
        tree: of the job.
        ranks: the host's workers, ascending.
    """
    if len(ranks) < 2:
        return "it has one worker"
    if rack_group(tree, ranks) is None:
        return (
            f"its workers {list(ranks)} are not one group of the reduction tree, so that another "
            f"order of summing would come of it; name [{', '.join(map(str, ranks))}] as a group in "
            "topology.reduction_groups"
        )
    return ""


class Routes:
    """On which route each rank's gradient of each shard reaches the servers.

    Routes are numbers: of a rack agent's dispatcher, or `host_route` of a shard's owner. A rank
    without a route pushes to the servers itself.
    """

    def __init__(self) -> None:
        self._racks: dict[int, int] = {}
        self._workers: dict[int, int] = {}
        self._bundles: dict[int, int] = {}
        self._groups: tuple[tuple[int, ...], ...] = ()
        self._places: dict[int, dict[int, int]] = {}
        self._parts: list[dict[int, int]] = []
        self._known: dict[int, dict[int, int]] = {}

    def follow(self, racks: Mapping[int, int], groups: Iterable[tuple[int, ...]]) -> None:
        """A view came: rank -> dispatcher of its rack agent, and the host groups."""
        self._racks = dict(racks)
        self._workers = dict(Counter(racks.values()))
        self._groups = tuple(groups)
        self._known = {}
        for sizes in self._parts:
            self._share(sizes)

    def add(self, sizes: dict[int, int], bundles: Mapping[int, int] = MappingProxyType({})) -> None:
        """A plan came.

        Args:
            sizes: shard -> bytes of all its shards that a host may sum, in admission order, those
                on other servers too.
            bundles: shard -> workers of the largest rack whose agent takes it; others: of any.
        """
        self._bundles.update(bundles)
        self._parts.append(sizes)
        self._known = {}
        self._share(sizes)

    def _share(self, sizes: dict[int, int]) -> None:
        for members in dict.fromkeys(len(group) for group in self._groups):
            self._places.setdefault(members, {}).update(share_out(sizes, members))

    @property
    def racks(self) -> dict[int, int]:
        """rank -> dispatcher of its rack agent."""
        return self._racks

    def of(self, shard: int) -> dict[int, int]:
        """Return rank -> route, for ranks that have one."""
        largest = self._bundles.get(shard)
        if not self._groups and largest is None:
            return self._racks
        if shard not in self._known:
            routes = {
                rank: agent for rank, agent in self._racks.items()
                if largest is None or self._workers[agent] <= largest
            }  # fmt: skip
            for group in self._groups:
                place = self._places[len(group)].get(shard)
                if place is not None:
                    routes.update(dict.fromkeys(group, host_route(group[place])))
            self._known[shard] = routes
        return self._known[shard]

    def owner(self, shard: int, rank: int) -> int:
        """Return who sums the shard for the host of ``rank``, -1 for nobody."""
        return owner_on(self.of(shard).get(rank, -1))
