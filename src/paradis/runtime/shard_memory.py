"""One shard on a worker: the value, what travels as its gradient, and its coder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from paradis.errors import StateError
from paradis.numerics.coding import WorkerCoder
from paradis.numerics.elementwise import Options
from paradis.numerics.memory_order import as_bytes, copy_bytes
from paradis.runtime.bound_tensor import BoundTensor
from paradis.runtime.shard_store import split_sections
from paradis.storage.checkpoint import Section
from paradis.wire.messages import ShardPlan


@dataclass(slots=True)
class ShardMemory:
    """One shard on a worker.

    Attributes:
        tensors: owner of each segment.
        value: byte views of the value, padding included, in order.
        gradient: byte views of the gradient handed over, in order.
        digests: xxh3_64 of each segment's value as last installed.
        state: optimizer state sections to send along with the value: key -> bytes.
        coder: where the plan names a codec.
        lock: held while the coder's memories change or are copied.
        flats: per segment the gradient of the whole tensor; kept until the update is in.
        landing: memory for a value that is not to be seen yet, or None where there is none.
        landed: it holds the next value.
        pieces: per segment the value; empty: not looked at since `bind`.
        encoded_step: the last step whose code counted as it was made; -1: none.
    """

    plan: ShardPlan
    tensors: tuple[BoundTensor, ...]
    value: list[memoryview]
    gradient: list[memoryview]
    digests: list[int]
    state: dict[str, memoryview]
    staged: bool = False
    coder: WorkerCoder | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    flats: tuple[torch.Tensor | None, ...] = ()
    landing: memoryview | None = None
    landed: bool = False
    pieces: tuple[torch.Tensor, ...] = ()
    encoded_step: int = -1

    def bind(self) -> None:
        """Make the value's views anew from the tensors' memory."""
        size = self.tensors[0].dtype.itemsize if self.tensors else 1
        self.value = self.assemble([t.bytes for t in self.tensors], size)
        self.staged = any(t.staged for t in self.tensors)
        self.pieces = ()

    def assemble(self, sources: list[memoryview], size: int) -> list[memoryview]:
        """Cut whole tensors' bytes to this shard's segments, with padding between.

        Args:
            sources: per segment the bytes of the whole tensor it is a piece of.
            size: bytes of one element.
        """
        views: list[memoryview] = []
        end = 0
        for segment, source in zip(self.plan.segments, sources, strict=True):
            if segment.start > end:
                views.append(_padding((segment.start - end) * size))
            if segment.length:
                views.append(
                    source[segment.offset * size : (segment.offset + segment.length) * size]
                )
            end = segment.start + segment.length
        if self.plan.length > end:
            views.append(_padding((self.plan.length - end) * size))
        return views

    def digest(self) -> list[int]:
        """Return the xxh3_64 of each segment's present value."""
        result = []
        for segment, tensor in zip(self.plan.segments, self.tensors, strict=True):
            size = tensor.dtype.itemsize
            start = segment.offset * size
            piece = tensor.bytes[start : start + segment.length * size]
            result.append(xxhash.xxh3_64_intdigest(piece))
        return result

    def installed(self) -> None:
        """A new value is in ``value``: bring it into staged tensors."""
        if self.staged:
            for tensor in self.tensors:
                tensor.unstage()

    def encode(
        self, options: Options, *, coded: bool, empty: bool = False, counts_in: int = -1
    ) -> None:
        """Make the code of the gradient; from now on that is what travels as the gradient.

        Args:
            options: hyper-parameters of the step.
            coded: else not a code, but the gradient in full with what codes have left out.
            empty: the code of zeros, for a step that is skipped: its gradients may be anything.
            counts_in: the step in which the code counts at once, and the gradient is let go; -1: it
                counts when `step` brings the update.

        Raises:
            NonFiniteGradient: ``fields["segment"]`` says where. Nothing is changed, unless the code
                was to count at once.
        """
        assert self.coder is not None
        # In new memory: the last one may be sent yet.
        if coded:
            made = torch.empty(self.coder.code_bytes, dtype=torch.uint8)
        else:
            made = torch.zeros(self.plan.length, dtype=self.tensors[0].dtype)
        if empty:
            self.coder.forget()
            made.zero_()
        elif coded and counts_in >= 0:
            with self.lock:
                self.encoded_step = counts_in
                self.coder.encode_and_keep(self._gradients(), made, options)
            self.flats = ()
        elif coded:
            with self.lock:
                self.coder.encode(self._gradients(), made, options)
        else:
            parts = [made[s.start : s.start + s.length] for s in self.plan.segments]
            with self.lock:
                self.coder.encode_in_full(self._gradients(), parts)
        self.gradient = [as_bytes(made)]

    def _gradients(self) -> list[torch.Tensor | None]:
        return [
            None if flat is None else flat[s.offset : s.offset + s.length]
            for flat, s in zip(self.flats, self.plan.segments, strict=False)
        ]

    def step(self, code: torch.Tensor, present: Sequence[bool], options: Options) -> None:
        """Bring the tensors to the next version by the code of an update.

        Args:
            code: (code_bytes,) uint8.
            present: per segment, whether it was updated.
            options: hyper-parameters of the step.
        """
        assert self.coder is not None
        if not self.pieces:
            self.pieces = tuple(
                t.flat[s.offset : s.offset + s.length]
                for t, s in zip(self.tensors, self.plan.segments, strict=True)
            )
        with self.lock:
            self.coder.keep()
            self.coder.install(code, self.pieces, present, options)

    def let_go(self) -> None:
        """The gradient is not needed any more: whether its memory goes is the script's affair."""
        self.gradient, self.flats = [], ()

    def take(self, data: torch.Tensor, keys: Sequence[str], dtypes: Sequence[str]) -> None:
        """Go on with what codes start from at another version; what they have left out stays.

        Args:
            data: (nbytes,) uint8, columns over the shard in the order of ``keys``. Copied.
        """
        assert self.coder is not None
        columns = split_sections(data, self.plan, keys, dtypes)
        memories = {
            key: [column[s.start : s.start + s.length] for s in self.plan.segments]
            for key, column in columns.items()
        }
        with self.lock:
            self.coder.load_memories({**self.coder.own(), **memories})

    def sections(self, rank: int, step: int) -> list[Section]:
        """Return copies of what codes have left out, as they are in a checkpoint.

        Args:
            rank: of this worker.
            step: steps done at the checkpoint.

        Raises:
            StateError: the code of a later step has counted already.
        """
        if self.coder is None:
            return []
        with self.lock:
            if self.encoded_step >= step:
                raise StateError(
                    f"what codes of worker {rank} have left out after {step} steps is gone: it has "
                    f"made codes of step {self.encoded_step}; with training.free_gradients call "
                    "save_checkpoint on every worker, between step() and backward"
                )
            return [
                Section(tensor.name, own_key(self.plan.codec, name, rank), segment.offset,
                        piece.clone())
                for name, pieces in self.coder.own().items()
                for segment, tensor, piece in zip(
                    self.plan.segments, self.tensors, pieces, strict=True
                )
            ]  # fmt: skip

    def fill(self, data: memoryview) -> None:
        """Copy a received value into the tensors.

        Args:
            data: the whole shard's bytes.
        """
        copy_bytes(self.value, data)


_ZEROS = bytearray(64)


def _padding(nbytes: int) -> memoryview:
    """Return writable memory for padding bytes; what lands there is zeros, sent as zeros."""
    assert nbytes <= len(_ZEROS), nbytes
    return memoryview(_ZEROS)[:nbytes]


def own_key(codec: str, name: str, rank: int) -> str:
    """Return under which key a worker's own memory is in a checkpoint."""
    return f"{codec}.{name}.{rank}"
