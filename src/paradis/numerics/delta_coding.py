"""Codes of gradients up and of changes down: any codec, any optimizer of torch.

Up, a worker codes its gradient, plus what earlier codes left out. Down, the server does not code
its value but the way to it from what the workers hold: ``D = C(x - w); w += D``. What a code leaves
out stays in ``x - w`` and travels later. Workers add ``D`` to what they have: all hold ``w``, bit
for bit.

A step may also travel in full. Up, the first one takes along what codes have left out, so that
nothing is lost; down, it brings ``x``, and ``w`` is ``x`` from then on.

Source: error feedback, Karimireddy et al., ICML 2019; the way down, Gruntkowska et al., EF21-P and
friends, ICML 2023, with the server's value as the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paradis.errors import NonFiniteGradient
from paradis.numerics.codecs.codec import Codec
from paradis.numerics.coding import ServerCoder, WorkerCoder, pieces
from paradis.numerics.elementwise import Options
from paradis.numerics.shard_optimizer import ShardOptimizer


class DeltaWorker(WorkerCoder):
    """One shard on one worker.

    Args:
        codec: of gradients and changes.
        lengths: elements of each segment.
    """

    def __init__(self, codec: Codec, lengths: Sequence[int]) -> None:
        self._codec = codec
        super().__init__(lengths)
        # What codes have left out so far, and what it will be if the step under way counts.
        self._errors: list[torch.Tensor | None] = [None] * len(self.lengths)
        self._next: list[torch.Tensor | None] = [None] * len(self.lengths)
        self._spare: list[torch.Tensor | None] = [None] * len(self.lengths)
        self._taken: dict[int, None] = {}  # segments whose error goes along in full

    def encoded_bytes(self, length: int) -> int:
        """Return the bytes of the code of a segment."""
        return self._codec.encoded_bytes(length)

    def encode(
        self, gradients: Sequence[torch.Tensor | None], code: torch.Tensor, options: Options
    ) -> None:
        """Write the code; see `WorkerCoder.encode`."""
        self.forget()
        for index, (gradient, part) in enumerate(
            zip(gradients, pieces(code, self.sizes), strict=True)
        ):
            if gradient is None:
                part.zero_()
                continue
            try:
                self._codec.encode(gradient, part, self._room(index))
            except NonFiniteGradient as error:
                self.forget()
                error.fields["segment"] = index
                raise

    def _room(self, index: int) -> torch.Tensor | None:
        """Return a copy of a segment's error for the codec to update."""
        if not self._codec.remembers:
            return None
        room = self._spare[index]
        if room is None:
            room = torch.empty(self.lengths[index], dtype=self._codec.dtype)
        self._spare[index] = None
        error = self._errors[index]
        if error is None:
            room.zero_()
        else:
            room.copy_(error)
        self._next[index] = room
        return room

    @property
    def carries(self) -> bool:
        """Whether codes have left something out so far."""
        return any(error is not None for error in self._errors)

    def encode_in_full(
        self, gradients: Sequence[torch.Tensor | None], numbers: Sequence[torch.Tensor]
    ) -> None:
        """Add what codes have left out; see `WorkerCoder.encode_in_full`."""
        self.forget()
        for index, (gradient, part) in enumerate(zip(gradients, numbers, strict=True)):
            error = self._errors[index]
            if gradient is None:
                part.zero_()
            elif error is None:
                part.copy_(gradient)
            else:
                torch.add(gradient, error, out=part)
                self._taken[index] = None

    def keep(self) -> None:
        """The step counts; see `WorkerCoder.keep`."""
        for index in self._taken:
            self._errors[index] = self._spare[index] = None
        self._taken = {}
        for index, error in enumerate(self._next):
            if error is not None:
                self._spare[index], self._errors[index] = self._errors[index], error
                self._next[index] = None

    def forget(self) -> None:
        """The step does not count; see `WorkerCoder.forget`."""
        self._taken = {}
        for index, error in enumerate(self._next):
            if error is not None:
                self._spare[index] = error
                self._next[index] = None

    def install(
        self, code: torch.Tensor, values: Sequence[torch.Tensor], present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        """Add what the code says; see `WorkerCoder.install`."""
        parts = pieces(code, self.sizes)
        for part, value, here in zip(parts, values, present, strict=True):
            if here:
                self._codec.decode_add(part, value)

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return ``error``, if this codec has any."""
        if not self._codec.remembers:
            return {}
        empty = (torch.zeros(n, dtype=self._codec.dtype) for n in self.lengths)
        return {
            "error": [e if e is not None else z for e, z in zip(self._errors, empty, strict=True)]
        }

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take over ``error``."""
        for index, error in enumerate(memories.get("error", ())):
            own = error.to(self._codec.dtype, copy=True)
            self._errors[index] = own if bool(own.any()) else None


class DeltaServer(ServerCoder):
    """One shard on its server.

    Args:
        codec: as the workers'.
        length: elements of the shard, padding included.
        spans: (start, length) of each segment.
        values: (length,) of each segment, borrowed.
    """

    def __init__(
        self, codec: Codec, length: int, spans: Sequence[tuple[int, int]],
        values: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self._codec = codec
        self._spans = tuple(spans)
        self._values = tuple(values)
        self._sizes = tuple(codec.encoded_bytes(n) for _, n in self._spans)
        self._seen = torch.zeros(length, dtype=codec.dtype)
        self._held = [self._seen[start : start + n] for start, n in self._spans]
        self._full = False  # workers hold the values, and ``seen`` is out of date
        self.code = torch.zeros(sum(self._sizes), dtype=torch.uint8)

    def add(self, code: torch.Tensor, total: torch.Tensor, *, first: bool) -> None:
        """Decode into the sum; see `ServerCoder.add`."""
        parts = pieces(code, self._sizes)
        for part, (start, length) in zip(parts, self._spans, strict=True):
            target = total[start : start + length]
            if first:
                self._codec.decode(part, target)
            else:
                self._codec.decode_add(part, target)

    def update(
        self, mean: torch.Tensor, optimizer: ShardOptimizer, present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        """Run the optimizer, code the way to its values; see `ServerCoder.update`."""
        if self._full:
            self._full = False
            for value, held in zip(self._values, self._held, strict=True):
                held.copy_(value)
        gradients = [
            mean[start : start + length] if here else None
            for (start, length), here in zip(self._spans, present, strict=True)
        ]
        optimizer.apply(gradients, options)
        parts = pieces(self.code, self._sizes)
        ways = [mean[start : start + length] for start, length in self._spans]  # used up by now
        for part, value, held, way, here in zip(
            parts, self._values, self._held, ways, present, strict=True
        ):
            if here:
                torch.sub(value, held, out=way)
                nothing = torch.zeros_like(way) if self._codec.remembers else None
                self._codec.encode(way, part, nothing)
                self._codec.decode_add(part, held)
            else:
                part.zero_()

    def replaced(self) -> None:
        """Workers hold the very values; see `ServerCoder.replaced`."""
        self._full = True  # copied when the values go on without them: steps in full need no copy

    def seen(self) -> torch.Tensor | None:
        """Return what workers hold, unless it is the values."""
        return None if self._full else self._seen

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return ``seen``, the values that workers hold."""
        return {"seen": self._values if self._full else self._held}

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take over ``seen``."""
        if "seen" in memories:
            self._full = False
        for held, saved in zip(self._held, memories.get("seen", ()), strict=False):
            held.copy_(saved)
