"""Who has contributed to (shard, step), in which revision, and what is to be summed next.

Invariants:
* a rank is counted at most once in a sum, by one route (direct, or in its rack's sum);
* after the first direct push of a rack's worker the rack is direct for that step: its sum is refused;
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
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["held", "duplicate", "refused", "void"]
Revisions = dict[int, int]


@dataclass(frozen=True, slots=True)
class Contribution:
    """A received gradient (one rank) or rack sum (several ranks).

    Attributes:
        ranks: rank -> revision, in worker order.
        rack: index of the dispatcher that summed it, -1 for a direct push.
    """

    ranks: Revisions
    lease: int
    nbytes: int
    rack: int = -1


@dataclass(slots=True)
class Added:
    """Result of `Collection.add`.

    Attributes:
        outcome: held; duplicate (already counted); refused (another route or an older revision);
            void (held, and the sum made earlier is worthless).
        dropped: contributions that it replaces: release them.
        ask: ranks that must resend because their part of the void sum is gone.
    """

    outcome: Outcome
    dropped: list[Contribution] = field(default_factory=list)
    ask: list[int] = field(default_factory=list)


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
        rack_of: Mapping[int, int] | None = None,
    ) -> Added:
        """Take a contribution in, or say why not.

        Args:
            ranks: rank -> revision.
            rack: dispatcher index when it is a rack's sum.
            rack_of: rank -> dispatcher index of its rack agent, for direct pushes.
        """
        known = self._known(ranks)
        if known is not None and all(known.get(r, -1) >= v for r, v in ranks.items()):
            return Added("duplicate")
        if rack >= 0 and rack in self.direct:
            return Added("refused")
        dropped: list[Contribution] = []
        ask: dict[int, None] = {}
        if rack < 0 and rack_of is not None:
            for rank in ranks:
                owner = rack_of.get(rank, -1)
                if owner >= 0 and owner not in self.direct:
                    self.direct[owner] = None
                    ask.update(dict.fromkeys(self._drop_rack(owner, dropped)))
        for old in [c for c in self.held if any(r in ranks for r in c.ranks)]:
            if any(ranks.get(r, v) < v for r, v in old.ranks.items()):
                return Added("refused", dropped, list(ask))
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
        self.held.append(Contribution(dict(ranks), lease, nbytes, rack))
        return Added(outcome, dropped, [r for r in ask if r not in ranks])

    def _known(self, ranks: Iterable[int]) -> Revisions | None:
        """Return the revisions counted so far of these ranks, or None if some rank is missing."""
        known: Revisions = {}
        for contribution in (*self.held, *self.summing):
            known.update(contribution.ranks)
        if self.summed is not None and not self.poisoned:
            known.update(self.summed)
        return known if all(r in known for r in ranks) else None

    def _drop_rack(self, rack: int, dropped: list[Contribution]) -> list[int]:
        """A direct push made the rack direct: its held sum goes, its other workers must resend."""
        ask: list[int] = []
        for old in [c for c in self.held if c.rack == rack]:
            self.held.remove(old)
            dropped.append(old)
            ask.extend(old.ranks)
        return ask

    def revision_of(self, rank: int) -> int | None:
        """Return the revision in which the rank is counted at present, or None."""
        known = self._known([rank])
        return None if known is None else known[rank]

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

    def void_sum(self, expected: Mapping[int, int | None]) -> list[int] | None:
        """Throw the held sum away when the commits rule it out.

        Returns:
            Ranks whose part of it was right and must be sent again, or None if the sum stays.
        """
        if self.summed is None:
            return None
        if all(expected.get(r, v) == v for r, v in self.summed.items()):
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
        return tuple(groups)

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
