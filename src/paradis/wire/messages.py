"""Every message of Paradis, one frozen struct each, with its direction.

Data messages travel as frames (`wire/frame.py`): the fields named in ``HEADER_FIELDS`` go into the
fixed header, further fields into a small msgpack section, tensors into the payload. Control
messages travel as msgpack over gRPC and never carry a tensor. Nothing here can run code.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from paradis.wire.control_messages import CONTROL_MESSAGES as CONTROL_MESSAGES
from paradis.wire.control_messages import Announcement as Announcement
from paradis.wire.control_messages import Beat as Beat
from paradis.wire.control_messages import CheckpointDone as CheckpointDone
from paradis.wire.control_messages import CheckpointInfo as CheckpointInfo
from paradis.wire.control_messages import ControlMessage as ControlMessage
from paradis.wire.control_messages import CopyMemories as CopyMemories
from paradis.wire.control_messages import Failed as Failed
from paradis.wire.control_messages import Freeze as Freeze
from paradis.wire.control_messages import HostGroupLost as HostGroupLost
from paradis.wire.control_messages import Join as Join
from paradis.wire.control_messages import Leave as Leave
from paradis.wire.control_messages import Listening as Listening
from paradis.wire.control_messages import MemoriesCopied as MemoriesCopied
from paradis.wire.control_messages import NodeExited as NodeExited
from paradis.wire.control_messages import Pace as Pace
from paradis.wire.control_messages import Plan as Plan
from paradis.wire.control_messages import PlanReady as PlanReady
from paradis.wire.control_messages import Refused as Refused
from paradis.wire.control_messages import Register as Register
from paradis.wire.control_messages import Report as Report
from paradis.wire.control_messages import Saved as Saved
from paradis.wire.control_messages import SaveFailed as SaveFailed
from paradis.wire.control_messages import Shutdown as Shutdown
from paradis.wire.control_messages import Summary as Summary
from paradis.wire.control_messages import Variance as Variance
from paradis.wire.control_messages import View as View
from paradis.wire.control_messages import ViewReady as ViewReady
from paradis.wire.control_messages import Welcome as Welcome
from paradis.wire.parts import Options as Options
from paradis.wire.parts import ParameterSpec as ParameterSpec
from paradis.wire.parts import Piece as Piece
from paradis.wire.parts import Scalar as Scalar
from paradis.wire.parts import Segment as Segment
from paradis.wire.parts import ShardPlan as ShardPlan
from paradis.wire.parts import StepCommit as StepCommit

HEADER_FIELDS = (
    "generation",
    "group",
    "shard",
    "chunk",
    "step",
    "version",
    "worker",
    "incarnation",
    "sequence",
    "revision",
    "codec",
)


class DataMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Header fields common to all frames.

    Attributes:
        group: number of the ``wrap`` call the shard belongs to.
        chunk: unit of transfer inside a shard; 0, a shard travels in one chunk.
        worker: rank of the worker, or index of the dispatcher for a rack's sum.
        revision: how often the sender has replaced its gradient of this (shard, step).
        codec: number of the code that the payload is in, 0: numbers in full.
    """

    KIND: ClassVar[int] = 0
    LAZY: ClassVar[bool] = False
    """Whether a link may hold it back while more arrives, to send several at once."""

    @property
    def urgency(self) -> int:
        """Of frames with a payload that wait to be sent, the lowest number goes first."""
        return 0

    generation: int = 0
    group: int = 0
    shard: int = 0
    chunk: int = 0
    step: int = 0
    version: int = 0
    worker: int = 0
    incarnation: int = 0
    sequence: int = 0
    revision: int = 0
    codec: int = 0


class Hello(DataMessage, frozen=True, kw_only=True):
    """Connecting node -> accepting node, answering `Challenge`. First frame of its sender."""

    KIND: ClassVar[int] = 1
    node: str
    proof: bytes


class Challenge(DataMessage, frozen=True, kw_only=True):
    """Accepting node -> connecting node: random bytes to prove the job token over."""

    KIND: ClassVar[int] = 2
    nonce: bytes


class Push(DataMessage, frozen=True, kw_only=True):
    """Worker -> server or rack agent: one worker's gradient of (shard, step). Payload: gradient,
    or its code.

    Attributes:
        sequence: 1 if backward handed it over and every parameter in it has a gradient: without
            a commit it is known which parameters the update concerns. Else 0.
    """

    KIND: ClassVar[int] = 3

    @property
    def whole(self) -> bool:
        """Whether every parameter in the shard has a gradient that backward handed over."""
        return self.sequence > 0


