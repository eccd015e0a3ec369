"""Whether codes make steps faster: measured on the steps themselves, and decided once.

A group travels as codes for one window of steps, then in full for another; the leader compares
medians. What it cannot tell from noise it measures again, on all windows together, and at last the
codes stay unless they are likely slower.

Invariants:
* the decision is a function of the durations alone;
* a group changes how it travels at most ``2 * rounds`` times, and never after the decision.

    >>> trial = BenefitTrial(BenefitRule(window_steps=2))
    >>> trial.take(0, coded=True, times_ns=(41, 41)), trial.turn((0,))
    (None, True)
    >>> trial.take(0, coded=False, times_ns=(33, 33)), trial.turn((0,))
    (None, False)
    >>> trial.decision, trial.comparison().coded_ns
    ('off', 41.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

_SIGMA_OF_MAD: Final = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""

_MEDIAN_OVER_MEAN: Final = 1.2533
"""Standard error of a median over that of a mean, ``sqrt(pi / 2)``, of a normal distribution."""

_FIRST: Final = 4
"""The first window begins after so many settling times: caches fill, code is compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenefitRule:
    """How long is measured, and what counts.

    Attributes:
        settle_steps: after a change these do not count: they are half of each kind.
        window_steps: of each kind that count, per round.
        margin: codes may make a step longer by this share; they save bytes for others, too.
        sigmas: standard errors below which a difference is noise, while there is another round.
        last_sigmas: likewise in the last round: fewer, for there is something to decide.
        rounds: windows of each kind, at most.
    """

    settle_steps: int = 8
    window_steps: int = 16
    margin: float = 0.02
    sigmas: float = 3.0
    last_sigmas: float = 2.0
    rounds: int = 4


class StepMeter:
    """The durations of one worker's steps, one window for each period in codes or in full.

    Args:
        settle_steps: steps of a period that are left out.
        window_steps: steps that are measured.
    """

    def __init__(self, settle_steps: int, window_steps: int) -> None:
        self._settle_steps = settle_steps
        self._window_steps = window_steps
        self._skip = _FIRST * settle_steps
        self._coded: bool | None = None
        self._last_ns: int | None = None
        self._times: list[int] = []

    def closed(self, now_ns: int, *, coded: bool) -> tuple[int, ...]:
        """Note that ``step()`` was called.

        Args:
            now_ns: when.
            coded: the step travels as codes.

        Returns:
            The durations of a window's steps, in nanoseconds, when it is full; else nothing.
        """
        if self._coded not in (None, coded):
            self._skip, self._times = self._settle_steps, []
        self._coded = coded
        last, self._last_ns = self._last_ns, now_ns
        if self._skip > 0:
            self._skip -= 1
            return ()
        if last is None or len(self._times) == self._window_steps:
            return ()
        self._times.append(now_ns - last)
        return tuple(self._times) if len(self._times) == self._window_steps else ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Durations of a step, in nanoseconds.

    Attributes:
        coded_ns: as codes, on the worker that is slowest then.
        full_ns: in full, likewise.
        error_ns: standard error of their difference.
    """

    coded_ns: float
    full_ns: float
    error_ns: float

    def verdict(self, rule: BenefitRule, *, last: bool) -> str:
        """Return ``on`` or ``off`` for the codes, or an empty text: measure again.

        Args:
            last: there is no other round: what is not likely slower stays on.
        """
        longer_ns = self.coded_ns - self.full_ns
        allowed_ns = rule.margin * self.full_ns
        noise_ns = rule.sigmas * self.error_ns
        if longer_ns > allowed_ns + noise_ns:
            return "off"
        if longer_ns + noise_ns <= allowed_ns:
            return "on"
        if not last:
            return ""
        return "off" if longer_ns > max(allowed_ns, rule.last_sigmas * self.error_ns) else "on"


def standard_error(times: Sequence[int]) -> float:
    """Return the standard error of the median of some durations, by their absolute deviations."""
    middle = median(times)
    deviation = median(abs(t - middle) for t in times)
    return _MEDIAN_OVER_MEAN * _SIGMA_OF_MAD * deviation / math.sqrt(len(times))


class BenefitTrial:
    """The measurement of one group, as the leader sees it.

    Args:
        rule: how long and how exactly.
        taken: an earlier decision, ``on`` or ``off``, or empty.
        judged: there is something to decide; else durations are compared and nothing is changed.

    Attributes:
        decision: ``on`` or ``off``; empty: not made yet.
        coded: how the group is to travel.
    """

    def __init__(self, rule: BenefitRule, *, taken: str = "", judged: bool = True) -> None:
        self._rule = rule
        self._judged = judged
        self._round = 1
        self._times: dict[bool, dict[int, list[int]]] = {True: {}, False: {}}
        self._heard: dict[bool, dict[int, None]] = {True: {}, False: {}}
        self.decision = taken
        self.coded = taken != "off"

    def take(self, rank: int, *, coded: bool, times_ns: Sequence[int]) -> None:
        """Take a worker's window; one that is not of the present period is too late."""
        if self.decision or (self._judged and coded != self.coded):
            return
        self._times[coded].setdefault(rank, []).extend(times_ns)
        self._heard[coded][rank] = None

    def turn(self, members: Sequence[int]) -> bool:
        """Go on if all members' windows are here; return whether the group is to change.

        How it is to travel then is in ``coded``.

        Args:
            members: ranks that take part.
        """
        if self.decision:
            return False
        for kind in self._times:  # of who has left, windows of one kind may be missing
            self._times[kind] = {r: t for r, t in self._times[kind].items() if r in members}
        if not self._judged:
            self._compare_only(members)
            return False
        if any(rank not in self._heard[self.coded] for rank in members):
            return False
        self._heard[self.coded] = {}
        before = self.coded
        if self.coded:
            self.coded = False
        else:
            last = self._round >= self._rule.rounds
            self.decision = self.comparison().verdict(self._rule, last=last)
            self.coded = self.decision != "off"
            self._round += 1
        return self.coded != before

    def _compare_only(self, members: Sequence[int]) -> None:
        if all(rank in heard for heard in self._heard.values() for rank in members):
            self.decision = "on"  # there is no other way for these

    def comparison(self) -> Comparison:
        """Return what the windows so far say; each kind has one.

        In ``sync`` all wait for the slowest, so it is the slowest that counts, in either kind.
        """
        kinds = []
        for coded in (True, False):
            every = self._times[coded]
            slowest = max(sorted(every), key=lambda rank: median(every[rank]))
            kinds.append(every[slowest])
        errors = [standard_error(times) for times in kinds]
        return Comparison(float(median(kinds[0])), float(median(kinds[1])), math.hypot(*errors))

    def check(self) -> None:
        """Assert the invariants."""
        assert 1 <= self._round <= self._rule.rounds + 1
        assert self.decision in ("", "on", "off")
        assert not self.decision or self.coded == (self.decision != "off")


def benefit_text(what: str, group: int, comparison: Comparison, decision: str) -> str:
    """Return the line that says what was found, for people.

    Args:
        what: the codes.
        decision: ``on`` or ``off``.
    """
    coded_ms, full_ms = comparison.coded_ns / 1e6, comparison.full_ns / 1e6
    unclear = 0 < comparison.coded_ns - comparison.full_ns <= 2 * comparison.error_ns
    return (
        f"{what} of group {group} {'is off' if decision == 'off' else 'stays on'}: a step takes "
        f"{coded_ms:.1f} ms with it and {full_ms:.1f} ms without"
        f"{', which may be chance' if unclear else ''}"
    )
