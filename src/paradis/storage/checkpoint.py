"""Pieces of a checkpoint: written by servers, read back in ranges of any size, verified, pruned.

A server writes what it holds as one safetensors file. The file's name ends in a digest of its
content, so saving again never changes a file that an older manifest names. A reader asks for
elements (parameter, offset, length) and does not care how many servers wrote them. Every piece is
checked against the manifest's checksum when it is first touched, every header byte for byte.
"""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import xxhash

from paradis.errors import (
    ConfigError,
    LocalProtocolError,
    ParadisError,
    SnapshotCorrupt,
    StateError,
)
from paradis.storage import tensorfile
from paradis.storage.durable import make_directory, replacing, write_error
from paradis.storage.manifest import (
    ADVICE,
    FILE_NAME,
    Manifest,
    coverage_problems,
    group_directories,
    group_directory,
    is_complete,
    read_manifest,
    step_directories,
)
from paradis.storage.tensorfile import Entry
from paradis.wire.messages import Piece

_WHAT = "checkpoint part"


@dataclass(frozen=True, slots=True)
class Section:
    """A run of elements of one parameter that goes into a checkpoint.

    Attributes:
        key: ``value`` or the name of an optimizer state.
        offset: first element, in the parameter's memory order.
        tensor: (N,) contiguous, on the CPU; borrowed until `write_part` returns. It may share
            storage with other sections.
    """

    parameter: str
    key: str
    offset: int
    tensor: torch.Tensor


def write_part(directory: Path, name: str, sections: Sequence[Section]) -> tuple[Piece, ...]:
    """Write one node's part of a group; it is on the disk when this returns.

    Args:
        directory: the group's directory; created when missing.
        name: name of the writer, such as ``server-0``; the file's name starts with it.
        sections: what to write; none writes no file.

    Returns:
        One piece per section, in order; a section of no elements gives a piece of length 0.

    Raises:
        StateError: the disk is full or failed; no part of the file remains.
        LocalProtocolError: a section is doubled or not a contiguous vector on the CPU.
    """
    if Path(name).name != name:
        raise LocalProtocolError(f"{_WHAT} refused: expected a plain file name, got {name!r}")
    if not sections:
        return ()
    tensors = [(f"{s.parameter}|{s.key}|{s.offset}", _vector(s)) for s in sections]
    checksums = {title: tensorfile.checksum(tensor) for title, tensor in tensors}
    entries = [_entry(title, tensor) for title, tensor in tensors]
    digest = xxhash.xxh3_64(tensorfile.header(entries))
    for entry in tensorfile.in_file_order(entries):
        digest.update(checksums[entry.name].encode())
    file_name = f"{name}-{digest.hexdigest()}.safetensors"
    make_directory(directory, what=_WHAT, advice=ADVICE)
    with replacing(directory / file_name, what=_WHAT, advice=ADVICE) as file:
        tensorfile.write_tensors(file, tensors)
    return tuple(
        Piece(
            parameter=section.parameter,
            key=section.key,
            offset=section.offset,
            length=entry.shape[0],
            dtype=entry.dtype,
            file=file_name,
            tensor=entry.name,
            checksum=checksums[entry.name],
        )
        for section, entry in zip(sections, entries, strict=True)
    )


def _vector(section: Section) -> torch.Tensor:
    tensor = section.tensor
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise LocalProtocolError(
            f"{_WHAT} refused: {section.parameter} ({section.key}): expected a contiguous vector "
            f"on the CPU, got shape {tuple(tensor.shape)} on {tensor.device}"
        )
    return tensor


def _entry(title: str, tensor: torch.Tensor) -> Entry:
    return Entry(title, tensorfile.dtype_name(tensor.dtype), tuple(tensor.shape))


