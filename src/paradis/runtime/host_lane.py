"""The exchange of one ``wrap`` call among the workers of a host: three threads and their messages.

One thread sends, one sums what the others hand over, one receives updates. They never wait for each
other's work on another shard or call, so scripts may step their models in any order. Each message
is a header and, where it has one, a payload, both matched by shard.

Invariants:
* each queue holds two steps' shards at most: the role begins none before the last one ended;
* gradients are sent from where they lie. A step may end by another way before they were read; what
  is read then is a gradient of a step that is over, and refused as such.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import torch

from paradis.errors import ParadisError, RemoteProtocolError
from paradis.numerics.memory_order import as_bytes
from paradis.numerics.reduce import reduce_tree
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.runtime.host_group import HostGroup, Pending
from paradis.runtime.pages import allocate
from paradis.wire.messages import Update

_log = logging.getLogger("paradis.host")

FLUSH_S: Final = 5.0
"""How long an orderly end waits for what is still on its way."""

UP, DOWN = 0, 2
"""Tags of a shard: header and payload of its gradient, then of its update."""


class Header(NamedTuple):
    """What is said of one shard, as numbers of a (8,) int64 tensor.

    Attributes:
        number: revision of a gradient, version of an update.
        full: 1 if a payload follows.
    """

    step: int
    shard: int
    number: int
    full: int
    found_inf: int = 0
    priority: int = 0

    def tensor(self) -> torch.Tensor:
        """Return the header as it travels."""
        return torch.tensor([*self, 0, 0], dtype=torch.int64)

    @classmethod
    def read(cls, tensor: torch.Tensor, step: int, shard: int) -> Header:
        """Return a received header.

        Raises:
            RemoteProtocolError: it is of another step or shard.
        """
        header = cls(*tensor.tolist()[:6])
        if (header.step, header.shard) != (step, shard):
            raise RemoteProtocolError(
                f"local reduction broke: expected shard {shard} of step {step}, got shard "
                f"{header.shard} of step {header.step}; please report it with the workers' logs"
            )
        return header


class Shards(NamedTuple):
    """How the threads reach the worker's memory.

    Attributes:
        dtype: shard -> dtype of its elements.
        nbytes: shard -> bytes.
        claim: asked with the sending rank and an update before its payload is received: returns
            where to, or None if it is not wanted.
        arrived: called with the sending rank and the update when that is done; and whether a
            payload was received where ``claim`` said.
        abandon: called when a receive into claimed memory failed.
    """

    dtype: Callable[[int, int], torch.dtype]
    nbytes: Callable[[int, int], int]
    claim: Callable[[int, Update], list[memoryview] | None]
    arrived: Callable[[int, Update, bool], None]
    abandon: Callable[[int], None]


class Parcel(NamedTuple):
    """Something to send: to these ranks, with these tags, this header and payload."""

    ranks: tuple[int, ...]
    tag: int
    header: Header
    views: tuple[memoryview, ...]


class Own(NamedTuple):
    """A shard of this worker's that is to be summed."""

    step: int
    shard: int
    revision: int
    views: tuple[memoryview, ...]


