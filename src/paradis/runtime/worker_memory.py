"""A worker's tensors as the data plane sees them: shards of values and of gradients.

Values are received straight into the parameters, gradients are sent straight from ``.grad``: no
byte is copied on the way, but for tensors that are not one dense run of CPU memory, which go
through a flat staging copy.

Invariant: at most one connection receives into a shard's value at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paradis.numerics.coders import worker_coder
from paradis.numerics.memory_order import as_bytes
from paradis.runtime.bound_tensor import BoundTensor
from paradis.runtime.shard_memory import ShardMemory
from paradis.wire.messages import ShardPlan


class GroupMemory:
    """All shards of one ``wrap`` call on a worker.

    Args:
        detect_changes: keep digests of values, to see what the script changes.
        frees: in steps that travel as codes a gradient is let go as soon as its code is made, which
            counts at once (``training.free_gradients``).

    Attributes:
        on_arrived: called with every shard that has its next value, changed or not.
        coded: the present step travels as codes, where a shard has a coder.
        landing: values land beside the parameters, which the script reads meanwhile.
    """

    def __init__(self, *, detect_changes: bool, frees: bool = False) -> None:
        self.detect_changes = detect_changes
        self.frees = frees
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
