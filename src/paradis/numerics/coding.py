"""What a worker and a server each do with one shard that travels as codes.

A *worker coder* turns the worker's gradient into bytes, and the server's answer into the next
value; a *server coder* turns the workers' bytes into a mean, and the mean into a new value and the
answer. Both keep memories (errors of codes, momenta) of this shard.

Invariants:
* after every applied step all workers hold the value that the server coder counts as theirs, bit
  for bit: it is a function of the answers alone;
* a memory changes by one step or not at all: what `WorkerCoder.encode` would change counts from
  `keep` on, so that a gradient may be encoded anew, and a skipped step leaves no trace (unless the
  caller knows that there will be neither: `WorkerCoder.encode_and_keep`);
* a retry sends the same bytes again and never encodes again.

A shard's segments are coded one by one, their codes lie one after the other, without padding: no
block of a code crosses two parameters, and padding between segments does not travel.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from paradis.numerics.elementwise import Options
from paradis.numerics.shard_optimizer import ShardOptimizer

State = tuple[Mapping[str, torch.Tensor], Mapping[str, float]]
"""Optimizer state of a segment: (name -> (length,) tensor, name -> number)."""


def pieces(code: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return views of the codes of the segments that a shard's code is made of."""
    starts = itertools.accumulate(sizes, initial=0)
    return [code[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class WorkerCoder(ABC):
    """One shard on one worker.

    Args:
        lengths: elements of each segment.

    Attributes:
        sizes: bytes of each segment's code.
        code_bytes: bytes of the shard's code, up and down alike.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self.sizes = tuple(self.encoded_bytes(n) for n in self.lengths)
        self.code_bytes = sum(self.sizes)

    @abstractmethod
    def encoded_bytes(self, length: int) -> int:
        """Return the bytes of the code of a segment of ``length`` elements."""

    def begin(self, states: Sequence[State], options: Options) -> None:  # noqa: B027
        """Take over what codes start from; called before the first one.

        Args:
            states: the server's optimizer state per segment after the last step in full; copied.
            options: hyper-parameters of the shard's parameter group.
        """

    @abstractmethod
    def encode(
        self, gradients: Sequence[torch.Tensor | None], code: torch.Tensor, options: Options
    ) -> None:
        """Write the code of this worker's gradient; what it would change in memory is noted.

        May be called again before `keep`: the last call counts.

        Args:
            gradients: per segment (length,) of the value's dtype, or None where the parameter has
                none: its code is zero bytes, which decode as zeros, and its memory stays. Borrowed
                until `keep` or `forget`; must not change.
            code: (code_bytes,) uint8, written in place.
            options: hyper-parameters of this step.

        Raises:
            NonFiniteGradient: a gradient holds NaN or infinity; ``fields["segment"]`` says where.
                No memory is changed.
        """

    def encode_and_keep(
        self, gradients: Sequence[torch.Tensor | None], code: torch.Tensor, options: Options
    ) -> None:
        """Do what `encode` and then `keep` do, perhaps in one pass; nothing can be undone.

        The gradients are not needed any more then. `install` must come before the next call.

        Args:
            gradients: as of `encode`, borrowed for the call.
            code: as of `encode`.
            options: as of `encode`.

        Raises:
            NonFiniteGradient: as `encode`, but memories may have changed: the job must end.
        """
        self.encode(gradients, code, options)
        self.keep()

    @property
    def carries(self) -> bool:
        """Whether something is left out so far that gradients in full are to take along."""
        return False

    def encode_in_full(
        self, gradients: Sequence[torch.Tensor | None], numbers: Sequence[torch.Tensor]
    ) -> None:
        """Write gradients in full, with what codes have left out; else as `encode`.

        Args:
            gradients: as of `encode`. What was left out of one that is None stays.
            numbers: per segment (length,) of the value's dtype, written in place.
        """
        raise AssertionError(f"{type(self).__name__} carries nothing")  # pragma: no cover

    @abstractmethod
    def keep(self) -> None:
        """The step of the last `encode` was applied: its memories count. `install` comes next."""

    @abstractmethod
    def forget(self) -> None:
        """The step of the last `encode`, if there was one, was skipped: memories are as before."""

    @abstractmethod
    def install(
        self, code: torch.Tensor, values: Sequence[torch.Tensor], present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        """Bring the values to the next version, after `keep` where this worker's code counts.

        Args:
            code: (code_bytes,) uint8, the server's answer. Not modified, not kept.
            values: per segment (length,), the values of the version before; updated in place.
            present: per segment, whether it was updated at all.
            options: hyper-parameters of this step.
        """

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return name -> per segment (length,) tensor, lent: what a checkpoint must have."""
        return {}

    def own(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return those of the memories that no server has, lent."""
        return self.memories()

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:  # noqa: B027
        """Take over what `memories` returned. Copied."""


class ServerCoder(ABC):
    """One shard on its server.

    Args:
        spans: (start, length) of each segment in the shard, in elements.
        values: per segment (length,) view of the shard's value, borrowed, updated in place.

    Attributes:
        code: (code_bytes,) uint8, the answer of the last `update`; lent until the next one.
        refuses: `update` refuses a mean that is not finite by itself. It has changed no value then,
            but perhaps its memories: the shard cannot go on. A server's driver tells the leader of
            every error of `update`, which ends the job, and copies no shard that is being updated.
    """

    code: torch.Tensor
    refuses = False

    def begin(self, states: Sequence[State], options: Options) -> None:  # noqa: B027
        """Take over what codes start from; see `WorkerCoder.begin`."""

    @abstractmethod
    def add(self, code: torch.Tensor, total: torch.Tensor, *, first: bool) -> None:
        """Decode a worker's code into the shard's sum.

        Args:
            code: (code_bytes,) uint8.
            total: (length of the shard,) of the value's dtype; padding is left alone.
            first: write instead of adding.
        """

    def mean(self, codes: Sequence[torch.Tensor], total: torch.Tensor, divisor: int) -> None:
        """Decode workers' codes into their sum over a divisor, added in the order given.

        Args:
            codes: one or more, as of `add`.
            total: as of `add`, written; padding must be finite.
            divisor: number of workers, also of those without a code.
        """
        for place, code in enumerate(codes):
            self.add(code, total, first=not place)
        total.div_(divisor)

    @abstractmethod
    def update(
        self, mean: torch.Tensor, optimizer: ShardOptimizer, present: Sequence[bool],
        options: Options,
    ) -> None:  # fmt: skip
        """Make the next version of the values, and the answer.

        Args:
            mean: (length of the shard,), the mean of what was decoded; may be overwritten.
            optimizer: over the very ``values``.
            present: per segment; an absent one is left untouched.
            options: hyper-parameters of this step.

        Raises:
            NonFiniteGradient: the mean holds NaN or infinity, where it ``refuses`` that.
        """

    def start(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return the memories that a worker's coder starts from, lent; by name and segment."""
        return {}

    def replaced(self) -> None:  # noqa: B027
        """The values are ones that all workers hold, or get: assigned, or of a step in full."""

    def seen(self) -> torch.Tensor | None:
        """Return the (length of the shard,) values that workers hold, lent; None: the server's."""
        return None

    def memories(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return name -> per segment (length,) tensor, lent: what a checkpoint must have."""
        return {}

    def load_memories(self, memories: Mapping[str, Sequence[torch.Tensor]]) -> None:  # noqa: B027
        """Take over what `memories` returned. Copied."""