class PieceReader:
    """Reads any range of any parameter of one group; usable from several threads.

    Args:
        directory: the group's directory.
        manifest: its manifest, as `read_manifest` returned it.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._scalars = manifest.scalars
        self._pieces: defaultdict[str, defaultdict[str, list[Piece]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._files: defaultdict[str, list[Piece]] = defaultdict(list)
        for piece in sorted(manifest.pieces, key=lambda p: p.offset):
            self._pieces[piece.parameter][piece.key].append(piece)
            self._files[piece.file].append(piece)
        self._starts: dict[str, dict[str, int]] = {}
        self._checked: set[tuple[str, str]] = set()

    @property
    def files(self) -> dict[str, tuple[Piece, ...]]:
        """Names of the files, each with its pieces."""
        return {name: tuple(pieces) for name, pieces in self._files.items()}

    def keys(self, parameter: str) -> tuple[str, ...]:
        """Return ``value`` and the names of the parameter's optimizer states, sorted."""
        return tuple(sorted(self._pieces.get(parameter, ())))

    def scalars(self, parameter: str) -> dict[str, float]:
        """Return the parameter's single numbers of optimizer state, such as ``step``."""
        return dict(self._scalars.get(parameter, {}))

    def dtype(self, parameter: str, key: str) -> str:
        """Return the dtype in which a key of a parameter is stored.

        Raises:
            SnapshotCorrupt: the checkpoint has no such key.
        """
        return self._of(parameter, key)[0].dtype

    def read(self, parameter: str, key: str, offset: int, length: int, dtype: str) -> torch.Tensor:
        """Return elements ``offset .. offset + length`` in memory order, from any number of pieces.

        Returns:
            (length,) of ``dtype``, new memory that the caller owns.

        Raises:
            SnapshotCorrupt: elements are missing or damaged, or are of another dtype.
        """
        out = torch.empty(length, dtype=tensorfile.torch_dtype(dtype))
        if not length:
            return out
        pieces = self._of(parameter, key)
        end = position = offset
        end += length
        first = max(bisect_right(pieces, offset, key=lambda p: p.offset) - 1, 0)
        for piece in pieces[first:]:
            if piece.offset > position or position >= end:
                break
            stop = min(end, piece.offset + piece.length)
            if stop <= position:
                continue
            if tensorfile.torch_dtype(piece.dtype) != out.dtype:
                raise SnapshotCorrupt(
                    f"checkpoint {self._directory}: parameter {parameter} ({key}): expected dtype "
                    f"{dtype}, got {piece.dtype}; restore into the model it was saved from"
                )
            target = out[position - offset : stop - offset]
            self._fill(piece, position - piece.offset, target)
            position = stop
        if position < end:
            raise SnapshotCorrupt(
                f"checkpoint {self._directory}: parameter {parameter} ({key}): elements "
                f"{position}..{end - 1} are missing; use an earlier checkpoint"
            )
        return out

    def check(self, piece: Piece) -> None:
        """Check one piece against its checksum, whether or not it was touched before.

        Raises:
            SnapshotCorrupt: it is damaged; the message names file, tensor and parameter.
        """
        whole = torch.empty(piece.length, dtype=tensorfile.torch_dtype(piece.dtype))
        self._load(piece, 0, whole)
        self._compare(piece, whole)

    def check_file(self, name: str) -> None:
        """Check that a file is there, has the right size and header.

        Raises:
            SnapshotCorrupt: it is not as the manifest describes it.
        """
        pieces = self._files[name]
        path = self._directory / name
        try:
            entries = [Entry(p.tensor, p.dtype, (p.length,)) for p in pieces]
            expected = tensorfile.header(entries)
            with open(path, "rb") as file:
                got = file.read(len(expected))
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError as error:
            raise SnapshotCorrupt(
                f"checkpoint file is missing: {path}; use an earlier checkpoint"
            ) from error
        except (OSError, LocalProtocolError) as error:
            raise SnapshotCorrupt(f"checkpoint file cannot be read: {path}; {error}") from error
        size_expected = len(expected) + sum(entry.nbytes for entry in entries)
        if got != expected or size != size_expected:
            raise SnapshotCorrupt(
                f"checkpoint file is damaged: {path}; expected the header of {len(pieces)} tensors "
                f"and {size_expected} bytes, got {'another header' if got != expected else 'it'} "
                f"and {size} bytes; use an earlier checkpoint"
            )
        offsets = tensorfile.data_offsets(entries)
        self._starts[name] = {title: len(expected) + at for title, at in offsets.items()}

    def _of(self, parameter: str, key: str) -> list[Piece]:
        keys = self._pieces.get(parameter)
        found = keys.get(key) if keys else None
        if not found:
            raise SnapshotCorrupt(
                f"checkpoint {self._directory}: parameter {parameter} has no {key}; it has "
                f"{list(self.keys(parameter))}; use an earlier checkpoint"
            )
        return found

    def _fill(self, piece: Piece, start: int, target: torch.Tensor) -> None:
        if (piece.file, piece.tensor) in self._checked:
            self._load(piece, start, target)
            return
        whole = torch.empty(piece.length, dtype=target.dtype)
        self._load(piece, 0, whole)
        self._compare(piece, whole)
        target.copy_(whole[start : start + target.numel()])

    def _load(self, piece: Piece, start: int, target: torch.Tensor) -> None:
        if piece.file not in self._starts:
            self.check_file(piece.file)
        path = self._directory / piece.file
        try:
            with open(path, "rb") as file:
                file.seek(self._starts[piece.file][piece.tensor] + start * target.itemsize)
                got = file.readinto(tensorfile.raw_bytes(target))
        except OSError as error:
            raise SnapshotCorrupt(f"checkpoint file cannot be read: {path}; {error}") from error
        if got != target.nbytes:
            raise SnapshotCorrupt(
                f"checkpoint file is damaged: {path}; tensor {piece.tensor}: expected "
                f"{target.nbytes} bytes, got {got}; use an earlier checkpoint"
            )

    def _compare(self, piece: Piece, whole: torch.Tensor) -> None:
        got = tensorfile.checksum(whole)
        if got != piece.checksum:
            raise SnapshotCorrupt(
                f"checkpoint file is damaged: {self._directory / piece.file}; tensor "
                f"{piece.tensor} of parameter {piece.parameter}: expected checksum "
                f"{piece.checksum}, got {got}; use an earlier checkpoint"
            )
        self._checked.add((piece.file, piece.tensor))


