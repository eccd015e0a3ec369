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
from typing import Final, NamedTuple, NoReturn, cast

import torch

from paradis.errors import ConfigError, LocalProtocolError, NonFiniteGradient, SnapshotCorrupt
from paradis.numerics.codecs.freeze import freeze_variance
from paradis.numerics.codecs.onebit import Blend, OneBit, pack_mask
from paradis.numerics.codecs.onebit_adam import frozen_step, inverse_denominator, inverse_dtype
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

    Per element that is an error, an inverse denominator of two bytes, and a bit of momentum. A
    momentum in numbers is held from the freeze (or a restore) until the first answer; then its
    memory becomes that of the error, which is zero till then.

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
        self._errors: list[torch.Tensor | None] = [None] * len(lengths)  # None: zeros
        self._noted: list[_Noted | None] = [None] * len(lengths)
        self._momenta: list[torch.Tensor] = []  # numbers, or codes
        self._inverses: list[torch.Tensor] = []

    def begin(self, states: Sequence[State], options: Options) -> None:
        """Freeze the variance of Adam's state; see `WorkerCoder.begin`."""
        momenta, inverses = [], []
        for length, (tensors, numbers) in zip(self._lengths, states, strict=True):
            momentum = torch.zeros(length, dtype=self.codec.dtype)
            inverse = torch.zeros(length, dtype=inverse_dtype(self.codec.dtype))
            if tensors and numbers.get("step", 0.0) >= 1.0:
                frozen, real = freeze_variance(
                    tensors["exp_avg_sq"], int(numbers["step"]), betas(options)[1]
                )
                inverse = inverse_denominator(frozen, number(options, "eps"), real)
                momentum.copy_(tensors["exp_avg"]).masked_fill_(~real, 0.0)
            momenta.append(momentum)
            inverses.append(inverse)
        self._start(momenta, inverses)

    def _start(self, momenta: list[torch.Tensor], inverses: list[torch.Tensor]) -> None:
        flags = [inverse != 0.0 for inverse in inverses]
        self.masks = [None if bool(real.all()) else pack_mask(real) for real in flags]
        self._momenta, self._inverses = momenta, inverses
        self._errors = [None] * len(self._lengths)
        self.forget()

    def encode(
        self, segment: int, numbers: torch.Tensor, out: torch.Tensor, beta: float | None = None
    ) -> None:
        """Encode one segment, blended with the momentum if there is a beta.

        Its error memory stays as it is until `settle`.

        Raises:
            NonFiniteGradient: see `OneBit.signs`; ``fields["segment"]`` says where. Nothing is
                noted any more.
        """
        if not self._momenta:
            self._refuse()
        try:
            scales = self.codec.signs(self._blend(segment, numbers, beta), out)
        except NonFiniteGradient as error:
            self.forget()
            error.fields["segment"] = segment
            raise
        self._noted[segment] = _Noted(scales, beta)

    def _blend(self, segment: int, numbers: torch.Tensor, beta: float | None) -> Blend:
        momentum = None if beta is None else self._momenta[segment]
        return Blend(numbers, self._errors[segment], momentum, beta or 0.0, self.masks[segment])

    def _refuse(self) -> NoReturn:
        raise LocalProtocolError(
            "code refused: a shard of 1-bit Adam; expected begin() or load_memories() first, "
            "got neither; its variance is not frozen yet"
        )

    def settle(self, numbers: Sequence[torch.Tensor | None]) -> None:
        """The codes made by `encode` count: error memories become what they have left out.

        `move` must come next: a momentum in numbers has given up its memory.

        Args:
            numbers: per segment what `encode` was given; of the others None or anything.
        """
        for segment, noted in enumerate(self._noted):
            if noted is None:
                continue
            given = numbers[segment]
            assert given is not None, f"segment {segment} was encoded"
            target, momentum = self._errors[segment], self._momenta[segment]
            if target is None:
                packed = momentum.dtype == torch.uint8
                target = torch.empty_like(given, dtype=self.codec.dtype) if packed else momentum
            self.codec.leave(self._blend(segment, given, noted.beta), noted.scales, target)
            self._errors[segment] = target
        self.forget()

    def forget(self) -> None:
        """The codes made by `encode` do not count."""
        self._noted = [None] * len(self._lengths)

    def move(
        self, code: torch.Tensor, values: Sequence[torch.Tensor], present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        """Move the values along an answer, which is the momentum from then on.

        Raises:
            NonFiniteGradient: a scale of the code is not finite; ``fields["segment"]`` says where.
                Segments before it have moved.
        """
        if not self._momenta and self._lengths:
            self._refuse()
        assert not any(self._noted), "settle or forget first"
        lr, weight_decay = number(options, "lr"), number(options, "weight_decay")
        for segment, place in enumerate(self.slices):
            if not present[segment]:
                continue
            if self._momenta[segment].dtype != torch.uint8:
                self._momenta[segment] = torch.empty_like(code[place])
            self._momenta[segment].copy_(code[place])
            frozen_step(
                self.codec, self._momenta[segment], values[segment], self._inverses[segment],
                lr=lr, weight_decay=weight_decay,
            )  # fmt: skip

    def start(self) -> dict[str, Sequence[torch.Tensor]]:
        """Return momentum as numbers and inverse denominator; {} before `begin`."""
        if not self._momenta:
            return {}
        every = range(len(self._lengths))
        momenta = [self._momentum(segment) for segment in every]
        return {"momentum": momenta, "inverse": self._inverses}

    def _momentum(self, segment: int) -> torch.Tensor:
        momentum = self._momenta[segment]
        if momentum.dtype != torch.uint8:
            return momentum
        numbers = torch.empty(self._lengths[segment], dtype=self.codec.dtype)
        self.codec.decode(momentum, numbers, self.masks[segment])
        return numbers

    def errors(self) -> dict[str, Sequence[torch.Tensor]]:
        """Return the error memory alone; {} before `begin`."""
        if not self._momenta:
            return {}
        errors = zip(self._errors, self._lengths, strict=True)
        return {self._error_name: [
            torch.zeros(n, dtype=self.codec.dtype) if each is None else each for each, n in errors
        ]}  # fmt: skip

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return error memory, momentum as numbers, inverse denominator; {} before `begin`."""
        return {**self.errors(), **self.start()}

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take over memories, perhaps cut otherwise, or those of the other side of this shard.

        Without an error memory of its own name it starts at zero. A momentum that an answer's code
        says is kept as that code, if the cut is at its blocks.

        Raises:
            SnapshotCorrupt: names, lengths or dtypes are not those of this shard.
        """
        wanted = {"momentum", "inverse"}
        if not wanted <= set(memories) <= wanted | {"error", "server_error"}:
            raise SnapshotCorrupt(
                f"memories refused: expected {sorted(wanted)} and perhaps {self._error_name}, got "
                f"{sorted(memories)}; restore a checkpoint of OneBitAdam after its freeze"
            )
        kept = inverse_dtype(self.codec.dtype)
        for name, tensors in memories.items():
            dtypes = (self.codec.dtype, kept) if name == "inverse" else (self.codec.dtype,)
            check_memory(name, tensors, self._lengths, *dtypes)
        # A float32 inverse is of a checkpoint written before it was rounded.
        inverses = [t.to(kept, copy=True) for t in memories["inverse"]]
        self._start([t.clone() for t in memories["momentum"]], inverses)
        for segment, momentum in enumerate(self._momenta):
            code = self.codec.code_of_decoded(momentum, self.masks[segment])
            self._momenta[segment] = momentum if code is None else code
        for segment, error in enumerate(memories.get(self._error_name, ())):
            if bool(error.any()):
                self._errors[segment] = error.clone()


class _Noted(NamedTuple):
    """A code that was made and does not count yet: its scales, and the share of the momentum."""

    scales: torch.Tensor
    beta: float | None


def check_memory(
    name: str, tensors: Sequence[torch.Tensor], lengths: Sequence[int], *dtypes: torch.dtype
) -> None:
    """Refuse a memory that is not one flat tensor per segment, all of one of the dtypes.

    Raises:
        SnapshotCorrupt: a length or a dtype is another.
    """
    got = [(tuple(t.shape), t.dtype) for t in tensors]
    if got not in [[((length,), dtype) for length in lengths] for dtype in dtypes]:
        raise SnapshotCorrupt(
            f"memories refused: {name}; expected tensors of {' or '.join(map(str, dtypes))} with "
            f"{list(lengths)} elements, got {got}; cut them as this shard is cut"
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
        self._shard.forget()
        beta = betas(options)[0]
        for segment, gradient in enumerate(gradients):
            out = code[self._shard.slices[segment]]
            if gradient is None:
                out.zero_()
            else:
                self._shard.encode(segment, gradient, out, beta)

    def keep(self, gradients: Sequence[torch.Tensor | None] = ()) -> None:
        self._shard.settle(gradients)

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
        shard.settle([mean[span] for span in self._spans])
        shard.move(self.code, self._values, present, options)

    def start(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return self._shard.start()

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return self._shard.memories()

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._shard.load_memories(memories)
