"""Safetensors files, written without a second copy of the tensors in memory.

The layout is that of safetensors: eight bytes of header length, a JSON header padded with spaces
to a multiple of eight, raw little-endian data. The header of a given list of tensors is always the
same, byte for byte, so a reader who knows the list can check every byte of the file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import BinaryIO, Final, NamedTuple

import torch
import xxhash

from paradis.errors import LocalProtocolError

_TAGS: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME: Final = {str(dtype).removeprefix("torch."): dtype for dtype in _TAGS}


class Entry(NamedTuple):
    """One tensor of a file: its name, dtype name (``float32``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of its data in bytes."""
        return torch_dtype(self.dtype).itemsize * math.prod(self.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as checkpoints spell it: ``float32``, not ``torch.float32``.

    Raises:
        LocalProtocolError: safetensors files cannot hold this dtype.
    """
    if dtype not in _TAGS:
        raise LocalProtocolError(
            f"tensor refused: dtype {dtype} cannot be stored; expected one of {sorted(_BY_NAME)}"
        )
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name, with or without ``torch.``.

    Raises:
        LocalProtocolError: no such dtype.
    """
    dtype = _BY_NAME.get(name.removeprefix("torch."))
    if dtype is None:
        raise LocalProtocolError(f"dtype {name!r} is unknown; expected one of {sorted(_BY_NAME)}")
    return dtype


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, borrowed."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def checksum(tensor: torch.Tensor) -> str:
    """Return the xxh3_64 of the raw bytes of a contiguous CPU tensor, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(raw_bytes(tensor))


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries in the order of their data: wide elements first, so all are aligned."""
    return sorted(entries, key=lambda e: (-torch_dtype(e.dtype).itemsize, e.name))


def data_offsets(entries: Iterable[Entry]) -> dict[str, int]:
    """Return where each tensor's data starts, in bytes after the header.

    Raises:
        LocalProtocolError: two tensors have one name.
    """
    offsets: dict[str, int] = {}
    position = 0
    for entry in in_file_order(entries):
        if entry.name in offsets:
            raise LocalProtocolError(
                f"tensor file refused: two tensors have the same name {entry.name}"
            )
        offsets[entry.name] = position
        position += entry.nbytes
    return offsets


def header(entries: Iterable[Entry]) -> bytes:
    """Return length and header of the file that holds exactly these tensors."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ordered = in_file_order(entries)
    for entry, start in zip(ordered, data_offsets(ordered).values(), strict=True):
        table[entry.name] = {
            "dtype": _TAGS[torch_dtype(entry.dtype)],
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.nbytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tensors(file: BinaryIO, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write contiguous CPU tensors with distinct names; they are borrowed during the call.

    Raises:
        LocalProtocolError: two tensors have one name, or a dtype cannot be stored.
        OSError: the file could not be written.
    """
    by_name = dict(tensors)
    entries = [Entry(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors]
    file.write(header(entries))
    for entry in in_file_order(entries):
        file.write(raw_bytes(by_name[entry.name]))
