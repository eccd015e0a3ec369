"""Who is there: both ends prove that they know the job's token, and it never travels.

    acceptor  -> Challenge(nonce_a)
    connector -> Hello(who, proof = nonce_c + HMAC(token, "connect", both nonces, who))
    acceptor  -> Hello(who, proof = HMAC(token, "accept", both nonces, who))

``who`` is node name and incarnation. Each side proves over a nonce that the other side chose, so no
recorded answer can be used again, and the labels differ, so no answer can be reflected. A refused
connector gets a `Refusal`.
Invariant: before the proof is checked nothing larger than ``HANDSHAKE_LIMITS`` is accepted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Final

from paradis.errors import JoinRefused, RemoteProtocolError
from paradis.ids import NodeId
from paradis.transport.base import Identity
from paradis.wire.frame import HEADER_BYTES, Limits, decode_header, decode_message, encode
from paradis.wire.messages import Challenge, DataMessage, Hello, Refusal

HANDSHAKE_LIMITS: Final = Limits(meta_bytes_max=4096, payload_bytes_max=0)
NONCE_BYTES: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """The authenticated other end."""

    node: NodeId
    incarnation: int


def _prove(token: bytes, label: bytes, nonces: bytes, hello: tuple[str, int]) -> bytes:
    node, incarnation = hello
    text = label + nonces + incarnation.to_bytes(8, "little") + node.encode()
    return hmac.new(token, text, hashlib.sha256).digest()


def _unexpected(message: DataMessage, wanted: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"handshake failed: expected {wanted}, got {type(message).__name__}; "
        "install the same Paradis version on all hosts"
    )


class AcceptingHandshake:
    """The accepting node's side, without its transport.

    Attributes:
        challenge: the first message to send; its nonce is used once.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.challenge = Challenge(nonce=secrets.token_bytes(NONCE_BYTES))

    def verify(self, answer: DataMessage) -> tuple[Peer, Hello]:
        """Check the connector's proof; return who it is and our own proof to send.

        Raises:
            JoinRefused: the proof was made with another token.
            RemoteProtocolError: the answer is no `Hello`.
        """
        if not isinstance(answer, Hello):
            raise _unexpected(answer, "Hello")
        token, mine = self._identity.token, self._identity
        nonces = self.challenge.nonce + answer.proof[:NONCE_BYTES]
        expected = _prove(token, b"connect", nonces, (answer.node, answer.incarnation))
        if not hmac.compare_digest(answer.proof[NONCE_BYTES:], expected):
            raise JoinRefused(
                f"connection to {mine.node} refused: the job token does not match; "
                "start all nodes of a job with the same token"
            )
        proof = _prove(token, b"accept", nonces, (mine.node, mine.incarnation))
        reply = Hello(node=mine.node, incarnation=mine.incarnation, proof=proof)
        return Peer(node=NodeId(answer.node), incarnation=answer.incarnation), reply


class ConnectingHandshake:
    """The connecting node's side, without its transport."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._nonces = b""

    def answer(self, challenge: DataMessage) -> Hello:
        """Prove the token over the acceptor's nonce and one of our own.

        Raises:
            RemoteProtocolError: the message is no `Challenge` with a full nonce.
        """
        if not isinstance(challenge, Challenge) or len(challenge.nonce) != NONCE_BYTES:
            raise _unexpected(challenge, f"Challenge of {NONCE_BYTES} bytes")
        own = secrets.token_bytes(NONCE_BYTES)
        self._nonces = challenge.nonce + own
        who = self._identity
        proof = _prove(who.token, b"connect", self._nonces, (who.node, who.incarnation))
        return Hello(node=who.node, incarnation=who.incarnation, proof=own + proof)

    def verify(self, reply: DataMessage) -> Peer:
        """Check the acceptor's proof.

        Raises:
            JoinRefused: we were refused, or the acceptor does not know the token.
            RemoteProtocolError: the reply is neither `Hello` nor `Refusal`.
        """
        if isinstance(reply, Refusal):
            raise JoinRefused(reply.text)
        if not isinstance(reply, Hello):
            raise _unexpected(reply, "Hello")
        expected = _prove(
            self._identity.token, b"accept", self._nonces, (reply.node, reply.incarnation)
        )
        if not hmac.compare_digest(reply.proof, expected):
            raise JoinRefused(
                "the accepting node did not prove the job token; "
                "check that the address belongs to this job"
            )
        return Peer(node=NodeId(reply.node), incarnation=reply.incarnation)


def accept_peer(sock: socket.socket, identity: Identity, timeout_s: float) -> Peer:
    """Run the accepting side over a socket, which is left in non-blocking mode.

    Raises:
        JoinRefused: wrong token; the peer was told.
        RemoteProtocolError: the peer does not speak our protocol.
        OSError: the socket failed, the peer went away, or the deadline passed.
    """
    deadline = time.monotonic() + timeout_s
    handshake = AcceptingHandshake(identity)
    _send(sock, handshake.challenge, deadline)
    try:
        peer, reply = handshake.verify(_receive(sock, deadline))
    except JoinRefused as refused:
        _send(sock, Refusal(error=type(refused).__name__, text=refused.message), deadline)
        raise
    _send(sock, reply, deadline)
    return peer


def greet_peer(sock: socket.socket, identity: Identity, timeout_s: float) -> Peer:
    """Run the connecting side over a socket, which is left in non-blocking mode.

    Raises:
        JoinRefused: one of the ends does not know the token.
        RemoteProtocolError: the peer does not speak our protocol.
        OSError: the socket failed, the peer went away, or the deadline passed.
    """
    deadline = time.monotonic() + timeout_s
    handshake = ConnectingHandshake(identity)
    _send(sock, handshake.answer(_receive(sock, deadline)), deadline)
    return handshake.verify(_receive(sock, deadline))


def _send(sock: socket.socket, message: DataMessage, deadline: float) -> None:
    sock.settimeout(max(deadline - time.monotonic(), 1e-3))
    sock.sendall(encode(message, payload_bytes=0))


def _receive(sock: socket.socket, deadline: float) -> DataMessage:
    header = decode_header(_receive_exactly(sock, HEADER_BYTES, deadline), HANDSHAKE_LIMITS)
    return decode_message(header, _receive_exactly(sock, header.meta_bytes, deadline))


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("handshake not finished within its deadline")
        sock.settimeout(left_s)
        got = sock.recv_into(view)
        if not got:
            raise ConnectionResetError("the peer closed the connection during the handshake")
        view = view[got:]
    return data
