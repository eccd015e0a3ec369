"""The leader turns codes off for a group where they make steps slower, and says so once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from paradis.core.benefit import BenefitRule
from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.leader import LeaderConfig, LeaderRole
from paradis.roles.worker import WorkerRole
from paradis.roles.worker_state import WorkerConfig
from paradis.settings import SharedSettings
from paradis.wire import messages as msg

MS = 1_000_000
SPEC = msg.ParameterSpec(name="w", shape=(10_000,), dtype="float32", options_group=0)


class Leader:
    """A leader with two workers and a group of one parameter."""

    def __init__(self, optimizer: str = "SGD", benefit: str = "", **settings: Any) -> None:
        shared = SharedSettings(**settings)
        self.role = LeaderRole(LeaderConfig(
            job="j", workers=2, servers=1, dispatchers=1, settings=shared, shared=asdict(shared),
            benefit=BenefitRule(settle_steps=2, window_steps=4),
        ))  # fmt: skip
        self.effects: list[fx.Effect] = []
        for node in ("dispatcher-0", "agent-h", "worker-0", "worker-1", "server-0"):
            role = node.partition("-")[0]
            addresses = () if role in ("worker", "agent") else (f"tcp://{node}",)
            self.got(node, msg.Join(node=node, role=role, host="h", pid=1, addresses=addresses))
        self.confirm(msg.ViewReady(generation=1))
        for rank in range(2):
            self.got(f"worker-{rank}", msg.Register(
                rank=rank, group=0, part=0, parameters=(SPEC,), optimizer=optimizer,
                options=[{"lr": 0.1, "betas": [0.9, 0.999]}],
                coded_from=0 if optimizer == "SGD" and benefit != "off" else -1, benefit=benefit,
            ))  # fmt: skip
        (self.plan,) = self.sent(msg.Plan, "server-0")
        self.confirm(msg.PlanReady(generation=1, group=0, part=0))

    def got(self, source: str, message: Any) -> None:
        self.effects = self.role.handle(ev.Received(NodeId(source), message), 0)
        self.role.check()

    def confirm(self, ready: Any) -> None:
        for node in ("dispatcher-0", "server-0"):
            self.got(node, ready)

    def sent(self, kind: type, to: str) -> list[Any]:
        sends = [e for e in self.effects if isinstance(e, fx.Send) and e.target == to]
        return [e.message for e in sends if isinstance(e.message, kind)]

    def pace(self, rank: int, step: int, time_ms: float, *, coded: bool) -> None:
        times = tuple(int(time_ms * MS) + i for i in range(4))
        self.got(f"worker-{rank}", msg.Pace(
            rank=rank, group=0, step=step, coded=coded, times_ns=times
        ))  # fmt: skip

    def window(self, step: int, time_ms: float, *, coded: bool) -> None:
        for rank in range(2):
            assert not self.sent(msg.Freeze, "worker-0") or rank == 0
            self.pace(rank, step, time_ms, coded=coded)

    @property
    def told(self) -> list[msg.Freeze]:
        assert self.sent(msg.Freeze, "worker-0") == self.sent(msg.Freeze, "worker-1")
        return self.sent(msg.Freeze, "worker-0")

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(a.level, a.text) for a in self.sent(msg.Announcement, "agent-h")]


def test_slower_codes_are_turned_off_and_both_figures_are_said() -> None:
    leader = Leader(compression="int8")
    assert (leader.plan.settle_steps, leader.plan.window_steps) == (2, 4)
    leader.window(11, 41.0, coded=True)
    assert leader.told == [msg.Freeze(group=0, step=0, until=12)]
    assert not leader.said
    leader.window(20, 33.0, coded=False)
    assert not leader.told
    assert leader.said == [(
        "warning",
        "compression int8 of group 0 is off: a step takes 41.0 ms with it and 33.0 ms without",
    )]  # fmt: skip
    leader.window(30, 20.0, coded=False)
    assert not leader.told and not leader.said


def test_faster_codes_come_back_for_good() -> None:
    leader = Leader(compression="bf16")
    leader.window(11, 30.0, coded=True)
    leader.window(20, 33.0, coded=False)
    assert leader.told == [msg.Freeze(group=0, step=21, until=12)]
    assert leader.said == [(
        "info",
        "compression bf16 of group 0 stays on: a step takes 30.0 ms with it and 33.0 ms without",
    )]  # fmt: skip
    leader.window(40, 99.0, coded=True)
    assert not leader.told and not leader.said


def test_the_leader_waits_for_all_that_are_left() -> None:
    leader = Leader(compression="int8")
    leader.pace(0, 11, 41.0, coded=True)
    assert not leader.told
    leader.got("worker-1", msg.Leave(node="worker-1", steps={0: 11}))
    assert leader.sent(msg.Freeze, "worker-0") == [msg.Freeze(group=0, step=0, until=1)]
    assert not leader.sent(msg.Freeze, "worker-1")


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "int8", "compression_benefit": "assumed"},
        {"compression": "none"},
    ],
)
def test_nothing_is_measured_without_need(settings: dict[str, str]) -> None:
    leader = Leader(**settings)
    assert not leader.plan.window_steps
    leader.window(11, 41.0, coded=True)
    assert not leader.told and not leader.said


def test_one_bit_adam_is_reported_on_and_left_alone() -> None:
    leader = Leader("OneBitAdam")
    leader.window(40, 33.0, coded=False)
    assert not leader.told and not leader.said
    leader.window(2000, 41.0, coded=True)
    assert not leader.told
    text = "1-bit Adam of group 0 stays on: a step takes 41.0 ms with it and 33.0 ms without"
    assert leader.said == [("info", text)]


def manifest_of(leader: Leader) -> fx.WriteManifest:
    info = msg.CheckpointInfo(checkpoint="c", group=0, step=3, options=[], extra={})
    leader.got("worker-0", info)
    leader.got("server-0", msg.Saved(
        node="server-0", checkpoint="c", group=0, step=3, pieces=(), scalars={}
    ))  # fmt: skip
    (manifest,) = (e for e in leader.effects if isinstance(e, fx.WriteManifest))
    return manifest


def test_a_checkpoint_holds_the_decision_and_a_resumed_job_takes_it_over() -> None:
    leader = Leader(compression="int8")
    assert manifest_of(leader).benefit == ""
    leader = Leader(compression="int8")
    leader.window(11, 41.0, coded=True)
    leader.window(20, 33.0, coded=False)
    assert manifest_of(leader).benefit == "int8 off"
    resumed = Leader(compression="int8", benefit="off")
    assert (resumed.plan.coded_from, resumed.plan.window_steps) == (-1, 0)
    resumed.window(11, 20.0, coded=False)
    assert not resumed.told
    assert manifest_of(resumed).benefit == "int8 off"


def test_a_worker_tells_the_time_from_step_to_step_once_for_each_kind() -> None:
    """And says in its commits what it was told; the group goes by what the servers answer."""
    leader = Leader(compression="int8")
    role = WorkerRole(WorkerConfig(rank=0))
    told: list[msg.ControlMessage] = []

    def do(event: ev.Event, now_ns: int = 0) -> None:
        for effect in role.handle(event, now_ns):
            if isinstance(effect, fx.Send) and isinstance(effect.message, msg.Pace):
                told.append(effect.message)

    assert leader.role.view is not None
    for message in (leader.role.view, leader.plan):
        do(ev.Received(NodeId("dispatcher-0"), message))
    do(ev.PeerUp(NodeId("server-0")))
    commit = msg.StepCommit(revisions={}, present=b"", options=[{}])
    group = role.groups[0]
    for step in range(40):
        assert group.step == step
        if step == 17:
            do(ev.Received(NodeId("dispatcher-0"), msg.Freeze(group=0, step=0, until=18)))
        duration = 41 if group.coded else 33
        do(ev.StepClosed(0, commit, (), ()), (step * 1000 + duration * step) * MS)
        assert group.commit is not None
        assert group.commit.coded_until == (18 if step >= 17 else -1)
        for shard in leader.plan.shards:
            update = msg.Update(
                group=0, shard=shard.shard, step=step, version=step + 1, unchanged=True,
                coded_from=0, coded_until=20 if step >= 19 else -1,
            )  # fmt: skip
            do(ev.Received(NodeId("server-0"), update))
        assert group.coded == (step + 1 < 20)
    assert [(p.step, p.coded) for p in told if isinstance(p, msg.Pace)] == [(11, True), (25, False)]
    assert {len(p.times_ns) for p in told if isinstance(p, msg.Pace)} == {4}
