"""What a node that sums keeps of its shards and of each ``wrap`` call's present step."""

from __future__ import annotations

from collections.abc import Sequence

from paradis.core.aggregation import Collection
from paradis.core.codes import CodedSteps
from paradis.core.quorum import Quorum
from paradis.ids import NodeId
from paradis.roles import events as ev
from paradis.roles.stale_state import StaleGroup, StaleShard
from paradis.roles.step_ahead import Ahead
from paradis.roles.worker_state import push_bytes
from paradis.wire import messages as msg


class HeldShard:
    """A shard at a node that sums: its plan, version and collection.

    Attributes:
        version: number of applied updates; pushes of step == version are collected.
        ticket: number of the sum being made, so that a late result of a dropped one is known.
        members: the ranks that the last sum was over, absent ones included.
        pending: values that a worker changed, kept until all have committed: until then somebody
            may still pull the present version.
        kept: the last version that was no other value than the one before.
        present: of the last update: bit i is set if segment i was updated; empty: all were.
        whole: ranks whose push of this step has a gradient for every parameter in the shard.
        early: rank -> revision, and the options, it was applied with ahead of the commits, or None.
        readers: reader -> its last question, where it could not be answered at once.
        given: reader -> the last version that was sent to it.
    """

    __slots__ = ("plan", "version", "collection", "ticket", "initialized", "applying",
                 "nbytes", "pulls", "assigned", "assigning", "assign_step",
                 "sent", "members", "pending", "kept", "present", "whole",
                 "early", "stale", "readers", "given")  # fmt: skip

    def __init__(self, plan: msg.ShardPlan, version: int) -> None:
        self.plan = plan
        self.version = version
        self.collection = Collection()
        self.ticket = 0
        self.initialized = self.applying = False
        self.nbytes = push_bytes(plan, coded=False)
        self.pulls: list[tuple[NodeId, msg.Pull]] = []
        self.assigned: tuple[int, int] = (-1, -1)
        self.assigning: tuple[NodeId, msg.Assign] | None = None
        self.assign_step = self.kept = -1
        self.sent: dict[int, int] | None = None
        self.members: tuple[int, ...] = ()
        self.pending: ev.Received | None = None
        self.present = b""
        self.whole: dict[int, None] = {}
        self.early: tuple[dict[int, int | None], msg.Options] | None = None
        self.stale: StaleShard | None = None
        self.readers: dict[NodeId, msg.Read] = {}
        self.given: dict[NodeId, int] = {}

    @property
    def passive(self) -> bool:
        """Whether no gradient ever comes: module buffers, and tensors without elements."""
        return self.plan.is_buffer or self.plan.length == 0

    def note_present(self, present: Sequence[bool]) -> None:
        """Note which segments an update is about."""
        bits = bytearray((len(present) + 7) // 8)
        for index, here in enumerate(present):
            bits[index >> 3] |= here << (index & 7)
        self.present = b"" if all(present) else bytes(bits)

    def present_in(self, commit: msg.StepCommit) -> bool:
        """Whether a commit says that its worker has a gradient for some piece of the shard."""
        return any(parameter_present(commit, s.parameter) for s in self.plan.segments)


def parameter_present(commit: msg.StepCommit, parameter: int) -> bool:
    """Whether bit ``parameter`` of the commit's presence map is set."""
    byte = parameter >> 3
    return byte < len(commit.present) and bool(commit.present[byte] >> (parameter & 7) & 1)


class HeldGroup:
    """One ``wrap`` call at a node that sums.

    Attributes:
        step: the step in progress; commits and norm requests are of this step.
        norms: rank -> its latest norm request of the step.
        squares: round of norm requests -> the answer; the last one only.
        unfinished: shards that still have the version ``step``, passive ones left out.
        skipped: the last step that was skipped, below -1 if none.
        copied: the checkpoint whose copy is complete.
        gone: ranks whose early finish was told.
        coded_steps: those whose gradients and updates travel as codes.
        norms_of_v: shard -> parameter -> L1 norm of Adam's v, where the leader wants to know.
        ahead: what is known ahead of the commits, with early updates.
        reordered: the last step whose commits changed the admission order, below -1 if none.
        quorum: who makes the steps, where not everybody is waited for.
        ranks: who trains it; empty: all workers.
        saving: ``asked`` or ``copying``: a copy of whatever step the group is at; empty: none.
    """

    __slots__ = ("index", "step", "parts", "shards", "commits", "norms", "specs", "measuring",
                 "squares", "optimizer", "verdict", "options", "since_ns", "copying", "copied",
                 "skipped", "gone", "unfinished", "coded_steps", "norms_of_v", "ahead",
                 "reordered", "stale", "quorum", "ranks", "saving")  # fmt: skip

    def __init__(self, index: int, step: int) -> None:
        self.index = index
        self.step = step
        self.parts = 0
        self.shards: dict[int, HeldShard] = {}
        self.commits: dict[int, msg.StepCommit] = {}
        self.norms: dict[int, msg.NormRequest] = {}
        self.specs: list[msg.ParameterSpec] = []
        self.optimizer = ""
        self.options: list[msg.Options] = []
        self.verdict = ""
        self.measuring = 0
        self.squares: dict[int, dict[int, float]] = {}
        self.since_ns = 0
        self.copying = self.copied = ""
        self.skipped = -2
        self.gone: dict[int, None] = {}
        self.unfinished = 0
        self.coded_steps = CodedSteps()
        self.norms_of_v: dict[int, dict[int, float]] = {}
        self.ahead = Ahead()
        self.reordered = -2
        self.stale: StaleGroup | None = None
        self.quorum: Quorum | None = None
        self.ranks: tuple[int, ...] = ()
        self.saving = ""

    def coded_at(self, step: int) -> bool:
        """Whether a step travels as codes, where a shard's plan names a codec."""
        return step in self.coded_steps

    def catch_up(self, step: int) -> None:
        """A worker is at ``step``: a node without active shards has no other way to know."""
        if all(s.passive for s in self.shards.values()) and step > self.step:
            self.next_step(step)

    def next_step(self, step: int) -> None:
        """All shards have the version ``step``."""
        self.step = step
        self.unfinished = 0
        self.resize()
        for shard in self.shards.values():
            if shard.passive:
                shard.version = step
            self.unfinished += shard.version == step and not shard.passive
            shard.early = None
        self.commits = {}
        self.norms = {}
        self.ahead = Ahead()
        self.verdict = ""
        self.measuring = 0
        self.squares = {}
        if self.quorum is not None:
            self.quorum.next_step()

    def resize(self) -> None:
        """Take note of how large the step's gradients are."""
        coded = self.coded_at(self.step)
        for shard in self.shards.values():
            shard.nbytes = push_bytes(shard.plan, coded=coded)

    def said(self, rank: int) -> msg.StepCommit | None:
        """Return what the rank last said that counts, by a commit or a norm request."""
        commit = self.commits.get(rank)
        if commit is None and rank in self.norms:
            return self.norms[rank].commit
        return commit