class RackPush(DataMessage, frozen=True, kw_only=True):
    """Rack agent, or a worker for its host -> server: the sum over the workers. Payload: sum, or
    the workers' codes one after the other.

    Attributes:
        included: (rank, revision) of every gradient in the sum, in summing order, which is also
            that of codes.
        sequence: how many codes the payload has; 0: it is a sum in full.
    """

    KIND: ClassVar[int] = 4
    included: tuple[tuple[int, int], ...]

    @property
    def codes(self) -> int:
        """How often the payload has the length of one worker's push."""
        return max(1, self.sequence)


class PushAck(DataMessage, frozen=True, kw_only=True):
    """Receiver -> pusher: the push (shard, step, revision) is held; and credit given back.

    Attributes:
        sequence: 1 if the shard's bytes may be sent again, 0 if their credit is withheld.
    """

    KIND: ClassVar[int] = 5
    LAZY: ClassVar[bool] = True

    @property
    def credit(self) -> bool:
        """Whether the credit is given back."""
        return self.sequence > 0


class Resend(DataMessage, frozen=True, kw_only=True):
    """Receiver -> pusher: the sum of (shard, step) was void; push your gradient again.

    Attributes:
        direct: push to the server itself, not through the rack agent.
    """

    KIND: ClassVar[int] = 6
    direct: bool = False


class Commit(DataMessage, frozen=True, kw_only=True):
    """Worker -> every server with shards of the group, and its rack agent: ``step()`` is called."""

    KIND: ClassVar[int] = 7
    commit: StepCommit


class Update(DataMessage, frozen=True, kw_only=True):
    """Server, rack agent or worker of the same host -> worker: the shard at ``version``.

    Payload: new value, or the code of what makes it of the one before.

    Attributes:
        unchanged: no payload, the value is that of ``version - 1``.
        present: of a code: bit i is set if segment i was updated; empty: all were.
        coded_from: first step that travels as codes, -1: not known yet.
        coded_until: first one that travels in full again; below ``coded_from``: not known yet.
        found_inf: the step was skipped because some worker's scaler saw an overflow.
        priority: place of the shard in admission order from the next step on.
        revision: of one to a rack agent: 1 if the sum that it pushed is in the update, else 0.
    """

    KIND: ClassVar[int] = 8
    unchanged: bool = False
    found_inf: bool = False
    priority: int = -1
    present: bytes = b""
    coded_from: int = -1
    coded_until: int = -1

    @property
    def counted(self) -> bool:
        """Whether the rack agent's sum is in it."""
        return self.revision > 0

    @property
    def urgency(self) -> int:
        """The gradient that backward makes last is of the layer that forward reads first."""
        return -self.priority


class Pull(DataMessage, frozen=True, kw_only=True):
    """Worker -> server: send the shard when it has at least ``version``."""

    KIND: ClassVar[int] = 9


class Read(DataMessage, frozen=True, kw_only=True):
    """Worker -> server: a step begins here that reads shards of another worker group.

    The server says their versions at once, or when what is being written is (`Versions`), and
    sends a value (`Update`) where the one that the worker has, or was sent, lacks ``version``
    updates or more, at least one.

    Attributes:
        version: updates that a reader may miss.
        sequence: number of the question; `Versions` and `Update` carry it.
        revision: 1 if what was sent before may be lost, else 0.
        held: shard -> version that the worker has, -1 for none.
    """

    KIND: ClassVar[int] = 25
    held: dict[int, int]


class Versions(DataMessage, frozen=True, kw_only=True):
    """Server -> worker: shard -> its version now, in answer to `Read`; perhaps in several parts."""

    KIND: ClassVar[int] = 26
    versions: dict[int, int]


class Assign(DataMessage, frozen=True, kw_only=True):
    """Worker -> server: here are the shard's values. Payload: sections in the order of ``keys``.

    Attributes:
        keys: ``value`` and names of optimizer state with one entry per element.
        dtypes: dtype of each section.
        scalars: segment index -> {name: number} of per-parameter state such as ``step``.
        at_step: True: replaces the value within step ``step`` once all commits agree on it.
    """

    KIND: ClassVar[int] = 10
    keys: tuple[str, ...] = ("value",)
    dtypes: tuple[str, ...] = ()
    scalars: dict[int, dict[str, float]] = {}
    at_step: bool = False


class AssignAck(DataMessage, frozen=True, kw_only=True):
    """Server -> worker: the assignment is held."""

    KIND: ClassVar[int] = 11


