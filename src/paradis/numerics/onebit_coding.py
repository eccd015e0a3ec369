"""1-bit Adam on a shard: what worker and server do once the variance is frozen.

    worker:  c = b1 * m + (1 - b1) * g + e;      push C(c);  e = c - C(c)
    server:  a = mean of the decoded pushes + E; send M = C(a);  E = a - M
    both:    m = M;  x -= lr * (m / (sqrt(v) + eps) + weight_decay * x)

v is frozen bias-corrected, floored, and without the elements that have none (`freeze_variance`);
``1 / (sqrt(v) + eps)`` is computed once, so a later eps does not count. Betas, learning rate and
weight decay count as given with each step. m has no bias correction: it starts as Adam's.

The last answer's code is m: 32 times fewer bytes than its numbers, and the very same bits.

A parameter that has no gradient on *some* workers counts there as zero momentum, not as a zero
gradient: its code is zero bytes.

Source: Tang et al., 1-bit Adam, ICML 2021, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from paradis.errors import ConfigError
from paradis.numerics.codecs.codec import array
from paradis.numerics.codecs.onebit import OneBit
from paradis.numerics.coding import ServerCoder, State, WorkerCoder
from paradis.numerics.elementwise import Options
from paradis.numerics.frozen_shard import FrozenShard, betas
from paradis.numerics.shard_optimizer import ShardOptimizer

DEFAULT: Final = OneBit()


def onebit_codec(options: Options, dtype: torch.dtype = torch.float32) -> OneBit:
    """Return the code of a parameter group of `paradis.optim.OneBitAdam`.

    Args:
        options: of the group; ``scale`` is ``l1``, one scale per block of 1024 elements, or
            ``l2``, one scale per segment, as the published code has it per tensor.
        dtype: of values, gradients, memories and scales.

    Raises:
        ConfigError: another ``scale``, or a dtype that is not float32 or float64.
    """
    scale = options.get("scale", "l1")
    if scale not in ("l1", "l2"):
        raise ConfigError(
            f"optimizer option refused: scale of OneBitAdam; expected 'l1' or 'l2', got {scale!r}; "
            "leave the default"
        )
    return OneBit(dtype=dtype) if scale == "l1" else OneBit(block_elements=None, norm="l2",
                                                            dtype=dtype)  # fmt: skip


class OneBitAdamWorker(WorkerCoder):
    """1-bit Adam on a worker; memories ``error``, ``momentum``, ``inverse``.

    Args:
        lengths: elements of each segment.
        codec: of `onebit_codec`, the same on worker and server.
    """

    def __init__(self, lengths: Sequence[int], codec: OneBit = DEFAULT) -> None:
        self._codec = codec
        super().__init__(lengths)
        self._shard = FrozenShard(codec, self.lengths, "error")

    def encoded_bytes(self, length: int) -> int:
        return self._codec.encoded_bytes(length)

    def begin(self, states: Sequence[State], options: Options) -> None:
        self._shard.begin(states, options)

    def encode(
        self, gradients: Sequence[torch.Tensor | None], code: torch.Tensor, options: Options
    ) -> None:
        self._encode(gradients, code, options, at_once=False)

    def encode_and_keep(
        self, gradients: Sequence[torch.Tensor | None], code: torch.Tensor, options: Options
    ) -> None:
        self._encode(gradients, code, options, at_once=True)

    def _encode(
        self, gradients: Sequence[torch.Tensor | None], code: torch.Tensor, options: Options,
        *, at_once: bool,
    ) -> None:  # fmt: skip
        self._shard.forget()
        beta = betas(options)[0]
        out = array(code, "code", self.code_bytes, torch.uint8)
        for segment, gradient in enumerate(gradients):
            place = self._shard.slices[segment]
            if gradient is None:
                out[place] = 0
            else:
                self._shard.encode(segment, gradient, out[place], beta, at_once=at_once)

    def keep(self) -> None:
        self._shard.settle()

    def forget(self) -> None:
        self._shard.forget()

    def install(
        self, code: torch.Tensor, values: Sequence[torch.Tensor], present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        self._shard.move(code, values, present, options)

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return self._shard.memories()

    def own(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return self._shard.errors()

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._shard.load_memories(memories)


class OneBitAdamServer(ServerCoder):
    """1-bit Adam on a server; memories ``server_error``, ``momentum``, ``inverse``.

    Args:
        spans: (start, length) of each segment in the shard, in elements.
        values: per segment (length,) view of the shard's value, borrowed, updated in place.
        codec: of `onebit_codec`, the same on worker and server.
    """

    refuses = True

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        values: Sequence[torch.Tensor],
        codec: OneBit = DEFAULT,
    ) -> None:
        self._shard = FrozenShard(codec, [length for _, length in spans], "server_error")
        self._spans = [slice(start, start + length) for start, length in spans]
        self._values = values
        self.code = torch.zeros(self._shard.code_bytes, dtype=torch.uint8)

    def begin(self, states: Sequence[State], options: Options) -> None:
        self._shard.begin(states, options)

    def add(self, code: torch.Tensor, total: torch.Tensor, *, first: bool) -> None:
        shard = self._shard
        given = array(code, "code", shard.code_bytes, torch.uint8)
        numbers = array(total, "sum", total.numel(), shard.codec.dtype)
        for segment, (span, place) in enumerate(zip(self._spans, shard.slices, strict=True)):
            shard.codec.take(given[place], numbers[span], shard.mask(segment), add=not first)

    def mean(self, codes: Sequence[torch.Tensor], total: torch.Tensor, divisor: int) -> None:
        """Decode codes into their mean, in one pass over memory where all workers sent one."""
        if divisor != len(codes):
            super().mean(codes, total, divisor)
            return
        shard = self._shard
        given = [array(code, "code", shard.code_bytes, torch.uint8) for code in codes]
        numbers = array(total, "mean", total.numel(), shard.codec.dtype)
        for segment, (span, place) in enumerate(zip(self._spans, shard.slices, strict=True)):
            shard.codec.take_mean(
                [code[place] for code in given], numbers[span], shard.mask(segment)
            )

    def update(
        self, mean: torch.Tensor, optimizer: ShardOptimizer, present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        shard, out = self._shard, self.code.numpy()
        for segment, (span, place) in enumerate(zip(self._spans, shard.slices, strict=True)):
            if present[segment]:
                shard.encode(segment, mean[span], out[place], at_once=True)
            else:
                out[place] = 0
        shard.move(self.code, self._values, present, options)

    def start(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return self._shard.start()

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return self._shard.memories()

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._shard.load_memories(memories)
