"""Reading one frame after another into placed memory, whatever carries the bytes.

Invariant: the header is checked before the sink is asked for memory, the section is decoded before
the payload is received, and the placed lengths add up before the first byte is written into them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from paradis.errors import InternalError, RemoteProtocolError
from paradis.ids import NodeId
from paradis.transport.base import Placement, Sink
from paradis.transport.send_queue import byte_views
from paradis.wire.frame import (
    FLAG_PAYLOAD_CHECKSUM,
    HEADER_BYTES,
    FrameHeader,
    Limits,
    checksum,
    decode_header,
    decode_message,
)
from paradis.wire.messages import HEADER_FIELDS, Challenge, Hello

Fill = Callable[[Sequence[memoryview]], None]
"""Receives exactly as many bytes as the views hold, in order; raises when it cannot."""

_SHARD: Final = HEADER_FIELDS.index("shard")
_log = logging.getLogger("paradis.transport")
_HANDSHAKE_KINDS: Final = frozenset((Hello.KIND, Challenge.KIND))


class FrameReader:
    """Turns a stream of bytes from an authenticated peer into deliveries."""

    def __init__(self, peer: NodeId, sink: Sink, limits: Limits, fill: Fill) -> None:
        self._peer = peer
        self._sink = sink
        self._limits = limits
        self._fill = fill
        self._head = memoryview(bytearray(HEADER_BYTES))

    def read_frame(self) -> None:
        """Receive one frame and deliver it.

        Raises:
            ParadisError: the frame is illegal or the sink does not want it; drop the connection.
            Exception: whatever ``fill`` raises.
        """
        self._fill((self._head,))
        header = decode_header(self._head, self._limits)
        if header.kind in _HANDSHAKE_KINDS:
            raise RemoteProtocolError(
                f"frame {header.name} refused: the handshake is over; drop the link"
            )
        meta = bytearray(header.meta_bytes)
        if meta:
            self._fill((memoryview(meta),))
        message = decode_message(header, meta)
        placement = self._receive_payload(header) if header.payload_bytes else None
        if placement is not None and self._corrupt(header, placement):
            self._sink.abandoned(self._peer, header, placement)
            return
        self._sink.deliver(self._peer, message, placement)

    def _receive_payload(self, header: FrameHeader) -> Placement:
        placement = self._sink.place(self._peer, header)
        views = byte_views(placement.views)
        placed = sum(map(len, views))
        if placed != header.payload_bytes or any(view.readonly for view in views):
            raise InternalError(
                f"payload of {header.name} from {self._peer}, shard {header.fields[_SHARD]}, not "
                f"received: expected {header.payload_bytes} writable bytes, got {placed} from the "
                "sink; fix the sink's place()"
            )
        try:
            self._fill(views)
        except BaseException:
            self._sink.abandoned(self._peer, header, placement)
            raise
        return placement

    def _corrupt(self, header: FrameHeader, placement: Placement) -> bool:
        """Whether the payload does not match its checksum."""
        if not header.flags & FLAG_PAYLOAD_CHECKSUM:
            return False
        found = checksum(byte_views(placement.views))
        if found == header.payload_checksum:
            return False
        _log.warning(
            "frame %s from %s, shard %d, dropped: expected payload checksum %016x, got %016x; many "
            "of these on links without retries point to a host's memory or network card",
            header.name, self._peer, header.fields[_SHARD], header.payload_checksum, found,
        )  # fmt: skip
        return True
