"""What a role can ask for. A driver carries effects out; results come back as events."""

from __future__ import annotations

import msgspec

from paradis.ids import NodeId
from paradis.wire.messages import (
    CheckpointInfo,
    ControlMessage,
    DataMessage,
    Options,
    Plan,
    Saved,
    ShardPlan,
    Update,
)


class Payload(msgspec.Struct, frozen=True):
    """Descriptor of bytes a driver can find; roles never see the bytes."""


class Gradient(Payload, frozen=True):
    """The worker's own gradient of a shard."""

    group: int
    shard: int


class Sum(Payload, frozen=True):
    """The sum held in the shard's accumulator."""

    shard: int


class HostSum(Payload, frozen=True):
    """The sum of a shard's gradients over the workers of this host."""

    group: int
    shard: int


class Sections(Payload, frozen=True):
    """Value and optimizer state of a shard, in the order of ``keys``.

    Attributes:
        copied: the value may change before it is sent: send a copy of what it is now.
    """

    group: int
    shard: int
    keys: tuple[str, ...] = ("value",)
    copied: bool = False


class Code(Payload, frozen=True):
    """The code of what made the shard's value of the one before."""

    shard: int


class Lease(Payload, frozen=True):
    """A received payload, still held."""

    lease: int


class Effect(msgspec.Struct, frozen=True):
    """Root of all effects."""


class Send(Effect, frozen=True):
    """Send a message; data messages by the data plane, control messages by the stream."""

    target: NodeId
    message: DataMessage | ControlMessage
    payload: Payload | None = None


class SetTimer(Effect, frozen=True):
    """Call back with ``TimerFired(name)`` at ``at_ns``; a later one of this name replaces it."""

    name: str
    at_ns: int


class Release(Effect, frozen=True):
    """Give a received payload's memory back."""

    lease: int


class ReleaseSum(Effect, frozen=True):
    """The shard's accumulator is free for the next step."""

    shard: int


class SumCounted(Effect, frozen=True):
    """The code that a rack agent made of the shard's sum is in the update of a step: what it has
    left out counts."""

    shard: int
    step: int


class Connect(Effect, frozen=True):
    """Open a data connection to each of these nodes, unless there is one."""

    addresses: dict[NodeId, tuple[str, ...]]


class Announce(Effect, frozen=True):
    """A line for the user; ``once`` suppresses repetitions of the same text."""

    level: str
    text: str
    once: bool = False


class Count(Effect, frozen=True):
    """Add to one of this node's counters (`paradis.observe.metrics`)."""

    name: str
    amount: int = 1


class Fail(Effect, frozen=True):
    """This node cannot go on: error class and text. The driver ends the node."""

    error: str
    text: str


class End(Effect, frozen=True):
    """This node's work is done: drain and end with success."""

    reason: str


# ------------------------------------------------------------------------------------- worker


class Complete(Effect, frozen=True):
    """Wake the script's thread that waits for ``what`` (``step``, ``plan``, ``pull``, ...).

    Attributes:
        late: of a step: it was made without this worker, whose count of steps has jumped.
    """

    group: int
    what: str
    step: int = 0
    error: str = ""
    text: str = ""
    found_inf: bool = False
    late: bool = False
    squares: dict[int, float] = {}
    plan: Plan | None = None
    path: str = ""


