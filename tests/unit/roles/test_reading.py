"""What servers tell readers of other worker groups, and when a reader's step begins."""

from __future__ import annotations

from typing import Any

import pytest

from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.server import ServerRole
from paradis.roles.worker import WorkerRole
from paradis.roles.worker_state import WorkerConfig
from paradis.wire import messages as msg

LEADER, SERVER, READER = NodeId("dispatcher-0"), NodeId("server-0"), NodeId("worker-1")


def view(members: tuple[int, ...] = (0, 1), generation: int = 1) -> msg.View:
    return msg.View(
        generation=generation, members=members, left={0: {3: 9}} if 0 not in members else {},
        tree=((0, 1),), addresses={"server-0": ("sim",)}, racks={"r": ("", (0, 1))},
    )  # fmt: skip


def plan(bound: int) -> msg.Plan:
    """Group 3, trained by worker 0 and read by worker 1: two shards of 4 numbers."""
    shards = tuple(
        msg.ShardPlan(
            shard=n, server="server-0", dtype="float32", length=4, options_group=0, priority=n,
            segments=(msg.Segment(n, 0, 4, 0),),
        )
        for n in range(2)
    )  # fmt: skip
    return msg.Plan(
        generation=1, group=3, part=0, first_parameter=0, optimizer="SGD", options=[{"lr": 0.5}],
        parameters=tuple(
            msg.ParameterSpec(name=f"w{n}", shape=(4,), dtype="float32", options_group=0)
            for n in range(2)
        ),
        shards=shards, step=0, ranks=(0,), reading=bound,
    )  # fmt: skip


