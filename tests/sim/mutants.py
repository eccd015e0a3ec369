"""Planted mistakes, by name. Each must be caught by the simulator, the replay, or the layer test.

A mutant is a patch of the roles or of core; ``seeds`` are where it shows first (found by running
seeds from 0 up), so that the test is quick; ``by`` names the check: a word of its message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from paradis.core.aggregation import Added, Collection, Contribution
from paradis.core.flow import Ledger, Outbox
from paradis.roles import effects as fx
from paradis.roles import receiver, server, worker_pushes, worker_values
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.rack_agent import RackAgentRole
from paradis.roles.receiver import Receiver
from paradis.roles.server import ServerRole
from paradis.roles.server_early import ServerEarly
from paradis.roles.worker import WorkerRole
from paradis.roles.worker_early import WorkerEarly
from paradis.roles.worker_sharing import WorkerSharing
from paradis.sim.driver import Simulation
from paradis.sim.job import MS
from paradis.sim.scenario import scenario
from paradis.sim.worker import SimWorker
from paradis.wire import messages as msg

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """One planted mistake."""

    name: str
    plant: Callable[[Patch], None]
    by: str
    workload: str = "floats"
    seeds: tuple[int, ...] = ()


def run(seed: int, workload: str) -> str:
    """Return the trace of a seed; less patient than the real runs, for mutants hang."""
    return Simulation(replace(scenario(seed, workload), liveness_ns=6500 * MS)).run().trace


# --------------------------------------------------------------------- sums


def arrival_order(patch: Patch) -> None:
    """The sum is made in the order of arrival."""
    real = Collection.plan_sum

    def plan_sum(self: Collection, tree: Any, absent: Any) -> Any:
        held = list(self.held)
        planned = real(self, tree, absent)
        return None if planned is None else (tuple(c.lease for c in held),)

    patch.setattr(Collection, "plan_sum", plan_sum)


def tree_by_placement(patch: Patch) -> None:
    """The server shapes the tree by what arrives: all direct pushes in one flat group."""
    patch.setattr(receiver, "restrict", lambda tree, members: (tuple(sorted(members)),))


def _add_anything(self: Collection, ranks: Any, *, lease: int, nbytes: int, **rest: Any) -> Added:
    rest.pop("rack_of", None)
    self.held.append(Contribution(dict(ranks), lease, nbytes, rest["rack"], rest["tag"]))
    return Added("held")


def _sum_everything(self: Collection, tree: Any, absent: Any) -> Any:
    if self.summing or self.summed is not None or not self.held:
        return None
    groups = []
    for group in tree:
        here = [c.lease for c in self.held if any(r in group for r in c.ranks)]
        known = {r for c in self.held for r in c.ranks} | set(absent)
        if any(r not in known for r in group):
            return None
        groups.append(tuple(dict.fromkeys(here)))
    return tuple(groups)


def counted_twice(patch: Patch) -> None:
    """A repeated contribution is held, and summed, again."""
    patch.setattr(Collection, "add", _add_anything)
    patch.setattr(Collection, "plan_sum", _sum_everything)
    patch.setattr(Collection, "check", lambda self: None)


def two_routes(patch: Patch) -> None:
    """A rack's sum counts beside direct pushes of its workers."""
    real = Collection.add

    def add(self: Collection, ranks: Any, **rest: Any) -> Added:
        if rest["rack"] >= 0 or any(c.rack >= 0 for c in self.held):
            return _add_anything(self, ranks, **rest)
        return real(self, ranks, **rest)

    patch.setattr(Collection, "add", add)
    patch.setattr(Collection, "plan_sum", _sum_everything)
    patch.setattr(Collection, "check", lambda self: None)


def old_revision(patch: Patch) -> None:
    """A sum with an older revision than the committed one is applied."""

    def is_good(self: Collection, expected: Mapping[int, int | None]) -> bool:
        needed = {r for r, v in expected.items() if v is not None}
        return self.summed is not None and set(self.summed) == needed

    patch.setattr(Collection, "is_good", is_good)
    patch.setattr(Collection, "void_sum", lambda self, expected, ranks: None)
    patch.setattr(Collection, "drop_wrong", lambda self, expected: [])


def absent_not_counted(patch: Patch) -> None:
    """The mean divides by the number of contributions, not of members."""
    real = Receiver.sum_if_complete

    def sum_if_complete(
        self: Receiver, group: HeldGroup, shard: HeldShard, tree: Any, divisor: int
    ) -> Any:
        absent = [r for r, v in self.expected(group, shard).items() if v is None]
        there = sum(r not in absent for g in tree for r in g)
        return real(self, group, shard, tree, max(1, there) if divisor > 1 else 1)

    patch.setattr(Receiver, "sum_if_complete", sum_if_complete)


