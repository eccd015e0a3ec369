"""Who makes a step when not everybody is waited for, and who must have a version before it goes.

Of n workers the first n - b that commit a step make it; the step's update is the mean of theirs.
One server chooses for all; the others hear of it from the workers.

Invariants:
* a step is chosen once, and what was chosen is remembered until nobody can ask for it any more;
* the first step is everybody's: values may still be given to the servers before it;
* a version is overwritten only when everybody has it who makes the step before, or was let in at
  it: so nobody ever has shards of two versions, and what is on its way is never overwritten;
* a worker is let in at a version that is not chosen for yet: every server will come to it, and none
  is beyond it.

Source: Chen et al., Revisiting Distributed Synchronous SGD, ICLR workshop 2016 (backup workers).
There a late worker reads whatever the servers have; here it gets one whole version.

    >>> choice = Choice(1, 0)
    >>> choice.choose(0, [0, 2, 1], (0, 1, 2)).members
    (0, 1, 2)
    >>> choice.next_step(1)
    {}
    >>> choice.choose(1, [2, 0], (0, 1, 2))
    Word(step=1, members=(0, 2), holders=(0, 1, 2), saving='')
    >>> choice.asked(1, 1, 1)  # too late for step 1, which is not over
    >>> choice.next_step(2)  # worker 1 has committed step 1 and is let in at version 2
    {1: 1}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_WORDS_MAX = 64
"""Steps whose members a server remembers, to tell a late push from a repeated one."""


@dataclass(frozen=True, slots=True)
class Word:
    """What was chosen for a step.

    Attributes:
        members: ranks whose mean the update is, ascending.
        holders: ranks that have the step's version or were let in at it, ascending: no server
            overwrites it before they say that they have it.
        saving: checkpoint that the step's version is to be copied for before, or empty.
    """

    step: int
    members: tuple[int, ...]
    holders: tuple[int, ...]
    saving: str = ""


def quorum_size(workers: int, backup: int) -> int:
    """Return how many of ``workers`` make a step: all but ``backup``, and one at least."""
    return max(1, workers - backup)


class Choice:
    """The choosing server's memory of one group.

    Args:
        backup: workers that a step does without.
        first: the first step, which everybody makes.

    Attributes:
        word: of the present step, once it is chosen.
        last: of the step before. A member of it may have missed it; one of an earlier step cannot,
            for a step ends only when everybody has its version who made the one before.
    """

    def __init__(self, backup: int, first: int) -> None:
        self.word: Word | None = None
        self.last: Word | None = None
        self._backup = backup
        self._first = first
        self._base: dict[int, int] = {}
        self._asking: dict[int, int] = {}
        self._save = ("", -1)

    def choose(self, step: int, arrived: Iterable[int], workers: Sequence[int]) -> Word | None:
        """Choose the members of the present step if enough have committed it.

        Args:
            step: the present one; not chosen yet.
            arrived: ranks that have committed it, by arrival.
            workers: ranks that take part in the job at present.
        """
        assert self.word is None, "a step is chosen once"
        here = [r for r in arrived if r in workers]
        size = quorum_size(len(workers), self._backup)
        if step == self._first:
            size = len(workers)
        if not here or len(here) < size:
            return None
        members = tuple(sorted(here[:size]))
        for rank in here:
            self._base[rank] = max(step, self._base.get(rank, step))
        holders = tuple(sorted(r for r, v in self._base.items() if v == step and r in workers))
        saving = self._save[0] if self._save[1] == step else ""
        self.word = Word(step, members, holders, saving)
        for rank in members:
            self._base[rank] = step + 1
        for rank in here[size:]:
            self._asking[rank] = step
        return self.word

    def asked(self, rank: int, step: int, now: int) -> Word | int | None:
        """A worker's commit comes that is too late for its step, or comes again.

        Args:
            rank: the worker.
            step: that it has committed.
            now: the present step.

        Returns:
            The word that it may have missed; or the version that it is let in at; or None: it will
            be let in when the present step is over (`next_step`).
        """
        for word in (self.word, self.last):
            if word is not None and word.step == step and rank in word.members:
                return word
        base = self._base.get(rank, -1)
        if step >= base:
            if self.word is not None:
                self._asking[rank] = step
                return None
            base = self._base[rank] = now
        return base

    def save(self, checkpoint: str, now: int) -> int:
        """Return the version that a checkpoint is of: one that is not chosen for; -1: not yet.

        Args:
            checkpoint: its name; asked for again, it gets the same version. One is asked for
                when the one before is copied.
            now: the present step.
        """
        if self._save[0] != checkpoint:
            if self.word is not None:
                return -1
            self._save = (checkpoint, now)
        return self._save[1]

    def next_step(self, step: int) -> dict[int, int]:
        """The present step is over.

        Returns:
            rank -> committed step, of those that are let in at version ``step``.
        """
        self.last, self.word = self.word, None
        let_in, self._asking = self._asking, {}
        self._base.update(dict.fromkeys(let_in, step))
        return let_in


class Quorum:
    """What every server of a group knows.

    Args:
        choice: on the server that chooses.

    Attributes:
        word: of the present step, once it is known here.
    """

    def __init__(self, choice: Choice | None) -> None:
        self.choice = choice
        self.word: Word | None = None
        self._have: dict[int, int] = {}
        self._made: dict[int, tuple[int, ...]] = {}

    def told(self, word: Word) -> bool:
        """Hear what was chosen for the present step; return whether that is new."""
        if self.word is not None:
            return False
        self.word = word
        self._made = dict([*self._made.items()][-_WORDS_MAX:])
        self._made[word.step] = word.members
        return True

    def next_step(self) -> None:
        """The present step is over."""
        self.word = None

    def holds(self, rank: int, version: int) -> None:
        """A worker has all shards of this server at a version, or had them."""
        self._have[rank] = max(version, self._have.get(rank, -1))

    def lacking(self, step: int, workers: Sequence[int]) -> list[int]:
        """Return who must have the version ``step`` before it is overwritten and may not have it.

        Args:
            step: the present one.
            workers: ranks that take part in the job at present; who has left needs nothing.
        """
        holders = self.word.holders if self.word is not None else ()
        return [r for r in holders if r in workers and self._have.get(r, -1) < step]

    def made(self, step: int) -> tuple[int, ...]:
        """Return the members of a step that was chosen not long ago, () for any other."""
        return self._made.get(step, ())


def lateness(late: int, steps: int, rank: int, backup: int) -> str:
    """Return what a worker is told when it was late for the first time."""
    return (
        f"worker {rank} was late in {late} of {steps} steps: the others went on without it "
        f"(training.backup_workers = {backup}), its gradient was dropped, and it goes on with "
        "their parameters; said once, later ones are counted as late_steps in nodes.json. A worker "
        "that is late most of the time gives nothing: give it a smaller batch or a faster machine"
    )


def dropped(contributors: Iterable[Mapping[int, int]], members: Sequence[int]) -> int:
    """Return how many contributions (rank -> revision) are of nobody who makes the step."""
    return sum(all(r not in members for r in ranks) for ranks in contributors)