class Lane:
    """The exchange of one ``wrap`` call.

    Args:
        index: number of the call.
        group: returns the connected group, or None when there will be none.
        broke: called with the reason when a thread cannot go on.
        timeout_s: deadline of each wait.
    """

    def __init__(
        self, index: int, group: Callable[[], HostGroup | None], shards: Shards,
        *, post: Callable[[ev.Event], None], broke: Callable[[str], None], timeout_s: float,
    ) -> None:  # fmt: skip
        self.index = index
        self.sums: dict[int, torch.Tensor] = {}
        self._group = group
        self._shards = shards
        self._post = post
        self._broke = broke
        self._limit = timedelta(seconds=timeout_s)
        self.outgoing: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self.summing: queue.SimpleQueue[fx.Gather | Own | None] = queue.SimpleQueue()
        self.expected: queue.SimpleQueue[fx.Expect | None] = queue.SimpleQueue()
        self._headers: dict[tuple[int, int], tuple[torch.Tensor, Pending]] = {}
        self._payloads: dict[tuple[int, int], tuple[torch.Tensor, Pending]] = {}
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._ranks: tuple[int, ...] = ()
        jobs = (self._send_all, self._sum_all, self._receive_all)
        self.threads = [
            threading.Thread(target=self._run, args=(job,), name=f"paradis-host-{index}",
                             daemon=True)
            for job in jobs
        ]  # fmt: skip
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        """Let the threads finish what is queued, then end."""
        self.outgoing.put(None)
        self.summing.put(None)
        self.expected.put(None)

    def _run(self, job: Callable[[HostGroup], None]) -> None:
        group = self._group()
        if group is None:
            return
        try:
            job(group)
        except (RuntimeError, ParadisError) as error:  # torch raises what Gloo says as the former
            self._broke(str(error).partition("\n")[0])
        except Exception as error:  # a bug: the workers push directly rather than wait
            _log.exception("the exchange on this host broke")
            self._broke(repr(error))

    # ----------------------------------------------------------------- sending

    def _send_all(self, group: HostGroup) -> None:
        under_way: dict[tuple[int, int], tuple[object, list[Pending]]] = {}
        while (parcel := self.outgoing.get()) is not None:
            payload = _flat(parcel.views) if parcel.views else None
            header = parcel.header.tensor()
            for rank in parcel.ranks:
                earlier = under_way.pop((rank, parcel.tag), None)
                for pending in earlier[1] if earlier is not None else ():
                    pending.wait(self._limit)  # long done, unless that worker has fallen behind
                sends = [group.send(rank, parcel.tag, header)]
                if payload is not None:
                    sends.append(group.send(rank, parcel.tag + 1, payload))
                under_way[rank, parcel.tag] = ((header, payload), sends)
        until = time.monotonic() + FLUSH_S
        for _, sends in under_way.values():
            for pending in sends:
                pending.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))

    # ----------------------------------------------------------------- summing

    def _sum_all(self, group: HostGroup) -> None:
        while (asked := self.summing.get()) is not None:
            if isinstance(asked, fx.Gather):
                self._ranks = asked.ranks
                for shard in asked.shards:
                    for rank in asked.ranks:
                        if rank != group.rank:
                            self._open(group, rank, shard)
            else:
                self._sum(group, asked)

    def _open(self, group: HostGroup, rank: int, shard: int) -> None:
        """Begin to receive what one worker hands over of a shard."""
        key = (rank, shard)
        header = torch.empty(8, dtype=torch.int64)
        self._headers[key] = (header, group.receive(rank, 4 * shard + UP, header))
        if key not in self._payloads:  # else that of a step without a gradient is still open
            buffer = self._buffers.get(key)
            if buffer is None:
                buffer = self._buffers[key] = allocate(self._shards.nbytes(self.index, shard))
            self._payloads[key] = (buffer, group.receive(rank, 4 * shard + UP + 1, buffer))

    def _sum(self, group: HostGroup, own: Own) -> None:
        parts: list[torch.Tensor] = []
        included: list[tuple[int, int]] = []
        for rank in self._ranks:
            if rank == group.rank:
                if own.views:
                    parts.append(_flat(own.views))
                    included.append((rank, own.revision))
                continue
            tensor, pending = self._headers.pop((rank, own.shard))
            pending.wait(self._limit)
            header = Header.read(tensor, own.step, own.shard)
            if header.full:
                buffer, payload = self._payloads.pop((rank, own.shard))
                payload.wait(self._limit)
                parts.append(buffer)
                included.append((rank, header.number))
        if parts:
            self._reduce(own.shard, parts, partial=len(parts) < len(self._ranks))
        self._post(ev.HostSummed(self.index, own.shard, own.step, tuple(included)))

    def _reduce(self, shard: int, parts: Sequence[torch.Tensor], *, partial: bool) -> None:
        total = self.sums.get(shard)
        if total is None:
            total = self.sums[shard] = allocate(self._shards.nbytes(self.index, shard))
        dtype = self._shards.dtype(self.index, shard)
        reduce_tree([[part.view(dtype) for part in parts]], total.view(dtype), 1, partial)

    # --------------------------------------------------------------- receiving

    def _receive_all(self, group: HostGroup) -> None:
        while (asked := self.expected.get()) is not None:
            opened = []
            for shard, rank in asked.owners.items():
                header = torch.empty(8, dtype=torch.int64)
                opened.append((shard, rank, header, group.receive(rank, 4 * shard + DOWN, header)))
            for shard, rank, header, pending in opened:
                pending.wait(self._limit)
                self._receive(group, rank, Header.read(header, asked.step, shard))

    def _receive(self, group: HostGroup, rank: int, header: Header) -> None:
        update = Update(
            group=self.index, shard=header.shard, step=header.step, version=header.number,
            worker=rank, unchanged=not header.full, found_inf=bool(header.found_inf),
            priority=header.priority,
        )  # fmt: skip
        if not header.full:
            self._shards.arrived(rank, update, False)
            return
        views = self._shards.claim(rank, update)
        try:
            self._take(group, rank, header.shard, views)
        except RuntimeError:
            if views is not None:
                self._shards.abandon(header.shard)
            raise
        if views is not None:
            self._shards.arrived(rank, update, True)

    def _take(
        self, group: HostGroup, rank: int, shard: int, views: list[memoryview] | None
    ) -> None:
        """Receive an update's payload: where it belongs, or into memory that is dropped."""
        whole = views is not None and len(views) == 1
        target = _flat(tuple(views)) if views is not None and whole else torch.empty(
            self._shards.nbytes(self.index, shard), dtype=torch.uint8
        )  # fmt: skip
        group.receive(rank, 4 * shard + DOWN + 1, target).wait(self._limit)
        if views is not None and not whole:
            data, start = as_bytes(target), 0
            for view in views:
                view[:] = data[start : start + len(view)]
                start += len(view)


def _flat(views: tuple[memoryview, ...]) -> torch.Tensor:
    """Return the bytes of a shard, (nbytes,) uint8: where they lie if they are one piece."""
    if len(views) == 1:
        return torch.frombuffer(views[0], dtype=torch.uint8)
    flat = torch.empty(sum(map(len, views)), dtype=torch.uint8)
    data, start = as_bytes(flat), 0
    for view in views:
        data[start : start + len(view)] = view
        start += len(view)
    return flat
