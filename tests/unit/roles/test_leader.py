"""The leader: joins and refusals, plans, early finish, failures, checkpoints."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.leader import LeaderConfig, LeaderRole
from paradis.settings import SharedSettings
from paradis.wire import messages as msg

SECOND = 1_000_000_000


class Leader:
    """A leader under test, with names for what is done to it."""

    def __init__(self, workers: int = 2, dispatchers: int = 1, **settings: Any) -> None:
        shared = SharedSettings(**settings)
        self.role = LeaderRole(LeaderConfig(
            job="j", workers=workers, servers=1, dispatchers=dispatchers, settings=shared,
            shared=asdict(shared),
        ))  # fmt: skip
        self.effects: list[fx.Effect] = []

    def do(self, event: ev.Event, now_ns: int = 0) -> list[fx.Effect]:
        self.effects = self.role.handle(event, now_ns)
        self.role.check()
        return self.effects

    def got(self, source: str, message: Any, now_ns: int = 0) -> list[fx.Effect]:
        return self.do(ev.Received(NodeId(source), message), now_ns)

    def sent(self, kind: type, to: str | None = None) -> list[Any]:
        return [
            e.message
            for e in self.effects
            if isinstance(e, fx.Send) and isinstance(e.message, kind) and to in (None, e.target)
        ]

    def join(self, node: str, **fields: Any) -> None:
        role = node.partition("-")[0]
        addresses = () if role in ("worker", "agent") else (f"tcp://{node}",)
        self.got(node, msg.Join(node=node, role=role, host="h", pid=1, addresses=addresses,
                                **fields))  # fmt: skip

    def start(self, racks: tuple[str, ...] = ("", "")) -> None:
        dispatchers = self.role.config.dispatchers
        for i in range(dispatchers):
            self.join(f"dispatcher-{i}", rack=f"r{i}")
        self.join("agent-h")
        for rank in range(self.role.config.workers):
            self.join(f"worker-{rank}", rack=racks[rank])
        self.join("server-0")
        self.confirm()

    def confirm(self) -> None:
        """Let servers and dispatchers confirm what is being published."""
        assert self.role.view is not None
        ready = msg.ViewReady(generation=self.role.generation)
        for i in range(self.role.config.dispatchers):
            self.got(f"dispatcher-{i}", ready)
        self.got("server-0", ready)

    def register(self, rank: int, **fields: Any) -> None:
        self.got(f"worker-{rank}", register(rank, **fields))


def register(rank: int, shape: tuple[int, ...] = (4,), step: int = 0) -> msg.Register:
    """Return a registration of one parameter."""
    spec = msg.ParameterSpec(name="w", shape=shape, dtype="float32", options_group=0)
    return msg.Register(rank=rank, group=0, part=0, parameters=(spec,), optimizer="SGD",
                        options=[{"lr": 0.1}], step=step)  # fmt: skip


def colocated(workers: int, dedicated: int, **settings: Any) -> Leader:
    """Return the leader of a job with a server beside each worker; nobody has joined."""
    leader = Leader(workers, **settings)
    config = replace(leader.role.config, servers=dedicated + workers, colocated=True)
    leader.role = LeaderRole(config)
    return leader


@pytest.fixture
def leader() -> Leader:
    """A job of two workers that has started."""
    started = Leader()
    started.start()
    return started


def test_view_goes_to_workers_when_all_others_have_confirmed() -> None:
    leader = Leader()
    for node in ("dispatcher-0", "worker-0", "worker-1"):
        leader.join(node)
        assert leader.sent(msg.Welcome, node)[0].world_size == 2
        assert leader.role.view is None
    leader.join("server-0")
    assert leader.sent(msg.View, "server-0") and not leader.sent(msg.View, "worker-0")
    ready = msg.ViewReady(generation=1)
    leader.got("server-0", ready)
    assert leader.sent(msg.View) == []
    leader.got("dispatcher-0", ready)
    assert leader.sent(msg.View, "worker-0") and leader.sent(msg.View, "worker-1")


def test_every_join_has_its_own_incarnation(leader: Leader) -> None:
    incarnations = [m.incarnation for m in leader.role.nodes.values()]
    assert len(set(incarnations)) == len(incarnations)


@pytest.mark.parametrize(
    ("node", "text"),
    [("worker-1", "is in the job"), ("worker-7", "expected an index below 2"),
     ("server-1", "the job has 1 servers")],
)  # fmt: skip
def test_join_is_refused_with_the_reason(leader: Leader, node: str, text: str) -> None:
    leader.join(node)
    (refused,) = leader.sent(msg.Refused)
    assert refused.error == "JoinRefused" and text in refused.text


def test_free_name_is_the_lowest(leader: Leader) -> None:
    assert leader.role.free_name("worker") == "worker-2"


def test_colocated_servers_are_named_after_their_workers() -> None:
    role = colocated(workers=2, dedicated=1).role
    request = msg.Join(node="", role="server", host="h", pid=1)

    def beside(rank: int) -> NodeId:
        return role.name_of(msgspec.structs.replace(request, beside=rank))

    assert [beside(0), beside(1)] == ["server-1", "server-2"]
    assert role.name_of(request) == "server-0"
    first = msgspec.structs.replace(request, node="server-0")
    role.handle(ev.Received(NodeId("server-0"), first), 0)
    refused = role.refusal(msgspec.structs.replace(request, node=role.name_of(request)))
    assert "the job has 3 servers, the last 2 with --beside RANK each" in refused


def test_a_server_beside_a_worker_needs_a_job_that_has_them(leader: Leader) -> None:
    request = msg.Join(node="server-1", role="server", host="h", pid=1, beside=0)
    assert "no co-located servers" in leader.role.refusal(request)


def test_a_plan_gives_colocated_servers_their_smaller_shares() -> None:
    leader = colocated(workers=4, dedicated=2, shard_bytes=64 << 10)
    for rank in range(4):
        leader.join(f"worker-{rank}")
    for i in range(6):
        leader.join(f"server-{i}")
    leader.join("dispatcher-0")
    for rank in range(4):
        leader.got(f"worker-{rank}", register(rank, shape=(1 << 22,)))
    (plan,) = leader.role.plans.values()
    held = [sum(s.length for s in plan.shards if s.server == f"server-{i}") for i in range(6)]
    shares = [each / (1 << 22) for each in held]
    assert shares == pytest.approx([0.3, 0.3, 0.1, 0.1, 0.1, 0.1], abs=0.02)


def test_a_colocated_server_away_from_its_worker_is_announced() -> None:
    leader = colocated(workers=2, dedicated=0)
    leader.join("dispatcher-0")
    leader.join("agent-h")
    leader.join("server-0")
    leader.join("server-1")
    leader.join("worker-0")
    leader.got("worker-1", msg.Join(node="worker-1", role="worker", host="far", pid=1))
    (announced,) = leader.sent(msg.Announcement, "agent-h")
    assert "not beside their workers: server-1 on h, worker-1 on far" in announced.text


def test_join_timeout_names_who_is_missing() -> None:
    leader = Leader()
    leader.join("worker-0")
    leader.do(ev.TimerFired("join"), 121 * SECOND)
    (failed,) = leader.sent(msg.Failed, "worker-0")
    assert "dispatcher-0, server-0, worker-1" in failed.text


def test_plan_is_made_when_all_registered_the_same(leader: Leader) -> None:
    leader.register(0)
    assert leader.sent(msg.Plan) == []
    leader.register(1)
    (plan,) = leader.sent(msg.Plan, "server-0")
    assert [s.server for s in plan.shards] == ["server-0"]
    ready = msg.PlanReady(generation=1, group=0, part=0)
    leader.got("server-0", ready)
    leader.got("dispatcher-0", ready)
    assert leader.sent(msg.Plan, "worker-0") == [plan]


def test_different_models_fail_the_job_with_the_difference(leader: Leader) -> None:
    leader.register(0)
    leader.register(1, shape=(5,))
    (failed,) = leader.sent(msg.Failed, "worker-1")
    assert failed.error == "JoinRefused"
    assert "'w' shape: worker 0 (4,), worker 1 (5,)" in failed.text


def test_registrations_at_different_steps_fail_the_job(leader: Leader) -> None:
    leader.register(0)
    leader.register(1, step=3)
    assert "different steps: {0: 0, 1: 3}" in leader.sent(msg.Failed)[0].text


def test_register_deadline_names_who_did_not_call(leader: Leader) -> None:
    leader.register(0)
    leader.do(ev.TimerFired("register:0:0"), 200 * SECOND)
    assert "called on workers [0] but not on [1]" in leader.sent(msg.Failed)[0].text


def test_early_finish_publishes_a_view_without_the_worker(leader: Leader) -> None:
    leader.got("worker-1", msg.Leave(node="worker-1", steps={0: 5}))
    (view,) = leader.sent(msg.View, "server-0")
    assert (view.members, view.left, view.generation) == ((0,), {1: {0: 5}}, 2)
    assert not leader.sent(msg.Announcement, "agent-h"), "perhaps nobody makes another step"


def test_an_announcement_that_several_servers_make_is_passed_on_once(leader: Leader) -> None:
    leader.got("server-0", msg.Announcement(level="warning", text="worker 1 finished early"))
    leader.got("server-0", msg.Announcement(level="warning", text="something else"))
    leader.got("server-0", msg.Announcement(level="warning", text="worker 1 finished early"))
    assert not leader.sent(msg.Announcement, "agent-h")


def test_early_finish_completes_a_registration_that_waited_for_it(leader: Leader) -> None:
    leader.register(0)
    leader.got("worker-1", msg.Leave(node="worker-1", steps={}))
    leader.confirm()
    assert leader.sent(msg.Plan, "server-0")


def test_job_ends_when_all_have_left(leader: Leader) -> None:
    for rank in (0, 1):
        leader.got(f"worker-{rank}", msg.Leave(node=f"worker-{rank}", steps={0: 5}))
    assert leader.sent(msg.Shutdown, "server-0")
    leader.got("server-0", msg.Report(node="server-0", counters={"updates": 3.0}))
    effects = leader.do(ev.TimerFired("summary"))
    assert leader.sent(msg.Summary, "agent-h")[0].nodes == {"server-0": {"updates": 3.0}}
    assert any(isinstance(e, fx.End) for e in effects)


def test_a_killed_worker_fails_the_job(leader: Leader) -> None:
    leader.got("agent-h", msg.NodeExited(node="worker-1", code=-9))
    assert "worker-1 ended with status -9" in leader.sent(msg.Failed, "worker-0")[0].text
    leader.join("worker-0")
    assert "the job is over" in leader.sent(msg.Refused)[0].text


def test_a_closed_stream_fails_the_job_unless_its_end_is_explained(leader: Leader) -> None:
    effects = leader.do(ev.PeerLost(NodeId("server-0"), "reset", control=True), SECOND)
    assert effects == [fx.SetTimer("lost:server-0", 3 * SECOND)]
    leader.do(ev.TimerFired("lost:server-0"), 3 * SECOND)
    assert "closed its control stream" in leader.sent(msg.Failed)[0].text.replace("\n", " ")


def test_silence_fails_the_job_and_beats_prevent_it(leader: Leader) -> None:
    leader.got("agent-h", msg.Beat(nodes=("worker-0", "worker-1", "server-0")), 4 * SECOND)
    leader.do(ev.TimerFired("alive"), 6 * SECOND)
    assert leader.sent(msg.Failed) == []
    leader.do(ev.TimerFired("alive"), 10 * SECOND)
    assert "has not been heard of for 6.0 s (limit 5 s)" in leader.sent(msg.Failed)[0].text


def test_a_lost_rack_agent_is_left_out_and_the_job_goes_on() -> None:
    leader = Leader(workers=2, dispatchers=2, rack_aggregation="on")
    leader.start(racks=("r0", "r1"))
    assert leader.role.view is not None
    assert leader.role.view.racks["r1"] == ("dispatcher-1", (1,))
    leader.got("agent-h", msg.NodeExited(node="dispatcher-1", code=-9))
    (view,) = leader.sent(msg.View, "server-0")
    assert view.racks["r1"] == ("", (1,)) and leader.sent(msg.Failed) == []
    assert leader.sent(msg.View, "dispatcher-1") == []


@pytest.mark.parametrize(
    ("racks", "agents"),
    [
        (("r0", "r0", "r0"), {"r0": ""}),  # one rack: its agent would only be a detour
        (("r0", "r1", "r2"), {"r0": "", "r1": "", "r2": ""}),  # nothing to sum in any rack
        (("r0", "r1", "r1"), {"r0": "", "r1": "dispatcher-1"}),
        (("r0", "r2", "r2"), {"r0": "", "r2": ""}),  # no dispatcher there
    ],
)
def test_a_rack_agent_is_used_where_it_saves_traffic(
    racks: tuple[str, ...], agents: dict[str, str]
) -> None:
    leader = Leader(workers=3, dispatchers=2)
    leader.start(racks=racks)
    assert leader.role.view is not None
    assert {rack: agent for rack, (agent, _) in leader.role.view.racks.items()} == agents


def test_rack_aggregation_can_be_turned_off() -> None:
    leader = Leader(workers=4, dispatchers=2, rack_aggregation="off")
    leader.start(racks=("r0", "r0", "r1", "r1"))
    assert leader.role.view is not None
    assert [agent for agent, _ in leader.role.view.racks.values()] == ["", ""]


def test_checkpoint_is_complete_when_every_owner_has_written(leader: Leader) -> None:
    leader.register(0)
    leader.register(1)
    info = msg.CheckpointInfo(checkpoint="c", group=0, step=3, options=[], extra={})
    saved = msg.Saved(node="server-0", checkpoint="c", group=0, step=3, pieces=(), scalars={})
    leader.got("server-0", saved)  # other stream: may come first
    (manifest,) = leader.got("worker-0", info)
    assert isinstance(manifest, fx.WriteManifest) and manifest.parts == (saved,)
    leader.do(ev.ManifestWritten("c", "/c"))
    (done,) = leader.sent(msg.CheckpointDone, "worker-0")
    assert (done.path, done.step, done.error) == ("/c", 3, "")


def test_failed_part_fails_the_checkpoint_and_not_the_job(leader: Leader) -> None:
    info = msg.CheckpointInfo(checkpoint="c", group=0, step=3, options=[], extra={})
    leader.got("worker-0", info)
    leader.got("server-0", msg.SaveFailed(node="server-0", checkpoint="c", text="disk full"))
    assert leader.sent(msg.CheckpointDone, "worker-0")[0].error == "server-0: disk full"
    leader.got("server-0", msg.SaveFailed(node="server-0", checkpoint="c", text="again"))
    assert leader.effects == []