def before_commit(patch: Patch) -> None:
    """The server applies when the first worker has committed."""
    real = Receiver.members

    def members(self: Receiver, group: HeldGroup) -> tuple[int, ...]:
        everybody = real(self, group)
        some = tuple(r for r in everybody if r in group.commits)
        return some if some and isinstance(self, ServerRole) else everybody

    patch.setattr(Receiver, "members", members)


# ------------------------------------------------------------- repeats, order


def no_retry(patch: Patch) -> None:
    """Nobody sets a retry timer."""
    patch.setattr(WorkerRole, "_arm_retry", lambda self, event, now_ns: None)
    patch.setattr(RackAgentRole, "_arm", lambda self, now_ns: None)


def other_bytes(patch: Patch) -> None:
    """A repeated push is encoded anew: other bytes under the same revision."""
    real = SimWorker.resolve
    sent: dict[tuple[int, int, int, int], None] = {}

    def resolve(self: SimWorker, message: Any, payload: Any) -> Any:
        message, parcel = real(self, message, payload)
        key = (id(self), message.shard, message.step, message.revision)
        if isinstance(message, msg.Push) and parcel is not None:
            if key in sent:
                parcel = (torch.add(parcel[0], 1.0), parcel[1])
            sent[key] = None
        return message, parcel

    patch.setattr(SimWorker, "resolve", resolve)


def no_fence(patch: Patch) -> None:
    """Frames of an old generation are taken in."""
    patch.setattr(Receiver, "_in_view", lambda self, event, message: True)


def old_version(patch: Patch) -> None:
    """A worker installs any update that comes, also that of an earlier step."""

    def wants(self: WorkerRole, group: int, shard: int, *_: Any) -> bool:
        return group in self.groups and shard in self.groups[group].waiting

    patch.setattr(worker_values.WorkerValues, "wants", wants)


def early_values(patch: Patch) -> None:
    """Changed values replace the server's before all workers have the present version."""
    real = ServerRole._on_assign

    def on_assign(self: ServerRole, event: Any, message: msg.Assign) -> None:
        found = self._by_shard.get(message.shard)
        if found is None:
            return real(self, event, message)
        verdict, found[0].verdict = found[0].verdict, "apply"
        real(self, event, message)
        found[0].verdict = verdict

    patch.setattr(ServerRole, "_on_assign", on_assign)


def leak(patch: Patch) -> None:
    """A dropped payload is not released."""
    patch.setattr(Receiver, "_drop", lambda self, event: None)


# -------------------------------------------------------------- flow control


def credit_when_applied(patch: Patch) -> None:
    """Credit waits for the update, which waits for norms, which wait for pushes."""

    def on_released(self: Ledger, shard: int, tag: int, size: int) -> bool:
        self.stored -= size
        return False

    patch.setattr(Ledger, "on_released", on_released)
    patch.setattr(Ledger, "on_stored", lambda self, shard, tag, size: False)
    patch.setattr(Ledger, "owes", lambda self, shard, tag: True)
    patch.setattr(Ledger, "check", lambda self: None)


def naive_window(patch: Patch) -> None:
    """No reserve: whatever is ready goes while there is credit."""
    patch.setattr(Outbox, "may_push", lambda self, rank, size: self.used + size <= self.quota)


def stays_on_agent(patch: Patch) -> None:
    """A worker goes on pushing to a rack agent that is gone."""
    patch.setattr(worker_pushes.WorkerPushes, "_go_direct", lambda self, group, shard: None)


# ------------------------------------------------------------ other answers


def norm_of_old_sums(patch: Patch) -> None:
    """Norms are measured on whatever sums there are."""
    patch.setattr(server.ServerRole, "expected", _expected_of_sum, raising=False)


def _expected_of_sum(self: ServerRole, group: HeldGroup, shard: HeldShard) -> Any:
    expected = Receiver.expected(self, group, shard)
    if group.norms and not group.commits and shard.collection.summed is not None:
        return {**expected, **shard.collection.summed}
    return expected


def overflow_forgotten(patch: Patch) -> None:
    """Nobody is told that the step was skipped for an overflow."""
    real = ServerRole._send

    def send(self: ServerRole, target: Any, message: Any, payload: Any = None) -> None:
        if isinstance(message, msg.Update):
            message = msg.Update(**{f: getattr(message, f) for f in message.__struct_fields__
                                    if f != "found_inf"})  # fmt: skip
        real(self, target, message, payload)

    patch.setattr(ServerRole, "_send", send)


# ------------------------------------------------- updates ahead of the commits


