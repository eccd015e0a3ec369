"""Distributed Lion as an optimizer: what users construct, and Lion in one process.

Sources: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2 (Lion); Liu
et al., Communication Efficient Distributed Training with Distributed Lion, 2024. The sign of 0 is
+1 here, as one bit has it; in Lion it is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paradis.errors import ConfigError
from paradis.numerics.codecs.codec import NUMPY_OF


class DistributedLion(torch.optim.Optimizer):
    """Lion, whose workers vote on the sign of each element's step: one bit up, one bit down.

    Each worker has a momentum of its own; there is nothing to freeze and no error memory::

        d = sgn(b1 * m + (1 - b1) * g);  m = b2 * m + (1 - b2) * g      # on each worker
        x -= lr * (sgn(sum of d) + weight_decay * x)                    # a tie alternates

    Given to ``paradis.wrap`` workers vote; on its own it is the majority of one. Take a learning
    rate 3 to 10 times less than AdamW's and a weight decay as many times larger.

    Args:
        params: parameters or groups, as in torch; float32 or float64.
        lr: learning rate: how far each element moves.
        betas: shares of the momentum in the sign, and in the next momentum.
        weight_decay: decoupled.

    Raises:
        ConfigError: a hyper-parameter or a parameter's dtype does not fit.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0.0 or weight_decay < 0.0 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(
                "optimizer refused: DistributedLion; expected lr and weight_decay of 0 or more and "
                f"betas in [0, 1), got {lr}, {weight_decay} and {betas}; leave the defaults"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters.

        Raises:
            ConfigError: a parameter is not float32 or float64.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in NUMPY_OF:
                self.param_groups.pop()
                raise ConfigError(
                    f"parameter refused: dtype {parameter.dtype} of DistributedLion; expected "
                    "float32 or float64; keep parameters in float32 and use autocast"
                )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step.

        Args:
            closure: reevaluates the model, as in torch.

        Raises:
            ConfigError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _move(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _move(
    x: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
) -> None:
    """Do Lion's step on one parameter, each product and sum rounded on its own."""
    if g.is_sparse:
        raise ConfigError(
            "step refused: a sparse gradient of DistributedLion; expected a dense one; construct "
            "the embedding with sparse=False"
        )
    if not state:
        state["exp_avg"] = torch.zeros_like(x)
    m, (beta1, beta2) = state["exp_avg"], group["betas"]
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    negative = m.mul(beta1).add_(g.mul(1.0 - beta1)) < 0
    m.mul_(beta2).add_(g.mul(1.0 - beta2))
    one = torch.ones_like(x)
    sign = torch.where(negative, -one, one)
    x.sub_(sign.add_(x.mul(weight_decay)).mul_(lr))
