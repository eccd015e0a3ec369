"""Distributed Lion on a shard: workers vote with signs, the server counts and keeps nothing else.

    worker:  d = sgn(b1 * m + (1 - b1) * g);  m = b2 * m + (1 - b2) * g;  push d
    server:  D = sgn(sum of d);  a tie is +1 if (updates so far + index) is even, else -1
    both:    x -= lr * (D + weight_decay * x)

A segment's code is one byte, 1 for a vote and 0 for none, and then the bits of `encode_lion`: so a
worker without a gradient of a parameter abstains. Ties go by the place of an element in its
parameter and by the updates of that parameter, which no cut into shards changes.

Source: Liu et al., Communication Efficient Distributed Training with Distributed Lion, 2024.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch

from paradis.errors import NonFiniteGradient, SnapshotCorrupt
from paradis.numerics.codecs.kernels import kernels
from paradis.numerics.codecs.lion import code_bytes, encode_lion, lion_step
from paradis.numerics.coding import ServerCoder, State, WorkerCoder
from paradis.numerics.elementwise import Options
from paradis.numerics.finite import first_non_finite
from paradis.numerics.frozen_shard import betas, check_memory, number
from paradis.numerics.shard_optimizer import ShardOptimizer

_HEAD: Final = 1
"""Bytes that say whether there is a vote."""


def lion_bytes(length: int) -> int:
    """Return the bytes of the code of a segment of ``length`` elements."""
    return _HEAD + code_bytes(length)


def _places(lengths: Sequence[int]) -> list[slice]:
    edges = [0, *itertools.accumulate(lion_bytes(n) for n in lengths)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


class LionWorker(WorkerCoder):
    """Distributed Lion on a worker; its memory is ``momentum``, its own.

    Args:
        lengths: elements of each segment.
        dtype: of values, gradients and momentum: float32 or float64.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(lengths)
        self._places = _places(self.lengths)
        self._momenta = [torch.zeros(n, dtype=dtype) for n in self.lengths]
        self._next = [torch.empty(n, dtype=dtype) for n in self.lengths]
        self._noted = [False] * len(self.lengths)
        self._dtype = dtype

    def encoded_bytes(self, length: int) -> int:
        return lion_bytes(length)

    def begin(self, states: Sequence[State], options: Options) -> None:
        """Take over ``exp_avg``, if there is one, as the first momentum."""
        self.forget()
        for momentum, (tensors, _) in zip(self._momenta, states, strict=True):
            if "exp_avg" in tensors:
                momentum.copy_(tensors["exp_avg"])
            else:
                momentum.zero_()

    def encode(
        self, gradients: Sequence[torch.Tensor | None], code: torch.Tensor, options: Options
    ) -> None:
        self.forget()
        beta1, beta2 = betas(options)
        for segment, gradient in enumerate(gradients):
            out = code[self._places[segment]]
            if gradient is None:
                out.zero_()
                continue
            after = self._next[segment].copy_(self._momenta[segment])
            try:
                encode_lion(gradient, after, out[_HEAD:], beta1=beta1, beta2=beta2)
            except NonFiniteGradient as error:
                self.forget()
                error.fields["segment"] = segment
                raise
            out[0] = 1
            self._noted[segment] = True

    def keep(self) -> None:
        for segment, noted in enumerate(self._noted):
            if noted:
                self._momenta[segment], self._next[segment] = (
                    self._next[segment],
                    self._momenta[segment],
                )
        self.forget()

    def forget(self) -> None:
        self._noted = [False] * len(self.lengths)

    def install(
        self, code: torch.Tensor, values: Sequence[torch.Tensor], present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        _move(code, self._places, values, present, options)

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return {"momentum": self._momenta}

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take over the momentum, perhaps cut otherwise.

        Raises:
            SnapshotCorrupt: names, lengths or dtypes are not those of this shard.
        """
        momenta = _only(memories, "momentum")
        check_memory("momentum", momenta, self.lengths, self._dtype)
        self.forget()
        for mine, given in zip(self._momenta, momenta, strict=True):
            mine.copy_(given)


class LionServer(ServerCoder):
    """Distributed Lion on a server; its memory is ``ties``: 1 where the next tie is negative.

    Args:
        spans: (start, length) of each segment in the shard, in elements.
        values: per segment (length,) view of the shard's value, borrowed, updated in place.
        offsets: place of each segment's first element in its parameter.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        values: Sequence[torch.Tensor],
        offsets: Sequence[int],
    ) -> None:
        self._lengths = [length for _, length in spans]
        self._spans = [slice(start, start + length) for start, length in spans]
        self._places = _places(self._lengths)
        self._values = values
        self._parity = [offset % 2 for offset in offsets]
        self.code = torch.zeros(sum(lion_bytes(n) for n in self._lengths), dtype=torch.uint8)

    def add(self, code: torch.Tensor, total: torch.Tensor, *, first: bool) -> None:
        decode = kernels("decode").decode
        numbers = total.numpy()
        one = np.ones(1, numbers.dtype)
        for span, place in zip(self._spans, self._places, strict=True):
            vote = code[place].numpy()
            size = span.stop - span.start
            if vote[0]:
                scales = one[: min(1, size)]
                decode(vote[_HEAD:], scales, size, vote[:0], numbers[span], not first)
            elif first:
                numbers[span] = 0

    def update(
        self, mean: torch.Tensor, optimizer: ShardOptimizer, present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        for segment, span in enumerate(self._spans):
            bad = first_non_finite(mean[span]) if present[segment] else None
            if bad is not None:
                raise NonFiniteGradient(
                    f"vote refused: segment {segment}, element {bad}; expected a finite mean of "
                    "votes; leave this step out",
                    segment=segment,
                    element=bad,
                )
        for segment, (span, place) in enumerate(zip(self._spans, self._places, strict=True)):
            self.code[place].zero_()
            if present[segment]:
                self._count(segment, mean[span], self.code[place])
        _move(self.code, self._places, self._values, present, options)

    def _count(self, segment: int, mean: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sign of the mean, of a tie by its place, and turn the ties round."""
        numbers, parity = mean.numpy(), self._parity[segment]
        negative = np.empty(numbers.size, np.bool_)
        # Element k's tie is negative where parity + k is odd.
        np.less(numbers[parity::2], 0, out=negative[parity::2])
        np.less_equal(numbers[1 - parity :: 2], 0, out=negative[1 - parity :: 2])
        out[0] = 1
        out[_HEAD:].numpy()[:] = np.packbits(negative, bitorder="little")
        self._parity[segment] = 1 - parity

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        ties = []
        for length, parity in zip(self._lengths, self._parity, strict=True):
            bits = torch.zeros(length, dtype=torch.uint8)
            bits[1 - parity :: 2] = 1
            ties.append(bits)
        return {"ties": ties}

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take over the ties, perhaps cut otherwise.

        Raises:
            SnapshotCorrupt: names, lengths or dtypes are not those of this shard.
        """
        ties = _only(memories, "ties")
        check_memory("ties", ties, self._lengths, torch.uint8)
        for segment, bits in enumerate(ties):
            if bits.numel():
                self._parity[segment] = int(bits[0])


def _move(
    code: torch.Tensor, places: Sequence[slice], values: Sequence[torch.Tensor],
    present: Sequence[bool], options: Options,
) -> None:  # fmt: skip
    lr, weight_decay = number(options, "lr"), number(options, "weight_decay")
    for place, value, there in zip(places, values, present, strict=True):
        if there:
            lion_step(code[place][_HEAD:], value, lr=lr, weight_decay=weight_decay)


def _only(memories: Mapping[str, Sequence[torch.Tensor]], name: str) -> Sequence[torch.Tensor]:
    if set(memories) != {name}:
        raise SnapshotCorrupt(
            f"memories refused: expected {name}, got {sorted(memories)}; restore a checkpoint of "
            "DistributedLion"
        )
    return memories[name]
