"""Rules of backup workers on a server that the simulator does not look at."""

from __future__ import annotations

from typing import Any

import msgspec

from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.server import ServerRole
from paradis.wire import messages as msg

SECOND_NS = 1_000_000_000
LEADER = NodeId("dispatcher-0")


def server(count: int = 1) -> ServerRole:
    """Return a server that warns after 10 s and gives up after 30, past its first step.

    Args:
        count: of its shards.
    """
    role = ServerRole(
        NodeId("server-0"), quota_bytes=64, warning_ns=10 * SECOND_NS, timeout_ns=30 * SECOND_NS
    )
    ranks = (0, 1, 2)
    view = msg.View(generation=1, members=ranks, left={}, tree=(ranks,), addresses={},
                    racks={"r": ("", ranks)})  # fmt: skip
    parts = range(count)
    spec = msg.ParameterSpec(name="w", shape=(4,), dtype="float32", options_group=0)
    plan = msg.Plan(
        generation=1, group=0, part=0, first_parameter=0, optimizer="SGD", options=[{"lr": 0.5}],
        parameters=tuple(msgspec.structs.replace(spec, name=f"w{i}") for i in parts),
        shards=tuple(msg.ShardPlan(
            shard=i, server="server-0", dtype="float32", length=4, options_group=0, priority=i,
            segments=(msg.Segment(i, 0, 4, 0),),
        ) for i in parts), step=0, backup=1,
    )  # fmt: skip
    role.handle(ev.Received(LEADER, view), 0)
    role.handle(ev.Received(LEADER, plan), 0)
    for i in parts:
        role.handle(ev.Stored(i, 1), 0)
    for rank in ranks:
        commit(role, rank, 0, 0)
    return role


def commit(
    role: ServerRole, rank: int, step: int, at_s: int, present: bytes = b"\0"
) -> list[fx.Effect]:
    """Let a worker commit a step, without a gradient if nothing else is said."""
    said = msg.StepCommit(revisions={}, present=present, options=[{"lr": 0.5}])
    message = msg.Commit(generation=1, worker=rank, step=step, commit=said)
    event = ev.Received(NodeId(f"worker-{rank}"), message)
    return role.handle(event, at_s * SECOND_NS)


def sent(effects: list[fx.Effect], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, fx.Send) and isinstance(e.message, kind)]


def targets(effects: list[fx.Effect], kind: type) -> list[str]:
    return [
        e.target for e in effects if isinstance(e, fx.Send) and isinstance(e.message, kind)
    ]  # fmt: skip


def held_up() -> ServerRole:
    """Return a server whose step 1 is chosen, while worker 2 may still receive version 1."""
    role = server()
    commit(role, 0, 1, 5)
    commit(role, 1, 1, 5)
    assert role.groups[0].step == 1
    return role


def test_it_names_who_keeps_a_version_from_being_overwritten() -> None:
    role = held_up()
    (warning,) = sent(role.handle(ev.TimerFired("sync:0"), 16 * SECOND_NS), msg.Announcement)
    assert "has waited 11.0 s for worker 2 to receive the values of version 1" in warning.text
    (failed,) = sent(role.handle(ev.TimerFired("sync:0"), 36 * SECOND_NS), msg.Failed)
    assert failed.error == "DeadlineExceeded" and "giving up" in failed.text


def test_a_member_that_commits_again_makes_it_ask_for_a_lost_word() -> None:
    role = held_up()
    again = commit(role, 0, 1, 6)
    assert targets(again, msg.Quorum) == ["worker-0", "worker-2"]
    holding = msg.Holding(worker=2, step=1, version=1)
    done = role.handle(ev.Received(NodeId("worker-2"), holding), 7 * SECOND_NS)
    assert targets(done, msg.Update) == ["worker-0", "worker-1"] and role.groups[0].step == 2


def test_who_left_keeps_nothing_back() -> None:
    role = held_up()
    view = msg.View(generation=2, members=(0, 1), left={2: {0: 1}}, tree=((0, 1, 2),),
                    addresses={}, racks={"r": ("", (0, 1))})  # fmt: skip
    role.handle(ev.Received(LEADER, view), 7 * SECOND_NS)
    assert role.groups[0].step == 2


