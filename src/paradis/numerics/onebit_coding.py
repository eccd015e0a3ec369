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

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, cast

import torch

from paradis.errors import ConfigError, LocalProtocolError, NonFiniteGradient, SnapshotCorrupt
from paradis.numerics.codecs.freeze import freeze_variance
from paradis.numerics.codecs.onebit import OneBit, pack_mask
from paradis.numerics.codecs.onebit_adam import frozen_step, inverse_denominator, momentum_parts
from paradis.numerics.coding import ServerCoder, State, WorkerCoder
from paradis.numerics.elementwise import Options
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


def number(options: Options, key: str) -> float:
    """Return a hyper-parameter that is one number."""
    return float(cast(float, options[key]))


def betas(options: Options) -> tuple[float, float]:
    """Return Adam's or Lion's betas."""
    first, second = cast(list[float], options["betas"])
    return float(first), float(second)


class FrozenShard:
    """What worker and server of a shard keep alike: error memory, momentum, frozen variance.

    Args:
        codec: gives blocks, norm and dtype.
        lengths: elements of each segment.
        error: name of the error memory among `memories`.

    Attributes:
        slices: place of each segment's code in the shard's.
        code_bytes: bytes of the shard's code.
        masks: per segment packed bits of the elements that have variance; None when all have.
    """

    def __init__(self, codec: OneBit, lengths: Sequence[int], error: str) -> None:
        self.codec = codec
        edges = [0, *itertools.accumulate(codec.encoded_bytes(n) for n in lengths)]
        self.slices = [slice(a, b) for a, b in itertools.pairwise(edges)]
        self.code_bytes = edges[-1]
        self.masks: list[torch.Tensor | None] = [None] * len(lengths)
        self._lengths = tuple(lengths)
        self._error_name = error
        self._errors = [torch.zeros(n, dtype=codec.dtype) for n in lengths]
        self._rooms: list[torch.Tensor] = []
        self._noted = [False] * len(lengths)
        self._momenta: list[torch.Tensor] = []
        self._inverses: list[torch.Tensor] = []
        self._last = torch.zeros(self.code_bytes, dtype=torch.uint8)

    def begin(self, states: Sequence[State], options: Options) -> None:
        """Freeze the variance of Adam's state; see `WorkerCoder.begin`."""
        momenta, inverses = [], []
        for length, (tensors, numbers) in zip(self._lengths, states, strict=True):
            momentum = torch.zeros(length, dtype=self.codec.dtype)
            inverse = torch.zeros(length, dtype=self.codec.dtype)
            if tensors and numbers.get("step", 0.0) >= 1.0:
                frozen, real = freeze_variance(
                    tensors["exp_avg_sq"], int(numbers["step"]), betas(options)[1]
                )
                inverse = inverse_denominator(frozen, number(options, "eps"), real)
                momentum.copy_(tensors["exp_avg"]).masked_fill_(~real, 0.0)
            momenta.append(momentum)
            inverses.append(inverse)
        self._start(momenta, inverses)
        for error in self._errors:
            error.zero_()

    def _start(self, momenta: list[torch.Tensor], inverses: list[torch.Tensor]) -> None:
        self._noted = [False] * len(self._lengths)
        self._momenta, self._inverses = momenta, inverses
        flags = [inverse != 0.0 for inverse in inverses]
        self.masks = [None if bool(real.all()) else pack_mask(real) for real in flags]

    def encode(
        self, segment: int, numbers: torch.Tensor, out: torch.Tensor, beta: float | None = None
    ) -> None:
        """Encode one segment, blended with the momentum if there is a beta.

        What its error memory was is kept until `settle` or `restore`.

        Raises:
            NonFiniteGradient: see `OneBit.encode_blend`; ``fields["segment"]`` says where. All
                error memories are as they were before the segments noted so far.
        """
        self._require_beginning()
        length = self._lengths[segment]
        momentum = None if beta is None else self._momenta[segment]
        try:
            self.codec.encode_blend(
                numbers, out, self._errors[segment],
                momentum=momentum_parts(self.codec, momentum, length),
                beta=beta or 0.0, mask=self.masks[segment], room=self._rooms[segment],
            )  # fmt: skip
        except NonFiniteGradient as error:
            self.restore()
            error.fields["segment"] = segment
            raise
        self._noted[segment] = True

    def _require_beginning(self) -> None:
        if not self._momenta and self._lengths:
            raise LocalProtocolError(
                "code refused: a shard of 1-bit Adam; expected begin() or load_memories() first, "
                "got neither; its variance is not frozen yet"
            )
        if len(self._rooms) < len(self._lengths):
            self._rooms = [self.codec.scratch(n) for n in self._lengths]

    def settle(self) -> None:
        """The error memories that `encode` noted count from now on."""
        self._noted = [False] * len(self._lengths)

    def restore(self) -> None:
        """The error memories that `encode` noted are as they were before."""
        for segment, noted in enumerate(self._noted):
            if noted:
                self._errors[segment].copy_(self._kept(segment))
        self.settle()

    def _kept(self, segment: int) -> torch.Tensor:
        """Return the error memory without what `encode` noted."""
        if not self._noted[segment]:
            return self._errors[segment]
        room = self._rooms[segment]
        return room[room.numel() - self._lengths[segment] :]

    def move(
        self, code: torch.Tensor, values: Sequence[torch.Tensor], present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        """Move the values along an answer, which is the momentum from then on.

        Raises:
            NonFiniteGradient: a scale of the code is not finite; ``fields["segment"]`` says where.
                Segments before it have moved.
        """
        self._require_beginning()
        lr, weight_decay = number(options, "lr"), number(options, "weight_decay")
        for segment, place in enumerate(self.slices):
            if not present[segment]:
                continue
            self._last[place].copy_(code[place])
            self._momenta[segment] = self._last[place]
            frozen_step(
                self.codec, self._last[place], values[segment], self._inverses[segment],
                lr=lr, weight_decay=weight_decay,
            )  # fmt: skip

    def _momentum(self, segment: int) -> torch.Tensor:
        momentum = self._momenta[segment]
        if momentum.dtype != torch.uint8:
            return momentum
        numbers = torch.empty(self._lengths[segment], dtype=self.codec.dtype)
        self.codec.decode(momentum, numbers, self.masks[segment])
        return numbers

    def errors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return the error memory alone; {} before `begin`."""
        if not self._momenta:
            return {}
        return {self._error_name: [self._kept(segment) for segment in range(len(self._lengths))]}

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return error memory, momentum as numbers, inverse denominator; {} before `begin`."""
        if not self._momenta:
            return {}
        every = range(len(self._lengths))
        return {
            **self.errors(),
            "momentum": [self._momentum(segment) for segment in every],
            "inverse": self._inverses,
        }

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take over memories, perhaps cut otherwise, or those of the other side of this shard.

        Without an error memory of its own name it starts at zero.

        Raises:
            SnapshotCorrupt: names, lengths or dtypes are not those of this shard.
        """
        wanted = {"momentum", "inverse"}
        if not wanted <= set(memories) <= wanted | {"error", "server_error"}:
            raise SnapshotCorrupt(
                f"memories refused: expected {sorted(wanted)} and perhaps {self._error_name}, got "
                f"{sorted(memories)}; restore a checkpoint of OneBitAdam after its freeze"
            )
        for name, tensors in memories.items():
            check_memory(name, tensors, self._lengths, self.codec.dtype)
        self._start([t.clone() for t in memories["momentum"]],
                    [t.clone() for t in memories["inverse"]])  # fmt: skip
        for segment, error in enumerate(self._errors):
            if self._error_name in memories:
                error.copy_(memories[self._error_name][segment])
            else:
                error.zero_()


def check_memory(
    name: str, tensors: Sequence[torch.Tensor], lengths: Sequence[int], dtype: torch.dtype
) -> None:
    """Refuse a memory that is not one flat tensor per segment.

    Raises:
        SnapshotCorrupt: a length or a dtype is another.
    """
    got = [(tuple(t.shape), t.dtype) for t in tensors]
    if got != [((length,), dtype) for length in lengths]:
        raise SnapshotCorrupt(
            f"memories refused: {name}; expected tensors of {dtype} with {list(lengths)} elements, "
            f"got {got}; cut them as this shard is cut"
        )


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
        self._shard.restore()
        beta = betas(options)[0]
        for segment, gradient in enumerate(gradients):
            out = code[self._shard.slices[segment]]
            if gradient is None:
                out.zero_()
            else:
                self._shard.encode(segment, gradient, out, beta)

    def keep(self) -> None:
        self._shard.settle()

    def forget(self) -> None:
        self._shard.restore()

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
        codec, shard = self._shard.codec, self._shard
        for span, place, mask in zip(self._spans, shard.slices, shard.masks, strict=True):
            (codec.decode if first else codec.decode_add)(code[place], total[span], mask)

    def update(
        self, mean: torch.Tensor, optimizer: ShardOptimizer, present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        shard = self._shard
        for segment, (span, place) in enumerate(zip(self._spans, shard.slices, strict=True)):
            if present[segment]:
                shard.encode(segment, mean[span], self.code[place])
            else:
                self.code[place].zero_()
        shard.settle()
        shard.move(self.code, self._values, present, options)

    def start(self) -> Mapping[str, Sequence[torch.Tensor]]:
        memories = self._shard.memories()
        return {name: memories[name] for name in ("momentum", "inverse")}

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return self._shard.memories()

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._shard.load_memories(memories)
