"""One shard on its server: value, optimizer, and the coder where it travels as codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paradis.numerics.codecs.freeze import bias_corrected
from paradis.numerics.coding import ServerCoder
from paradis.numerics.memory_order import as_bytes
from paradis.numerics.shard_optimizer import ShardOptimizer
from paradis.runtime.pages import Returns
from paradis.wire.messages import Options, ParameterSpec, ShardPlan

Scalars = dict[int, dict[str, float]]

_TAKES_OVER = ("onebit", "onebit-tensor")
"""Codecs whose coders need the optimizer's state no more once they have begun: two models less."""

_RETURNS = Returns()

MEMORY = "."
"""In a checkpoint, between a codec's name and that of its memory; no state of torch has it."""


@dataclass(slots=True)
class HeldValue:
    """One shard's tensors.

    Attributes:
        value: (length,) of the shard's dtype; padding between segments stays zero.
        segments: views of ``value``, one per parameter piece.
        optimizer: None for buffers.
        coder: where the plan names a codec.
        begin_with: options that the coder begins with when it is used first, None: it has begun.
    """

    plan: ShardPlan
    specs: tuple[ParameterSpec, ...]
    value: torch.Tensor
    segments: list[torch.Tensor]
    optimizer: ShardOptimizer | None
    coder: ServerCoder | None = None
    begin_with: Options | None = None

    def ready_coder(self) -> ServerCoder:
        """Return the coder, begun from the optimizer's state unless a checkpoint had its own."""
        assert self.coder is not None and self.optimizer is not None
        options, self.begin_with = self.begin_with, None
        if options is not None and not self.coder.memories():
            states = [self.optimizer.state(i) for i in range(len(self.segments))]
            self.coder.begin(states, options)
            if self.plan.codec in _TAKES_OVER:
                held = self.optimizer.state_bytes()
                for index in range(len(self.segments)):
                    self.optimizer.load_state(index, {}, {})
                del states
                _RETURNS.freed(held)
        return self.coder

    def norms_of_v(self) -> dict[int, float]:
        """Return the L1 norm of Adam's bias-corrected v, per parameter of the group."""
        assert self.optimizer is not None
        norms: dict[int, float] = {}
        for index, segment in enumerate(self.plan.segments):
            tensors, numbers = self.optimizer.state(index)
            if "exp_avg_sq" in tensors and numbers["step"]:
                norm = float(tensors["exp_avg_sq"].sum(dtype=torch.float64))
                corrected = bias_corrected(norm, int(numbers["step"]), self.optimizer.beta2)
                norms[segment.parameter] = norms.get(segment.parameter, 0.0) + corrected
        return norms

    def memory_sections(
        self,
    ) -> tuple[tuple[str, ...], tuple[str, ...], Scalars, list[memoryview]]:
        """Return what workers' coders start from, as it travels: keys, dtypes, {}, buffers."""
        keys, dtypes, buffers = [], [], []
        start = self.ready_coder().start()
        # Large elements first: each section starts at a multiple of its own.
        for key in sorted(start, key=lambda key: (-start[key][0].itemsize, key)):
            tensors = start[key]
            column = torch.zeros(self.plan.length, dtype=tensors[0].dtype)
            for segment, tensor in zip(self.plan.segments, tensors, strict=True):
                column[segment.start : segment.start + segment.length] = tensor
            keys.append(key)
            dtypes.append(str(column.dtype).removeprefix("torch."))
            buffers.append(as_bytes(column))
        return tuple(keys), tuple(dtypes), {}, buffers

    def saved_memories(self) -> dict[str, Sequence[torch.Tensor]]:
        """Return what a checkpoint must have of the coder: key -> per segment, lent."""
        if self.coder is None:
            return {}
        prefix = self.plan.codec + MEMORY
        memories = self.ready_coder().memories()
        return {prefix + key: pieces for key, pieces in memories.items()}

    def load_memories(self, saved: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Give the coder its memories of a checkpoint, if it was saved with this codec."""
        if self.coder is None:
            return
        self.coder.replaced()
        prefix = self.plan.codec + MEMORY
        whole = {
            key.removeprefix(prefix): tensors
            for key, tensors in saved.items()
            if key.startswith(prefix) and len(tensors) == len(self.segments)
        }
        # A rank after the name: a worker's own.
        whole = {key: tensors for key, tensors in whole.items() if MEMORY not in key}
        if whole:
            self.coder.load_memories(whole)
