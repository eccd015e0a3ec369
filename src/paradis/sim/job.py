"""What a simulated job consists of: sizes, models, and how often what happens. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from paradis.core.codes import needs_all_codes

MS = 1_000_000
"""Nanoseconds of a millisecond of virtual time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What one ``wrap`` call registers.

    Attributes:
        parts: numbers of elements of the parameters of each registration; the first part is
            registered at the start, later ones after a step.
        buffer: elements of one module buffer in the first part, 0 for none.
    """

    parts: tuple[tuple[int, ...], ...]
    buffer: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """How often a script does what, as probabilities per step unless said otherwise.

    Attributes:
        absent: per parameter and worker: no gradient.
        revise: the gradients change after backward.
        drop: a whole backward is thrown away.
        late: per shard: its gradient is only handed over by ``step()``.
        norm: the norm is asked for (all workers do, or none).
        change: the script changes values (all workers alike).
        found_inf: per worker: its scaler saw an overflow.
        look: per worker: pulls the values, or the optimizer state, between steps.
        snapshot: worker 0 asks for a checkpoint.
    """

    absent: float = 0.0
    revise: float = 0.0
    drop: float = 0.0
    late: float = 0.0
    norm: float = 0.0
    change: float = 0.0
    found_inf: float = 0.0
    look: float = 0.0
    snapshot: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weather:
    """What the network does to data messages until ``calm_ns``; control streams are reliable.

    Attributes:
        latency_ns: least time of a message.
        jitter_ns: most time added; messages overtake each other only in bad weather.
        loss: probability that a message is lost.
        repeat: probability that it arrives twice.
        no_memory: probability that a payload finds no memory at its receiver.
    """

    latency_ns: int = 50_000
    jitter_ns: int = 200_000
    loss: float = 0.0
    repeat: float = 0.0
    no_memory: float = 0.0
    reorder: bool = False
    calm_ns: int = 400 * MS

    @property
    def fair(self) -> bool:
        """Whether messages behave as on a good link."""
        return not (self.loss or self.repeat or self.reorder or self.no_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something that happens to a node or to the link between two.

    Attributes:
        kind: ``pause`` (the node handles nothing), ``cut`` (the link is lost and cannot be opened
            for a while), ``crash`` (the node ends; only rack agents may) or ``sever`` (the workers
            of the node's host lose each other).
    """

    kind: str
    at_ns: int
    node: str
    peer: str = ""
    duration_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What the leader says of how all groups travel (`paradis.wire.messages.Freeze`).

    Attributes:
        heard: in which of its steps each worker hears of it.
    """

    step: int
    until: int
    heard: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One scenario.

    Attributes:
        racks: rack index of each worker; one rack agent per rack index.
        hosts: host of each worker, where the workers of a host reduce first; empty: none do.
        tree: logical groups, empty for the default.
        quota_bytes: of every pusher at every receiver; roles raise it to two largest shards.
        leaves: rank -> number of steps after which it leaves early.
        slow: node -> factor on its numeric work and thinking time.
        coded: gradients and updates travel as codes, where the dtype allows.
        recompress: rack agents make one code of their workers' codes.
        coded_late: not from the beginning, but when the leader says so.
        changes: what the leader says while the job runs.
        measured: the leader measures what codes are good for, in short windows, and goes by it.
        early: servers may update before the workers have committed.
        groups: numbers of workers of the worker groups, in order; each has a model of its own.
            Empty: all workers train all models.
        bounds: of each worker group: updates that a reader may miss, and in ``ssp`` its staleness.
        modes: of each worker group; empty: all are of ``mode``.
        mode: of all groups, with the bound of ``ssp`` and whether ``async`` scales rates.
        backup: workers that a step does without.
        liveness_ns: virtual time within which everything must end after the weather calmed.
    """

    seed: int
    workload: str
    workers: int
    servers: int
    steps: int
    models: tuple[Model, ...]
    racks: tuple[int, ...]
    dispatchers: int
    hosts: tuple[int, ...] = ()
    tree: tuple[tuple[int, ...], ...] = ()
    quota_bytes: int = 1
    habits: Habits = Habits()
    weather: Weather = Weather()
    faults: tuple[Fault, ...] = ()
    leaves: dict[int, int] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    early: bool = False
    retry_ns: int = 30 * MS
    coded: bool = False
    coded_late: bool = False
    recompress: bool = False
    changes: tuple[Change, ...] = ()
    measured: bool = False
    mode: str = "sync"
    staleness: int = 1
    scaling: bool = False
    groups: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    backup: int = 0
    liveness_ns: int = 20_000 * MS

    def ranks_of(self, group: int) -> tuple[int, ...]:
        """Return the ranks that train a model, ascending."""
        if not self.groups:
            return tuple(range(self.workers))
        first = sum(self.groups[:group])
        return tuple(range(first, first + self.groups[group]))

    def trains(self, rank: int, group: int) -> bool:
        """Whether a worker trains a model, else it reads it."""
        return rank in self.ranks_of(group)

    def bound_of(self, group: int) -> int:
        """Return how many updates of a model a reader may miss; in ``ssp`` also its staleness."""
        return self.bounds[group] if self.groups else self.staleness

    def mode_of(self, group: int) -> str:
        """Return the mode in which a model is trained."""
        return self.modes[group] if self.modes else self.mode

    def needs_all(self, group: int) -> bool:
        """Whether a committed step of a model ends only with all gradients."""
        return needs_all_codes(mode=self.mode_of(group), backup_workers=self.backup)

    @property
    def clean(self) -> bool:
        """Whether nothing fails, so that memory bounds hold to the letter."""
        return self.weather.fair and not self.faults and not self.leaves
