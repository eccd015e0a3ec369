"""Manifest of a checkpoint: what it holds, written last, so that having one means being complete.

A checkpoint of step 12 is ``<root>/step-00000012/`` with one directory ``group-<n>/`` for each
``wrap`` call it covers; each group has its own ``manifest.json`` beside its files. A checkpoint is
complete when all groups that its manifests name have theirs. A manifest is compact JSON in one
canonical form and ends in a checksum over the rest, so every changed byte is noticed.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from paradis.errors import ConfigError, SnapshotCorrupt, StateError
from paradis.storage.durable import flush_directory, make_directory, replacing
from paradis.wire.messages import Options, ParameterSpec, Piece, Scalar

FORMAT: Final = 1
FILE_NAME: Final = "manifest.json"
ADVICE: Final = (
    "the previous checkpoint is untouched; free space or set checkpoint.directory to another disk"
)
_STEP_NAME: Final = re.compile(r"step-(\d{8,})")
_GROUP_NAME: Final = re.compile(r"group-(\d+)")
_DIFFERENCES_SHOWN: Final = 10
_FLOAT: Final = "float:"
_TEXT: Final = "text:"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one group of a checkpoint holds.

    Attributes:
        paradis: version of Paradis that wrote it.
        step: finished training steps of this group.
        groups: numbers of all groups of the checkpoint, this one included.
        parameters: in the order of registration.
        optimizer: class name of the optimizer, as registered.
        options: hyper-parameters per parameter group.
        scalars: parameter name -> {state name: number}, such as ``step``.
        extra: the user's own values.
        pieces: every tensor of every file.
        layouts: strides, in elements, of the parameters that are not contiguous: pieces follow
            a parameter's memory order.
        aliases: further name of a tied parameter -> name it is stored under.
        mode: ``sync``: all of one step; ``ssp``, ``async``: ``step`` is worker 0's, and each shard
            is whole, but they hold different steps of the others.
        benefit: the codec whose benefit was measured, and ``on`` or ``off``; empty: undecided.
    """

    format: int = FORMAT
    paradis: str
    step: int
    group: int
    groups: tuple[int, ...]
    parameters: tuple[ParameterSpec, ...]
    optimizer: str
    options: list[Options]
    scalars: dict[str, dict[str, float]]
    extra: dict[str, Scalar]
    pieces: tuple[Piece, ...]
    layouts: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    mode: str = "sync"
    benefit: str = ""


# ------------------------------------------------------------------------------------- directories


