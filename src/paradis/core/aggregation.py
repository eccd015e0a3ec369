"""Who has contributed to (shard, step), in which revision, and what is to be summed next.

Invariants:
* a rank is counted at most once in a sum, by one route (direct, or in its rack's sum);
* after the first direct push of a rack's worker the rack is direct for the step, its sum refused;
* a sum is *good* when it was made of exactly the revisions that the commits name.

The same object serves the server (contributors: ranks and racks) and the rack agent (ranks only).

    >>> c = Collection()
    >>> c.add({0: 0}, lease=5, nbytes=8).outcome
    'held'
    >>> c.add({0: 0}, lease=6, nbytes=8).outcome
    'duplicate'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["held", "duplicate", "refused", "void"]
Revisions = dict[int, int]


@dataclass(frozen=True, slots=True)
class Contribution:
    """A received gradient (one rank) or rack sum (several ranks).

    Attributes:
        ranks: rank -> revision, in worker order.
        rack: index of the dispatcher that summed it, -1 for a direct push.
        tag: what the pusher calls it, for acknowledgements: a gradient's revision, or the number
            that a rack agent gave to its sum.
    """

    ranks: Revisions
    lease: int
    nbytes: int
    rack: int = -1
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Added:
    """Result of `Collection.add`.

    Attributes:
        outcome: held; duplicate (already counted); refused (another route or an older revision);
            void (held, and the sum made earlier is worthless).
        dropped: contributions that it replaces: release them.
        ask: ranks that must resend because their part of the void sum is gone, or must push
            directly because their rack's sum no longer counts.
    """

    outcome: Outcome
    dropped: Sequence[Contribution] = ()
    ask: Sequence[int] = ()


_HELD = Added("held")


class Collection:
    """Contributions to one (shard, step).

    Attributes:
        held: contributions waiting to be summed, by arrival (never the order of summing).
        summing: contributions of the sum being made.
        summed: rank -> revision in the sum that is held, or None.
        direct: racks (dispatcher index) whose workers push directly in this step.
    """

    __slots__ = ("held", "summing", "summed", "direct", "poisoned")

    def __init__(self) -> None:
        self.held: list[Contribution] = []
        self.summing: list[Contribution] = []
        self.summed: Revisions | None = None
        self.direct: dict[int, None] = {}
        self.poisoned = False

    @property
    def empty(self) -> bool:
        """Whether nothing is held, being summed or summed."""
        return not self.held and not self.summing and self.summed is None

    def add(
        self,
        ranks: Revisions,
        *,
        lease: int,
        nbytes: int,
        rack: int = -1,
        tag: int = 0,
        rack_of: Mapping[int, int] | None = None,
    ) -> Added:
        """Take a contribution in, or say why not.

        Args:
            ranks: rank -> revision.
            rack: dispatcher index when it is a rack's sum.
            tag: what the pusher calls it.
            rack_of: rank -> dispatcher index of its rack agent, for direct pushes.
        """
        if self.empty and not self.direct and not rack_of:
            self.held.append(Contribution(dict(ranks), lease, nbytes, rack, tag))
            return _HELD
        known = self._known()
        if all(known.get(r, -1) >= v for r, v in ranks.items()):
            return Added("duplicate")
        if rack >= 0 and rack in self.direct:
            return Added("refused", ask=[r for r in ranks if r not in known])
        dropped: list[Contribution] = []
        ask: dict[int, None] = {}
        if rack < 0 and rack_of is not None:
            self._go_direct(ranks, rack_of, dropped, ask)
        overlap = [c for c in self.held if any(r in ranks for r in c.ranks)]
        if any(ranks.get(r, v) < v for c in overlap for r, v in c.ranks.items()):
            return Added("refused", dropped, list(ask))
        for old in overlap:
            self.held.remove(old)
            dropped.append(old)
            ask.update(dict.fromkeys(r for r in old.ranks if r not in ranks))
        outcome: Outcome = "held"
        if self.summing and any(r in c.ranks for c in self.summing for r in ranks):
            self.poisoned = True
            outcome = "void"
        elif self.summed is not None and any(r in self.summed for r in ranks):
            ask.update(dict.fromkeys(r for r in self.summed if r not in ranks))
            self.summed = None
            outcome = "void"
        self.held.append(Contribution(dict(ranks), lease, nbytes, rack, tag))
        return Added(outcome, dropped, [r for r in ask if r not in ranks])

    def _go_direct(
        self,
        ranks: Iterable[int],
        rack_of: Mapping[int, int],
        dropped: list[Contribution],
        ask: dict[int, None],
    ) -> None:
        """A direct push makes its rack direct: all of the rack's workers must push directly."""
        for rank in ranks:
            owner = rack_of.get(rank, -1)
            if owner >= 0 and owner not in self.direct:
                self.direct[owner] = None
                self._drop_rack(owner, dropped)
                known = self._known()
                mates = (r for r, o in rack_of.items() if o == owner and r not in known)
                ask.update(dict.fromkeys(mates))

    def _known(self) -> Revisions:
        """Return the newest revision counted so far of every rank."""
        known: Revisions = dict(self.summed or {})
        for contribution in (*self.summing, *self.held):
            for rank, revision in contribution.ranks.items():
                known[rank] = max(revision, known.get(rank, -1))
        return known

    def _drop_rack(self, rack: int, dropped: list[Contribution]) -> None:
        for old in [c for c in self.held if c.rack == rack]:
            self.held.remove(old)
            dropped.append(old)

    @property
    def ranks_held(self) -> int:
        """Number of ranks whose contributions wait to be summed."""
        return sum(len(c.ranks) for c in self.held)

    def revision_of(self, rank: int) -> int | None:
        """Return the newest revision in which the rank is counted at present, or None."""
        return self._known().get(rank)

    def drop_wrong(self, expected: Mapping[int, int | None]) -> list[Contribution]:
        """Drop held contributions that the commits rule out.

        Args:
            expected: rank -> committed revision, None when the rank committed "absent"; ranks that
                have not committed are missing.
        """
        wrong = [
            c for c in self.held
            if any(r in expected and expected[r] != v for r, v in c.ranks.items())
        ]  # fmt: skip
        for contribution in wrong:
            self.held.remove(contribution)
        return wrong

    def is_good(self, expected: Mapping[int, int | None]) -> bool:
        """Whether the held sum consists of exactly the committed revisions."""
        needed = {r: v for r, v in expected.items() if v is not None}
        return self.summed == needed and not self.poisoned

    def void_sum(
        self, expected: Mapping[int, int | None], ranks: Iterable[int]
    ) -> list[int] | None:
        """Throw the held sum away when the commits rule it out.

        Args:
            expected: as for `drop_wrong`.
            ranks: the ranks that the sum is over.

        Returns:
            Ranks whose part of it was right and must be sent again, or None if the sum stays.
        """
        if self.summed is None:
            return None
        lacks = any(expected.get(r) is not None and r not in self.summed for r in ranks)
        if not lacks and all(expected.get(r, v) == v for r, v in self.summed.items()):
            return None
        ask = [r for r, v in self.summed.items() if expected.get(r, v) == v]
        self.summed = None
        return ask

    def plan_sum(
        self, tree: Sequence[Sequence[int]], absent: Iterable[int]
    ) -> tuple[tuple[int, ...], ...] | None:
        """Return leases per logical group in canonical order when everybody needed is here.

        Args:
            tree: logical groups of the step's members.
            absent: ranks that committed without a gradient for this shard.
        """
        if self.summing or self.summed is not None or not self.held:
            return None
        skip = dict.fromkeys(absent)
        by_rank = {r: c for c in self.held for r in c.ranks}
        groups: list[tuple[int, ...]] = []
        for group in tree:
            leases: dict[int, None] = {}
            for rank in group:
                if rank in by_rank:
                    leases[by_rank[rank].lease] = None
                elif rank not in skip:
                    return None
            groups.append(tuple(leases))
        return tuple(groups) if any(groups) else None

    def start_sum(self) -> None:
        """The planned sum is being made."""
        self.summing, self.held = self.held, []
        self.poisoned = False

    def finish_sum(self) -> tuple[list[Contribution], list[int]]:
        """The sum is made.

        Returns:
            The contributions to release, and ranks to ask for a resend when a newer revision came
            in meanwhile, so that the sum is void.
        """
        done, self.summing = self.summing, []
        ranks: Revisions = {}
        for contribution in done:
            ranks.update(contribution.ranks)
        if self.poisoned:
            self.poisoned = False
            replaced = {r for c in self.held for r in c.ranks}
            return done, [r for r in ranks if r not in replaced]
        self.summed = ranks
        return done, []

    def clear(self) -> list[Contribution]:
        """Forget everything; return what to release."""
        released, self.held = self.held, []
        assert not self.summing
        self.summed = None
        self.direct = {}
        return released

    def check(self) -> None:
        """Assert that no rank is counted twice."""
        for part in (self.held, self.summing):
            ranks = [r for c in part for r in c.ranks]
            assert len(ranks) == len(set(ranks)), f"rank counted twice: {ranks}"
        assert self.summed is None or not self.summing or self.poisoned