# ------------------------------------------------------------------------------ verifying, removing


def verify(path: Path) -> list[str]:
    """Return everything that is wrong with a checkpoint, or one group of it; empty when whole."""
    groups = group_directories(path)
    if not groups:
        return [f"checkpoint {path} holds no groups; it is not complete"]
    problems: list[str] = []
    wanted: set[int] = set()
    for directory in groups:
        try:
            manifest = read_manifest(directory)
        except StateError as error:
            problems.append(error.message)
            continue
        wanted.update(manifest.groups)
        problems += _group_problems(directory, manifest)
    if groups != (path,):
        absent = (group_directory(path, n) for n in sorted(wanted))
        problems += [f"checkpoint group is missing: {d}" for d in absent if not d.is_dir()]
    return problems


def _group_problems(directory: Path, manifest: Manifest) -> list[str]:
    problems = [f"checkpoint {directory}: {text}" for text in coverage_problems(manifest)]
    reader = PieceReader(directory, manifest)
    for name, pieces in reader.files.items():
        try:
            reader.check_file(name)
        except ParadisError as error:
            problems.append(error.message)
            continue
        for piece in pieces:
            try:
                reader.check(piece)
            except ParadisError as error:
                problems.append(error.message)
    return problems


def condition(checkpoint: Path) -> Literal["complete", "incomplete", "damaged"]:
    """Return what the manifests of a checkpoint say about it; its files are not read."""
    try:
        return "complete" if is_complete(checkpoint) else "incomplete"
    except StateError:
        return "damaged"


def remove_incomplete(root: Path) -> tuple[Path, ...]:
    """Remove checkpoints without all manifests that are older than the newest complete one.

    Newer ones may be in the making, and damaged ones are left for a person to look at.

    Returns:
        The directories removed.

    Raises:
        StateError: a directory could not be removed.
    """
    found = [(d, condition(d)) for d in step_directories(root)]
    complete = [i for i, (_, state) in enumerate(found) if state == "complete"]
    older = found[: complete[-1]] if complete else []
    return _remove([d for d, state in older if state == "incomplete"])


def prune(root: Path, keep: int) -> tuple[Path, ...]:
    """Remove complete checkpoints but the newest ``keep`` (1 or more); see `remove_incomplete`."""
    if keep < 1:
        raise ConfigError(f"checkpoints to keep: expected 1 or more, got {keep}")
    complete = [d for d in step_directories(root) if condition(d) == "complete"]
    return _remove(complete[:-keep])


def _remove(checkpoints: Sequence[Path]) -> tuple[Path, ...]:
    for checkpoint in checkpoints:
        try:
            # Manifests first: what a crash leaves behind then counts as incomplete.
            for directory in group_directories(checkpoint):
                (directory / FILE_NAME).unlink(missing_ok=True)
            shutil.rmtree(checkpoint)
        except OSError as error:
            raise write_error(
                "removal of a checkpoint", checkpoint, error, "remove it by hand"
            ) from error
    return tuple(checkpoints)
