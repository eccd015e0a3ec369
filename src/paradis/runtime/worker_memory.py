"""A worker's tensors as the data plane sees them: shards of values and of gradients.

Values are received straight into the parameters, gradients are sent straight from ``.grad``: no
byte is copied on the way, but for tensors that are not one dense run of CPU memory, which go
through a flat staging copy.

Invariant: at most one connection receives into a shard's value at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from paradis.numerics.coders import worker_coder
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

    def encode(self, options: Options, *, coded: bool, empty: bool = False) -> None:
        """Make the code of the gradient; from now on that is what travels as the gradient.

        Args:
            options: hyper-parameters of the step.
            coded: else not a code, but the gradient in full with what codes have left out.
            empty: the code of zeros, for a step that is skipped: its gradients may be anything.

        Raises:
            NonFiniteGradient: ``fields["segment"]`` says where. Nothing is changed.
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

    def sections(self, rank: int) -> list[Section]:
        """Return copies of what codes have left out, as they are in a checkpoint."""
        if self.coder is None:
            return []
        with self.lock:
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


class GroupMemory:
    """All shards of one ``wrap`` call on a worker.

    Args:
        detect_changes: keep digests of values, to see what the script changes.

    Attributes:
        on_arrived: called with every shard that has its next value, changed or not.
        coded: the present step travels as codes, where a shard has a coder.
        landing: values land beside the parameters, which the script reads meanwhile.
    """

    def __init__(self, *, detect_changes: bool) -> None:
        self.detect_changes = detect_changes
        self.tensors: list[BoundTensor] = []
        self.shards: dict[int, ShardMemory] = {}
        self._zeros = memoryview(bytearray(64))
        self._last: tuple[torch.Tensor, memoryview] | None = None
        self.on_arrived: Callable[[int], None] | None = None
        self.coded = False
        self.landing = False

    def add(self, shards: tuple[ShardPlan, ...]) -> None:
        """Add the shards of a plan; their tensors are in ``tensors`` already."""
        for plan in shards:
            owners = tuple(self.tensors[s.parameter] for s in plan.segments)
            memory = ShardMemory(plan, owners, [], [], [], {})
            if plan.codec:
                memory.coder = worker_coder(
                    plan.codec, [s.length for s in plan.segments], owners[0].dtype
                )
            memory.bind()
            self.shards[plan.shard] = memory

    def zeros(self, nbytes: int) -> memoryview:
        """Return bytes of zeros, lent, for a gradient that is absent inside a present shard."""
        if len(self._zeros) < nbytes:
            self._zeros = memoryview(bytearray(nbytes))
        return self._zeros[:nbytes]

    def _bytes_of(self, gradient: torch.Tensor) -> memoryview:
        """Return a gradient's bytes; the shards of one tensor come one after the other."""
        last = self._last
        if last is None or last[0] is not gradient:
            last = self._last = (gradient, as_bytes(gradient))
        return last[1]

    def set_gradient(self, shard: int, gradients: list[torch.Tensor | None]) -> None:
        """Say what a shard's gradient is; the tensors are borrowed until the step is done.

        Args:
            gradients: per segment the flat gradient of the whole tensor, or None for zeros.
        """
        memory = self.shards[shard]
        memory.flats = tuple(gradients)
        if self.codes(shard):
            return
        size = memory.tensors[0].dtype.itemsize
        sources = [
            self.zeros(t.tensor.numel() * size) if g is None else self._bytes_of(g)
            for t, g in zip(memory.tensors, gradients, strict=True)
        ]
        memory.gradient = memory.assemble(sources, size)

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return tensor -> flat gradient, lent, of what was handed over and has no update yet."""
        return {
            segment.parameter: flat
            for memory in self.shards.values()
            for segment, flat in zip(memory.plan.segments, memory.flats, strict=False)
            if flat is not None
        }

    def codes(self, shard: int) -> bool:
        """Whether a coder makes what travels of the shard's gradient in the present step.

        In full it does so until what codes have left out has gone along.
        """
        coder = self.shards[shard].coder
        return coder is not None and (self.coded or coder.carries)

    def forget(self, shard: int) -> None:
        """The last code of the shard's gradient does not count."""
        memory = self.shards[shard]
        if memory.coder is not None:
            with memory.lock:
                memory.coder.forget()

    def let_go(self, shard: int) -> None:
        """A shard has the update that its gradient was handed over for."""
        self._last = None
        self.shards[shard].let_go()

    def kept(self, shard: int) -> None:
        """The shard's next value is the one it has: the step did not count for it."""
        self.forget(shard)
        self.let_go(shard)
        if self.detect_changes:  # what the script changed is known to the servers now
            self.shards[shard].digests = self.shards[shard].digest()
        self.arrived(shard)

    def land(self) -> None:
        """Receive the next values of all trained shards beside the parameters."""
        for memory in self.shards.values():
            if memory.landing is None and not memory.plan.is_buffer:
                memory.landing = memoryview(bytearray(sum(map(len, memory.value))))
            memory.landed = False
        self.landing = True

    def receiving(self, shard: int) -> list[memoryview]:
        """Return the memory that a shard's next value is received into."""
        memory = self.shards[shard]
        landing = memory.landing if self.landing else None
        return memory.value if landing is None else [landing]

    def take_landed(self) -> None:
        """Bring what has landed into the parameters, on the script's thread."""
        self.landing = False
        for shard, memory in self.shards.items():
            if memory.landed:
                assert memory.landing is not None
                memory.fill(memory.landing)
                memory.landed = False
                self.installed(shard)

    def stop_landing(self) -> None:
        """Receive into the parameters again; what has landed is dropped."""
        self.landing = False

    def name_of_change(self, shard: int, digests: list[int]) -> str:
        """Return the name of the first parameter whose value the script changed in a shard."""
        memory = self.shards[shard]
        pairs = zip(memory.tensors, digests, memory.digests, strict=True)
        return next((t.name for t, now, before in pairs if now != before), memory.tensors[0].name)

    def installed(self, shard: int) -> None:
        """A shard's new value has been received."""
        memory = self.shards[shard]
        if self.landing and memory.landing is not None:
            memory.landed = True
            self.arrived(shard)
            return
        if memory.coder is not None and memory.coder.carries:
            with memory.lock:
                memory.coder.keep()  # in full, what codes had left out has gone along
        memory.installed()
        if self.detect_changes:
            memory.digests = memory.digest()
        self.arrived(shard)

    def arrived(self, shard: int) -> None:
        """A shard has its next value, which may be the one it had."""
        if self.on_arrived is not None:
            self.on_arrived(shard)

    def follow(self) -> bool:
        """Look where the tensors lie now; return whether one lies elsewhere than before."""
        moved = False
        for bound in self.tensors:
            if bound.staged:
                bound.stage()
            elif bound.moved():
                bound.bind()
                moved = True
        if moved:
            for memory in self.shards.values():
                memory.bind()
        return moved

    def versions(self) -> list[int]:
        """Return what torch counts of each tensor: changes in place, but not through ``.data``."""
        with torch._C.DisableTorchFunctionSubclass():  # another call may wait for its value
            return [bound.tensor._version for bound in self.tensors]

    def changed(self) -> dict[int, list[int]]:
        """Return shard -> digests of the shards whose value the script changed."""
        self.follow()
        if not self.detect_changes:
            return {}
        found = {}
        for shard, memory in self.shards.items():
            if memory.plan.is_buffer:
                continue
            digests = memory.digest()
            if digests != memory.digests:
                found[shard] = digests
        return found
