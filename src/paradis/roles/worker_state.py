"""What a worker knows of its groups and shards between two events."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from paradis.core.benefit import StepMeter
from paradis.core.codes import CodedSteps
from paradis.core.turns import Turns
from paradis.wire.messages import CheckpointInfo, Plan, Quorum, ShardPlan, StepCommit, Update

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4,
                 "int16": 2, "int8": 1, "uint8": 1, "bool": 1}  # fmt: skip


Assignment = tuple[tuple[str, ...], tuple[str, ...], dict[int, dict[str, float]]]
"""Keys, dtypes and scalars of values to send to the server."""


RACK_WORKERS_MAX = 1 << 20
"""More than any rack has."""


SUM_TAG = 0xFFFF
"""Stands for the revision where the sum of a host is pushed: no script changes a gradient so often
in one step."""


def push_bytes(plan: ShardPlan, *, coded: bool) -> int:
    """Return the payload bytes of a gradient or update of a shard.

    Args:
        plan: the shard.
        coded: its group travels as codes where its plan names a codec.
    """
    if coded and plan.codec:
        return plan.code_bytes
    return plan.length * ELEMENT_BYTES[plan.dtype]


def choosing_server(plan: Plan) -> str:
    """Return the server that chooses who makes a step: it has the first shard with gradients."""
    shards = [s for s in plan.shards if not s.is_buffer and s.length]
    return min(shards, key=lambda s: s.shard).server if shards else ""


def largest_bundle(plan: ShardPlan) -> int:
    """Return how many workers may stand in a rack whose agent takes the shard's gradients.

    Where their codes are sent on together, at most as many as have no more bytes than in full.
    """
    if not plan.codec or plan.recompressed:
        return RACK_WORKERS_MAX
    return push_bytes(plan, coded=False) // max(1, plan.code_bytes)


def shard_sizes(plan: Plan) -> dict[int, int]:
    """Return shard -> bytes, in admission order, of the shards whose gradients may be summed on
    a host: codes cannot."""
    shards = (s for s in plan.shards if not s.is_buffer and s.length and not s.codec)
    ordered = sorted(shards, key=lambda s: (s.priority, s.shard))
    return {s.shard: push_bytes(s, coded=False) for s in ordered}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What bounds and times a worker.

    Attributes:
        quota_bytes: bytes that may be unreturned at one receiver.
        room_bytes: bytes that may be on the way to all receivers, at least one largest shard for
            each, and four. So much keeps a link busy: 1.3 ms at 100 Gbit/s, 0.13 s at 1.
        retry_ns: how long nothing must come before unanswered messages go again. Links are
            reliable, so this only heals a lost link or a receiver that dropped a frame.
        early_update: servers may update before the workers have committed.
    """

    rank: int
    quota_bytes: int = 32 << 20
    room_bytes: int = 16 << 20
    retry_ns: int = 3_000_000_000
    early_update: bool = False


class Shard:
    """One shard as the worker sees it in the present step.

    Attributes:
        target: where pushes go: the rack agent or the server.
        ready: backward (or ``step()``) has produced the gradient.
        whole: backward handed it over, so every parameter in it has a gradient.
        sent: pushed at least once in this step.
        acked: the receiver holds the present revision.
        void: the receiver's copy was dropped; push again when ``step()`` is called.
        stale: the receiver is in a newer generation; push again when we are, too.
        detour: goes through the lane in this step, for the window has passed its place.
        assign: values to send to the server: keys, dtypes, scalars.
        next_priority: place in admission order from the next step on, -1: as it is.
        version: in a group with clocks: the number of updates in the value that we have.
        owner: rank that sums the shard for this host, -1: nobody does.
        mine: this worker is the owner.
        handed: given to the owner in this step, the gradient or the word that there is none.
        gathered: of one that is mine: what the host's workers hand over is being summed.
        alone: this worker's gradient goes to the server by itself in this step, whoever owns.
        alone_at: a later step in which it will be alone.
        included: (rank, revision) of what is in the host's sum, which the owner holds; or empty.
    """

    __slots__ = ("version", "plan", "target", "ready", "sent", "acked", "void", "stale", "detour",
                 "revision", "present", "assign", "nbytes", "next_priority", "whole",
                 "owner", "mine", "handed", "alone", "alone_at", "included",
                 "gathered")  # fmt: skip

    def __init__(self, plan: ShardPlan, target: str) -> None:
        self.plan = plan
        self.target = target
        self.nbytes = push_bytes(plan, coded=False)
        self.assign: Assignment | None = None
        self.next_priority = -1
        self.version = 0
        self.owner = -1
        self.mine = False
        self.alone_at = -1
        self.reset()

    def reset(self) -> None:
        """Forget the step that ended."""
        self.ready = self.sent = self.acked = self.void = self.stale = self.detour = False
        self.present = self.whole = False
        self.handed = self.alone = self.gathered = False
        self.revision = 0
        self.included: tuple[tuple[int, int], ...] = ()

    @property
    def shares(self) -> bool:
        """Whether the gradient goes to the owner on this host, not to a server or rack agent."""
        return self.owner >= 0 and not self.alone

    @property
    def sum_held(self) -> bool:
        """Whether what this worker pushes is the sum of its host, and it is there."""
        return self.shares and bool(self.included)

    @property
    def tag(self) -> int:
        """What the receiver's answers call that which is pushed at present."""
        return SUM_TAG if self.sum_held else self.revision

    @property
    def server(self) -> str:
        """The server that owns the shard."""
        return self.plan.server

    @property
    def trainable(self) -> bool:
        """Whether gradients are pushed: not for buffers, nor for tensors without elements."""
        return not self.plan.is_buffer and self.plan.length > 0


