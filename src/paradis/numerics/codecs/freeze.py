"""What 1-bit Adam freezes, and the norms by which it is decided when.

The decision itself, on those norms, is `paradis.core.freezing`; its names stand here, too.
"""

from __future__ import annotations

import math

import torch

from paradis.core.freezing import (
    FreezeRule,
    FreezeWatch,
    bias_corrected,
    uncorrected_freeze_step,
    variance_ratio,
)

__all__ = [
    "FreezeRule",
    "FreezeWatch",
    "bias_corrected",
    "freeze_variance",
    "uncorrected_freeze_step",
    "variance_norm",
    "variance_ratio",
]


def variance_norm(exp_avg_sq: torch.Tensor, step: int, beta2: float) -> float:
    """Return the L1 norm of the bias-corrected v, summed in float64.

    Args:
        exp_avg_sq: (N,) or of any shape, Adam's v, which is never negative. Not modified.
        step: updates of v so far, 1 or more.
        beta2: Adam's b2.
    """
    return bias_corrected(float(exp_avg_sq.detach().sum(dtype=torch.float64)), step, beta2)


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
