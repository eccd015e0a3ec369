"""A simulated node's leases and accumulators, with the story of what is in them.

Invariants: a lease's memory is valid until its last holder lets go; an accumulator is used for one
thing at a time: a payload received into it, or a sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

Story = dict[int, tuple[int, int]]
"""rank -> (step, revision): whose gradients are in a payload or sum."""


@dataclass(slots=True)
class Lease:
    """A received payload.

    Attributes:
        accumulator_of: shard whose accumulator it was received into, -1 for the store.
    """

    data: torch.Tensor
    story: Story
    holders: int = 1
    accumulator_of: int = -1


@dataclass(slots=True)
class Accumulator:
    """One shard's accumulator."""

    data: torch.Tensor
    story: Story
    lease: int = 0
    summed: bool = False


class Memory:
    """The leases of one node."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.accumulators: dict[int, Accumulator] = {}
        self.store_bytes = 0
        self.store_bytes_peak = 0
        self._next = 1

    def place(self, data: torch.Tensor, story: Story, *, accumulator_of: int = -1) -> int:
        """Receive a payload; into the shard's accumulator if that is named and free."""
        number = self._next
        self._next += 1
        own = self.accumulators.get(accumulator_of)
        fits = own is not None and own.data.numel() == data.numel()
        if own is not None and fits and not own.lease and not own.summed:
            own.data.copy_(data)
            own.lease = number
            self.leases[number] = Lease(own.data, story, accumulator_of=accumulator_of)
        else:
            self.leases[number] = Lease(data, story)
            self.store_bytes += data.nbytes
            self.store_bytes_peak = max(self.store_bytes_peak, self.store_bytes)
        return number

    def retain(self, number: int) -> None:
        """Add a holder."""
        self.leases[number].holders += 1

    def release(self, number: int) -> None:
        """Drop a holder; a lease that is not there was released twice."""
        assert number in self.leases, f"lease {number} was released twice or never given"
        lease = self.leases[number]
        lease.holders -= 1
        if lease.holders:
            return
        del self.leases[number]
        if lease.accumulator_of >= 0:
            self.accumulators[lease.accumulator_of].lease = 0
        else:
            self.store_bytes -= lease.data.nbytes

    def open(self, shard: int, data: torch.Tensor) -> None:
        """Give a shard its accumulator."""
        self.accumulators[shard] = Accumulator(data, {})

    def sum_target(self, shard: int, sources: Iterable[int], length: int) -> Accumulator:
        """Return the accumulator, of this length, and keep it until `release_sum`.

        If a payload that is not part of the sum is in it, that payload keeps the memory.
        """
        own = self.accumulators[shard]
        if own.lease and own.lease not in tuple(sources):
            self.leases[own.lease].accumulator_of = -1
            self.store_bytes += own.data.nbytes
            own = self.accumulators[shard] = Accumulator(own.data.clone(), {})
        own.summed = True
        if own.data.numel() != length:  # a bundle of codes, or no more
            own.data = torch.empty(length, dtype=own.data.dtype)
        return own

    def release_sum(self, shard: int) -> None:
        """The sum is not needed any more."""
        self.accumulators[shard].summed = False
