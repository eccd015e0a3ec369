"""What a ``torch.amp.GradScaler`` needs in ``step()``."""

from __future__ import annotations

from typing import Any

import torch


def unscale(optimizer: torch.optim.Optimizer, scaler: Any) -> tuple[bool, dict[str, Any] | None]:
    """Unscale gradients unless the script did.

    Args:
        optimizer: as the scaler knows it.
        scaler: None where the script uses none.

    Returns:
        Whether this worker overflowed, and what the scaler keeps of the optimizer.
    """
    if scaler is None:
        return False, None
    # The scaler offers no public way to its per-optimizer state; torch's own fused
    # optimizers are handed it by the same keyword.
    state = scaler._per_optimizer_states[id(optimizer)]
    if not state["found_inf_per_device"]:
        scaler.unscale_(optimizer)
    if not state["found_inf_per_device"]:
        # No gradient here in this step, but perhaps an overflow elsewhere: note it, too.
        device = next(p.device for g in optimizer.param_groups for p in g["params"])
        state["found_inf_per_device"] = {device: torch.zeros((), device=device)}
    found = sum(float(t.item()) for t in state["found_inf_per_device"].values())
    return found > 0, state
