"""Memory for received payloads, leased by number, bounded in bytes, reused without page faults.

Invariants:
* a lease's memory is reused only when nobody retains it;
* the first contribution of a shard to arrive is received into the shard's accumulator, so one
  worker needs no contribution store at all; the sum ends up in the accumulator in any case;
* store bytes never exceed the bound: a payload without room is received into scratch memory and
  dropped (credits keep that from happening; a peer that ignores them harms itself);
* free memory is let go only where the bound wants it for a payload that no free memory fits, and
  fits what is more than half as long: which sizes are in use changes in the course of a step, and
  memory made anew costs as much as receiving into it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paradis.numerics.memory_order import as_bytes
from paradis.runtime.pages import allocate


@dataclass(slots=True)
class _Lease:
    """What is leased; ``memory`` is what it is the beginning of."""

    buffer: torch.Tensor
    memory: torch.Tensor
    holders: int = 1
    shard: int = -1


@dataclass(slots=True)
class _Accumulator:
    """One shard's accumulator: it holds a sum, or a lease is being received into it, or neither."""

    buffer: torch.Tensor | None = None
    view: memoryview | None = None
    lease: int = 0
    summed: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """Memory for one payload; ``lease`` 0 means scratch memory whose content is dropped."""

    lease: int
    views: tuple[memoryview, ...]


class Arena:
    """Leased buffers of one node. Thread-safe.

    Args:
        store_bytes_max: bound of leased bytes, accumulators not counted.

    Attributes:
        memory_bytes: of the store, leased or kept for later; above the bound by less than what is
            leased, where that lies in memory longer than itself.
    """

    def __init__(self, store_bytes_max: int) -> None:
        self.store_bytes_max = store_bytes_max
        self.store_bytes = 0
        self.store_bytes_peak = 0
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.memory_bytes = 0
        self._accumulators: dict[int, _Accumulator] = defaultdict(_Accumulator)
        self._next = 1
        self._scratch = memoryview(bytearray(1 << 16))

    def widen(self, nbytes: int) -> None:
        """Raise the bound: more is to be held at one time than was known at the start."""
        with self._lock:
            self.store_bytes_max += nbytes

    def place(self, nbytes: int, *, accumulator_of: int = -1) -> Placed:
        """Lease memory for a payload.

        Args:
            nbytes: length of the payload.
            accumulator_of: shard whose accumulator may take the payload if it is free, or -1.
        """
        with self._lock:
            number = self._next
            if accumulator_of >= 0:
                own = self._accumulators[accumulator_of]
                # A code is no sum's size: the accumulator would be made anew twice a step.
                fits = own.buffer is None or own.buffer.numel() == nbytes
                if fits and not own.lease and not own.summed:
                    buffer = self._own_buffer(own, nbytes)
                    own.lease = number
                    return self._lease(_Lease(buffer, buffer, shard=accumulator_of), own.view)
            if self.store_bytes + nbytes > self.store_bytes_max:
                return Placed(0, (self._scratch_view(nbytes),))
            self._count(nbytes)
            memory = self._take(nbytes)
            return self._lease(_Lease(memory[:nbytes], memory))

    def scratch(self, nbytes: int) -> Placed:
        """Return memory for a payload that nobody wants."""
        with self._lock:
            return Placed(0, (self._scratch_view(nbytes),))

    def _scratch_view(self, nbytes: int) -> memoryview:
        # Several readers may drop into the same memory at once: nobody reads it.
        if nbytes > len(self._scratch):
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]

    def _take(self, nbytes: int) -> torch.Tensor:
        """Return used memory, of less than twice the length, or new memory."""
        size = nbytes
        if not self._free[nbytes] and self.memory_bytes + nbytes > self.store_bytes_max:
            larger = [n for n, free in self._free.items() if free and nbytes < n < 2 * nbytes]
            if larger:
                size = min(larger)
            else:
                self._let_go(nbytes)
        if self._free[size]:
            return self._free[size].pop()
        self.memory_bytes += nbytes
        return allocate(nbytes)

    def _let_go(self, nbytes: int) -> None:
        """Let free memory go until so many bytes fit; small ones first, they are of least use."""
        for size in sorted(self._free):
            free = self._free[size]
            while free and self.memory_bytes + nbytes > self.store_bytes_max:
                free.pop()
                self.memory_bytes -= size
            if not free:
                del self._free[size]

    def _count(self, nbytes: int) -> None:
        self.store_bytes += nbytes
        self.store_bytes_peak = max(self.store_bytes_peak, self.store_bytes)

    @staticmethod
    def _own_buffer(own: _Accumulator, nbytes: int) -> torch.Tensor:
        if own.buffer is None or own.buffer.numel() != nbytes:
            own.buffer = allocate(nbytes)
            own.view = as_bytes(own.buffer)
        return own.buffer

    def _lease(self, lease: _Lease, view: memoryview | None = None) -> Placed:
        number = self._next
        self._next += 1
        self._leases[number] = lease
        return Placed(number, (as_bytes(lease.buffer) if view is None else view,))

    def bytes_of(self, lease: int) -> torch.Tensor:
        """Return the leased bytes, (nbytes,) uint8, lent until the lease is released."""
        return self._leases[lease].buffer

    def retain(self, lease: int) -> None:
        """Add a holder: a send that still reads the memory."""
        with self._lock:
            self._leases[lease].holders += 1

    def release(self, lease: int) -> None:
        """Drop a holder; the last one gives the memory back."""
        with self._lock:
            held = self._leases[lease]
            held.holders -= 1
            if held.holders:
                return
            del self._leases[lease]
            if held.shard >= 0:
                self._accumulators[held.shard].lease = 0
            else:
                self.store_bytes -= held.buffer.numel()
                self._free[held.memory.numel()].append(held.memory)

    def sum_target(self, shard: int, sources: Sequence[int], nbytes: int = 0) -> torch.Tensor:
        """Return the accumulator, uint8 and ``nbytes`` long; keep it until `release_sum`.

        It is as long as each source where ``nbytes`` is 0. If a payload that is not part of the sum
        is being received into it, that payload keeps the memory and the shard gets a new one.
        """
        with self._lock:
            own = self._accumulators[shard]
            nbytes = nbytes or self._leases[sources[0]].buffer.numel()
            if own.lease and own.lease not in sources:
                late = self._leases[own.lease]
                late.shard = -1
                self._count(late.buffer.numel())
                self.memory_bytes += late.memory.numel()
                own.lease, own.buffer = 0, None
            own.summed = True
            return self._own_buffer(own, nbytes)

    def sum_of(self, shard: int) -> torch.Tensor:
        """Return the bytes of the sum that is held, (nbytes,) uint8."""
        buffer = self._accumulators[shard].buffer
        assert buffer is not None, f"shard {shard} holds no sum"
        return buffer

    def release_sum(self, shard: int) -> None:
        """The sum is not needed any more; the accumulator may receive again."""
        with self._lock:
            self._accumulators[shard].summed = False

    @property
    def leased(self) -> int:
        """Number of leases that are out."""
        return len(self._leases)
