"""Optimizers whose workers and servers exchange one bit per element; use them as torch's own.

>>> import torch
>>> model = torch.nn.Linear(4, 1)
>>> optimizer = OneBitAdam(model.parameters(), lr=1e-3, freeze_step=1000)
>>> optimizer.frozen
False
"""

from __future__ import annotations

from paradis.numerics.lion_optimizer import DistributedLion
from paradis.numerics.onebit_adam_optimizer import OneBitAdam

__all__ = ["DistributedLion", "OneBitAdam"]
