"""The leader's duty of knowing who is there and of publishing it: names, racks, views and plans.

Invariant: the generation only grows, and a view or plan is in force on all servers and rack agents
before any worker hears of it; they are published one at a time, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paradis.core.benefit import BenefitRule
from paradis.core.host_groups import obstacle
from paradis.core.tree import Tree, default_tree, rack_group
from paradis.core.worker_groups import decode
from paradis.ids import NodeId, dispatcher_id, index_of, role_of, server_id, worker_id
from paradis.roles import effects as fx
from paradis.settings import SharedSettings
from paradis.wire import messages as msg


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderConfig:
    """What the job consists of.

    Attributes:
        servers: all of them; dedicated ones come first.
        colocated: the last ``workers`` of the servers stand beside worker 0, 1, ...
        tree: logical groups of ranks; empty: one group per rack.
        benefit: how the benefit of codes is measured, where the settings want it.
        first_generation: last generation and incarnation of an earlier life of this job's store.
    """

    job: str
    workers: int
    servers: int
    dispatchers: int
    settings: SharedSettings
    shared: dict[str, msg.Scalar]
    colocated: bool = False
    tree: Tree = ()
    benefit: BenefitRule = BenefitRule()
    first_generation: int = 0
    first_incarnation: int = 0

    @property
    def dedicated(self) -> int:
        """Servers that stand beside no worker."""
        return self.servers - self.workers if self.colocated else self.servers


@dataclass(slots=True)
class Member:
    """A node that joined."""

    join: msg.Join
    incarnation: int
    seen_ns: int
    gone: bool = False


class LeaderViews:
    """Members and publishing; `paradis.roles.leader.LeaderRole` is the whole role."""

    def __init__(self, config: LeaderConfig) -> None:
        self.config = config
        self.generation = config.first_generation
        self.incarnation = config.first_incarnation
        self.nodes: dict[NodeId, Member] = {}
        self.view: msg.View | None = None
        self._unready: dict[str, None] = {}
        self._queue: list[msg.View | msg.Plan] = []
        self._publishing: msg.View | msg.Plan | None = None
        self._left: dict[int, dict[int, int]] = {}
        self._host_groups: dict[str, tuple[int, ...]] = {}
        self.worker_groups = decode(config.settings.worker_groups, config.workers)
        self._over = ""
        self._out: list[fx.Effect] = []

    # ----------------------------------------------------------------- members

    def refusal(self, join: msg.Join) -> str:
        """Return why a node may not join, or an empty text."""
        node = NodeId(join.node)
        limits = {"worker": self.config.workers, "server": self.config.servers,
                  "dispatcher": self.config.dispatchers}  # fmt: skip
        if self._over:
            return f"{node} refused: the job is over ({self._over}); start a new one"
        limit = limits.get(join.role)
        if join.beside >= 0 and not self.config.colocated:
            return (f"a server beside worker {join.beside} refused: the job has no co-located "
                    "servers; leave --beside out, or give dispatcher 0 --colocated")  # fmt: skip
        if limit is not None and not 0 <= index_of(node) < limit:
            beside = join.role == "server" and self.config.colocated
            which = f", the last {self.config.workers} with --beside RANK each" if beside else ""
            return (f"{node} refused: the job has {limit} {join.role}s{which}; "
                    f"expected an index below {limit}; check RANK or --index")  # fmt: skip
        member = self.nodes.get(node)
        if member is not None and role_of(node) != "agent":
            state = "has ended" if member.gone else "is in the job"
            return (f"{node} refused: a node of this name {state} (host {member.join.host}, pid "
                    f"{member.join.pid}); give each node its own RANK or --index")  # fmt: skip
        return ""

    def _absent(self) -> list[NodeId]:
        wanted = [dispatcher_id(i) for i in range(self.config.dispatchers)]
        wanted += [server_id(i) for i in range(self.config.servers)]
        wanted += [worker_id(i) for i in range(self.config.workers)]
        return [n for n in wanted if not self._complete(n)]

    def _complete(self, node: NodeId) -> bool:
        member = self.nodes.get(node)
        return member is not None and (role_of(node) == "worker" or bool(member.join.addresses))

    def name_of(self, join: msg.Join) -> NodeId:
        """Return the name of a node that joins: what it asks for, or what is free for its kind."""
        if join.node:
            return NodeId(join.node)
        if join.beside >= 0:
            return server_id(self.config.dedicated + join.beside)
        name = self.free_name(join.role)
        if join.role == "server" and index_of(name) >= self.config.dedicated:
            return server_id(self.config.servers)  # what is free stands beside a worker: refused
        return name

    def free_name(self, role: str) -> NodeId:
        """Return the lowest free name of a role, for a node that asks for any."""
        index = 0
        while NodeId(f"{role}-{index}") in self.nodes:
            index += 1
        return NodeId(f"{role}-{index}")

    def _of_role(self, role: str) -> list[NodeId]:
        return sorted((n for n in self.nodes if role_of(n) == role), key=index_of)

    def _first_view(self) -> None:
        self._warn_capabilities()
        self._warn_apart()
        ranks = tuple(range(self.config.workers))
        by_rack: dict[str, list[int]] = {}
        for rank in ranks:
            by_rack.setdefault(self.nodes[worker_id(rank)].join.rack, []).append(rank)
        tree = self.config.tree or default_tree(ranks, by_rack if len(by_rack) > 1 else {})
        racks = self._racks(by_rack, tree)
        self._host_groups = self._make_host_groups(ranks, tree, racks)
        self._publish_view(ranks, tree, racks)

    def _racks(
        self, by_rack: dict[str, list[int]], tree: Tree
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """A rack agent is used where the rack has several workers and the job several racks."""
        mode = self.config.settings.rack_aggregation
        early = self.config.settings.early_update
        direct = early or self.config.settings.backup_workers > 0
        left_out: list[str] = []
        racks: dict[str, tuple[str, tuple[int, ...]]] = {}
        for rack, ranks in by_rack.items():
            agents = [n for n in self._of_role("dispatcher") if self.nodes[n].join.rack == rack]
            pays = mode == "on" or (mode == "auto" and len(ranks) > 1 and len(by_rack) > 1)
            usable = agents and pays and rack_group(tree, ranks) is not None
            usable = usable and len(self.worker_groups) < 2  # its workers may train others
            if usable and direct:
                left_out.append(rack)
            racks[rack] = (agents[0] if usable and not direct else "", tuple(ranks))
        if left_out:
            why = "early_update" if early else "backup_workers"
            text = f"with training.{why} no rack agent sums for {', '.join(left_out)}"
            self._announce("warning", f"{text}: workers push directly to the servers")
        return racks

    def _make_host_groups(
        self, ranks: Iterable[int], tree: Tree, racks: dict[str, tuple[str, tuple[int, ...]]]
    ) -> dict[str, tuple[int, ...]]:
        """The workers of a host reduce first where that is wished and leaves the bits as they are.

        A group's name holds a process number, so that no later one is taken for it.
        """
        settings = self.config.settings
        mode = settings.local_reduction
        several = len(self.worker_groups) > 1
        modes = {g.mode for g in self.worker_groups} or {settings.mode}
        direct = settings.early_update or settings.backup_workers > 0
        if several or modes != {"sync"} or direct or settings.overlap == "double_buffer":
            return {}  # `on` is refused with these
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.nodes[worker_id(rank)].join.host, []).append(rank)
        apart = any(self.nodes[n].join.host not in by_host for n in self._of_role("server"))
        if mode == "off" or (mode == "auto" and len(by_host) == 1 and not apart):
            return {}
        through_agent = {r for agent, of_rack in racks.values() if agent for r in of_rack}
        groups: dict[str, tuple[int, ...]] = {}
        for host, members in by_host.items():
            why = obstacle(tree, members)
            if not why and any(r in through_agent for r in members):
                why = "its gradients are summed by a rack agent"
            if not why:
                groups[f"{host}/{self.nodes[worker_id(members[0])].join.pid}"] = tuple(members)
            elif mode == "on":
                self._announce("warning", f"no local reduction on host {host}: {why}")
        return groups

    def _end_host_group(self, rank: int) -> bool:
        """The host group of this worker, if it has one, is no more; return whether it had."""
        kept = {n: ranks for n, ranks in self._host_groups.items() if rank not in ranks}
        had = len(kept) < len(self._host_groups)
        self._host_groups = kept
        return had

    def _warn_capabilities(self) -> None:
        seen: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for node in self._of_role("server"):
            key = tuple(sorted(self.nodes[node].join.capability.items()))
            seen.setdefault(key, []).append(node)
        if len(seen) > 1:
            parts = "; ".join(f"{', '.join(n)}: {dict(k)}" for k, n in seen.items())
            text = f"servers differ in CPU or torch, so bits may depend on placement: {parts}"
            self._announce("warning", text)

    def _warn_apart(self) -> None:
        """A co-located server on another host than its worker makes links busier, not lighter."""
        apart = []
        for rank in range(self.config.servers - self.config.dedicated):
            pair = (server_id(self.config.dedicated + rank), worker_id(rank))
            hosts = [self.nodes[node].join.host for node in pair]
            if hosts[0] != hosts[1]:
                apart.append(f"{pair[0]} on {hosts[0]}, {pair[1]} on {hosts[1]}")
        if apart:
            text = "; ".join(apart[:4])
            self._announce("warning", f"co-located servers are not beside their workers: {text}")

    # ------------------------------------------------------------- publishing

    def _publish_view(
        self,
        members: Iterable[int],
        tree: Tree,
        racks: dict[str, tuple[str, tuple[int, ...]]],
    ) -> None:
        addresses = {
            str(n): m.join.addresses
            for n, m in self.nodes.items()
            if m.join.addresses and role_of(n) in ("server", "dispatcher")
        }
        self.generation += 1
        self.view = msg.View(
            generation=self.generation, members=tuple(members), left=dict(self._left), tree=tree,
            addresses=addresses, racks=racks, host_groups=dict(self._host_groups),
        )  # fmt: skip
        self._publish(self.view)

    def _publish(self, message: msg.View | msg.Plan) -> None:
        """Servers and rack agents first; workers when all of those have confirmed."""
        self._queue.append(message)
        if self._publishing is None:
            self._publish_next()

    def _publish_next(self) -> None:
        if not self._queue:
            return
        self._publishing = self._queue.pop(0)
        self._out.append(fx.Persist({"generation": str(self.generation)}))
        first = self._of_role("server") + self._of_role("dispatcher")
        first = [n for n in first if not self.nodes[n].gone]
        self._unready = dict.fromkeys(first)
        for node in first:
            self._send(node, self._publishing)

    def _on_ready(self, source: NodeId, ready: msg.ViewReady | msg.PlanReady) -> None:
        now = self._publishing
        if now is None or ready.generation != now.generation:
            return
        if isinstance(ready, msg.PlanReady) != isinstance(now, msg.Plan):
            return
        self._confirmed(source)

    def _confirmed(self, source: NodeId) -> None:
        """A node has it in force, or is gone; after the last one the workers get it."""
        now = self._publishing
        self._unready.pop(source, None)
        if now is None or self._unready:
            return
        for node in self._of_role("worker"):
            if not self.nodes[node].gone:
                self._send(node, now)
        self._publishing = None
        self._publish_next()

    # ---------------------------------------------------------------- plumbing

    def _announce(self, level: str, text: str) -> None:
        for node in self._of_agents():
            self._send(node, msg.Announcement(level=level, text=text))
        if not self._of_agents():
            for node in self._of_role("worker")[:1]:
                self._send(node, msg.Announcement(level=level, text=text))

    def _send(self, target: str, message: msg.ControlMessage) -> None:
        self._out.append(fx.Send(NodeId(target), message))

    def _of_agents(self) -> list[NodeId]:
        return sorted(n for n in self.nodes if role_of(n) == "agent")

    def check(self) -> None:
        """Assert the invariants; called after every event in tests and simulation."""
        incarnations = [m.incarnation for m in self.nodes.values()]
        assert len(set(incarnations)) == len(incarnations)
        assert self.view is None or self.view.generation <= self.generation