class PullState(DataMessage, frozen=True, kw_only=True):
    """Worker -> server: send value and optimizer state of the shard at ``version``.

    Attributes:
        memories: send what its codes start from instead.
    """

    KIND: ClassVar[int] = 12
    memories: bool = False


class State(DataMessage, frozen=True, kw_only=True):
    """Server -> worker: answer to `PullState`. Payload: sections in the order of ``keys``."""

    KIND: ClassVar[int] = 13
    keys: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    scalars: dict[int, dict[str, float]] = {}


class NormRequest(DataMessage, frozen=True, kw_only=True):
    """Worker -> server: square sums of the mean gradient of ``step``, please.

    Carries what counts so far, as a commit does, but commits nothing.
    """

    KIND: ClassVar[int] = 14
    commit: StepCommit


class Norms(DataMessage, frozen=True, kw_only=True):
    """Server -> worker: shard -> square sum (float64) of the mean gradient of ``step``."""

    KIND: ClassVar[int] = 15
    squares: dict[int, float]


class Snapshot(DataMessage, frozen=True, kw_only=True):
    """Worker 0 -> server: copy all shards of the group at ``version`` for a checkpoint.

    Attributes:
        as_is: of a group that worker 0 does not train: at whatever version they are.
        sequence: 1: not yet; with backup workers the choosing server says which version.
    """

    KIND: ClassVar[int] = 16
    checkpoint: str
    as_is: bool = False


class SnapshotAck(DataMessage, frozen=True, kw_only=True):
    """Server -> worker 0: copied; training may go on while the files are written.

    Attributes:
        sequence: 1: not copied yet; the checkpoint will be of ``version``.
    """

    KIND: ClassVar[int] = 17
    checkpoint: str


class Refusal(DataMessage, frozen=True, kw_only=True):
    """Server or rack agent -> worker: the step cannot be done; error class and text."""

    KIND: ClassVar[int] = 18
    error: str
    text: str


class Stale(DataMessage, frozen=True, kw_only=True):
    """Receiver -> sender: your ``generation`` is not mine; ``version`` carries mine.

    The frame (shard, step, revision) was dropped and must be sent again in the new view.
    """

    KIND: ClassVar[int] = 19


class Begin(DataMessage, frozen=True, kw_only=True):
    """Worker -> every server with shards of the group: gradients of ``step`` are coming.

    Sent with ``training.early_update`` only. Says ahead of the commit what a server must know to
    update: options, and which values the script has changed. The commit must say the same.
    """

    KIND: ClassVar[int] = 20
    commit: StepCommit


class Confirmed(DataMessage, frozen=True, kw_only=True):
    """Server -> worker: all have committed ``step`` as it was applied here; it is over.

    Sent with ``training.early_update`` only, where an update may come before the commits.

    Attributes:
        priorities: shard -> place in admission order from the next step on, if the step changed it.
        coded_from: as of `Update`, likewise ``coded_until``.
    """

    KIND: ClassVar[int] = 21
    priorities: dict[int, int] = {}
    coded_from: int = -1
    coded_until: int = -1


class Quorum(DataMessage, frozen=True, kw_only=True):
    """Choosing server -> worker, worker -> server: who makes ``step``.

    Sent with ``training.backup_workers`` only. Servers have no links to each other, so the members
    carry it. A server that waits for a holder's `Holding` asks for it by the same message.

    Attributes:
        members: ranks whose mean the update is.
        holders: ranks that must have the version ``step`` before it is overwritten.
        saving: checkpoint to copy the version ``step`` for before it is overwritten, or empty.
    """

    KIND: ClassVar[int] = 22
    members: tuple[int, ...]
    holders: tuple[int, ...]
    saving: str = ""


class Late(DataMessage, frozen=True, kw_only=True):
    """Choosing server -> worker: ``step`` was made without you; go on with ``version``, whole."""

    KIND: ClassVar[int] = 23


class Holding(DataMessage, frozen=True, kw_only=True):
    """Worker -> server: I have all your shards at ``version``: overwrite it when you like."""

    KIND: ClassVar[int] = 24


DATA_MESSAGES: tuple[type[DataMessage], ...] = (
    Hello, Challenge, Push, RackPush, PushAck, Resend, Commit, Update, Pull, Assign, AssignAck,
    PullState, State, NormRequest, Norms, Snapshot, SnapshotAck, Refusal, Stale,
    Begin, Confirmed, Quorum, Late, Holding, Read, Versions,
)  # fmt: skip
