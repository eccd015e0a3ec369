"""The leader's role: membership, generations, plans, checkpoints. Not on the path of a step.

Invariants:
* the generation only grows, and a view or plan is in force on all servers and rack agents before
  any worker hears of it;
* an incarnation is never used twice;
* a manifest is written only when all parts are (`paradis.roles.saves`).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from paradis.core.colocation import EPSILON_MAX
from paradis.core.registration import RegisteredParameter, Registration, compare
from paradis.core.worker_groups import ranks_of
from paradis.ids import NodeId, dispatcher_id, index_of, role_of, worker_id
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.leader_codes import LeaderCodes
from paradis.roles.leader_views import LeaderConfig, Member
from paradis.roles.planning import make_plan, weigh_servers
from paradis.roles.saves import Saves
from paradis.settings import SharedSettings
from paradis.wire import messages as msg

__all__ = ["LeaderConfig", "LeaderRole"]


_SECOND_NS = 1_000_000_000
_SAVES_NS = 70 * _SECOND_NS
"""How long the end of a job waits for checkpoints that are being written."""

_SAID_MAX = 64
"""Announcements remembered so that they are not repeated."""


class LeaderRole(LeaderCodes):
    """Pure state machine of the leading dispatcher's control duty."""

    def __init__(self, config: LeaderConfig) -> None:
        super().__init__(config)
        self.plans: dict[tuple[int, int], msg.Plan] = {}
        self._registered: dict[tuple[int, int], dict[int, msg.Register]] = {}
        self._done: dict[int, None] = {}
        self._saves = Saves()
        self._reports: dict[str, dict[str, float]] = {}
        self._said: dict[str, None] = {}
        self._saves_until_ns = 0
        self._next_shard = 0

    def handle(self, event: ev.Event, now_ns: int) -> list[fx.Effect]:
        """Take one event, return what to do about it."""
        self._out = []
        match event:
            case ev.Received():
                self._on_message(event.source, event.message, now_ns)
            case ev.PeerLost():
                self._on_stream_lost(event.peer, event.reason, now_ns)
            case ev.TimerFired():
                self._on_timer(event.name, now_ns)
            case ev.ManifestWritten():
                self._checkpoint_done(self._saves.close(event.checkpoint, event.path, event.error))
            case ev.EffectFailed():
                self._fail(event.error, f"dispatcher-0: {event.what}: {event.text}", now_ns)
        return self._out

    def _on_message(self, source: NodeId, message: object, now_ns: int) -> None:
        member = self.nodes.get(source)
        if member is not None:
            member.seen_ns = now_ns
        match message:
            case msg.Join():
                self._on_join(source, message, now_ns)
            case msg.Listening():
                self._on_listening(source, message.addresses, now_ns)
            case msg.Register():
                self._on_register(source, message, now_ns)
            case msg.ViewReady() | msg.PlanReady():
                self._on_ready(source, message)
            case msg.Beat():
                for node in message.nodes:
                    if NodeId(node) in self.nodes:
                        self.nodes[NodeId(node)].seen_ns = now_ns
            case msg.Leave():
                self._on_leave(NodeId(message.node), message.steps, now_ns)
            case msg.HostGroupLost():
                self._on_host_group_lost(message)
            case msg.NodeExited():
                self._on_exited(message, now_ns)
            case msg.Failed():
                self._fail(message.error, message.text, now_ns)
            case msg.Announcement():
                if message.text not in self._said:  # every server may have the same to say
                    self._said = {
                        **dict.fromkeys(list(self._said)[-_SAID_MAX:]),
                        message.text: None,
                    }
                    self._announce(message.level, message.text)
            case msg.Variance():
                self._on_variance(message)
            case msg.Pace():
                self._on_pace(message)
            case msg.Report():
                self._reports[message.node] = message.counters
            case msg.MemoriesCopied():
                self._saves.copied(message)
                self._send(worker_id(0), message)
            case msg.CheckpointInfo() | msg.Saved() | msg.SaveFailed():
                self._on_checkpoint(message)

    # ------------------------------------------------------------------- joins

    def _on_join(self, source: NodeId, join: msg.Join, now_ns: int) -> None:
        refusal = self.refusal(join)
        if refusal:
            self._send(source, msg.Refused(error="JoinRefused", text=refusal))
            return
        if not self.nodes:
            deadline = now_ns + int(self.config.settings.join_timeout_s * 1e9)
            self._out.append(fx.SetTimer("join", deadline))
            self._out.append(fx.SetTimer("alive", now_ns + self._beat_ns))
        self.incarnation += 1
        self.nodes[source] = Member(join, self.incarnation, now_ns)
        self._out.append(fx.Persist({"incarnation": str(self.incarnation)}))
        self._send(source, msg.Welcome(
            node=source, incarnation=self.incarnation, generation=self.generation,
            job=self.config.job, world_size=self.config.workers, settings=self.config.shared,
        ))  # fmt: skip
        self._check_never_joined(now_ns)
        self._maybe_first_view(now_ns)

    def _check_never_joined(self, now_ns: int) -> None:
        """A worker whose process ended without joining cannot be waited for."""
        absent = [r for r in self._done if worker_id(r) not in self.nodes]
        waiting = [n for n in self._of_role("worker") if not self.nodes[n].gone]
        if absent and waiting and self.view is None:
            self._fail("JobFailed", f"worker {absent[0]} ended before it called paradis.wrap, for "
                       f"which {', '.join(waiting[:8])} waits; call it on every worker",
                       now_ns)  # fmt: skip

    def _on_listening(self, source: NodeId, addresses: tuple[str, ...], now_ns: int) -> None:
        member = self.nodes.get(source)
        if member is not None:
            member.join = msgspec.structs.replace(member.join, addresses=addresses)
            self._maybe_first_view(now_ns)

    def _maybe_first_view(self, now_ns: int) -> None:
        if not self._absent() and self.view is None:
            self._first_view()
            for key in list(self._registered):
                self._plan_if_complete(key, now_ns)

    @property
    def _beat_ns(self) -> int:
        return int(self.config.settings.heartbeat_interval_s * 1e9)

    def _on_register(self, source: NodeId, register: msg.Register, now_ns: int) -> None:
        key = (register.group, register.part)
        if key in self.plans:
            return
        table = self._registered.setdefault(key, {})
        table[register.rank] = register
        if len(table) == 1:
            deadline = now_ns + int(self.config.settings.join_timeout_s * 1e9)
            self._out.append(fx.SetTimer(f"register:{key[0]}:{key[1]}", deadline))
        self._plan_if_complete(key, now_ns)

    def _plan_if_complete(self, key: tuple[int, int], now_ns: int) -> None:
        """Make the plan when all members have registered the same."""
        table = self._registered[key]
        wanted = self.view.members if self.view else tuple(range(self.config.workers))
        if key in self.plans or any(r not in table for r in wanted):
            return
        steps = {r: table[r].step for r in sorted(table)}
        if len(set(steps.values())) > 1:
            self._fail("WorkersDisagree", f"wrap number {self._call(key[0])} (part {key[1]}) was "
                       f"registered at different steps: {steps}; register on every worker at the "
                       "same step",
                       now_ns)  # fmt: skip
            return
        ranks = self._trainers(key[0])
        trained = [_registration(table[r]) for r in sorted(table) if r in ranks]
        read = [_registration(table[r]) for r in sorted(table) if r not in ranks]
        if not trained:
            return  # all who would train it have left; who reads it is told when the time is over
        refusal = compare(trained, read)
        if refusal:
            self._fail("JoinRefused", refusal, now_ns)
            return
        if self.view is not None:  # else the first view comes back to it: servers may be missing
            self._plan(table[min(r for r in table if r in ranks)])

    def _trainers(self, group: int) -> tuple[int, ...]:
        """Return the ranks that train what a ``wrap`` call registers under this number."""
        groups = self.worker_groups
        return (
            ranks_of(groups, group % len(groups)) if groups else tuple(range(self.config.workers))
        )

    def _plan(self, register: msg.Register) -> None:
        key = (register.group, register.part)
        servers = [str(n) for n in self._of_role("server")]
        weights = weigh_servers(servers, self.config.servers - self.config.dedicated)
        earlier = [p for (g, _), p in self.plans.items() if g == register.group]
        first = sum(len(p.parameters) for p in earlier)
        placed = [s for p in self.plans.values() for s in p.shards]
        plan = make_plan(
            register, self._placement_settings(register.group), weights,
            generation=self.generation, first_parameter=first, first_shard=self._next_shard,
            placed=placed,
        )  # fmt: skip  # a plan adds shards to a view: frames in flight stay valid
        plan = self._with_trial(self._of_worker_group(plan), register)
        self._next_shard += len(plan.shards)
        self.plans[key] = plan
        self._publish(plan)
        self._watch_variance(plan)

    def _call(self, group: int) -> int:
        """Return the number of the ``wrap`` call that a group is of."""
        return group // max(1, len(self.worker_groups))

    def _of_worker_group(self, plan: msg.Plan) -> msg.Plan:
        """Say who trains what is planned, and how fresh everybody else reads it."""
        groups = self.worker_groups
        if len(groups) < 2:
            return plan
        bound = groups[plan.group % len(groups)].staleness
        return msgspec.structs.replace(plan, ranks=self._trainers(plan.group), reading=bound)

    def _placement_settings(self, group: int) -> SharedSettings:
        """Unequal shares are there to even out links, so loads keep closer to them."""
        settings = self.config.settings
        if self.worker_groups:
            own = self.worker_groups[group % len(self.worker_groups)]
            settings = replace(
                settings, mode=own.mode, staleness=own.staleness, compression=own.compression
            )
        if not self.config.colocated:
            return settings
        return replace(settings, load_epsilon=min(settings.load_epsilon, EPSILON_MAX))

    # -------------------------------------------------------------------- ends

    def _on_leave(self, node: NodeId, steps: dict[int, int], now_ns: int) -> None:
        if role_of(node) != "worker" or self._over:
            return
        rank = index_of(node)
        if rank in self._done:
            return
        self._done[rank] = None
        if node in self.nodes:
            self.nodes[node].gone = True
        if len(self._done) == self.config.workers:
            self._finish("all workers have finished", now_ns)
            return
        self._left[rank] = steps
        self._save_without(rank)
        if self.view is None:
            self._check_never_joined(now_ns)
            return
        self._go_on_without(rank, now_ns)

    def _save_without(self, rank: int) -> None:
        told, ready = self._saves.left(rank)
        self._out.extend(self._with_benefit(manifest) for manifest in ready)
        for message in told:
            self._send(worker_id(0), message)

    def _go_on_without(self, rank: int, now_ns: int) -> None:
        """The servers say so, or fail the job, if the others really make another step."""
        assert self.view is not None
        members = [r for r in self.view.members if r != rank]
        self._end_host_group(rank)
        self._publish_view(members, self.view.tree, self.view.racks)
        for key in list(self._registered):
            self._plan_if_complete(key, now_ns)
        self._weigh_all()

    def _on_host_group_lost(self, lost: msg.HostGroupLost) -> None:
        """The workers of a host push directly from now on."""
        if self.view is None or self._over or not self._end_host_group(index_of(NodeId(lost.node))):
            return
        self._announce("warning", lost.text)
        self._publish_view(self.view.members, self.view.tree, self.view.racks)

    def _lose_agent(self, node: NodeId, text: str) -> None:
        """A dispatcher that is not the leader is gone: its rack's workers push directly."""
        if self.nodes[node].gone and node not in self._unready:
            return
        self.nodes[node].gone = True
        self._announce("warning", f"{text}; workers of its rack push directly to the servers")
        self._confirmed(node)
        if self.view is not None:
            racks = {
                rack: ("" if agent == node else agent, ranks)
                for rack, (agent, ranks) in self.view.racks.items()
            }
            if racks != self.view.racks:
                self._publish_view(self.view.members, self.view.tree, racks)

    def _may_go(self, node: NodeId) -> bool:
        """Whether the job goes on without this node: a rack agent that is not the leader."""
        known = node in self.nodes and self.view is not None and not self._over
        return known and role_of(node) == "dispatcher" and node != dispatcher_id(0)

    def _on_exited(self, exited: msg.NodeExited, now_ns: int) -> None:
        node = NodeId(exited.node)
        if self._may_go(node):
            self._lose_agent(node, exited.text or f"{node} ended with status {exited.code}")
            return
        if node in self.nodes:
            self.nodes[node].gone = True
        if exited.code == 0 and role_of(node) == "worker":
            self._on_leave(node, {g: -1 for g, _ in self.plans}, now_ns)
        elif not self._over and (exited.code != 0 or role_of(node) != "worker"):
            self._fail("JobFailed", exited.text or f"{node} ended with status {exited.code}",
                       now_ns)  # fmt: skip

    def _on_stream_lost(self, node: NodeId, reason: str, now_ns: int) -> None:
        member = self.nodes.get(node)
        if member is None or member.gone or self._over:
            return
        if role_of(node) == "agent":
            return
        # Its host agent may still say how it ended.
        self._out.append(fx.SetTimer(f"lost:{node}", now_ns + 2_000_000_000))

    def _on_timer(self, name: str, now_ns: int) -> None:
        kind, _, rest = name.partition(":")
        if self._over and kind not in ("summary", "saved"):
            return
        if kind == "join" and self.view is None:
            absent = ", ".join(self._absent()[:8])
            waited = self.config.settings.join_timeout_s
            self._fail("DeadlineExceeded", f"the job did not start: after {waited:.0f} s still "
                       f"missing: {absent}; look at their logs, or raise "
                       "communication.join_timeout", now_ns)  # fmt: skip
        elif kind == "register":
            self._on_register_deadline(rest, now_ns)
        elif kind == "lost" and not self.nodes[NodeId(rest)].gone and self._may_go(NodeId(rest)):
            self._lose_agent(NodeId(rest), f"{rest} closed its control stream")
        elif kind == "lost" and not self.nodes[NodeId(rest)].gone:
            host = self.nodes[NodeId(rest)].join.host
            self._fail("JobFailed", f"{rest} on host {host} closed its control "
                       "stream without leaving; look at its log", now_ns)  # fmt: skip
        elif kind == "alive":
            self._check_alive(now_ns)
        elif kind == "summary":
            self._summary()
        elif kind == "saved":
            self._end_when_saved(now_ns)

    def _on_register_deadline(self, rest: str, now_ns: int) -> None:
        group, part = (int(x) for x in rest.split(":"))
        if (group, part) in self.plans:
            return
        have = sorted(self._registered.get((group, part), {}))
        missing = [r for r in range(self.config.workers) if r not in have and r not in self._done]
        self._fail("DeadlineExceeded", f"wrap number {self._call(group)} (part {part}) was "
                   f"called on workers {have} but not on {missing}; call paradis.wrap on every "
                   "worker",
                   now_ns)  # fmt: skip

    def _check_alive(self, now_ns: int) -> None:
        limit_ns = int(self.config.settings.failure_timeout_s * 1e9)
        for node, member in self.nodes.items():
            silent_ns = now_ns - member.seen_ns
            if role_of(node) == "agent" or member.gone or node == dispatcher_id(0):
                continue
            if silent_ns > limit_ns and self._may_go(node):
                self._lose_agent(node, f"{node} has not been heard of for {silent_ns / 1e9:.1f} s")
                break
            if silent_ns > limit_ns:
                self._fail("JobFailed", f"{node} on host {member.join.host} has not been heard of "
                           f"for {silent_ns / 1e9:.1f} s (limit {limit_ns / 1e9:.0f} s)",
                           now_ns)  # fmt: skip
                return
        self._out.append(fx.SetTimer("alive", now_ns + self._beat_ns))

    def _fail(self, error: str, text: str, now_ns: int) -> None:
        if self._over:
            return
        self._over = text
        for node, member in self.nodes.items():
            if not member.gone:
                self._send(node, msg.Failed(error=error, text=text))
        self._out.append(fx.SetTimer("summary", now_ns + 1_000_000_000))

    def _finish(self, reason: str, now_ns: int) -> None:
        self._over = reason
        self._saves_until_ns = now_ns + _SAVES_NS
        self._end_when_saved(now_ns)

    def _end_when_saved(self, now_ns: int) -> None:
        """Send servers and dispatchers home, unless a checkpoint is still being written."""
        if not self._saves_until_ns:
            return
        if self._saves and now_ns < self._saves_until_ns:
            self._out.append(fx.SetTimer("saved", now_ns + _SECOND_NS))
            return
        self._saves_until_ns = 0
        for node, member in self.nodes.items():
            if role_of(node) in ("server", "dispatcher") and not member.gone:
                self._send(node, msg.Shutdown(reason=self._over))
        self._out.append(fx.SetTimer("summary", now_ns + _SECOND_NS))

    def _summary(self) -> None:
        for node in self._of_agents():
            self._send(node, msg.Summary(nodes=dict(self._reports)))
            self._send(node, msg.Shutdown(reason=self._over))
        self._out.append(fx.End(self._over))

    # ------------------------------------------------------------- checkpoints

    def _on_checkpoint(self, message: msg.CheckpointInfo | msg.Saved | msg.SaveFailed) -> None:
        plans = tuple(p for _, p in sorted(self.plans.items()))
        copied = self._saves.implied(message) if isinstance(message, msg.Saved) else None
        if copied is not None:
            self._send(worker_id(0), copied)
        answer = self._saves.note(message, plans)
        if isinstance(answer, fx.WriteManifest):
            self._out.append(self._with_benefit(answer))
        else:
            self._checkpoint_done(answer)
        if isinstance(message, msg.CheckpointInfo):
            for node, told in self._saves.ask_workers(message):
                self._send(node, told)

    def _checkpoint_done(self, done: msg.CheckpointDone | None) -> None:
        if done is None:
            return
        told = self._of_role("worker")[:1]
        if self._saves.whole(done, max(1, len(self.worker_groups))):
            told += self._of_agents()
        for node in told:
            if not self.nodes[node].gone:
                self._send(node, done)
        if self._saves_until_ns:
            self._out.append(fx.SetTimer("saved", 0))


def _registration(register: msg.Register) -> Registration:
    parameters = tuple(
        RegisteredParameter(p.name, p.shape, p.dtype, p.options_group, p.trainable)
        for p in register.parameters
    )
    return Registration(
        register.rank, parameters, register.optimizer, register.options, register.compression
    )
