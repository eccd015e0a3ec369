"""Memory for received payloads, leased by number, bounded in bytes, reused without page faults.

Invariants:
* a lease's memory is reused only when nobody retains it;
* the first contribution of a shard to arrive is received into the shard's accumulator, so one
  worker needs no contribution store at all; the sum ends up in the accumulator in any case;
* store bytes never exceed the bound: a payload without room is received into scratch memory and
  dropped (credits keep that from happening; a peer that ignores them harms itself);
* the store's memory is a quarter more than the bound, for holes between payloads; what finds no
  hole even so has memory of its own, as long as it is leased.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from paradis.numerics.memory_order import as_bytes
from paradis.runtime.pages import allocate
from paradis.runtime.region import Region

_HOLES: Final = 1.25
"""Memory of the store, in bounds."""


@dataclass(slots=True)
class _Lease:
    buffer: torch.Tensor
    holders: int = 1
    shard: int = -1
    region: Region | None = None
    start: int = 0


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
    """

    def __init__(self, store_bytes_max: int) -> None:
        self.store_bytes_max = store_bytes_max
        self.store_bytes = 0
        self.store_bytes_peak = 0
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._regions: list[Region] = []
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
                    return self._lease(_Lease(buffer, shard=accumulator_of), own.view)
            if self.store_bytes + nbytes > self.store_bytes_max:
                return Placed(0, (self._scratch_view(nbytes),))
            self._count(nbytes)
            return self._lease(self._take(nbytes))

    def scratch(self, nbytes: int) -> Placed:
        """Return memory for a payload that nobody wants."""
        with self._lock:
            return Placed(0, (self._scratch_view(nbytes),))

    def _scratch_view(self, nbytes: int) -> memoryview:
        # Several readers may drop into the same memory at once: nobody reads it.
        if nbytes > len(self._scratch):
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]

    def _take(self, nbytes: int) -> _Lease:
        for region in self._regions:
            if (start := region.take(nbytes)) >= 0:
                return _Lease(region.memory[start : start + nbytes], region=region, start=start)
        missing = int(_HOLES * self.store_bytes_max) - self.reserved_bytes
        if missing < nbytes:
            return _Lease(allocate(nbytes))
        self._regions.append(Region(missing))  # the first, or the bound has been raised
        return self._take(nbytes)

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
                if held.region is not None:
                    held.region.give(held.start, held.buffer.numel())

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
    def reserved_bytes(self) -> int:
        """Bytes of the store's memory; of those never needed so far none are resident."""
        return sum(region.memory.numel() for region in self._regions)

    @property
    def leased(self) -> int:
        """Number of leases that are out."""
        return len(self._leases)
