"""The virtual driver: a heap of events, virtual time, one seeded source of randomness.

It runs the very roles of a whole job, from joining to shutdown. Invariant: the same job gives the
same events in the same order, whatever the hash seed of the process; ties go by sequence number.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import msgspec
import xxhash

from paradis.core.benefit import BenefitRule
from paradis.core.worker_groups import WorkerGroup, encode
from paradis.ids import LEADER, NodeId, dispatcher_id, server_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.leader import LeaderConfig, LeaderRole
from paradis.roles.rack_agent import RackAgentRole
from paradis.roles.server import ServerRole
from paradis.settings import SharedSettings
from paradis.sim.agent import AgentNode
from paradis.sim.checkers import Checkers, Violation
from paradis.sim.job import MS, Fault, Job
from paradis.sim.mixed_checks import MixedCheckers
from paradis.sim.network import Network
from paradis.sim.nodes import LeaderNode, Parcel, ServerNode, SimNode, inbox
from paradis.sim.quorum_checks import QuorumCheckers
from paradis.sim.reading_checks import Reading
from paradis.sim.stale_checks import StaleCheckers
from paradis.sim.worker import SimWorker, register_worker
from paradis.sim.workloads import Reference, Workload
from paradis.wire import messages as msg

SETTINGS = SharedSettings(
    heartbeat_interval_s=1e5,
    failure_timeout_s=1e6,
    sync_timeout_s=1e5,
    join_timeout_s=1e5,
    shard_bytes=64 << 10,
    bucket_bytes=256,
    small_tensor_bytes=48,
    rack_aggregation="on",
    compression_elements_min=1,
)

BENEFIT = BenefitRule(settle_steps=0, window_steps=1)
"""A job has few steps."""

EVENTS_MAX = 200_000
"""A run with more events than this does not end."""

Thing = ev.Event | Callable[[], object]
Deliver = tuple[NodeId, msg.DataMessage, Parcel]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came of a run.

    Attributes:
        trace: xxh3 over a line per event.
        refused: why the job failed, where a script did what early updates do not allow.
        virtual_ns: virtual time at the end.
    """

    trace: str
    events: int
    virtual_ns: int
    steps: int
    lost: int
    repeated: int
    refused: str = ""


