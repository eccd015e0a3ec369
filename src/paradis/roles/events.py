"""What a role can be told: messages from peers, timers, and results of its own effects."""

from __future__ import annotations

import msgspec

from paradis.ids import NodeId
from paradis.wire.messages import ControlMessage, DataMessage, Saved, StepCommit


class Event(msgspec.Struct, frozen=True):
    """Root of all events."""


class Received(Event, frozen=True):
    """A message arrived. ``lease`` names the received payload; 0: none, or it was dropped."""

    source: NodeId
    message: DataMessage | ControlMessage
    lease: int = 0


class PeerUp(Event, frozen=True):
    """A data connection to the peer is ready for sending."""

    peer: NodeId


class PeerLost(Event, frozen=True):
    """The data connection to the peer is gone; or, with ``control``, the control stream.

    Both may lead to the same process: the first dispatcher is the leader and may be a rack agent.
    """

    peer: NodeId
    reason: str
    control: bool = False


class TimerFired(Event, frozen=True):
    """A timer set earlier reached its time; old timers are recognised by name."""

    name: str


# ------------------------------------------------------------------------------------- worker


class RegisterAsked(Event, frozen=True):
    """The script called ``wrap`` or ``add_param_group``: register these parameters."""

    registration: ControlMessage


class ShardsReady(Event, frozen=True):
    """Backward has produced the gradients of these shards.

    Attributes:
        step: what they are of, where ``step()`` may have been called since; -1: the present one.
    """

    group: int
    shards: tuple[int, ...]
    step: int = -1


class StepBegun(Event, frozen=True):
    """The first gradient of a step may go; the step's updates may go ahead of the commits.

    Attributes:
        commit: options and changed values as they are now; nothing else in it counts.
    """

    group: int
    commit: StepCommit


class StepClosed(Event, frozen=True):
    """The script called ``step()``.

    Attributes:
        commit: presence, options and the rest; ``revisions`` is filled in by the role.
        present: shards that hold at least one gradient.
        revised: shards whose gradient changed since it was handed over.
        late: present shards whose code is still being made: `ShardsReady` follows, with the step.
    """

    group: int
    commit: StepCommit
    present: tuple[int, ...]
    revised: tuple[int, ...]
    late: tuple[int, ...] = ()


class NormAsked(Event, frozen=True):
    """The script called ``clip_grad_norm_``: like `StepClosed`, but commits nothing."""

    group: int
    commit: StepCommit
    present: tuple[int, ...]
    revised: tuple[int, ...]


class AssignAsked(Event, frozen=True):
    """Send shard values (and state) to the servers; ``shards`` -> (keys, dtypes, scalars)."""

    group: int
    shards: dict[int, tuple[tuple[str, ...], tuple[str, ...], dict[int, dict[str, float]]]]


class PullAsked(Event, frozen=True):
    """Fetch the values of these shards at the current version."""

    group: int
    shards: tuple[int, ...]


class ReadAsked(Event, frozen=True):
    """A step begins that reads a group which others train: bring its values within the bound."""

    group: int


class StateAsked(Event, frozen=True):
    """Fetch value and optimizer state of shards of the group.

    Attributes:
        shards: which; empty: all.
        memories: fetch what codes start from instead.
    """

    group: int
    shards: tuple[int, ...] = ()
    memories: bool = False


class SnapshotAsked(Event, frozen=True):
    """Ask the servers to copy the group's shards for a checkpoint."""

    group: int
    info: ControlMessage


class HostSummed(Event, frozen=True):
    """The gradients of a shard are summed over this host; `effects.HostSum` is the sum.

    Attributes:
        included: (rank, revision) of each gradient in it, in summing order; empty: there is none.
    """

    group: int
    shard: int
    step: int
    included: tuple[tuple[int, int], ...]


class HostGroupBroken(Event, frozen=True):
    """The workers of this host do not reach each other."""

    reason: str


class LeaveAsked(Event, frozen=True):
    """The script ended."""


# ------------------------------------------------------------------------- server, rack agent


class Reduced(Event, frozen=True):
    """A sum is ready."""

    shard: int
    ticket: int


class Applied(Event, frozen=True):
    """The optimizer has updated the shard, unless element ``non_finite`` (>= 0) of its gradient is
    NaN or infinite: then nothing was changed.

    ``norms`` are those that `effects.Apply` asked for: parameter -> L1 norm of its corrected v.
    """

    shard: int
    step: int
    non_finite: int = -1
    norms: dict[int, float] = {}


class Stored(Event, frozen=True):
    """Assigned or loaded values are in place."""

    shard: int
    ticket: int


class Measured(Event, frozen=True):
    """Square sums of held sums, per shard."""

    group: int
    step: int
    squares: dict[int, float]


class Copied(Event, frozen=True):
    """All shards of the group are copied for the checkpoint."""

    group: int
    checkpoint: str


class Written(Event, frozen=True):
    """This server's part of a checkpoint is on disk, or ``error`` says why not."""

    checkpoint: str
    saved: Saved | None
    error: str = ""


class ManifestWritten(Event, frozen=True):
    """The checkpoint is complete, or ``error`` says why not."""

    checkpoint: str
    path: str
    error: str = ""


class EffectFailed(Event, frozen=True):
    """An effect raised: error class and text. A bug, or a disk or memory that gave out."""

    what: str
    error: str
    text: str
