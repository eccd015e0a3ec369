"""Planted mistakes about codes: what they lead from, and when a group changes to them and back.

As in `mutants.py`: name, patch, the word of the check that catches it, workload, first seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from paradis.core.codes import CodedSteps
from paradis.roles import events as ev
from paradis.roles.rack_agent import RackAgentRole
from paradis.roles.server import ServerRole
from paradis.roles.worker import WorkerRole
from paradis.wire import messages as msg

Patch = pytest.MonkeyPatch


def code_of_nothing(patch: Patch) -> None:
    """A step that is skipped is answered with the code of the one before."""
    real = ServerRole._finish

    def finish(self: ServerRole, group: Any, shard: Any, *, unchanged: bool) -> None:
        coded = self.coded(group, shard) and group.verdict == "skip"
        real(self, group, shard, unchanged=unchanged and not coded)

    patch.setattr(ServerRole, "_finish", finish)


def code_twice(patch: Patch) -> None:
    """A code that comes twice is applied twice."""
    real = WorkerRole._on_update

    def on_update(self: WorkerRole, group: Any, update: Any, event: Any) -> None:
        over = update.step == group.step and update.shard not in group.waiting
        if update.codec and over and event.lease and group.committed:
            self._out.append(self._install(group, update, event.lease))
            return
        real(self, group, update, event)

    patch.setattr(WorkerRole, "_on_update", on_update)


def change_over_change(patch: Patch) -> None:
    """A change is agreed while an earlier one is still to come."""
    real = CodedSteps.agreed

    def agreed(self: CodedSteps, told: Iterable[CodedSteps], step: int) -> CodedSteps:
        said = list(told)
        if self.begin > step:
            return real(self, said, step)
        if self.end > step:
            later = CodedSteps(self.begin, step).agreed(said, step)
            return CodedSteps(later.begin, self.end)
        return real(self, said, step)

    patch.setattr(CodedSteps, "agreed", agreed)


def goes_by_hearsay(patch: Patch) -> None:
    """A worker goes back as soon as the leader says so, whoever else has heard it."""
    real = WorkerRole._on_control

    def on_control(self: WorkerRole, message: object) -> None:
        real(self, message)
        if isinstance(message, msg.Freeze) and message.group in self.groups:
            group = self.groups[message.group]
            if message.until > message.step and not group.closed:
                group.coded_steps = CodedSteps(0, group.step + 1)

    patch.setattr(WorkerRole, "_on_control", on_control)


def decides_alone(patch: Patch) -> None:
    """A server changes with the first commit that says so, and not after all have said it."""
    real = ServerRole._on_commit

    def on_commit(self: ServerRole, source: Any, message: Any, now_ns: int) -> None:
        group = self.groups.get(message.group)
        if group is not None and message.step == group.step and isinstance(message, msg.Commit):
            told = CodedSteps(message.commit.coded_from, message.commit.coded_until)
            group.coded_steps = group.coded_steps.agreed([told], group.step)
        real(self, source, message, now_ns)

    patch.setattr(ServerRole, "_on_commit", on_commit)


def end_not_told(patch: Patch) -> None:
    """The answers of a step do not say that it is the last one in codes."""
    real = WorkerRole.handle

    def handle(self: WorkerRole, event: ev.Event, now_ns: int) -> Any:
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Update | msg.Confirmed):
            fields = {f: getattr(event.message, f) for f in event.message.__struct_fields__}
            kind = type(event.message)
            event = ev.Received(event.source, kind(**{**fields, "coded_until": -1}), event.lease)
        return real(self, event, now_ns)

    patch.setattr(WorkerRole, "handle", handle)


def bundled_backwards(patch: Patch) -> None:
    """A rack agent puts codes one after the other in another order than that of the sum."""
    real = RackAgentRole.sum_if_complete

    def sum_if_complete(
        self: RackAgentRole, group: Any, shard: Any, tree: Any, divisor: int
    ) -> Any:
        backwards = self.coded(group, shard)
        tree = tuple(ranks[::-1] for ranks in tree) if backwards else tree
        return real(self, group, shard, tree, divisor)

    patch.setattr(RackAgentRole, "sum_if_complete", sum_if_complete)


def agent_is_deaf(patch: Patch) -> None:
    """A rack agent does not hear how steps travel, neither with updates nor from pushes."""
    patch.setattr(RackAgentRole, "follow_push", lambda self, push: False)
    patch.setattr(RackAgentRole, "follow_update", lambda self, group, shard, update: None)


def counts_what_was_left_out(patch: Patch) -> None:
    """A rack agent whose workers pushed directly takes its code for one that counts."""
    real = RackAgentRole.follow_update

    def follow_update(self: RackAgentRole, group: Any, shard: Any, update: msg.Update) -> None:
        real(self, group, shard, update)
        self._counted[shard.plan.shard] = True

    patch.setattr(RackAgentRole, "follow_update", follow_update)


def codes_of_nothing_known(patch: Patch) -> None:
    """A rack agent makes one code of several before it knows which elements have variance."""
    patch.setattr(RackAgentRole, "can_sum", lambda self, group, shard: True)


Planted = tuple[str, Callable[[Patch], None], str, str, tuple[int, ...]]

MUTANTS: tuple[Planted, ...] = (
    ("code of nothing", code_of_nothing, "made for", "floats", (128,)),
    ("code applied twice", code_twice, "made for", "floats", (16,)),
    ("change over change", change_over_change, "SameWay", "floats", (52,)),
    ("a worker goes by hearsay", goes_by_hearsay, "SameWay", "floats", (5,)),
    ("a server decides alone", decides_alone, "SameWay", "floats", (163,)),
    ("the end is not told", end_not_told, "SameWay", "floats", (29,)),
    ("bundled backwards", bundled_backwards, "Exact", "floats", (116,)),
    ("an agent is deaf", agent_is_deaf, "SameWay", "floats", (52,)),
    ("left out counts", counts_what_was_left_out, "counts its code", "floats", (52,)),
    ("codes of nothing known", codes_of_nothing_known, "codes of nothing", "floats", (52,)),
)
