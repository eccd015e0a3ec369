"""Bytes and statuses of the control plane: msgpack <-> messages, error classes <-> gRPC codes.

Invariant: what decodes is one of ``CONTROL_MESSAGES`` with every field of its declared type, and an
error that crosses a stream comes out as the class it went in as.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Final

import grpc
import msgspec

from paradis.errors import (
    ConfigError,
    DeadlineExceeded,
    FrameCorrupt,
    InternalError,
    JoinRefused,
    LocalProtocolError,
    NumericsError,
    Overloaded,
    ParadisError,
    PeerUnreachable,
    RemoteProtocolError,
    StaleError,
    StateError,
    VersionMismatch,
    error_classes,
    from_name,
)
from paradis.wire.messages import CONTROL_MESSAGES, ControlMessage

SERVICE: Final = "paradis.Control"
METHOD: Final = "Session"
TOKEN_KEY: Final = "paradis-token"
ACCEPTED_KEY: Final = "paradis-accepted"
ERROR_KEY: Final = "paradis-error"

MESSAGE_BYTES_MAX: Final = 64 << 20
"""Bound of one message; a plan of 100,000 parameters takes about 20 MB."""

GOODBYE: Final = b""
"""Last message of a client that leaves in order; an end without it is a lost connection."""

_DETAIL_CHARS_MAX: Final = 2000  # a status travels in HTTP/2 headers, which gRPC bounds at 8 KiB

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    functools.reduce(operator.or_, CONTROL_MESSAGES)
)

_CLASS_OF_STATUS: Final[dict[grpc.StatusCode, type[ParadisError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.FAILED_PRECONDITION: StateError,
    grpc.StatusCode.UNIMPLEMENTED: VersionMismatch,
    grpc.StatusCode.DATA_LOSS: FrameCorrupt,
    grpc.StatusCode.ABORTED: StaleError,
    grpc.StatusCode.UNAVAILABLE: PeerUnreachable,
    grpc.StatusCode.CANCELLED: PeerUnreachable,
    grpc.StatusCode.UNKNOWN: PeerUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.PERMISSION_DENIED: JoinRefused,
    grpc.StatusCode.UNAUTHENTICATED: JoinRefused,
    grpc.StatusCode.NOT_FOUND: StateError,
    grpc.StatusCode.ALREADY_EXISTS: StateError,
    grpc.StatusCode.OUT_OF_RANGE: NumericsError,
    grpc.StatusCode.INTERNAL: InternalError,
}


def encode(message: ControlMessage) -> bytes:
    """Return the msgpack bytes of a control message.

    Raises:
        LocalProtocolError: the message is none of ``CONTROL_MESSAGES`` or too large.
    """
    name = type(message).__name__
    if type(message) not in CONTROL_MESSAGES:
        raise LocalProtocolError(f"control message refused: {name} is not a control message")
    try:
        data = _encoder.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"control message {name} refused: {error}") from error
    if len(data) > MESSAGE_BYTES_MAX:
        raise LocalProtocolError(
            f"control message {name} refused: {len(data)} bytes exceed {MESSAGE_BYTES_MAX}; "
            "register the model in several parts"
        )
    return data


def decode(data: bytes) -> ControlMessage:
    """Return the message of msgpack bytes from a peer.

    Raises:
        RemoteProtocolError: the bytes are not a control message.
    """
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"control message refused: {len(data)} bytes do not decode: {error}; "
            "install the same Paradis version on all hosts"
        ) from error
    assert isinstance(message, ControlMessage)
    return message


def status_of(error: ParadisError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return (code, details, trailing metadata) that carry an error to a peer."""
    code = grpc.StatusCode[type(error).grpc_status]
    return code, error.message[:_DETAIL_CHARS_MAX], ((ERROR_KEY, type(error).__name__),)


def error_of(code: grpc.StatusCode, details: str, class_name: str, address: str) -> ParadisError:
    """Rebuild the error of a status.

    Args:
        code: status of the call.
        details: its text.
        class_name: value of ``ERROR_KEY``, or empty when gRPC itself made the status.
        address: the peer, named in the message when gRPC made the status.
    """
    if class_name in error_classes():
        return from_name(class_name, details)
    cls = _CLASS_OF_STATUS.get(code, InternalError)
    return cls(f"control connection to {address} failed: {details or code.name} ({code.name})")


def error_of_call(call: grpc.Call, address: str) -> ParadisError:
    """Rebuild the error of a call that has ended with another status than OK."""
    trailing = dict(call.trailing_metadata() or ())
    name = trailing.get(ERROR_KEY, "")
    return error_of(call.code(), call.details() or "", str(name), address)
