"""The exchange among the workers of a host, over real connections, each worker a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from paradis.errors import PeerUnreachable, RemoteProtocolError
from paradis.numerics.memory_order import as_bytes
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.runtime.host_group import HostGroup, meeting_point
from paradis.runtime.host_lane import Header, Shards
from paradis.runtime.sharing import Sharing
from paradis.wire.messages import Update

ELEMENTS = 6
WAIT_S = 30.0


class Worker:
    """One worker's end, with a shard's value in two pieces and a list of what happened."""

    def __init__(self, path: Path, ranks: tuple[int, ...], rank: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.value = torch.zeros(ELEMENTS)
        self.wanted = True
        self.events: list[Any] = []
        self._changed = threading.Condition()
        shards = Shards(
            dtype=lambda group, shard: torch.float32,
            nbytes=lambda group, shard: 4 * ELEMENTS,
            claim=self._claim,
            arrived=lambda rank, update, placed: self.note((rank, update, placed)),
            abandon=lambda shard: self.note("abandoned"),
        )
        self.sharing = Sharing(
            lambda: HostGroup(path, ranks, rank, timeout_s=WAIT_S), rank, shards,
            post=self.note, timeout_s=WAIT_S,
        )  # fmt: skip

    def _claim(self, rank: int, update: Update) -> list[memoryview] | None:
        whole = as_bytes(self.value)
        return [whole[:8], whole[8:]] if self.wanted else None

    def note(self, what: object) -> None:
        with self._changed:
            self.events.append(what)
            self._changed.notify_all()

    def wait_for(self, kind: type) -> Any:
        def found() -> Any:
            return next((e for e in self.events if isinstance(e, kind)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, WAIT_S)
            first = found()
            self.events.remove(first)
            return first

    def hand_over(self, step: int, owner: int, gradient: torch.Tensor | None) -> None:
        views = [] if gradient is None else [as_bytes(gradient)[:12], as_bytes(gradient)[12:]]
        effect = fx.HandOver(0, 7, step, 0, gradient is not None, owner)
        self.sharing.gather(fx.Gather(0, step, (7,) if owner == self.rank else (), self.ranks))
        self.sharing.hand_over(effect, views)


@contextmanager
def workers(tmp_path: Path, count: int) -> Iterator[list[Worker]]:
    ranks = tuple(range(count))
    path = tmp_path / "meeting"
    made = [Worker(path, ranks, rank) for rank in ranks]
    try:
        yield made
    finally:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda w: w.sharing.close(orderly=True), made))
        assert not path.exists()
        assert not [t.name for t in threading.enumerate() if t.name.startswith("paradis-host")]


def test_gradients_go_to_the_owner_and_updates_come_back(tmp_path: Path) -> None:
    """In one step a worker has no gradient: what was to be received waits for the next step."""
    with workers(tmp_path, 3) as made:
        owner = made[1]
        for step in range(3):
            for worker in made:
                own = torch.full((ELEMENTS,), float(10**worker.rank))
                worker.hand_over(step, 1, None if (step, worker.rank) == (1, 2) else own)
            summed = owner.wait_for(ev.HostSummed)
            present = [r for r in range(3) if (step, r) != (1, 2)]
            assert summed == ev.HostSummed(0, 7, step, tuple((r, 0) for r in present))
            total = torch.frombuffer(owner.sharing.sum_of(0, 7), dtype=torch.float32)
            assert total.tolist() == [float(sum(10**r for r in present))] * ELEMENTS
            new = torch.full((ELEMENTS,), step + 1.0)
            update = Update(shard=7, step=step, version=step + 1, priority=3, unchanged=step == 2)
            owner.sharing.spread(update, [] if step == 2 else [as_bytes(new)])
            made[2].wanted = step == 0
            for worker in (made[0], made[2]):
                worker.sharing.expect(fx.Expect(0, step, {7: 1}))
            rank, arrived, placed = made[0].wait_for(tuple)
            assert (rank, arrived.version, arrived.priority, placed) == (1, step + 1, 3, step < 2)
            assert arrived.unchanged == (step == 2)
            assert made[0].value.tolist() == [min(step + 1.0, 2.0)] * ELEMENTS
            if step == 0:  # before it does not want the next one
                made[2].wait_for(tuple)
        assert made[2].value.tolist() == [1.0] * ELEMENTS  # the second was not wanted


def test_a_worker_that_is_severed_ends_the_waits_of_all(tmp_path: Path) -> None:
    with workers(tmp_path, 3) as made:
        for worker, other in zip(made, (1, 2, 0), strict=True):
            worker.sharing.expect(fx.Expect(0, 0, {7: other}))
        made[2].sharing.sever()
        for worker in (made[1], made[0]):  # who waits for the one, then who waits for the other
            assert worker.wait_for(ev.HostGroupBroken).reason
            worker.sharing.sever()  # as its role asks


def test_who_does_not_come_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(PeerUnreachable, match=r"workers \[3, 4\] do not find each other"):
        HostGroup(tmp_path / "meeting", (3, 4), 3, timeout_s=0.2)
    assert not (tmp_path / "meeting").exists()


def test_a_group_that_does_not_come_about_is_reported(tmp_path: Path) -> None:
    seen: list[ev.Event] = []
    done = threading.Event()

    def post(event: ev.Event) -> None:
        seen.append(event)
        done.set()

    unused: Callable[..., Any] = lambda *_: None  # noqa: E731
    sharing = Sharing(
        lambda: HostGroup(tmp_path / "meeting", (0, 1), 0, timeout_s=0.2), 0,
        Shards(unused, unused, unused, unused, unused), post=post, timeout_s=WAIT_S,
    )  # fmt: skip
    assert done.wait(WAIT_S)
    assert isinstance(seen[0], ev.HostGroupBroken) and "one host?" in seen[0].reason
    sharing.close(orderly=True)


def test_headers_of_another_step_are_refused() -> None:
    header = Header(3, 7, 1, 1, 1, 5)
    assert Header.read(header.tensor(), 3, 7) == header
    with pytest.raises(RemoteProtocolError, match="expected shard 7 of step 4, got shard 7 of"):
        Header.read(header.tensor(), 4, 7)


def test_meeting_points_differ_by_secret_and_by_group() -> None:
    first = meeting_point("host/12", (0, 1), b"secret")
    assert first == meeting_point("host/12", (0, 1), b"secret")
    others = [
        meeting_point("host/12", (0, 1), b"other"),
        meeting_point("host/13", (0, 1), b"secret"),
        meeting_point("host/12", (0, 2), b"secret"),
    ]
    assert first not in others


def test_waits_take_a_deadline(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda r: HostGroup(tmp_path / "m", (0, 1), r), range(2)))
    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        groups[0].receive(1, 5, torch.empty(1)).wait(timedelta(milliseconds=20))


def test_a_forked_child_keeps_no_connection(tmp_path: Path) -> None:
    """Else the others would not see this process end while its data loaders live."""
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda r: HostGroup(tmp_path / "m", (0, 1), r), range(2)))
    held = [number for group in groups for number, _ in group._sockets]
    assert held
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        open_still = [n for n in held if os.path.exists(f"/proc/self/fd/{n}")]
        os.write(writer, str(open_still).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1000) == b"[]"
    assert all(os.path.exists(f"/proc/self/fd/{n}") for n in held)
    for end in (reader, writer):
        os.close(end)
