"""A shard of 1-bit Adam once the variance is frozen, on a worker or on its server.

Codes are made, settled and applied segment by segment; see `paradis.numerics.onebit_coding`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, NoReturn, cast

import numpy as np
import torch

from paradis.errors import LocalProtocolError, NonFiniteGradient, SnapshotCorrupt
from paradis.numerics.codecs.codec import (
    NUMPY_OF,
    Array,
    array,
    gradient_arrays,
)
from paradis.numerics.codecs.freeze import freeze_variance
from paradis.numerics.codecs.onebit import OneBit, Sources, pack_mask
from paradis.numerics.codecs.onebit_adam import inverse_denominator, inverse_dtype, move
from paradis.numerics.coding import State
from paradis.numerics.elementwise import Options

_NO_BYTES: Final = np.empty(0, np.uint8)


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
        self._arrays: list[_Arrays | None] = [None] * len(lengths)  # None: look again
        self._nothing = np.empty(0, NUMPY_OF[codec.dtype])

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
        self._arrays = [None] * len(self._lengths)
        self.forget()

    def _look(self, segment: int) -> _Arrays:
        """Return a segment's memories as kernels take them."""
        found = self._arrays[segment]
        if found is None:
            found = self._arrays[segment] = self._arrays_of(segment)
        return found

    def _arrays_of(self, segment: int) -> _Arrays:
        length, dtype, nothing = self._lengths[segment], self.codec.dtype, self._nothing
        momentum, error = self._momenta[segment], self._errors[segment]
        numbers, code, scales, bits = nothing, _NO_BYTES, nothing, _NO_BYTES
        if momentum.dtype == torch.uint8:
            code = momentum.numpy()
            size = self.codec.scale_bytes(length)
            scales, bits = code[:size].view(NUMPY_OF[dtype]), code[size:]
        else:
            numbers = momentum.numpy()
        return _Arrays(
            numbers, code, scales, bits, nothing if error is None else error.numpy(),
            gradient_arrays(self._inverses[segment], dtype), self.mask(segment),
        )  # fmt: skip

    def mask(self, segment: int) -> Array:
        """Return a segment's mask as kernels take it."""
        mask = self.masks[segment]
        return _NO_BYTES if mask is None else mask.numpy()

    def encode(
        self, segment: int, numbers: torch.Tensor, out: Array, beta: float | None = None, *,
        at_once: bool = False,
    ) -> None:  # fmt: skip
        """Encode one segment, blended with the momentum if there is a beta.

        Its error memory stays as it is until `settle`, and ``numbers`` must.

        Args:
            segment: which one.
            numbers: (length,) of the codec's dtype, or bfloat16. Borrowed.
            out: the segment's code, written.
            beta: share of the momentum that is kept; None: what is given is encoded.
            at_once: the code counts: its error memory is written in the same pass, and `move` must
                come before anything else, as after `settle`.

        Raises:
            NonFiniteGradient: see `OneBit.signs`; ``fields["segment"]`` says where. Nothing is
                noted any more. With ``at_once`` error memories before that place have changed, so
                the shard cannot go on.
        """
        if not self._momenta:
            self._refuse()
        assert self._errors[segment] is not self._momenta[segment], "move first"
        own = self._look(segment)
        given = gradient_arrays(numbers, self.codec.dtype, self._lengths[segment])
        if beta is None:
            sources = (*given, self._nothing, _NO_BYTES, self._nothing, own.error)
        else:
            sources = (*given, own.numbers, own.bits, own.scales, own.error)
        left = self._nothing
        if at_once:
            left = own.error if own.error.size else self._target(segment)
        scales, bad = self.codec.write_signs(sources, beta or 0.0, own.mask, out, left)
        if bad >= 0:
            self.forget()
            # A new error memory has been zero so far, whatever it holds.
            memory = self._errors[segment] if own.error.size else None
            error = self.codec.refused(bad, numbers, memory)
            error.fields["segment"] = segment
            raise error
        if not at_once:
            self._noted[segment] = _Noted(scales, beta or 0.0, sources)

    def _target(self, segment: int) -> Array:
        """Return a segment's error memory, to be written: at first that of a momentum in numbers.

        Errors are zero till then, and the momentum is not needed any more where they are written.
        """
        error = self._errors[segment]
        if error is None:
            error = self._momenta[segment]
            if error.dtype == torch.uint8:
                error = torch.empty(self._lengths[segment], dtype=self.codec.dtype)
            self._errors[segment], self._arrays[segment] = error, None
        return error.numpy()

    def _refuse(self) -> NoReturn:
        raise LocalProtocolError(
            "code refused: a shard of 1-bit Adam; expected begin() or load_memories() first, "
            "got neither; its variance is not frozen yet"
        )

    def settle(self) -> None:
        """The codes made by `encode` count: error memories become what they have left out.

        `move` must come next: a momentum in numbers has given up its memory.
        """
        for segment, noted in enumerate(self._noted):
            if noted is None:
                continue
            own = self._look(segment)
            target = own.error if own.error.size else self._target(segment)
            self.codec.write_left(noted.sources, noted.beta, own.mask, noted.scales, target)
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
        kind = NUMPY_OF[self.codec.dtype].type
        rates = kind(number(options, "lr")), kind(number(options, "weight_decay"))
        everything = array(code, "code", self.code_bytes, torch.uint8)
        for segment, (place, length) in enumerate(zip(self.slices, self._lengths, strict=True)):
            if not present[segment]:
                continue
            if self._momenta[segment].dtype != torch.uint8:
                self._momenta[segment] = torch.empty(place.stop - place.start, dtype=torch.uint8)
                self._arrays[segment] = None
            own, value = self._look(segment), values[segment]
            own.code[:] = everything[place]
            x = array(value, "value", length, self.codec.dtype)
            try:
                move(self.codec, own.bits, own.scales, x, own.inverse, rates)
            except NonFiniteGradient as error:
                error.fields["segment"] = segment
                raise

    def drop_momenta(self) -> None:
        """Let go of the momenta: what is encoded is given whole from now on, and nothing moves."""
        self._momenta = [torch.empty(0, dtype=torch.uint8) for _ in self._lengths]
        self._arrays = [None] * len(self._lengths)

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
    """A code that was made and does not count yet: its scales, and what it was made of."""

    scales: Array
    beta: float
    sources: Sources


class _Arrays(NamedTuple):
    """A segment's memories as kernels take them; what there is not has no elements.

    Made once: to look at a tensor's memory takes longer than a small kernel.

    Attributes:
        numbers: of the momentum; or else
        code: the momentum's, and its
        scales: and its
        bits: views of the code.
        error: the error memory.
        inverse: the inverse denominator, in the codec's dtype or as bits of bfloat16.
        mask: packed bits.
    """

    numbers: Array
    code: Array
    scales: Array
    bits: Array
    error: Array
    inverse: tuple[Array, Array]
    mask: Array


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
