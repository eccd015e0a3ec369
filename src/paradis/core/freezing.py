"""When 1-bit Adam may freeze the variance: the decision, on numbers.

Invariant: the decision is a function of numbers that all ranks share; whoever decides names a
future step, and nobody freezes on its own.

Source: Tang et al., 1-bit Adam, ICML 2021, section 7.1 compares ``|v_t|_1 / |v_(t - d)|_1`` with
0.96, ``d = 1 / (1 - b2)``. On the plain v that measures mostly Adam's start: with steady gradients
it passes only at the step that `uncorrected_freeze_step` gives. Here v is bias-corrected, the ratio
counts both ways, and it must hold for most parameters and several checks running.

    >>> watch = FreezeWatch(FreezeRule(beta2=0.9, interval=10))
    >>> [watch.observe(step, {0: 2.0}, {0: 64}) for step in (10, 20, 30, 40)]
    [False, False, False, True]
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paradis.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezeRule:
    """When v counts as steady.

    Attributes:
        beta2: Adam's b2.
        threshold: least ratio of a group that is steady.
        share: least share of elements in steady groups.
        checks: checks running that must pass.
        interval: steps from one check to the next.
    """

    beta2: float = 0.999
    threshold: float = 0.96
    share: float = 0.95
    checks: int = 3
    interval: int = 50

    def __post_init__(self) -> None:
        if not 0.0 < self.beta2 < 1.0:
            raise ConfigError(
                f"freeze rule refused: beta2; expected a number between 0 and 1, got {self.beta2}; "
                "1-bit Adam needs Adam's second moment"
            )

    @property
    def window(self) -> int:
        """Steps between the two norms that are compared, ``1 / (1 - b2)``."""
        return round(1.0 / (1.0 - self.beta2))

    @property
    def lag(self) -> int:
        """The window, up to the next multiple of the interval: norms are taken at those."""
        return -(-self.window // self.interval) * self.interval

    def recorded(self, step: int) -> bool:
        """Return whether the norms after ``step`` updates are wanted, for this check or later."""
        return step > 0 and step % self.interval == 0

    def due(self, step: int, warm_up_steps: int) -> bool:
        """Return whether to check at a step: after the learning rate's warm-up, and late enough.

        Args:
            step: updates of v so far.
            warm_up_steps: steps until the learning rate stops rising.
        """
        return step > warm_up_steps and step >= 2 * self.window and step % self.interval == 0

    def steady(self, ratios: Sequence[float], counts: Sequence[int]) -> bool:
        """Return whether enough elements are in groups whose ratio reaches the threshold.

        Args:
            ratios: `steadiness` per group.
            counts: elements per group.
        """
        good = sum(n for ratio, n in zip(ratios, counts, strict=True) if ratio >= self.threshold)
        return good > 0 and good >= self.share * sum(counts)

    def advance(self, passed: int, steady: bool) -> int:
        """Return the checks passed running after one more; freeze when it reaches ``checks``.

        Args:
            passed: what the last call returned, 0 at first.
            steady: whether this check passed and the loss does not diverge.
        """
        return passed + 1 if steady else 0


class FreezeWatch:
    """The norms of one window, and how many checks running have passed.

    Args:
        rule: when v counts as steady.
        warm_up_steps: steps until the learning rate stops rising: no check before.
    """

    def __init__(self, rule: FreezeRule, warm_up_steps: int = 0) -> None:
        self.rule = rule
        self.warm_up_steps = warm_up_steps
        self.passed = 0
        self._norms: deque[tuple[int, dict[int, float]]] = deque(
            maxlen=rule.lag // rule.interval + 1
        )

    def observe(self, step: int, norms: Mapping[int, float], counts: Mapping[int, int]) -> bool:
        """Take the norms at one step; return whether the variance may be frozen.

        Args:
            step: updates of v so far. One that is not `FreezeRule.recorded`, or not after the
                last, is ignored.
            norms: parameter -> L1 norm of its bias-corrected v.
            counts: parameter -> elements.
        """
        if not self.rule.recorded(step) or (self._norms and step <= self._norms[-1][0]):
            return False
        self._norms.append((step, dict(norms)))
        before = dict(self._norms).get(step - self.rule.lag)
        passes = False
        if before is not None and self.rule.due(step, self.warm_up_steps):
            order = sorted(norms)
            ratios = [steadiness(norms[p], before.get(p, math.nan)) for p in order]
            passes = self.rule.steady(ratios, [counts[p] for p in order])
        self.passed = self.rule.advance(self.passed, passes)
        return self.passed >= self.rule.checks


def bias_corrected(norm: float, step: int, beta2: float) -> float:
    """Return a norm of v after ``step`` updates, of the bias-corrected v: ``/ (1 - b2^step)``."""
    return norm / -math.expm1(step * math.log(beta2))


def steadiness(first: float, second: float) -> float:
    """Return how alike two norms of bias-corrected v are: ``min(r, 1 / r)``.

    Returns:
        A number in [0, 1]; 1 when both norms are 0, 0 when one is or one is not finite.
    """
    if not (math.isfinite(first) and math.isfinite(second)):
        return 0.0
    return 1.0 if first == second else max(0.0, min(first, second)) / max(first, second)


def variance_ratio(now: tuple[float, int], before: tuple[float, int], beta2: float) -> float:
    """Return how alike two norms of v are once bias-corrected; see `steadiness`.

    Args:
        now: L1 norm of v, not corrected, and the updates of v behind it.
        before: the same, at an earlier step.
        beta2: Adam's b2.
    """
    return steadiness(bias_corrected(*now, beta2), bias_corrected(*before, beta2))


def uncorrected_freeze_step(beta2: float, threshold: float = 0.96) -> float:
    """Return where the published test passes with steady gradients: ``t*``, not rounded.

    With ``d = 1 / (1 - b2)`` the ratio is ``(1 - b2^t) / (1 - b2^(t - d))`` seen from below, so
    ``t* = d + ln((1 - q) / (1 - q b2^d)) / ln(b2)`` for the threshold q.
    """
    window = 1.0 / (1.0 - beta2)
    return window + math.log((1.0 - threshold) / (1.0 - threshold * beta2**window)) / math.log(
        beta2
    )
