"""Messages of the control plane, one frozen struct each: msgpack over gRPC, never a tensor.

Roles and drivers import them from `paradis.wire.messages`, beside those of the data plane.
"""

from __future__ import annotations

import msgspec

from paradis.wire.parts import Options, ParameterSpec, Piece, Scalar, ShardPlan


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of the messages on the gRPC streams. The tag is the class name."""


class Join(ControlMessage, frozen=True, kw_only=True):
    """Node -> leader, first message of its stream (the job token travels as call metadata).

    Attributes:
        node: wanted name; an empty name asks for the next free one of ``role``.
        beside: of a co-located server without a name: the rank of its worker; -1 of all others.
        addresses: data-plane addresses the node listens on (servers, dispatchers).
        capability: CPU capability, threads and torch version, compared among servers.
    """

    node: str
    role: str
    host: str
    pid: int
    rack: str = ""
    beside: int = -1
    addresses: tuple[str, ...] = ()
    capability: dict[str, str] = {}


class Welcome(ControlMessage, frozen=True, kw_only=True):
    """Leader -> node: joined.

    Attributes:
        settings: the job's settings that every node must agree on (numbers in SI units, strings).
    """

    node: str
    incarnation: int
    generation: int
    job: str
    world_size: int
    settings: dict[str, Scalar]


class Listening(ControlMessage, frozen=True, kw_only=True):
    """Server or dispatcher -> leader: my data plane accepts connections at these addresses."""

    node: str
    addresses: tuple[str, ...]


class Refused(ControlMessage, frozen=True, kw_only=True):
    """Leader -> node: what you asked is refused; error class and text."""

    error: str
    text: str


class Register(ControlMessage, frozen=True, kw_only=True):
    """Worker -> leader: the parameters of one ``wrap`` call (or of a later ``add_param_group``).

    Attributes:
        coded_from: first step that may travel as codes; -1: when the leader says so.
        coded_until: of a later part: the first step since then that travels in full.
        compression: how it travels; empty: as the configuration says.
        benefit: whether codes make steps faster, as an earlier run found it, ``on`` or ``off``;
            empty: not known.
    """

    rank: int
    group: int
    part: int
    parameters: tuple[ParameterSpec, ...]
    optimizer: str
    options: list[Options]
    step: int = 0
    coded_from: int = 0
    coded_until: int = -1
    compression: str = ""
    benefit: str = ""


class Plan(ControlMessage, frozen=True, kw_only=True):
    """Leader -> servers, rack agents, then workers: the shards of one registered part.

    Attributes:
        parameters: specs of this part; segment indices start at ``first_parameter``.
        step: step (= version) at which the new shards start.
        restore: directory of the checkpoint the servers load from, or empty.
        coded_from: first step that travels as codes where a shard has a codec; -1: told later.
        coded_until: first step after it in full; below ``coded_from``: none yet.
        settle_steps: steps after a change of how the group travels that workers leave out of what
            they measure.
        window_steps: steps whose durations they then tell (`Pace`); 0: they measure nothing.
        restored: what the checkpoint says of groups: options to take over, and step.
        mode: ``sync``; or ``ssp``, ``async``, where each worker's gradient is an update by itself.
        staleness: of ``ssp``: how many steps a worker may be ahead of the slowest, at least 1.
        scaling: the learning rate of an update is divided by its staleness.
        ranks: who trains it; everybody else reads it. Empty: all train it.
        reading: updates that the value of a reader may lack when its step begins.
        backup: of ``sync``: workers that a step does without.
    """

    generation: int
    group: int
    part: int
    first_parameter: int
    parameters: tuple[ParameterSpec, ...]
    optimizer: str
    options: list[Options]
    shards: tuple[ShardPlan, ...]
    step: int
    restore: str = ""
    coded_from: int = -1
    coded_until: int = -1
    settle_steps: int = 0
    window_steps: int = 0
    mode: str = "sync"
    staleness: int = 0
    scaling: bool = False
    ranks: tuple[int, ...] = ()
    reading: int = 0
    backup: int = 0


class PlanReady(ControlMessage, frozen=True, kw_only=True):
    """Server or rack agent -> leader: the plan is in force here."""

    generation: int
    group: int
    part: int


class View(ControlMessage, frozen=True, kw_only=True):
    """Leader -> all nodes: membership at a generation, before any plan that needs it.

    Attributes:
        members: ranks that take part.
        left: rank -> number of steps it finished per group, for ranks that left early.
        tree: logical groups of ranks, in order: the canonical reduction, fixed at job start.
        addresses: node -> data-plane addresses.
        racks: rack name -> (rack agent or "", ranks in worker order).
        host_groups: name -> ranks, ascending, of a host's workers that reduce first.
    """

    generation: int
    members: tuple[int, ...]
    left: dict[int, dict[int, int]]
    tree: tuple[tuple[int, ...], ...]
    addresses: dict[str, tuple[str, ...]]
    racks: dict[str, tuple[str, tuple[int, ...]]]
    host_groups: dict[str, tuple[int, ...]] = {}


class ViewReady(ControlMessage, frozen=True, kw_only=True):
    """Server or rack agent -> leader: the view is in force here."""

    generation: int


class Leave(ControlMessage, frozen=True, kw_only=True):
    """Worker -> leader: I am done. ``steps`` is the number of finished steps per group."""

    node: str
    steps: dict[int, int]


class HostGroupLost(ControlMessage, frozen=True, kw_only=True):
    """Worker -> leader: the workers of my host group cannot reduce among themselves any more."""

    node: str
    text: str


class NodeExited(ControlMessage, frozen=True, kw_only=True):
    """Host agent -> leader: a process ended. ``code`` as in subprocess; text for the user."""

    node: str
    code: int
    text: str = ""


class Beat(ControlMessage, frozen=True, kw_only=True):
    """Host agent, or a node without one -> leader: these nodes are alive."""

    nodes: tuple[str, ...]


class Announcement(ControlMessage, frozen=True, kw_only=True):
    """Leader or server (by the leader) -> host agents: a line for the user, with a log level."""

    level: str
    text: str


class Failed(ControlMessage, frozen=True, kw_only=True):
    """Leader -> all, or node -> leader: the job cannot go on; error class and text."""

    error: str
    text: str


class Shutdown(ControlMessage, frozen=True, kw_only=True):
    """Leader -> servers, dispatchers, host agents: the job is over, drain and end."""

    reason: str


class Variance(ControlMessage, frozen=True, kw_only=True):
    """Server -> leader, every so many steps until the freeze: how large Adam's v is here.

    Attributes:
        group: of the ``wrap`` call.
        step: steps that the group has done.
        norms: parameter index -> L1 norm of the bias-corrected v of the elements that live here.
        counts: parameter index -> how many elements these are.
    """

    node: str
    group: int
    step: int
    norms: dict[int, float]
    counts: dict[int, int]


class Freeze(ControlMessage, frozen=True, kw_only=True):
    """Leader -> workers: the group may travel as codes from ``step`` on.

    It does from the first step after all workers have said in a commit that they know.

    Attributes:
        until: if it is more than ``step``: and in full again from this step on, likewise.
    """

    group: int
    step: int
    until: int = -1


class Pace(ControlMessage, frozen=True, kw_only=True):
    """Worker -> leader, once for each period of a group in codes or in full: its steps' durations.

    Attributes:
        step: the last one of them.
        coded: they travelled as codes.
        times_ns: from one call of ``step()`` to the next, in nanoseconds.
    """

    rank: int
    group: int
    step: int
    coded: bool
    times_ns: tuple[int, ...]


class Report(ControlMessage, frozen=True, kw_only=True):
    """Node -> leader: counters since its start (``observe/metrics.py``)."""

    node: str
    counters: dict[str, float]


class Summary(ControlMessage, frozen=True, kw_only=True):
    """Leader -> host agents at the end: the last counters of every node."""

    nodes: dict[str, dict[str, float]]


class Saved(ControlMessage, frozen=True, kw_only=True):
    """Server -> leader: this server's part of the checkpoint is on disk.

    Attributes:
        scalars: parameter name -> {state name: number}.
        options: hyper-parameters of the last step, where worker 0 does not know them.
    """

    node: str
    checkpoint: str
    group: int
    step: int
    pieces: tuple[Piece, ...]
    scalars: dict[str, dict[str, float]]
    options: list[Options] = []


class SaveFailed(ControlMessage, frozen=True, kw_only=True):
    """Server -> leader: this server could not write its part."""

    node: str
    checkpoint: str
    text: str


class CheckpointInfo(ControlMessage, frozen=True, kw_only=True):
    """Worker 0 -> leader, with its `Snapshot`: what belongs in the manifest beside the pieces.

    Attributes:
        workers: ranks that have a part of their own, what their codes have left out so far.
        version: steps of this run, which leaves out those before a restore; ``step`` counts all.
        as_is: of a group that worker 0 does not train: its own step and options are the servers'.
    """

    checkpoint: str
    group: int
    step: int
    options: list[Options]
    extra: dict[str, Scalar]
    workers: tuple[int, ...] = ()
    version: int = 0
    as_is: bool = False


class CopyMemories(ControlMessage, frozen=True, kw_only=True):
    """Leader -> workers: copy your part of a checkpoint, after ``step`` steps of this run."""

    checkpoint: str
    group: int
    step: int


class MemoriesCopied(ControlMessage, frozen=True, kw_only=True):
    """Worker -> leader -> worker 0: this worker's part is copied; training may go on."""

    rank: int
    checkpoint: str
    group: int


class CheckpointDone(ControlMessage, frozen=True, kw_only=True):
    """Leader -> workers and host agents: the manifest is written (or ``error`` says why not)."""

    checkpoint: str
    path: str
    step: int
    error: str = ""


CONTROL_MESSAGES: tuple[type[ControlMessage], ...] = (
    Join, Welcome, Listening, Refused, Register, Plan, PlanReady, View, ViewReady, Leave,
    HostGroupLost, NodeExited, Beat, Variance, Freeze, Pace,
    Announcement, Failed, Shutdown, Report, Summary, Saved, SaveFailed, CheckpointInfo,
    CheckpointDone, CopyMemories, MemoriesCopied,
)  # fmt: skip