def test_a_push_that_is_too_late_is_acknowledged_and_counted_once() -> None:
    role = held_up()
    role.handle(ev.Received(NodeId("worker-2"), msg.Holding(worker=2, step=1, version=1)), 7)
    late = msg.Push(generation=1, worker=2, step=1)
    effects = role.handle(ev.Received(NodeId("worker-2"), late, 9), 8)
    assert sent(effects, msg.PushAck)[0].credit and fx.Release(9) in effects
    assert [e for e in effects if isinstance(e, fx.Count)] == [fx.Count("dropped_pushes")]
    repeated = msg.Push(generation=1, worker=1, step=1)
    effects = role.handle(ev.Received(NodeId("worker-1"), repeated, 10), 9)
    assert sent(effects, msg.PushAck) and not [e for e in effects if isinstance(e, fx.Count)]


def test_only_the_choosing_server_answers_who_is_late() -> None:
    role = server()
    role.groups[0].quorum.choice = None  # type: ignore[union-attr]
    commit(role, 0, 1, 5)
    commit(role, 1, 1, 5)
    word = msg.Quorum(worker=1, step=1, members=(0, 1), holders=(0, 1))
    done = role.handle(ev.Received(NodeId("worker-1"), word), 6 * SECOND_NS)
    assert targets(done, msg.Update) == ["worker-0", "worker-1"]
    assert not sent(commit(role, 2, 1, 7), msg.Late)


def test_state_that_is_asked_for_while_it_changes_is_sent_when_it_has_changed() -> None:
    role = server()
    for rank in (0, 1):
        push = msg.Push(generation=1, worker=rank, step=1)
        role.handle(ev.Received(NodeId(f"worker-{rank}"), push, 5 + rank), 5)
        commit(role, rank, 1, 5, present=b"\1")
    role.handle(ev.Received(NodeId("worker-2"), msg.Holding(worker=2, step=1, version=1)), 6)
    applied = role.handle(ev.Reduced(0, 1), 7)
    assert [e for e in applied if isinstance(e, fx.Apply)]
    asked = msg.PullState(worker=2, version=1, sequence=3, memories=True)
    assert role.handle(ev.Received(NodeId("worker-2"), asked), 8) == []
    (state,) = sent(role.handle(ev.Applied(0, 1), 9), msg.State)
    assert (state.version, state.sequence) == (2, 3)


def test_what_codes_start_from_is_sent_when_the_whole_step_is_over() -> None:
    """A shard may have its version before the step ends, but codes begin with the end of one."""
    role = server(2)
    for rank in (0, 1):
        for shard in (0, 1):
            push = msg.Push(generation=1, worker=rank, step=1, shard=shard)
            role.handle(ev.Received(NodeId(f"worker-{rank}"), push, 5 + rank + 2 * shard), 5)
        commit(role, rank, 1, 5, present=b"\3")
    role.handle(ev.Received(NodeId("worker-2"), msg.Holding(worker=2, step=1, version=1)), 6)
    role.handle(ev.Reduced(0, 1), 7)
    role.handle(ev.Reduced(1, 1), 7)
    role.handle(ev.Applied(0, 1), 8)
    asked = msg.PullState(worker=2, shard=0, version=2, sequence=3, memories=True)
    assert not sent(role.handle(ev.Received(NodeId("worker-2"), asked), 9), msg.State)
    (state,) = sent(role.handle(ev.Applied(1, 1), 10), msg.State)
    assert (state.shard, state.version, state.sequence) == (0, 2, 3)


def test_a_late_push_of_another_size_is_acknowledged_without_its_payload() -> None:
    """A gradient in full finds no memory where codes are expected, and its worker waits for us."""
    role = held_up()
    role.handle(ev.Received(NodeId("worker-2"), msg.Holding(worker=2, step=1, version=1)), 7)
    assert role.groups[0].step == 2
    late = ev.Received(NodeId("worker-2"), msg.Push(generation=1, worker=2, step=1), 0)
    effects = role.handle(late, 8)
    assert sent(effects, msg.PushAck)[0].credit
    assert [e for e in effects if isinstance(e, fx.Count)] == [fx.Count("dropped_pushes")]
    present = ev.Received(NodeId("worker-1"), msg.Push(generation=1, worker=1, step=2), 0)
    assert role.handle(present, 9) == [], "there was no memory: it comes again"