@dataclass(kw_only=False, slots=True)
class Group:
    """One ``wrap`` call.

    Attributes:
        step: number of finished steps.
        closed: ``step()`` (or a norm) was asked and is not answered.
        committed: the present ``closed`` is a commit.
        waiting: shards whose update (or pulled value) has not arrived.
        pull_round: number of the last request for values, so that an earlier answer is known;
            likewise ``norm_round``, ``state_round`` and ``assign_count``.
        started: receiver -> (step, parts) its outbox was begun for.
        coded_steps: those whose gradients and updates travel as codes.
        told: what the leader says that they may be.
        meter: takes the time of steps, where the leader wants to know; or None.
        copies: checkpoint -> step, of which this worker's part is to be copied, or is; last few.
        begun: what was said ahead of the commit, with early updates.
        early: shard -> update and lease of those that wait for ``step()``.
        missed: shards whose early update may be lost; it is asked for after the commit.
        confirming: servers that have not said that the step is confirmed.
        clocked: each worker has its own clock (modes ``ssp`` and ``async``): a step is answered
            with whatever version its shards have then.
        ranks: who trains it; empty: all workers.
        backup: workers that a step does without; then ``chooser`` is the server that chooses.
        word: who makes the present step, once that is known, of a step that this worker makes.
        let_in: version to go on with in place of a step that was made without this worker, until
            that is begun; -1: none.
        catching: the values of that version are being fetched.
        turns: which receiver is served next, in the (step, parts) ``turns_of``.
        closed_steps: how often ``step()`` was called; ``late_steps``: how often it was late.
    """

    index: int
    step: int
    parts: int = 0
    closed: bool = False
    committed: bool = False
    commit: StepCommit | None = None
    found_inf: bool = False
    coded_steps: CodedSteps = CodedSteps()
    told: CodedSteps = CodedSteps()
    meter: StepMeter | None = None
    state_memories: bool = False
    assign_count: int = 0
    norm_round: int = 0
    pull_round: int = 0
    state_round: int = 0
    clocked: bool = False
    ranks: tuple[int, ...] = ()
    backup: int = 0
    chooser: str = ""
    word: Quorum | None = None
    let_in: int = -1
    catching: bool = False
    closed_steps: int = 0
    late_steps: int = 0
    snapshot: CheckpointInfo | None = None
    copies: dict[str, int] = field(default_factory=dict)
    shards: dict[int, Shard] = field(default_factory=dict)
    waiting: dict[int, None] = field(default_factory=dict)
    assigning: dict[int, None] = field(default_factory=dict)
    state_waiting: dict[int, None] = field(default_factory=dict)
    snapshot_from: dict[str, None] = field(default_factory=dict)
    norm_from: dict[str, None] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)
    started: dict[str, tuple[int, int]] = field(default_factory=dict)
    begun: StepCommit | None = None
    early: dict[int, tuple[Update, int]] = field(default_factory=dict)
    missed: dict[int, None] = field(default_factory=dict)
    confirming: dict[str, None] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    turns_of: tuple[int, int] = (-1, -1)
    _ordered: tuple[int, list[Shard]] = (0, [])

    def among(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the job's members that train the group."""
        return tuple(r for r in members if r in self.ranks) if self.ranks else members

    def ordered(self) -> list[Shard]:
        """Return the shards in admission order."""
        if self._ordered[0] != len(self.shards):
            shards = sorted(self.shards.values(), key=lambda s: (s.plan.priority, s.plan.shard))
            self._ordered = (len(shards), shards)
        return self._ordered[1]

    @property
    def busy(self) -> bool:
        """Whether the script's thread waits for something."""
        return bool(self.waiting or self.assigning or self.state_waiting or self.snapshot_from
                    or self.norm_from or self.confirming)  # fmt: skip

    def next_step(self) -> None:
        """All updates are here, and are being installed: the next step begins."""
        self.step += 1
        self.closed = self.committed = False
        self.commit = self.begun = self.word = None
        self.missed = {}
        for shard in self.shards.values():
            shard.reset()
            shard.alone = shard.detour = shard.alone_at == self.step and shard.owner >= 0
        self.resize()
        self.reorder()

    @property
    def coded(self) -> bool:
        """Whether the present step travels as codes, where a shard's plan names a codec."""
        return self.step in self.coded_steps

    def resize(self) -> None:
        """Take note of how large the step's gradients are."""
        for shard in self.shards.values():
            shard.nbytes = push_bytes(shard.plan, coded=self.coded)

    def reorder(self) -> None:
        """Take over the admission order that came with the updates, on all workers at once."""
        for shard in self.shards.values():
            if shard.next_priority not in (-1, shard.plan.priority):
                shard.plan = msgspec.structs.replace(shard.plan, priority=shard.next_priority)
                self._ordered = (0, [])


def commit_with_revisions(commit: StepCommit, group: Group) -> StepCommit:
    """Return the commit with the revisions that count."""
    revisions = {s.plan.shard: s.revision for s in group.ordered() if s.present and s.revision}
    return msgspec.structs.replace(
        commit, revisions=revisions, coded_from=group.told.begin, coded_until=group.told.end
    )
