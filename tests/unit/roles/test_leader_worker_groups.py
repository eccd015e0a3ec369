"""The leader of a job with worker groups: who trains a plan, who reads it, and what must agree."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from paradis.core.worker_groups import WorkerGroup, encode
from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.leader import LeaderConfig, LeaderRole
from paradis.settings import SharedSettings
from paradis.wire import messages as msg

GROUPS = (
    WorkerGroup(name="body", workers=2, parameters=("body",), mode="sync", staleness=1,
                compression="bf16"),
    WorkerGroup(name="head", workers=1, parameters=("head",), mode="ssp", staleness=3,
                compression="none"),
)  # fmt: skip


class Leader:
    """A leader of two groups, on two racks and one host, that has started."""

    def __init__(self) -> None:
        settings = SharedSettings(
            worker_groups=encode(GROUPS), compression_elements_min=1, local_reduction="auto"
        )
        self.role = LeaderRole(LeaderConfig(
            job="j", workers=3, servers=1, dispatchers=2, settings=settings,
            shared=asdict(settings),
        ))  # fmt: skip
        for node, rack in (
            ("dispatcher-0", "r0"), ("dispatcher-1", "r1"), ("server-0", ""), ("worker-0", "r0"),
            ("worker-1", "r0"), ("worker-2", "r1"),
        ):  # fmt: skip
            role = node.partition("-")[0]
            addresses = () if role == "worker" else (f"sim://{node}",)
            self.got(node, msg.Join(node=node, role=role, host="h", pid=1, rack=rack,
                                    addresses=addresses))  # fmt: skip
        self.confirm(msg.ViewReady(generation=1))

    def confirm(self, ready: msg.ViewReady | msg.PlanReady) -> list[fx.Effect]:
        """Let servers and dispatchers confirm what is being published."""
        nodes = ("server-0", "dispatcher-0", "dispatcher-1")
        return [effect for node in nodes for effect in self.got(node, ready)]

    def got(self, source: str, message: Any) -> list[fx.Effect]:
        effects = self.role.handle(ev.Received(NodeId(source), message), 0)
        self.role.check()
        return effects

    def register(self, group: int, **of: dict[str, Any]) -> list[fx.Effect]:
        """Let all workers register a parameter; ``of`` says what is otherwise on one of them."""
        found: list[fx.Effect] = []
        for rank in range(3):
            fields: dict[str, Any] = {
                "shape": (8,), "optimizer": "SGD", "options": [{"lr": 0.5}], "group_of": 0,
                **of.get(f"on_{rank}", {}),
            }  # fmt: skip
            spec = msg.ParameterSpec(
                name=GROUPS[group].name, shape=fields["shape"], dtype="float32",
                options_group=fields["group_of"],
            )  # fmt: skip
            found += self.got(f"worker-{rank}", msg.Register(
                rank=rank, group=group, part=0, parameters=(spec,), optimizer=fields["optimizer"],
                options=fields["options"],
            ))  # fmt: skip
        return found


def sent(effects: list[fx.Effect], kind: type, to: str) -> list[Any]:
    return [
        e.message
        for e in effects
        if isinstance(e, fx.Send) and isinstance(e.message, kind) and e.target == to
    ]


def test_a_plan_says_who_trains_it_how_and_how_fresh_it_is_read() -> None:
    leader = Leader()
    (body,) = sent(leader.register(0), msg.Plan, "server-0")
    assert (body.ranks, body.reading, body.mode, body.shards[0].codec) == (
        (0, 1),
        1,
        "sync",
        "bf16",
    )
    told = leader.confirm(msg.PlanReady(generation=1, group=0, part=0))
    assert all(sent(told, msg.Plan, f"worker-{rank}") == [body] for rank in range(3))
    (head,) = sent(leader.register(1), msg.Plan, "server-0")
    assert (head.ranks, head.reading, head.mode, head.staleness) == ((2,), 3, "ssp", 3)
    assert head.shards[0].codec == "" and head.shards[0].shard > body.shards[0].shard


def test_nobody_sums_for_workers_that_train_different_parameters() -> None:
    view = Leader().role.view
    assert view is not None
    assert view.racks == {"r0": ("", (0, 1)), "r1": ("", (2,))} and view.host_groups == {}


def test_optimizers_must_agree_among_those_who_train() -> None:
    other = {"optimizer": "Adam", "options": [{"lr": 0.1}, {"lr": 0.2}], "group_of": 1}
    assert sent(Leader().register(0, on_2=other), msg.Plan, "server-0")
    (plan,) = sent(Leader().register(1, on_2={**other, "group_of": 0}), msg.Plan, "server-0")
    assert plan.optimizer == "Adam"
    (failed,) = sent(Leader().register(0, on_1=other), msg.Failed, "worker-0")
    assert "optimizer: worker 0 SGD, worker 1 Adam" in failed.text


@pytest.mark.parametrize("group", [0, 1])
def test_models_must_agree_among_all(group: int) -> None:
    (failed,) = sent(Leader().register(group, on_2={"shape": (9,)}), msg.Failed, "worker-1")
    assert (
        failed.error == "JoinRefused" and f"parameter '{GROUPS[group].name}' shape" in failed.text
    )
