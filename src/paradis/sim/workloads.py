"""The two workloads, and what must come of them: a slow, independent reference.

``counting``: worker k pushes the weight ``10^k * digit`` in float64, so any lost, repeated or
misplaced contribution changes a known digit of the sum. ``floats``: random float32 of very
different sizes, so any other order of summing changes the bits.

Invariant: the reference shares no code with roles or core: it folds the records of the scripts over
the canonical tree, one torch addition at a time, with zeros for the absent.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from paradis.sim.job import Job
from paradis.wire.messages import Plan, ShardPlan

RATE = 0.5
"""Learning rate of plain SGD; a power of two, so that counting stays exact."""

_POOL_ELEMENTS = 4096
_POOL: dict[str, torch.Tensor] = {}


def _pool() -> torch.Tensor:
    """Return float32 numbers between 1e-4 and 1e4 in size, some of them negative zeros."""
    if "floats" not in _POOL:
        source = random.Random(20240229)
        numbers = [
            -0.0 if source.random() < 0.02 else source.gauss(0, 1) * 10.0 ** source.randint(-4, 4)
            for _ in range(_POOL_ELEMENTS)
        ]
        _POOL["floats"] = torch.tensor(numbers, dtype=torch.float32)
    return _POOL["floats"]


class Workload:
    """Where gradients and initial values come from."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.counting = job.workload == "counting"
        self.dtype_name = "float64" if self.counting else "float32"
        self.dtype = torch.float64 if self.counting else torch.float32

    def gradient(
        self, rank: int, step: int, parameter: int, attempt: int, length: int
    ) -> torch.Tensor:
        """Return a fresh gradient, (length,); another one for every attempt."""
        if self.counting:
            digit = (step * 3 + parameter + attempt * 2) % 9 + 1
            return torch.full((length,), float(10**rank * digit), dtype=self.dtype)
        mixed = (
            rank * 7919 + step * 104729 + parameter * 1299709 + attempt * 15485863
        ) * 2654435761
        start = (mixed + self.job.seed) % (_POOL_ELEMENTS - length)
        return _pool()[start : start + length].clone()

    def initial(self, parameter: int, length: int) -> torch.Tensor:
        """Return a parameter's value before training, (length,)."""
        if self.counting:
            return torch.full((length,), float(parameter + 1), dtype=self.dtype)
        start = (parameter * 999983 + self.job.seed) % (_POOL_ELEMENTS - length)
        return _pool()[start : start + length].clone()


@dataclass(slots=True)
class Record:
    """What one worker's script said when it closed a step.

    Attributes:
        gradients: shard -> (length,), for shards with a gradient.
        present: parameters with a gradient.
        revisions: shard -> revision that the role committed.
        changed: shard -> number added to the value before the update.
    """

    gradients: dict[int, torch.Tensor]
    present: frozenset[int]
    revisions: dict[int, int] = field(default_factory=dict)
    found_inf: bool = False
    clip: float = 1.0
    changed: dict[int, float] = field(default_factory=dict)


class Reference:
    """The values that a correct system must arrive at.

    Args:
        tree: the canonical tree, as the first view published it; set when that is known.
        made: (group, step) -> ranks that made it, as the servers say; None: all who committed it.
    """

    def __init__(self) -> None:
        self.tree: tuple[tuple[int, ...], ...] = ()
        self.shards: dict[int, tuple[int, ShardPlan]] = {}
        self.records: dict[tuple[int, int], dict[int, Record]] = {}
        self.norms: dict[tuple[int, int, int], dict[int, Record]] = {}
        self.made: dict[tuple[int, int], tuple[int, ...]] | None = None
        self.used: dict[tuple[int, int], tuple[int, ...]] = {}
        self._values: dict[tuple[int, int], torch.Tensor] = {}

    def plan(self, plan: Plan) -> None:
        """Learn the shards of a part."""
        for shard in plan.shards:
            self.shards[shard.shard] = (plan.group, shard)

    def start(self, shard: int, version: int, value: torch.Tensor) -> None:
        """The lowest worker assigned this value at this version."""
        self._values[shard, version] = value.clone()

    def record(self, group: int, step: int, rank: int, record: Record) -> None:
        """A worker closed a step."""
        members = self.records.setdefault((group, step), {})
        assert rank not in members, f"worker {rank} closed step {step} of group {group} twice"
        members[rank] = record

    def value(self, shard: int, version: int) -> torch.Tensor:
        """Return the shard's value at a version, (length,)."""
        key = (shard, version)
        if key not in self._values:
            self._values[key] = self._next(shard, version - 1)
        return self._values[key]

    def committed(self, group: int, step: int) -> dict[int, Record]:
        """Return rank -> record of all members of a step; nobody may join them afterwards."""
        records = self.records[group, step]
        if self.made is not None:
            return {r: records[r] for r in self.made[group, step]}
        members = tuple(sorted(records))
        assert self.used.setdefault((group, step), members) == members, (
            f"step {step} of group {group} was applied without all of {members}"
        )
        return records

    def _next(self, shard: int, step: int) -> torch.Tensor:
        group, plan = self.shards[shard]
        value = self.value(shard, step).clone()
        if plan.is_buffer:
            return value
        records = self.committed(group, step)
        first = records[min(records)]
        if shard in first.changed:
            value += first.changed[shard]
        if any(r.found_inf for r in records.values()):
            return value
        present = frozenset().union(*(r.present for r in records.values()))
        pieces = [s for s in plan.segments if s.parameter in present]
        if not pieces:
            return value
        mean = self.mean(shard, records) * first.clip if first.clip != 1.0 else self.mean(
            shard, records
        )  # fmt: skip
        for s in pieces:
            span = slice(s.start, s.start + s.length)
            value[span].add_(mean[span], alpha=-RATE)
        return value

    def mean(self, shard: int, records: dict[int, Record]) -> torch.Tensor:
        """Return the mean over all members in canonical order, (length,)."""
        plan = self.shards[shard][1]
        dtype = getattr(torch, plan.dtype)
        zeros = torch.zeros(plan.length, dtype=dtype)
        total: torch.Tensor | None = None
        for group in self.tree:
            part: torch.Tensor | None = None
            for rank in group:
                if rank in records:
                    gradient = records[rank].gradients.get(shard, zeros)
                    part = gradient if part is None else part + gradient
            if part is not None:
                total = part if total is None else total + part
        assert total is not None
        return total / len(records)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits."""
    whole = torch.int64 if a.dtype == torch.float64 else torch.int32
    return a.shape == b.shape and torch.equal(a.view(whole), b.view(whole))
