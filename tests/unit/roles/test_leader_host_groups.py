"""The leader names the host groups, and ends them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.leader import LeaderConfig, LeaderRole
from paradis.settings import SharedSettings
from paradis.wire import messages as msg

HOSTS = ("a", "a", "b", "b")
BY_HOST = ((0, 1), (2, 3))


class Leader:
    """A leader of four workers and one server."""

    def __init__(
        self, hosts: tuple[str, ...] = HOSTS, tree: tuple[tuple[int, ...], ...] = BY_HOST,
        server: str = "s", rack: str = "", **settings: Any,
    ) -> None:  # fmt: skip
        shared = SharedSettings(**settings)
        self.role = LeaderRole(LeaderConfig(
            job="j", workers=4, servers=1, dispatchers=1, settings=shared, shared=asdict(shared),
            tree=tree,
        ))  # fmt: skip
        self.told: list[str] = []
        self.rack = rack
        self._join("agent-h", "s")
        self._join("dispatcher-0", "s")
        self._join("server-0", server)
        for rank, host in enumerate(hosts):
            self._join(f"worker-{rank}", host, pid=10 + rank)
        self.confirm()

    def _join(self, node: str, host: str, pid: int = 1) -> None:
        role = node.partition("-")[0]
        addresses = (f"tcp://{node}",) if role in ("server", "dispatcher") else ()
        self.got(node, msg.Join(node=node, role=role, host=host, pid=pid, addresses=addresses,
                                rack=self.rack))  # fmt: skip

    def got(self, source: str, message: Any) -> None:
        for effect in self.role.handle(ev.Received(NodeId(source), message), 0):
            if isinstance(effect, fx.Send) and isinstance(effect.message, msg.Announcement):
                self.told.append(effect.message.text)
        self.role.check()

    def confirm(self) -> None:
        for node in ("server-0", "dispatcher-0"):
            self.got(node, msg.ViewReady(generation=self.role.generation))

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        assert self.role.view is not None
        return self.role.view.host_groups


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_one_group_for_each_host(mode: str) -> None:
    assert Leader(local_reduction=mode).groups == {"a/10": (0, 1), "b/12": (2, 3)}


def test_off_or_where_it_saves_nothing() -> None:
    one = {"hosts": ("a",) * 4, "tree": ((0, 1, 2, 3),)}
    assert Leader().groups == {}
    assert Leader(**one, server="a", local_reduction="auto").groups == {}
    assert Leader(**one, local_reduction="auto").groups == {"a/10": (0, 1, 2, 3)}
    assert Leader(**one, server="a", local_reduction="on").groups == {"a/10": (0, 1, 2, 3)}


def test_a_host_that_would_change_the_order_of_summing_does_not_and_is_told_why() -> None:
    leader = Leader(tree=((0, 1), (2,), (3,)), local_reduction="on")
    assert leader.groups == {"a/10": (0, 1)}
    assert leader.told == [
        "no local reduction on host b: its workers [2, 3] are not one group of the reduction tree, "
        "so that another order of summing would come of it; name [2, 3] as a group in "
        "topology.reduction_groups"
    ]
    assert Leader(tree=((0, 1, 2, 3),), local_reduction="auto").told == []


@pytest.mark.parametrize("agents", ["on", "off"])
def test_workers_of_a_rack_agent_do_not(agents: str) -> None:
    leader = Leader(hosts=("a",) * 4, tree=((0, 1, 2, 3),), rack="r",
                    local_reduction="on", rack_aggregation=agents)  # fmt: skip
    assert leader.groups == ({} if agents == "on" else {"a/10": (0, 1, 2, 3)})
    why = "no local reduction on host a: its gradients are summed by a rack agent"
    assert leader.told == ([why] if agents == "on" else [])


def test_a_worker_that_leaves_ends_its_group() -> None:
    leader = Leader(local_reduction="on")
    leader.got("worker-3", msg.Leave(node="worker-3", steps={}))
    assert leader.groups == {"a/10": (0, 1)}
    assert leader.role.generation == 2


def test_a_group_whose_workers_lose_each_other_is_ended_once() -> None:
    leader = Leader(local_reduction="on")
    leader.got("worker-1", msg.HostGroupLost(node="worker-1", text="lost"))
    leader.got("worker-0", msg.HostGroupLost(node="worker-0", text="lost, too"))
    assert leader.groups == {"b/12": (2, 3)}
    assert leader.told == ["lost"] and leader.role.generation == 2
