"""What a rack agent learns of how steps travel, where updates did not say it."""

from __future__ import annotations

from typing import Any

from paradis.ids import NodeId
from paradis.roles import events as ev
from paradis.roles.rack_agent import RackAgentRole
from paradis.wire import messages as msg

OPTIONS: list[msg.Options] = [{"lr": 0.1}]


class Agent:
    """Dispatcher 0, rack agent of two workers, with one shard of 16 bytes, or 5 as a code."""

    def __init__(self) -> None:
        self.role = RackAgentRole(NodeId("dispatcher-0"), quota_bytes=64, retry_ns=1000)
        self.got("dispatcher-0", msg.View(
            generation=1, members=(0, 1), left={}, tree=((0, 1),), addresses={"server-0": ("x",)},
            racks={"r": ("dispatcher-0", (0, 1))},
        ))  # fmt: skip
        self.got("dispatcher-0", msg.Plan(
            generation=1, group=0, part=0, first_parameter=0, optimizer="OneBitAdam", step=0,
            options=OPTIONS,
            parameters=(msg.ParameterSpec(name="w", shape=(4,), dtype="float32", options_group=0),),
            shards=(msg.ShardPlan(
                shard=0, server="server-0", dtype="float32", length=4, options_group=0, priority=0,
                segments=(msg.Segment(0, 0, 4, 0),), codec="onebit", code_bytes=5,
            ),),
        ))  # fmt: skip
        self.role.handle(ev.PeerUp(NodeId("server-0")), 0)

    def got(self, source: str, message: Any, lease: int = 0) -> None:
        self.role.handle(ev.Received(NodeId(source), message, lease), 0)
        self.role.check()

    def push(self, step: int, codec: int) -> None:
        for rank in (0, 1):
            push = msg.Push(generation=1, step=step, version=step, worker=rank, codec=codec)
            self.got(f"worker-{rank}", push, 10 * step + rank + 1)

    @property
    def size(self) -> int:
        return self.role._boxes["server-0", 0].size_of(0)


def test_what_a_push_says_of_its_step_counts_for_credit() -> None:
    """The update that should have said that codes begin did not say it."""
    agent = Agent()
    agent.push(0, codec=0)
    agent.role.handle(ev.Reduced(0, 1), 0)
    assert agent.size == 16
    agent.got("server-0", msg.Update(generation=1, version=1, revision=1), 5)
    assert agent.size == 16  # of the next step, as far as is known
    agent.push(1, codec=3)
    assert agent.size == 2 * 5
    assert agent.role.payload_bytes(0, codec=3, codes=1) == 5
    assert agent.role.payload_bytes(0, codec=0, codes=1) == 16
    assert agent.role.payload_bytes(0, codec=2, codes=1) == -1
