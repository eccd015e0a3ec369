"""Rules of ``ssp`` and ``async`` on a server that the simulator does not look at."""

from __future__ import annotations

from typing import Any

import pytest

from paradis.ids import NodeId
from paradis.observe.metrics import NAMES, staleness_counts
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.planning import mode_of
from paradis.roles.server import ServerRole
from paradis.roles.server_stale import slowed
from paradis.settings import SharedSettings
from paradis.wire import messages as msg

SECOND_NS = 1_000_000_000
LEADER = NodeId("dispatcher-0")


def server(mode: str, *, staleness: int = 1, workers: int = 2) -> ServerRole:
    """Return a server that warns after 10 s and gives up after 30, with one shard of 4 numbers."""
    role = ServerRole(
        NodeId("server-0"), quota_bytes=64, warning_ns=10 * SECOND_NS, timeout_ns=30 * SECOND_NS
    )
    ranks = tuple(range(workers))
    view = msg.View(generation=1, members=ranks, left={}, tree=(ranks,), addresses={},
                    racks={"r": ("", ranks)})  # fmt: skip
    shard = msg.ShardPlan(
        shard=0, server="server-0", dtype="float32", length=4, options_group=0, priority=0,
        segments=(msg.Segment(0, 0, 4, 0),),
    )  # fmt: skip
    plan = msg.Plan(
        generation=1, group=0, part=0, first_parameter=0, optimizer="SGD", options=[{"lr": 0.5}],
        parameters=(msg.ParameterSpec(name="w", shape=(4,), dtype="float32", options_group=0),),
        shards=(shard,), step=0, mode=mode, staleness=staleness,
    )  # fmt: skip
    role.handle(ev.Received(LEADER, view), 0)
    role.handle(ev.Received(LEADER, plan), 0)
    role.handle(ev.Stored(0, 1), 0)
    return role


def commit(role: ServerRole, rank: int, step: int, at_s: int, **said: Any) -> list[fx.Effect]:
    """Let a worker commit a step without a gradient."""
    fields = {"revisions": {}, "present": b"\0", "options": [{"lr": 0.5}], **said}
    message = msg.Commit(generation=1, worker=rank, step=step, commit=msg.StepCommit(**fields))
    event = ev.Received(NodeId(f"worker-{rank}"), message)
    return role.handle(event, at_s * SECOND_NS)


def sent(effects: list[fx.Effect], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, fx.Send) and isinstance(e.message, kind)]


def timers(effects: list[fx.Effect]) -> list[int]:
    return [e.at_ns // SECOND_NS for e in effects if isinstance(e, fx.SetTimer)]


def test_who_waits_too_long_is_told_for_whom_and_then_the_job_ends() -> None:
    role = server("ssp")
    assert timers(commit(role, 0, 0, at_s=0)) == [10]
    assert not sent(commit(role, 0, 1, at_s=4), msg.Update)
    first = role.handle(ev.TimerFired("stale:0"), 10 * SECOND_NS)
    assert not sent(first, msg.Announcement) and timers(first) == [14]
    second = role.handle(ev.TimerFired("stale:0"), 14 * SECOND_NS)
    (warning,) = sent(second, msg.Announcement)
    assert (
        "worker 0 has finished step 1 of group 0 on server-0 and has waited 10.0 s for worker 1"
        in (warning.text)
    )
    assert timers(second) == [24]
    last = role.handle(ev.TimerFired("stale:0"), 34 * SECOND_NS)
    (refusal,) = sent(last, msg.Refusal)
    assert refusal.step == 1 and refusal.error == "DeadlineExceeded"
    assert "training.staleness = 1" in refusal.text and "giving up" in refusal.text
    assert sent(last, msg.Failed)


def test_the_timer_rests_when_nobody_waits() -> None:
    role = server("ssp")
    commit(role, 0, 0, at_s=0)
    assert timers(role.handle(ev.TimerFired("stale:0"), 10 * SECOND_NS)) == []
    assert timers(commit(role, 0, 1, at_s=20)) == [30]


def test_in_async_nobody_waits_and_no_timer_is_set() -> None:
    role = server("async")
    for step in range(5):
        effects = commit(role, 0, step, at_s=step)
        (update,) = sent(effects, msg.Update)
        assert (update.step, update.version, update.unchanged) == (step, 0, True)
        assert timers(effects) == []


def test_an_overflow_is_told_to_its_worker_only() -> None:
    role = server("async")
    (update,) = sent(commit(role, 0, 0, at_s=0, found_inf=True, present=b"\1"), msg.Update)
    assert update.found_inf and update.version == 0
    (other,) = sent(commit(role, 1, 0, at_s=0), msg.Update)
    assert not other.found_inf


def test_a_push_of_a_step_that_is_over_changes_nothing() -> None:
    role = server("async")
    commit(role, 0, 0, at_s=0)
    push = msg.Push(generation=1, shard=0, worker=0, step=0)
    effects = role.handle(ev.Received(NodeId("worker-0"), push, 3), SECOND_NS)
    assert [type(e) for e in effects] == [fx.Release, fx.Send]
    assert sent(effects, msg.PushAck)[0].credit


def test_values_assigned_while_one_is_updated_wait_and_reach_everybody() -> None:
    role = server("async")
    push = msg.Push(generation=1, shard=0, worker=0, step=0)
    role.handle(ev.Received(NodeId("worker-0"), push, 3), 0)
    (reduce,) = [e for e in commit(role, 0, 0, at_s=0, present=b"\1") if isinstance(e, fx.Reduce)]
    assign = ev.Received(NodeId("worker-0"), msg.Assign(shard=0, worker=0, step=0, revision=2), 4)
    assert role.handle(assign, 0) == []
    role.handle(ev.Reduced(0, reduce.ticket), 0)
    effects = role.handle(ev.Applied(0, 0), 0)
    assert [e.lease for e in effects if isinstance(e, fx.Store)] == [4]
    assert not [e for e in role.handle(assign, 0) if isinstance(e, fx.Store)]
    assert sent(role.handle(ev.Stored(0, 2), 0), msg.AssignAck)[0].revision == 2
    assert sent(role.handle(assign, 0), msg.AssignAck)  # its acknowledgement was lost
    (update,) = sent(commit(role, 1, 0, at_s=0), msg.Update)
    assert (update.version, update.unchanged) == (1, False)


@pytest.mark.parametrize(("mode", "staleness", "told"), [
    ("sync", 1, "sync"), ("ssp", 0, "sync"), ("ssp", 2, "ssp"), ("async", 0, "async"),
])  # fmt: skip
def test_a_bound_of_nothing_is_sync(mode: str, staleness: int, told: str) -> None:
    assert mode_of(SharedSettings(mode=mode, staleness=staleness)) == told


def test_only_the_rate_is_divided() -> None:
    options: msg.Options = {"lr": 0.3, "weight_decay": 0.1, "initial_lr": 0.3}
    assert slowed(options, 3) == {"lr": 0.3 / 3, "weight_decay": 0.1, "initial_lr": 0.3}
    assert slowed(options, 1) is options
    assert slowed({"momentum": 0.9}, 2) == {"momentum": 0.9}


def test_staleness_is_counted_in_doubling_ranges() -> None:
    for staleness, name in ((0, "0"), (1, "1"), (2, "2"), (3, "2"), (4, "4"), (7, "4"), (8, "8"),
                            (15, "8"), (16, "16"), (900, "16")):  # fmt: skip
        counts = staleness_counts(staleness)
        assert counts == {"staleness_sum": staleness, f"staleness_{name}": 1}
        assert counts.keys() <= NAMES.keys()
