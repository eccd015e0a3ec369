"""What a worker exchanges with the others of its host: gradients up to the owners, updates down.

Invariant: nothing here runs a role's decision: the role says what to hand over, gather, spread and
expect; `paradis.runtime.host_lane` does it, for each ``wrap`` call by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from paradis.errors import ParadisError
from paradis.numerics.memory_order import as_bytes
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.runtime.host_group import OPEN_TIMEOUT_S, HostGroup
from paradis.runtime.host_lane import DOWN, FLUSH_S, UP, Header, Lane, Own, Parcel, Shards
from paradis.runtime.pages import allocate
from paradis.wire.messages import Update


class Sharing:
    """One worker's exchange with the other workers of its host.

    Args:
        connect: connects to the others; called on a thread of its own.
        rank: of this worker.
        post: takes what happens, for the role.
        timeout_s: deadline of each wait for another worker.
    """

    def __init__(
        self, connect: Callable[[], HostGroup], rank: int, shards: Shards,
        *, post: Callable[[ev.Event], None], timeout_s: float,
    ) -> None:  # fmt: skip
        self.rank = rank
        self._connect = connect
        self._shards = shards
        self._post = post
        self._timeout_s = timeout_s
        self._group: HostGroup | None = None
        self._ready = threading.Event()
        self._over = False
        self._lanes: dict[int, Lane] = {}
        self._ranks: tuple[int, ...] = ()
        self._spread: dict[tuple[int, int], torch.Tensor] = {}
        self._opener = threading.Thread(target=self._open, name="paradis-host", daemon=True)
        self._opener.start()

    def _open(self) -> None:
        try:
            group = self._connect()
            if self._over:
                group.sever()
            else:
                self._group = group
        except ParadisError as error:
            self._break(error.message)
        finally:
            self._ready.set()

    def _break(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._post(ev.HostGroupBroken(reason))

    def _wait_group(self) -> HostGroup | None:
        self._ready.wait(self._timeout_s)
        return self._group

    def _lane(self, index: int) -> Lane:
        lane = self._lanes.get(index)
        if lane is None:
            lane = self._lanes[index] = Lane(
                index, self._wait_group, self._shards, post=self._post, broke=self._break,
                timeout_s=self._timeout_s,
            )  # fmt: skip
        return lane

    # ----------------------------------------------- called under the node's lock, never waiting

    def gather(self, effect: fx.Gather) -> None:
        """See `effects.Gather`."""
        self._ranks = effect.ranks
        self._lane(effect.group).summing.put(effect)

    def hand_over(self, effect: fx.HandOver, views: Sequence[memoryview]) -> None:
        """See `effects.HandOver`; ``views`` is the gradient, empty for none."""
        lane = self._lane(effect.group)
        if effect.owner == self.rank:
            lane.summing.put(Own(effect.step, effect.shard, effect.revision, tuple(views)))
            return
        header = Header(effect.step, effect.shard, effect.revision, int(bool(views)))
        lane.outgoing.put(Parcel((effect.owner,), 4 * effect.shard + UP, header, tuple(views)))

    def spread(self, update: Update, views: Sequence[memoryview]) -> None:
        """See `effects.Spread`; ``views`` is the new value, copied before this returns."""
        data: tuple[memoryview, ...] = ()
        if views:
            key = (update.group, update.shard)
            buffer = self._spread.get(key)
            if buffer is None:
                buffer = self._spread[key] = allocate(sum(map(len, views)))
            data, start = (as_bytes(buffer),), 0
            for view in views:
                data[0][start : start + len(view)] = view
                start += len(view)
        others = tuple(r for r in self._ranks if r != self.rank)
        header = Header(update.step, update.shard, update.version, int(bool(views)),
                        int(update.found_inf), update.priority)  # fmt: skip
        parcel = Parcel(others, 4 * update.shard + DOWN, header, data)
        self._lane(update.group).outgoing.put(parcel)

    def expect(self, effect: fx.Expect) -> None:
        """See `effects.Expect`."""
        self._lane(effect.group).expected.put(effect)

    def sum_of(self, group: int, shard: int) -> memoryview:
        """Return the bytes of a sum that `HostSummed` told of, valid for the step."""
        return as_bytes(self._lanes[group].sums[shard])

    # -------------------------------------------------------------------- ends

    def sever(self) -> None:
        """End at once; the threads end by themselves. Idempotent."""
        self._over = True
        for lane in self._lanes.values():
            lane.end()
        if self._group is not None:
            self._group.sever()

    def close(self, *, orderly: bool) -> None:
        """End: after what is queued, or at once. Idempotent."""
        threads = [t for lane in self._lanes.values() for t in lane.threads]
        if orderly and not self._over:
            for lane in self._lanes.values():
                lane.end()
            self._join(threads, FLUSH_S)
        self.sever()
        # Their waits are over now. The end of the interpreter would abort a thread inside Gloo.
        self._join([*threads, self._opener], OPEN_TIMEOUT_S)
        self._group = None

    @staticmethod
    def _join(threads: Sequence[threading.Thread], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))