def step_directory(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of this step under a run's checkpoint root."""
    return root / f"step-{step:08d}"


def group_directory(checkpoint: Path, group: int) -> Path:
    """Return the directory of one group inside a checkpoint."""
    return checkpoint / f"group-{group}"


def step_directories(root: Path) -> tuple[Path, ...]:
    """Return all checkpoint directories under a root, complete or not, oldest first."""
    return _numbered(root, _STEP_NAME)


def group_directories(path: Path) -> tuple[Path, ...]:
    """Return the group directories that exist in a checkpoint; a group directory gives itself."""
    if (path / FILE_NAME).is_file() or _GROUP_NAME.fullmatch(path.name):
        return (path,)
    return _numbered(path, _GROUP_NAME)


def _numbered(parent: Path, pattern: re.Pattern[str]) -> tuple[Path, ...]:
    if not parent.is_dir():
        return ()
    found = [(int(m[1]), p) for p in parent.iterdir() if (m := pattern.fullmatch(p.name))]
    return tuple(p for _, p in sorted(found) if p.is_dir())


def is_complete(checkpoint: Path) -> bool:
    """Return whether every group that the checkpoint should hold has its manifest.

    Raises:
        SnapshotCorrupt: a manifest is there but damaged.
    """
    present = [d for d in _numbered(checkpoint, _GROUP_NAME) if (d / FILE_NAME).exists()]
    wanted = {n for d in present for n in read_manifest(d).groups}
    return bool(present) and all(
        (group_directory(checkpoint, n) / FILE_NAME).exists() for n in wanted
    )


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under a root, or None; incomplete ones are ignored.

    Raises:
        SnapshotCorrupt: the newest one with a manifest is damaged. Falling back to an older one
            is for a person to decide.
    """
    return next((d for d in reversed(step_directories(root)) if is_complete(d)), None)


def resolve(path: Path) -> Path:
    """Return the checkpoint that a user's path means: a root gives its newest complete one.

    Raises:
        ConfigError: there is no checkpoint at this path.
        SnapshotCorrupt: the newest checkpoint under a root is damaged.
    """
    if group_directories(path) or _STEP_NAME.fullmatch(path.name):
        if path.is_dir():
            return path
    elif (found := latest(path)) is not None:
        return found
    raise ConfigError(
        f"checkpoint not found: {path}; expected a checkpoint directory (step-...) or a directory "
        "of complete ones; check the path"
    )


# ------------------------------------------------------------------------------ writing and reading


def write_manifest(directory: Path, manifest: Manifest) -> Path:
    """Complete a group's checkpoint: check that nothing is missing, then write its manifest.

    Files in the directory that the manifest does not name (of an attempt that failed) go.

    Args:
        directory: the group's directory, with all files already in it.

    Raises:
        StateError: the pieces do not cover every parameter once, or the file cannot be written.
        ConfigError: a value of ``extra`` or of the options cannot be written as JSON.
    """
    problems = coverage_problems(manifest)
    if problems:
        raise StateError(
            f"checkpoint {directory} was not completed: {_shortened(problems)}; the previous "
            "checkpoint is untouched; save again"
        )
    try:
        data = _encoded(_packed(msgspec.to_builtins(manifest)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"checkpoint {directory} was not completed: a value cannot be written as JSON "
            f"({error}); expected numbers, text, booleans or None in extra"
        ) from error
    path = directory / FILE_NAME
    make_directory(directory, what="checkpoint manifest", advice=ADVICE)
    with replacing(path, what="checkpoint manifest", advice=ADVICE) as file:
        file.write(data)
    _sweep(directory, {FILE_NAME, *(piece.file for piece in manifest.pieces)})
    return path


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of one group.

    Raises:
        SnapshotCorrupt: there is none, or it is damaged, or of another format.
        StateError: the system does not let us read it.
    """
    path = directory / FILE_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SnapshotCorrupt(
            f"checkpoint {directory} is not complete: no manifest; expected {path}; "
            "use an earlier checkpoint"
        ) from error
    except OSError as error:
        raise StateError(f"checkpoint manifest could not be read: {path}; {error}") from error
    return _decoded(data, path)


def _encoded(document: dict[str, Any]) -> bytes:
    """Return the canonical JSON of a document with its checksum as the last key."""
    body = msgspec.json.encode(document, order="sorted")
    return body[:-1] + b',"~checksum":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def _decoded(data: bytes, path: Path) -> Manifest:
    advice = "use an earlier checkpoint"
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
        got = document.pop("~checksum", None)
        again = _encoded(document)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SnapshotCorrupt(
            f"checkpoint manifest is damaged: {path}; expected JSON, got: {error}; {advice}"
        ) from error
    if again != data:
        raise SnapshotCorrupt(
            f"checkpoint manifest is damaged: {path}; expected content with checksum {got}, got "
            f"other content; {advice}"
        )
    if document.get("format") != FORMAT:
        raise SnapshotCorrupt(
            f"checkpoint manifest refused: {path}; expected format {FORMAT}, got "
            f"{document.get('format')} of Paradis {document.get('paradis')}; use that version"
        )
    try:
        manifest = msgspec.convert(_unpacked(document), Manifest)
    except (msgspec.ValidationError, ValueError) as error:
        raise SnapshotCorrupt(
            f"checkpoint manifest refused: {path}; {error}; use the Paradis version that wrote it"
        ) from error
    for piece in manifest.pieces:
        if Path(piece.file).name != piece.file:
            raise SnapshotCorrupt(
                f"checkpoint manifest refused: {path}; expected plain file names, got "
                f"{piece.file!r}; do not use this checkpoint"
            )
    return manifest


def _packed(value: Any) -> Any:
    """Replace floats that JSON does not know by text, and escape text that looks like those."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{_FLOAT}{value}"
    if isinstance(value, str) and value.startswith((_FLOAT, _TEXT)):
        return _TEXT + value
    if isinstance(value, dict):
        return {key: _packed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_packed(item) for item in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, str):
        if value.startswith(_FLOAT):
            return float(value.removeprefix(_FLOAT))
        return value.removeprefix(_TEXT)
    if isinstance(value, dict):
        return {key: _unpacked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    return value


def _sweep(directory: Path, keep: set[str]) -> None:
    # The checkpoint is complete by now; litter that cannot be removed does it no harm.
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_file() and path.name not in keep:
                path.unlink(missing_ok=True)
        flush_directory(directory)


# ------------------------------------------------------------------------------------------ checks


def coverage_problems(manifest: Manifest) -> list[str]:
    """Return what is missing or doubled: every key of a parameter must cover it exactly once."""
    runs: dict[str, defaultdict[str, list[tuple[int, int]]]] = {
        spec.name: defaultdict(list, {"value": []}) for spec in manifest.parameters
    }
    problems = []
    for piece in manifest.pieces:
        if piece.parameter in runs:
            runs[piece.parameter][piece.key].append((piece.offset, piece.length))
        else:
            problems.append(f"parameter {piece.parameter} of file {piece.file} is unknown")
    for spec in manifest.parameters:
        for key, found in sorted(runs[spec.name].items()):
            size = math.prod(spec.shape)
            problems += _run_problems(f"{spec.name} ({key})", size, sorted(found))
    return problems


def _run_problems(what: str, size: int, runs: list[tuple[int, int]]) -> list[str]:
    problems = []
    position = 0
    for offset, length in runs:
        if offset > position:
            problems.append(f"parameter {what}: elements {position}..{offset - 1} are missing")
        elif offset < position and length:
            problems.append(f"parameter {what}: elements from {offset} are there twice")
        position = max(position, offset + length)
    if position < size:
        problems.append(f"parameter {what}: elements {position}..{size - 1} are missing")
    elif position > size:
        problems.append(f"parameter {what}: {position} elements, expected {size}")
    return problems


def check_parameters(
    manifest: Manifest,
    parameters: Sequence[ParameterSpec],
    layouts: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Check that a checkpoint is of this model; ``trainable`` and the order may differ.

    Args:
        parameters: what the model registers now.
        layouts: strides of those that are not contiguous; None says that all are contiguous.

    Raises:
        SnapshotCorrupt: with the differences by parameter name.
    """
    wanted = _described(parameters, layouts or {})
    held = _described(manifest.parameters, manifest.layouts)
    lines = [f"{n}: not in the checkpoint" for n in wanted if n not in held]
    lines += [f"{n}: only in the checkpoint" for n in held if n not in wanted]
    lines += [
        f"{n}: expected {wanted[n]}, got {held[n]}"
        for n in wanted
        if n in held and wanted[n] != held[n]
    ]
    if lines:
        raise SnapshotCorrupt(
            f"checkpoint of step {manifest.step} refused: it is of another model: "
            f"{_shortened(lines)}; restore it into the model it was saved from"
        )


def _described(
    parameters: Iterable[ParameterSpec], layouts: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    return {
        p.name: f"{p.dtype.removeprefix('torch.')} {tuple(p.shape)} of options group "
        f"{p.options_group}" + (f" with strides {layouts[p.name]}" if p.name in layouts else "")
        for p in parameters
    }


def _shortened(lines: Sequence[str]) -> str:
    more = len(lines) - _DIFFERENCES_SHOWN
    return "; ".join(lines[:_DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
