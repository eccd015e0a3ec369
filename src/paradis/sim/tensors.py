"""What a virtual worker's script holds: the tensors of its groups, and what it registers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

import torch

from paradis.roles.events import ShardsReady
from paradis.sim.job import Model
from paradis.wire import messages as msg


@dataclass(slots=True)
class Tensors:
    """A worker's tensors of one group, as flat shards.

    Attributes:
        changes: shard -> how often its gradient was written; ``handed``: that number when the
            role was told of it last in this step.
        present: parameters with a gradient.
        unmade: shards that ``step()`` was called for before their code was made.
    """

    plans: dict[int, msg.ShardPlan] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    changes: dict[int, int] = field(default_factory=dict)
    handed: dict[int, int] = field(default_factory=dict)
    present: dict[int, None] = field(default_factory=dict)
    unmade: dict[int, None] = field(default_factory=dict)

    def active(self) -> list[msg.ShardPlan]:
        """Return the shards that take gradients, in admission order."""
        plans = [p for p in self.plans.values() if not p.is_buffer and p.length]
        return sorted(plans, key=lambda p: p.priority)

    def holds(self, plan: msg.ShardPlan) -> bool:
        """Whether some parameter of the shard has a gradient."""
        return any(s.parameter in self.present for s in plan.segments)

    def late(
        self, present: Iterable[int], handed: Container[int], chance: Callable[[float], bool]
    ) -> tuple[int, ...]:
        """Return the shards whose code is made after ``step()``, of those not handed over."""
        coded = (s for s in present if s not in handed and self.plans[s].codec)
        self.unmade = dict.fromkeys(s for s in coded if chance(0.5))
        return tuple(self.unmade)

    def make(self, group: int, shard: int, step: int) -> ShardsReady:
        """Return what is said of a late code that is made."""
        del self.unmade[shard]
        return ShardsReady(group, (shard,), step)


def specs(model: Model, part: int, dtype: str) -> tuple[msg.ParameterSpec, ...]:
    """Return what a part registers."""
    found = [
        msg.ParameterSpec(name=f"p{part}.{i}", shape=(n,), dtype=dtype, options_group=0)
        for i, n in enumerate(model.parts[part])
    ]
    if part == 0 and model.buffer:
        found.append(
            msg.ParameterSpec(
                name="buffer", shape=(model.buffer,), dtype=dtype, options_group=-1, trainable=False
            )
        )
    return tuple(found)
