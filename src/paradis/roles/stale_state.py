"""What a server knows of a group whose workers do not wait for each other, between two events."""

from __future__ import annotations

import msgspec

from paradis.core.clocks import Clocks
from paradis.ids import NodeId
from paradis.wire.messages import PullState, StepCommit


class Committed(msgspec.Struct, frozen=True):
    """The last commit of a worker: of which of its steps, what it said, and when it came."""

    step: int
    commit: StepCommit
    since_ns: int


class StaleGroup:
    """One ``wrap`` call in mode ``ssp`` or ``async``.

    Attributes:
        bound: how many steps a worker may be ahead of the slowest, or `NO_BOUND`.
        scaling: the rate of an update is divided by its staleness, not by the number of members.
        commits: rank -> its last commit.
        saving: worker 0's step for which a copy is asked and not made; None: for none. Until it is
            made no value changes here.
        copying: the copy is being made.
        timer: the timer that looks for waiting workers is set.
    """

    __slots__ = ("mode", "bound", "scaling", "commits", "saving", "copying", "timer")

    def __init__(self, mode: str, bound: int, *, scaling: bool) -> None:
        self.mode = mode
        self.bound = bound
        self.scaling = scaling
        self.commits: dict[int, Committed] = {}
        self.saving: int | None = None
        self.copying = self.timer = False


class StaleShard:
    """One shard of such a group.

    Attributes:
        clocks: whose steps are in the value.
        read: rank -> version of the value from which its present gradient was made.
        current: (rank, step) that is being applied, or None.
        owed: rank -> step that is in the value and has no answer yet.
        given: rank -> version that first answered its last step; ``base`` of those that are not
            there. Who got it has that version's value or a later one.
        assigned: (rank, step, revision) of the last assignment: the lowest member's count, and the
            lowest member only becomes a higher one.
        asked: worker -> its last question for the state, asked while the value was changing.
    """

    __slots__ = ("clocks", "read", "current", "owed", "given", "base", "assigned", "asked")

    def __init__(self, clocks: Clocks, version: int) -> None:
        self.clocks = clocks
        self.read: dict[int, int] = {}
        self.current: tuple[int, int] | None = None
        self.owed: dict[int, int] = {}
        self.given: dict[int, int] = {}
        self.base = version
        self.assigned = (-1, -1, -1)
        self.asked: dict[NodeId, PullState] = {}

    def reassigned(self) -> None:
        """The value changed without an update: what anybody has is out of date."""
        self.given = {}
        self.base = -1

    def check(self, version: int) -> None:
        """Assert the invariants."""
        for rank, step in self.owed.items():
            assert self.clocks.done(rank) == step + 1, (rank, step, self.clocks.done(rank))
        assert all(v <= version for v in self.given.values()), (self.given, version)
