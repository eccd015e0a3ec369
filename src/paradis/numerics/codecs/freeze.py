"""When 1-bit Adam may freeze the variance, and what it freezes.

Invariant: the decision is a function of numbers that all ranks share; whoever decides names a
future step, and nobody freezes on its own.

Source: Tang et al., 1-bit Adam, ICML 2021, section 7.1 compares ``|v_t|_1 / |v_(t - d)|_1`` with
0.96, ``d = 1 / (1 - b2)``. On the plain v that measures mostly Adam's start: with steady gradients
it passes only at the step that `uncorrected_freeze_step` gives. Here v is bias-corrected, the ratio
counts both ways, and it must hold for most parameters and several checks running.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
            ratios: `variance_ratio` per group.
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


def bias_corrected(norm: float, step: int, beta2: float) -> float:
    """Return a norm of v after ``step`` updates, of the bias-corrected v: ``/ (1 - b2^step)``."""
    return norm / -math.expm1(step * math.log(beta2))


def variance_ratio(now: tuple[float, int], before: tuple[float, int], beta2: float) -> float:
    """Return how alike two norms of bias-corrected v are: ``min(r, 1 / r)``.

    Args:
        now: L1 norm of v, not corrected, and the updates of v behind it.
        before: the same, at an earlier step.
        beta2: Adam's b2.

    Returns:
        A number in [0, 1]; 1 when both norms are 0, 0 when one is or one is not finite.
    """
    first, second = bias_corrected(*now, beta2), bias_corrected(*before, beta2)
    if first == second:
        return 1.0
    low, high = min(first, second), max(first, second)
    return low / high if low > 0.0 and math.isfinite(high) else 0.0


def uncorrected_freeze_step(beta2: float, threshold: float = 0.96) -> float:
    """Return where the published test passes with steady gradients: ``t*``, not rounded.

    With ``d = 1 / (1 - b2)`` the ratio is ``(1 - b2^t) / (1 - b2^(t - d))`` seen from below, so
    ``t* = d + ln((1 - q) / (1 - q b2^d)) / ln(b2)`` for the threshold q.
    """
    window = 1.0 / (1.0 - beta2)
    return window + math.log((1.0 - threshold) / (1.0 - threshold * beta2**window)) / math.log(
        beta2
    )


def freeze_variance(
    exp_avg_sq: torch.Tensor, step: int, beta2: float, *, floor: float = 1e-3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variance to freeze and which elements have any.

    An element whose gradients were all 0 (an unused row, padding) has no variance, and one bit
    cannot say 0: it is masked. One whose gradients were almost 0 would move by
    ``lr * s / sqrt(v)``, far too much: v is raised to a floor.

    Args:
        exp_avg_sq: (N,) float32 or float64, Adam's v. Not modified.
        step: updates of v so far, 1 or more.
        beta2: Adam's b2.
        floor: least v, as a share of the median of the elements that have any.

    Returns:
        (N,) v, bias-corrected and floored, 0 where there is none; (N,) bool, true where v > 0.
    """
    frozen = exp_avg_sq.detach() / -math.expm1(step * math.log(beta2))
    real = frozen > 0
    if bool(real.any()):
        median = float(frozen[real].median())
        frozen = torch.where(real, frozen.clamp(min=floor * median), frozen)
    return frozen, real
