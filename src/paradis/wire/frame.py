"""Frames of the data plane: a fixed header, a small msgpack section, a raw payload.

The header is checked (magic, format, kind, lengths, checksum) before anything is allocated for
what follows it. Payloads are raw little-endian bytes. All integers are little-endian.

    >>> from paradis.wire.messages import Pull
    >>> head = encode(Pull(generation=3, shard=7, version=2), payload_bytes=0)
    >>> decode_header(head[:HEADER_BYTES], Limits()).kind
    9
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from paradis.errors import FrameCorrupt, VersionMismatch
from paradis.wire.messages import DATA_MESSAGES, HEADER_FIELDS, DataMessage

MAGIC: Final = b"PRDS"
FORMAT: Final = 1
CODECS_MAX: Final = 5
"""Largest number of a code that this version knows (`paradis.core.codes`)."""

_HEADER = struct.Struct("<4sBBHQIiIQQiIQHHIQQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED = struct.Struct(_HEADER.format + "Q")
HEADER_BYTES: Final = _CHECKED.size

FLAG_PAYLOAD_CHECKSUM: Final = 1

_BY_KIND: Final = {cls.KIND: cls for cls in DATA_MESSAGES}
_META_FIELDS: Final = {
    cls: tuple(f for f in cls.__struct_fields__ if f not in HEADER_FIELDS) for cls in DATA_MESSAGES
}
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a receiver allows, in bytes, checked before it allocates.

    Attributes:
        meta_bytes_max: msgpack section; a commit of 100,000 parameters needs about 16 KB.
        payload_bytes_max: largest shard with its optimizer state.
    """

    meta_bytes_max: int = 4 << 20
    payload_bytes_max: int = 1 << 30


class FrameHeader(NamedTuple):
    """A decoded and checked header; ``fields`` are the values of ``HEADER_FIELDS`` in order."""

    kind: int
    flags: int
    fields: tuple[int, ...]
    meta_bytes: int
    payload_bytes: int
    payload_checksum: int

    @property
    def sequence(self) -> int:
        """`DataMessage.sequence`."""
        return self.fields[8]

    @property
    def codec(self) -> int:
        """`DataMessage.codec`."""
        return self.fields[10]

    @property
    def name(self) -> str:
        """Name of the message class."""
        return _BY_KIND[self.kind].__name__


def encode(
    message: DataMessage, *, payload_bytes: int, payload_checksum: int | None = None
) -> bytes:
    """Return header and msgpack section of a frame; the payload follows on the wire.

    Args:
        message: the data message.
        payload_bytes: length of the payload that the caller sends next.
        payload_checksum: xxh3_64 of the payload, or None for an unchecked payload.
    """
    cls = type(message)
    names = _META_FIELDS[cls]
    meta = _encoder.encode([getattr(message, n) for n in names]) if names else b""
    flags = 0 if payload_checksum is None else FLAG_PAYLOAD_CHECKSUM
    m = message
    head = _HEADER.pack(
        MAGIC, FORMAT, cls.KIND, flags, m.generation, m.group, m.shard, m.chunk, m.step, m.version,
        m.worker, m.incarnation, m.sequence, m.codec, m.revision, len(meta), payload_bytes,
        payload_checksum or 0,
    )  # fmt: skip
    return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)) + meta


def decode_header(data: bytes | bytearray | memoryview, limits: Limits) -> FrameHeader:
    """Check and decode ``HEADER_BYTES`` bytes.

    Raises:
        FrameCorrupt: wrong magic, checksum, kind or length.
        VersionMismatch: another format version.
    """
    values = _CHECKED.unpack_from(data)
    magic, fmt, kind, flags = values[:4]
    codec, revision, meta_bytes, payload_bytes, payload_checksum, found = values[13:]
    if magic != MAGIC:
        raise FrameCorrupt(f"frame refused: expected magic {MAGIC!r}, got {magic!r}; "
                           "is the peer a Paradis node?")  # fmt: skip
    if fmt != FORMAT:
        raise VersionMismatch(f"frame refused: expected format {FORMAT}, got {fmt}; "
                              "install the same Paradis version on all hosts")  # fmt: skip
    if xxhash.xxh3_64_intdigest(memoryview(data)[: _HEADER.size]) != found:
        raise FrameCorrupt("frame refused: the header's checksum does not match; drop the link")
    if kind not in _BY_KIND or codec > CODECS_MAX:
        raise FrameCorrupt(f"frame refused: unknown kind {kind} or codec {codec}")
    if meta_bytes > limits.meta_bytes_max or payload_bytes > limits.payload_bytes_max:
        raise FrameCorrupt(
            f"frame {_BY_KIND[kind].__name__} refused: {meta_bytes} + {payload_bytes} bytes exceed "
            f"the limits {limits.meta_bytes_max} + {limits.payload_bytes_max}"
        )
    fields = (*values[4:13], revision, codec)
    return FrameHeader(kind, flags, fields, meta_bytes, payload_bytes, payload_checksum)


def decode_message(header: FrameHeader, meta: bytes | bytearray | memoryview) -> DataMessage:
    """Build the message of a header and its msgpack section.

    Raises:
        FrameCorrupt: the section is not what this kind carries.
    """
    cls = _BY_KIND[header.kind]
    names = _META_FIELDS[cls]
    values: dict[str, Any] = dict(zip(HEADER_FIELDS, header.fields, strict=True))
    try:
        if names:
            extra = msgspec.msgpack.decode(meta)
            values.update(zip(names, extra, strict=True))
            return msgspec.convert(values, cls, strict=False, str_keys=False)
        if header.meta_bytes:
            raise ValueError("unexpected section")
        return cls(**values)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise FrameCorrupt(f"frame {cls.__name__} refused: bad section: {error}") from error


def checksum(buffers: tuple[memoryview, ...]) -> int:
    """Return the xxh3_64 over the concatenation of the buffers."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()