class Server:
    """A server with the group at any version."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.role = ServerRole(SERVER, quota_bytes=64, warning_ns=10**9, timeout_ns=10**10)
        self.role.handle(ev.Received(LEADER, view()), 0)
        self.role.handle(ev.Received(LEADER, plan(bound)), 0)
        for shard in range(2):
            self.role.handle(ev.Stored(shard, 1), 0)

    def at(self, *versions: int) -> None:
        for shard, version in enumerate(versions):
            self.role.groups[3].shards[shard].version = version

    def read(self, *held: int, again: bool = False) -> tuple[dict[int, int], list[int]]:
        """Ask; return the versions told, and the shards sent."""
        message = msg.Read(
            group=3, worker=1, version=self.bound, sequence=1, revision=int(again),
            held=dict(enumerate(held)),
        )  # fmt: skip
        return answers(self.role.handle(ev.Received(READER, message), 0))


def answers(effects: list[fx.Effect]) -> tuple[dict[int, int], list[int]]:
    """Return what a reader is told, and what it is sent."""
    told: dict[int, int] = {}
    sent: list[int] = []
    for effect in effects:
        if not isinstance(effect, fx.Send) or effect.target != READER:
            continue
        message = effect.message
        if isinstance(message, msg.Versions):
            told |= message.versions
        elif isinstance(message, msg.Update):
            assert effect.payload == fx.Sections(3, message.shard, copied=True)
            sent.append(message.shard)
    return told, sent


@pytest.mark.parametrize(
    ("bound", "lacking", "sent"),
    [(0, 0, False), (0, 1, True), (1, 1, True), (3, 2, False), (3, 3, True), (3, 9, True)],
)
def test_a_value_is_sent_before_it_lacks_too_much(bound: int, lacking: int, sent: bool) -> None:
    server = Server(bound)
    server.at(10, 10)
    assert server.read(10 - lacking, 10) == ({0: 10, 1: 10}, [0] if sent else [])


def test_what_was_sent_is_not_sent_again_unless_it_may_be_lost() -> None:
    server = Server(1)
    assert server.read(-1, -1) == ({0: 0, 1: 0}, [0, 1])
    assert server.read(-1, -1)[1] == []
    assert server.read(-1, 0, again=True)[1] == [0]


def test_a_value_that_is_being_written_is_told_of_afterwards() -> None:
    server = Server(0)
    server.role.groups[3].shards[0].applying = True
    assert server.read(-1, -1) == ({1: 0}, [1])
    effects = server.role.handle(ev.Applied(0, 0), 0)
    assert answers(effects) == ({0: 1}, [0])
    assert answers(server.role.handle(ev.Stored(0, 2), 0)) == ({}, [])


def test_of_a_group_that_has_ended_the_last_value_is_sent_whatever_the_bound() -> None:
    server = Server(5)
    server.at(9, 9)
    assert server.read(8, 9)[1] == []
    server.role.handle(ev.Received(LEADER, view((1,), generation=2)), 0)
    assert server.read(8, 9)[1] == [0]


class Reader:
    """A worker that reads the group."""

    def __init__(self, bound: int) -> None:
        self.role = WorkerRole(WorkerConfig(rank=1))
        self.got(view(), LEADER)
        self.role.handle(ev.PeerUp(SERVER), 0)
        self.got(plan(bound), LEADER)

    def got(self, message: Any, source: NodeId = SERVER, lease: int = 0) -> list[fx.Effect]:
        effects = self.role.handle(ev.Received(source, message, lease), 0)
        self.role.check()
        return effects

    def begin(self) -> list[msg.Read]:
        effects = self.role.handle(ev.ReadAsked(3), 0)
        return [
            e.message for e in effects if isinstance(e, fx.Send) and isinstance(e.message, msg.Read)
        ]

    def update(self, shard: int, version: int) -> list[fx.Effect]:
        return self.got(msg.Update(group=3, shard=shard, version=version), lease=10 * version + 1)

    def told(self, sequence: int, *versions: int) -> list[fx.Effect]:
        return self.got(
            msg.Versions(group=3, sequence=sequence, versions=dict(enumerate(versions)))
        )


def begun(effects: list[fx.Effect]) -> bool:
    return fx.Complete(3, "read") in effects


def test_a_step_waits_for_what_lacks_too_much_and_for_nothing_else() -> None:
    reader = Reader(bound=2)
    (question,) = reader.begin()
    assert question.held == {0: -1, 1: -1} and question.version == 2
    assert not begun(reader.told(1, 0, 7))
    assert not begun(reader.update(0, 0))
    assert begun(reader.update(1, 7))
    (question,) = reader.begin()
    assert question.held == {0: 0, 1: 7}
    assert not begun(reader.told(1, 0, 7)), "an answer to the question before"
    assert not begun(reader.told(2, 3, 9))
    assert begun(reader.update(0, 1))


def test_what_comes_late_is_kept_until_the_next_step_begins() -> None:
    reader = Reader(bound=4)
    reader.begin()
    reader.update(0, 0)
    reader.update(1, 0)
    assert begun(reader.told(1, 2, 2))
    assert reader.update(0, 2) == []
    assert reader.update(0, 1) == [fx.Release(11)], "older than what is kept"
    assert reader.update(0, 3) == [fx.Release(21)], "the newer one is kept"
    assert not reader.role.reads(3, 0, 3) and reader.role.reads(3, 0, 4)
    effects = reader.role.handle(ev.ReadAsked(3), 0)
    assert fx.Install(3, 0, 3, 31) in effects
    reader.told(2, 3, 3)
    reader.update(1, 3)
    assert reader.role.handle(ev.LeaveAsked(), 0)[0] == fx.Release(31)


def test_a_new_link_asks_again_for_what_may_be_lost() -> None:
    reader = Reader(bound=1)
    reader.begin()
    reader.told(1, 5, 5)
    effects = reader.role.handle(ev.PeerUp(SERVER), 0)
    (again,) = [e.message for e in effects if isinstance(e, fx.Send)]
    assert isinstance(again, msg.Read) and again.revision == 1 and again.held == {0: -1, 1: -1}
    assert "2 shards are not there (shard 0 on server-0, shard 1 on server-0)" in (
        reader.role.missing(3)
    )