def never_confirmed(patch: Patch) -> None:
    """Nobody compares what was applied early with what is committed."""
    patch.setattr(ServerEarly, "_unconfirmed", lambda self, group, commits: "")


def installed_in_backward(patch: Patch) -> None:
    """A worker installs an early update as it comes."""

    def keep_early(self: WorkerEarly, group: Any, update: Any, event: Any) -> None:
        self._out.append(fx.Install(group.index, update.shard, update.version, event.lease))

    patch.setattr(WorkerEarly, "_keep_early", keep_early)


def unconfirmed_goes_on(patch: Patch) -> None:
    """A worker's step is over when its updates are in, whoever has not committed."""
    real = WorkerRole._finish_if_done

    def finish_if_done(self: WorkerRole, group: Any) -> None:
        group.confirming = {}
        real(self, group)

    patch.setattr(WorkerRole, "_finish_if_done", finish_if_done)


# ------------------------------------------------------------ local reduction


def handed_twice(patch: Patch) -> None:
    """A worker hands its gradient to the owner twice in a step."""
    real = WorkerSharing._tell_owner

    def tell_owner(self: WorkerSharing, group: Any, shard: Any, *, present: bool) -> None:
        for _ in range(2 if present and not shard.mine else 1):
            real(self, group, shard, present=present)

    patch.setattr(WorkerSharing, "_tell_owner", tell_owner)


def changed_unseen(patch: Patch) -> None:
    """A gradient that changes after it was handed over stays in the host's sum as it was."""
    real = WorkerSharing._close_with_host

    def close(self: WorkerSharing, group: Any, shard: Any, *, revised: bool) -> bool:
        return real(self, group, shard, revised=False)

    patch.setattr(WorkerSharing, "_close_with_host", close)


def stays_with_host(patch: Patch) -> None:
    """What the host's sum cannot be made of is not pushed by itself either."""
    patch.setattr(WorkerSharing, "_go_alone", lambda self, group, shard: None)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("arrival order", arrival_order, "Exact", "floats", (2,)),
    Mutant("tree shaped by placement", tree_by_placement, "Exact", "floats", (2,)),
    Mutant("repeat counted twice", counted_twice, "twice", "counting", (7,)),
    Mutant("two routes of one rack", two_routes, "twice", "counting", (24,)),
    Mutant("old revision applied", old_revision, "CountedOnce", "counting", (2,)),
    Mutant("absent rank not in the divisor", absent_not_counted, "Exact", "counting", (3,)),
    Mutant("applied before all commits", before_commit, "CountedOnce", "counting", (6,)),
    Mutant("handed over twice", handed_twice, "steps differ", "floats", (5,)),
    Mutant("changed after it was handed over", changed_unseen, "Exact", "floats", (5,)),
    Mutant("not in the sum and not alone", stays_with_host, "Liveness", "floats", (5,)),
    Mutant("no retry timer", no_retry, "Liveness", "counting", (1,)),
    Mutant("other bytes on a repeat", other_bytes, "Exact", "counting", (6,)),
    Mutant("no fence", no_fence, "Fence", "counting", (21,)),
    Mutant("old version installed", old_version, "Exact", "counting", (20,)),
    Mutant("values assigned early", early_values, "Exact", "counting", (30,)),
    Mutant("dropped payload leaks", leak, "Leases", "counting", (0,)),
    Mutant("credit held until applied", credit_when_applied, "Liveness", "counting", (10,)),
    Mutant("window without reserve", naive_window, "Waits", "counting", (99,)),
    Mutant("no direct pushes after the agent's end", stays_on_agent, "Liveness", "counting", (11,)),
    Mutant("norm of old sums", norm_of_old_sums, "Norms", "counting", (10,)),
    Mutant("overflow forgotten", overflow_forgotten, "found_inf", "counting", (2,)),
    Mutant("early updates never confirmed", never_confirmed, "CountedOnce", "counting", (14,)),
    Mutant("installed within backward", installed_in_backward, "Aside", "counting", (9,)),
    Mutant("goes on without confirmation", unconfirmed_goes_on, "CountedOnce", "counting", (35,)),
)
"""Those that a single run catches."""


def set_order(patch: Patch) -> None:
    """The order of a set of names decides the order of sending; only a replay can tell."""
    real = WorkerRole._send_commit

    def send_commit(self: WorkerRole, group: Any, only: str = "") -> None:
        targets: Iterable[str] = {s.server for s in group.shards.values()} | {
            s.target for s in group.shards.values()
        }
        for target in targets if not only else [only]:
            real(self, group, target)

    patch.setattr(WorkerRole, "_send_commit", send_commit)
