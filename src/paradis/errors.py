"""The errors of Paradis, one tree.

    ParadisError
      ConfigError                   the user must change something
      ProtocolError
        LocalProtocolError          we were asked to do something illegal: caller's bug
        RemoteProtocolError         a peer sent something illegal: drop the peer
          VersionMismatch
          FrameCorrupt
      StaleError                    the request is out of date: refresh and retry
        StaleGeneration
        StaleVersion
        NotOwner
      UnavailableError              try again later
        PeerUnreachable
        DeadlineExceeded
        Overloaded
      StateError                    do not retry; a person or a restore is needed
        SnapshotCorrupt
        JoinRefused
        WorkersDisagree
        JobFailed
      NumericsError
        NonFiniteGradient
      InternalError                 an invariant is broken: file a bug

Every message reads: what failed: which thing; expected and got; what to do.
"""

from __future__ import annotations

from typing import ClassVar


class ParadisError(Exception):
    """Root of every error that Paradis raises on purpose.

    Attributes:
        retryable: whether the same request may succeed later.
        grpc_status: name of the gRPC status code that carries this class on the control plane.
    """

    retryable: ClassVar[bool] = False
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class ConfigError(ParadisError):
    """The user must change a setting, an argument or the script."""

    grpc_status = "INVALID_ARGUMENT"


class ProtocolError(ParadisError):
    """Somebody broke the protocol."""


class LocalProtocolError(ProtocolError):
    """We were asked to do something illegal: the caller's bug."""

    grpc_status = "FAILED_PRECONDITION"


class RemoteProtocolError(ProtocolError):
    """A peer sent something illegal: drop the peer."""

    grpc_status = "INVALID_ARGUMENT"


class VersionMismatch(RemoteProtocolError):
    """Two nodes speak different versions of the protocol."""

    grpc_status = "UNIMPLEMENTED"


class FrameCorrupt(RemoteProtocolError):
    """A frame's header, length or checksum is wrong."""

    grpc_status = "DATA_LOSS"


class StaleError(ParadisError):
    """The request is out of date: refresh and retry."""

    retryable = True
    grpc_status = "ABORTED"


class StaleGeneration(StaleError):
    """The sender's view of membership and placement is old."""


class StaleVersion(StaleError):
    """The version asked for is older than what is held."""


class NotOwner(StaleError):
    """The shard lives on another server; ``fields['owner']`` names it."""


class UnavailableError(ParadisError):
    """Try again later."""

    retryable = True
    grpc_status = "UNAVAILABLE"


class PeerUnreachable(UnavailableError):
    """A node does not answer or its connection broke."""


class DeadlineExceeded(UnavailableError):
    """A wait reached its deadline."""

    grpc_status = "DEADLINE_EXCEEDED"


class Overloaded(UnavailableError):
    """A bounded queue or store is full."""

    grpc_status = "RESOURCE_EXHAUSTED"


class StateError(ParadisError):
    """Do not retry: a person or a restore is needed."""

    grpc_status = "FAILED_PRECONDITION"


class SnapshotCorrupt(StateError):
    """A checkpoint is incomplete, damaged or of another model."""

    grpc_status = "DATA_LOSS"


class JoinRefused(StateError):
    """A node may not join the job: wrong token, taken name or another model."""

    grpc_status = "PERMISSION_DENIED"


class WorkersDisagree(StateError):
    """Workers sent contradicting settings or values for the same step."""


class JobFailed(StateError):
    """The job ended because another node failed; the message names it."""

    grpc_status = "CANCELLED"


class NumericsError(ParadisError):
    """Arithmetic produced something that must not be applied."""

    grpc_status = "OUT_OF_RANGE"


class NonFiniteGradient(NumericsError):
    """A gradient holds NaN or infinity."""


class InternalError(ParadisError):
    """An invariant of Paradis is broken: please file a bug."""


def error_classes() -> dict[str, type[ParadisError]]:
    """Return every class of the tree by name, the root included, in definition order."""
    found: dict[str, type[ParadisError]] = {}
    todo: list[type[ParadisError]] = [ParadisError]
    while todo:
        cls = todo.pop(0)
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found


def from_name(name: str, message: str) -> ParadisError:
    """Rebuild an error that travelled as (class name, message); InternalError if unknown."""
    return error_classes().get(name, InternalError)(message)
