"""What a lost link is called, so that its reader knows whom and what to look at."""

from __future__ import annotations

import errno

from paradis.errors import ParadisError, PeerUnreachable
from paradis.ids import NodeId
from paradis.wire.messages import DataMessage


def describe_loss(error: Exception, peer: NodeId, address: str, user_timeout_ms: int) -> str:
    """Say why the link to a peer broke.

    Args:
        address: how the peer was reached.
        user_timeout_ms: how long the kernel waits for acknowledgements on this link.
    """
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, ParadisError):
        cause = error.message
    elif isinstance(error, EOFError):
        cause = "the peer closed it"
    elif code in (errno.ECONNRESET, errno.EPIPE):
        cause = "the peer's process ended or the peer dropped the link"
    elif code == errno.ETIMEDOUT:
        cause = f"the peer acknowledged nothing for {user_timeout_ms} ms"
    else:
        cause = repr(error)
    return f"connection to {peer} at {address} lost: {cause}"


def unreachable(message: DataMessage, peer: NodeId, address: str, reason: str) -> PeerUnreachable:
    """Return the error of a send over a link that is lost, or closed if no reason is known."""
    why = reason or f"the connection to {peer} at {address} is closed"
    return PeerUnreachable(
        f"frame {type(message).__name__} to {peer} not sent: {why}; connect again", peer=peer
    )