class Coding(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to make the next value of a code.

    Attributes:
        options: hyper-parameters of the step.
        present: per segment, whether it was updated.
    """

    options: Options
    present: tuple[bool, ...]


class Install(Effect, frozen=True):
    """The payload is the shard's value at ``version``: make it the parameters' value.

    Attributes:
        code: the payload is the code of what makes it of the value before; None: it is the value.
    """

    group: int
    shard: int
    version: int
    lease: int
    code: Coding | None = None


class Keep(Effect, frozen=True):
    """The shard's next value is the one that the parameters have."""

    group: int
    shard: int


class Refund(Effect, frozen=True):
    """The group's step was made without this worker: what its codes noted does not count."""

    group: int


class TakeMemories(Effect, frozen=True):
    """The payload holds what a shard's codes start from: the worker's coder goes on from there.

    What this worker's own codes have left out stays.
    """

    group: int
    shard: int
    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    lease: int


class KeepState(Effect, frozen=True):
    """The payload holds value and optimizer state of a shard: keep it for ``state_dict``."""

    group: int
    shard: int
    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    scalars: dict[int, dict[str, float]]
    lease: int


class OpenHostGroup(Effect, frozen=True):
    """Find the other workers of this host; `HostGroupBroken` says when that fails.

    Attributes:
        name: known to all of them and to nobody else.
        ranks: all of them, ascending.
    """

    name: str
    ranks: tuple[int, ...]


class CloseHostGroup(Effect, frozen=True):
    """Hand nothing to the other workers of this host any more."""


class HandOver(Effect, frozen=True):
    """Hand the own gradient of a shard, or nothing, to the worker that sums it for the host.

    Once for each (shard, step): the owner waits for it. It hands its own over to itself.

    Attributes:
        present: False: this worker has no gradient that could be summed.
    """

    group: int
    shard: int
    step: int
    revision: int
    present: bool
    owner: int


class Gather(Effect, frozen=True):
    """Sum what the host's workers hand over; `HostSummed` for each shard. Once a step for each.

    Attributes:
        shards: those that this worker owns on its host, in admission order.
        ranks: of the host, in summing order.
    """

    group: int
    step: int
    shards: tuple[int, ...]
    ranks: tuple[int, ...]


class Spread(Effect, frozen=True):
    """Send an update on to the other workers of this host. Once for each (shard, step).

    Attributes:
        lease: where the new value is, 0 if the update brought none.
    """

    update: Update
    lease: int


class Expect(Effect, frozen=True):
    """Receive updates from the workers that own these shards on this host. Once a step.

    Attributes:
        owners: shard -> rank, in the order in which they are likely to come.
    """

    group: int
    step: int
    owners: dict[int, int]


# ------------------------------------------------------------------------- server, rack agent


class OpenPlan(Effect, frozen=True):
    """Allocate what the plan's own shards need."""

    plan: Plan
    shards: tuple[ShardPlan, ...]


class Reduce(Effect, frozen=True):
    """Sum leases over tree groups into the shard's accumulator, then divide.

    Attributes:
        sources: leases per logical group, in canonical order.
        divisor: 1 in a rack agent, the number of members on a server.
        missing: some member contributes zero, so that negative zeros become positive.
        coded: the leases hold codes.
    """

    shard: int
    ticket: int
    sources: tuple[tuple[int, ...], ...]
    divisor: int
    missing: bool
    coded: bool = False


class Apply(Effect, frozen=True):
    """Run the optimizer on a shard with the sum it holds.

    Attributes:
        present: per segment, whether it has a gradient on any worker.
        clip: factor for the mean gradient, 1.0 for none.
        check: first look for NaN and infinity in the mean gradient; with any, change nothing.
        coded: the update travels as a code, so make that, too.
        measure: say how large Adam's bias-corrected v is afterwards.
        staleness: in ``ssp`` and ``async``: updates since the worker read the value; -1 in sync.
    """

    group: int
    shard: int
    step: int
    options: Options
    present: tuple[bool, ...]
    clip: float
    check: bool
    coded: bool = False
    measure: bool = False
    staleness: int = -1


class BeginCodes(Effect, frozen=True):
    """The group's next step travels as codes: they start from the optimizer's present state."""

    group: int
    options: list[Options]


class Store(Effect, frozen=True):
    """Take value and state of a shard from a lease."""

    group: int
    shard: int
    ticket: int
    lease: int
    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    scalars: dict[int, dict[str, float]]


class Load(Effect, frozen=True):
    """Read value and state of a shard from a checkpoint directory."""

    group: int
    shard: int
    ticket: int
    path: str


class Measure(Effect, frozen=True):
    """Square sums of the held sums of these shards."""

    group: int
    step: int
    shards: tuple[int, ...]


class Copy(Effect, frozen=True):
    """Copy the group's shards, report `Copied`, write them, report `Written`.

    Attributes:
        options: hyper-parameters to say along with the part, where worker 0 does not know them.
    """

    group: int
    checkpoint: str
    step: int
    options: list[Options] = []


# ------------------------------------------------------------------------------------- leader


class Persist(Effect, frozen=True):
    """Write these keys to the metadata store, all or none."""

    puts: dict[str, str]


class WriteManifest(Effect, frozen=True):
    """All parts are on disk: write the manifest, last.

    Attributes:
        benefit: the codec that was measured, and ``on`` or ``off``; empty: nothing is decided.
    """

    info: CheckpointInfo
    plans: tuple[Plan, ...]
    parts: tuple[Saved, ...]
    benefit: str = ""