class Simulation:
    """One run of one job.

    Args:
        job: the scenario.
        show: called with a line per event, for people.
    """

    def __init__(self, job: Job, show: Callable[[str], None] | None = None) -> None:
        self.job = job
        self.source = random.Random(job.seed)
        self.network = Network(job, self.source)
        self.workload = Workload(job)
        self.reference = Reference()
        self.checkers = checkers_of(self)
        self.reading = Reading(self)
        self.now = 0
        self.events = 0
        self.failures: list[str] = []
        self.excuses: list[tuple[str, str]] = []
        self.nodes: dict[str, SimNode] = {}
        self._show = show
        self._hash = xxhash.xxh3_64()
        self._encode = msgspec.msgpack.Encoder().encode
        self._heap: list[tuple[int, int, SimNode, Thing]] = []
        self._sequence = 0
        self._build()

    # ------------------------------------------------------------------ set-up

    def _build(self) -> None:
        job = self.job
        compression = "none"
        if job.coded:
            compression = "onebit" if job.recompress else "int8"
        settings = replace(
            SETTINGS, mode=job.mode, staleness=job.staleness, staleness_scaling=job.scaling,
            backup_workers=job.backup, rack_codes="recompress" if job.recompress else "forward",
            early_update=job.early, compression=compression,
            compression_benefit="measured" if job.measured else "assumed",
        )  # fmt: skip
        if job.groups:
            groups = [
                WorkerGroup(
                    name=f"g{i}", workers=n, parameters=(f"g{i}.*",), mode=job.mode_of(i),
                    staleness=job.bounds[i], compression=compression,
                )
                for i, n in enumerate(job.groups)
            ]  # fmt: skip
            settings = replace(settings, worker_groups=encode(groups))
        if job.backup:
            settings = replace(settings, rack_aggregation="off")
        if job.hosts:  # a rack agent would take their place
            settings = replace(settings, local_reduction="on", rack_aggregation="off")
        config = LeaderConfig(
            job="sim", workers=job.workers, servers=job.servers, dispatchers=job.dispatchers,
            settings=settings, shared=asdict(settings), tree=job.tree, benefit=BENEFIT,
        )  # fmt: skip
        leader = LeaderNode(self, LEADER, LeaderRole(config))
        self.nodes["leader"] = leader
        quota = job.quota_bytes
        for i in range(job.dispatchers):
            agent = RackAgentRole(dispatcher_id(i), quota_bytes=quota, retry_ns=job.retry_ns)
            self.nodes[dispatcher_id(i)] = AgentNode(self, dispatcher_id(i), agent)
        for i in range(job.servers):
            server = ServerRole(
                server_id(i), quota_bytes=quota, warning_ns=10**15, timeout_ns=10**16,
                early_update=job.early,
            )  # fmt: skip
            self.nodes[server_id(i)] = ServerNode(self, server_id(i), server)
        for rank in range(job.workers):
            worker = SimWorker(self, rank)
            self.nodes[worker.node] = worker

    def _join(self) -> None:
        for name, node in self.nodes.items():
            if isinstance(node, SimWorker):
                register_worker(node)
            elif name != "leader":
                role = "server" if isinstance(node, ServerNode) else "dispatcher"
                rack = f"rack-{name.rpartition('-')[2]}" if role == "dispatcher" else ""
                self.tell(node, LEADER, msg.Join(
                    node=name, role=role, host="sim", pid=0, rack=rack, addresses=(f"sim://{name}",)
                ))  # fmt: skip

    # ------------------------------------------------------------------- sends

    def at(self, time_ns: int, node: SimNode, thing: Thing) -> None:
        """Let a node handle an event, or run a callable on it, at a time."""
        self._sequence += 1
        heapq.heappush(self._heap, (time_ns, self._sequence, node, thing))

    def tell(self, sender: SimNode, target: NodeId, message: msg.ControlMessage) -> None:
        """Send a control message: reliably and in order."""
        node = self.nodes[inbox(sender, target, message)]
        source = LEADER if isinstance(sender, LeaderNode) else sender.node
        (at,) = self.network.arrivals(source, target, self.now, data=False)
        self.at(at, node, ev.Received(source, message))

    def send(
        self, sender: SimNode, target: NodeId, message: msg.DataMessage, parcel: Parcel
    ) -> None:
        """Send a data message over the link, if there is one."""
        link = self.network.link(sender.node, target)
        if not link.up:
            return
        epoch, node = link.epoch, self.nodes[target]

        def deliver() -> None:
            if link.up and link.epoch == epoch:
                node.receive(sender.node, message, parcel)

        for at in self.network.arrivals(sender.node, target, self.now, data=True):
            self.at(at, node, deliver)

    # ------------------------------------------------------------------- links

    def connect(self, node: SimNode, addresses: Mapping[NodeId, object]) -> None:
        """Open links that are not open, when they may open."""
        for peer in addresses:
            link = self.network.link(node.node, peer)
            if link.up or link.opening or self.nodes[peer].ended:
                continue
            link.opening = True
            opens_at = max(self.now, link.closed_until_ns) + self.network.weather.latency_ns
            self.at(opens_at, node, self._opener(node, peer))

    def _opener(self, node: SimNode, peer: NodeId) -> Callable[[], None]:
        def open_link() -> None:
            link = self.network.link(node.node, peer)
            link.opening = False
            other = self.nodes[peer]
            if link.up or node.ended or other.ended:
                return
            link.up = True
            link.epoch += 1
            self.at(self.now, other, ev.PeerUp(node.node))
            self.handle(node, ev.PeerUp(peer))

        return open_link

    def cut(self, a: NodeId, b: NodeId, duration_ns: int, reason: str) -> None:
        """Break a link; both ends learn of it."""
        link = self.network.link(a, b)
        link.closed_until_ns = max(link.closed_until_ns, self.now + duration_ns)
        if link.up:
            link.up = False
            for one, other in ((a, b), (b, a)):
                self.at(self.now + 1000, self.nodes[one], ev.PeerLost(other, reason))

    def end(self, node: SimNode) -> None:
        """A node is gone, and its links with it."""
        node.ended = True
        for a, b in list(self.network.links):
            if node.node in (a, b):
                self.cut(a, b, 10**18, f"{node.node} has ended")

    def _happen(self, fault: Fault) -> None:
        node = self.nodes[fault.node]
        if fault.kind == "pause":
            node.paused_until_ns = self.now + fault.duration_ns
        elif fault.kind == "sever":
            if isinstance(node, SimWorker) and node.sharing is not None and not node.ended:
                self.handle(node, ev.HostGroupBroken("severed"))
        elif fault.kind == "cut":
            self.cut(node.node, NodeId(fault.peer), fault.duration_ns, "the cable was pulled")
        else:
            self.end(node)
            text = msg.NodeExited(node=fault.node, code=-9, text=f"{fault.node} was killed")
            self.at(
                self.now + 20 * MS, self.nodes["leader"], ev.Received(NodeId("agent-sim"), text)
            )

    # --------------------------------------------------------------------- run

    def run(self) -> Result:
        """Run the job to its end.

        Raises:
            Violation: an invariant is broken, or the job does not end in time.
        """
        leader = self.nodes["leader"]
        self._join()
        for fault in self.job.faults:
            self.at(fault.at_ns, leader, partial(self._happen, fault))
        limit_ns = self.job.weather.calm_ns + self.job.liveness_ns
        while not leader.ended:
            self._next(limit_ns)
            if self.failures:
                break
        refused = self.failures[0] if self.failures else ""
        if refused and not self._excused(refused):
            raise Violation(f"the job failed: {refused}")
        if not refused:
            self._drain()
            self.checkers.end()
        steps = len(self.reference.records)
        return Result(
            trace=self._hash.hexdigest(), events=self.events, virtual_ns=self.now, steps=steps,
            lost=self.network.lost, repeated=self.network.repeated, refused=refused,
        )  # fmt: skip

    def _excused(self, failure: str) -> bool:
        """Whether a script did, in the step and on the worker that are named, what it may not."""
        told = "StateError" in failure and "training.early_update: false" in failure
        return told and any(f"step {s} " in failure and w in failure for s, w in self.excuses)

    def _next(self, limit_ns: int) -> None:
        if not self._heap:
            raise Violation(f"Liveness: nothing is left to happen; {self.story()}")
        at, sequence, node, thing = heapq.heappop(self._heap)
        self.now = max(self.now, at)
        if at > limit_ns or self.events > EVENTS_MAX:
            raise Violation(f"Liveness: not done at {at / 1e9:.2f} s virtual; {self.story()}")
        if at < node.paused_until_ns:
            heapq.heappush(self._heap, (node.paused_until_ns, sequence, node, thing))
        elif not node.ended:
            self._do(node, thing)

    def _do(self, node: SimNode, thing: Thing) -> None:
        if not isinstance(thing, ev.Event):
            thing = thing()  # type: ignore[assignment]
        if isinstance(thing, ev.Event):
            self.handle(node, thing)

    def _drain(self) -> None:
        """Let running jobs on servers end, so that what they hold is released."""
        while self._heap:
            _, _, node, thing = heapq.heappop(self._heap)
            if isinstance(node, ServerNode | AgentNode) and not isinstance(thing, ev.Event):
                thing()

    def handle(self, node: SimNode, event: ev.Event) -> None:
        """Let a role handle an event, and carry out what it asks for."""
        if node.ended:
            return
        self.events += 1
        name = "leader" if isinstance(node, LeaderNode) else node.node
        kind = type(event.message if isinstance(event, ev.Received) else event).__name__
        self._hash.update(f"{self.now} {name} {kind} ".encode() + self._encode(event))
        if self._show is not None:
            self._show(f"{self.now / 1e6:10.3f} ms  {name:13} {describe(event)}")
        effects = node.role.handle(event, self.now)
        for effect in effects:
            node.carry(effect)
        message = event.message if isinstance(event, ev.Received) else None
        if isinstance(message, msg.View) and not self.reference.tree:
            self.reference.tree = message.tree
        if isinstance(event, ev.StepClosed) and isinstance(node, SimWorker):
            self._note_revisions(node, event, effects)
        self.checkers.after(node, event, effects)

    def _note_revisions(
        self, node: SimWorker, event: ev.StepClosed, effects: list[fx.Effect]
    ) -> None:
        """Remember which revisions the role committed."""
        commit = node.role.groups[event.group].commit
        assert node.closing is not None
        if commit is not None:
            node.closing.revisions = dict(commit.revisions)

    def story(self) -> str:
        """Return where everybody stands."""
        workers = [n.waiting_for() for n in self.nodes.values() if isinstance(n, SimWorker)]
        return "; ".join(workers)


def checkers_of(sim: Simulation) -> Checkers:
    """Return what must hold in a job."""
    if sim.job.modes:
        return MixedCheckers(sim)
    if sim.job.mode != "sync":
        return StaleCheckers(sim)
    return QuorumCheckers(sim) if sim.job.backup else Checkers(sim)


def describe(event: ev.Event) -> str:
    """Return an event as a line for people."""
    if not isinstance(event, ev.Received):
        return repr(event)
    message = event.message
    fields = ", ".join(
        f"{f}={v!r}"
        for f in message.__struct_fields__
        if (v := getattr(message, f)) not in (0, "", (), {}, [], False, None)
    )
    lease = f" lease {event.lease}" if event.lease else ""
    return f"<- {event.source} {type(message).__name__}({fields[:300]}){lease}"
