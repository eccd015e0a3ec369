"""Checkpoints as plain PyTorch knows them: loadable where Paradis is not installed.

A state dict holds one tensor per name, in the parameter's shape; an optimizer's state dict is that
of the ``torch.optim`` class the job ran, so that training can go on without Paradis.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from paradis.errors import ConfigError, SnapshotCorrupt
from paradis.storage import tensorfile
from paradis.storage.checkpoint import PieceReader
from paradis.storage.durable import replacing
from paradis.storage.manifest import FILE_NAME, Manifest, group_directories, read_manifest
from paradis.wire.messages import ParameterSpec

_TORCH_SUFFIXES: Final = (".pt", ".pth")
_SUFFIX: Final = ".safetensors"


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of a checkpoint, or of one group of it, by name.

    Returns:
        Contiguous CPU tensors in the model's shapes; tied names hold the same tensor.

    Raises:
        SnapshotCorrupt: the checkpoint is incomplete or damaged.
        ConfigError: two groups have a parameter of one name: name one group's directory instead.
    """
    state: dict[str, torch.Tensor] = {}
    for directory in _groups(path):
        manifest = read_manifest(directory)
        found = _group_state(directory, manifest)
        both = sorted(set(state) & set(found))
        if both:
            raise ConfigError(
                f"export of {path} refused: several groups have a parameter {both[0]!r}; expected "
                f"distinct names; export one group, such as {directory}"
            )
        state.update(found)
    return state


def export_state_dict(path: Path, output: Path) -> tuple[str, ...]:
    """Write the model of a checkpoint as a plain state dict and return its names.

    Args:
        path: a checkpoint, or one group's directory in it.
        output: ``.safetensors``, where tied names are stored twice, or ``.pt``/``.pth`` for
            ``torch.load``, where they share their memory. Replaced when it exists.

    Raises:
        ConfigError: another ending, or no such directory, or see `read_state_dict`.
        SnapshotCorrupt: the checkpoint is incomplete or damaged.
        StateError: the output cannot be written; what it held before is untouched.
    """
    if output.suffix not in (_SUFFIX, *_TORCH_SUFFIXES):
        raise ConfigError(
            f"export refused: {output}: expected a name ending in {_SUFFIX} or "
            f"{' or '.join(_TORCH_SUFFIXES)}, got {output.suffix or 'no ending'}; choose one"
        )
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"export refused: {output}: no directory {output.parent}; create it")
    state = read_state_dict(path)
    advice = "free space or choose another output"
    with replacing(output.absolute(), what="export", advice=advice) as file:
        if output.suffix == _SUFFIX:
            tensorfile.write_tensors(file, list(state.items()))
        else:
            _save(state, file)
    return tuple(state)


def _save(state: dict[str, torch.Tensor], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch hides the error of a failed write behind its own about the archive.
        raise OSError(f"torch.save failed: {error}") from error


def optimizer_state_dict(directory: Path) -> dict[str, Any]:
    """Return the optimizer's state of one group, as ``torch.optim.Optimizer.state_dict`` would.

    Indices count the parameters of options group 0, then 1, and so on, each in the order of
    registration: the order in which torch packs them.

    Args:
        directory: a checkpoint of one group, or one group's directory.

    Raises:
        SnapshotCorrupt: the checkpoint is incomplete or damaged.
        ConfigError: the checkpoint has several groups.
    """
    groups = _groups(directory)
    if len(groups) != 1:
        raise ConfigError(
            f"optimizer state of {directory} refused: expected one group, got {len(groups)}; "
            f"name one group, such as {groups[0]}"
        )
    manifest = read_manifest(groups[0])
    reader = PieceReader(groups[0], manifest)
    state: dict[int, dict[str, torch.Tensor]] = {}
    param_groups: list[dict[str, Any]] = []
    index = 0
    for number, options in enumerate(manifest.options):
        members = [p for p in manifest.parameters if p.options_group == number]
        indices = list(range(index, index + len(members)))
        index += len(members)
        for i, spec in zip(indices, members, strict=True):
            found = _optimizer_state(groups[0], reader, manifest, spec)
            if found:
                state[i] = found
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        param_groups.append({**plain, "params": indices})
    return {"state": state, "param_groups": param_groups}


def _optimizer_state(
    directory: Path, reader: PieceReader, manifest: Manifest, spec: ParameterSpec
) -> dict[str, torch.Tensor]:
    # torch.optim keeps single numbers as float32 tensors, which its fused kernels rely on.
    scalars = reader.scalars(spec.name).items()
    found = {key: torch.tensor(value, dtype=torch.float32) for key, value in scalars}
    for key in reader.keys(spec.name):
        if key != "value":
            dtype = reader.dtype(spec.name, key)
            found[key] = _shaped(directory, reader, manifest, spec, key, dtype)
    return found


def _groups(path: Path) -> tuple[Path, ...]:
    found = group_directories(path)
    if not found:
        raise ConfigError(f"checkpoint not found: {path} holds no groups; check the path")
    if found == (path,):
        return found
    wanted = {n for d in found for n in read_manifest(d).groups}
    missing = sorted(wanted - {int(d.name.removeprefix("group-")) for d in found})
    if missing:
        raise SnapshotCorrupt(
            f"checkpoint {path} is not complete: no {FILE_NAME} of groups {missing}; "
            "use an earlier checkpoint"
        )
    return found


def _group_state(directory: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    reader = PieceReader(directory, manifest)
    state = {
        spec.name: _shaped(directory, reader, manifest, spec, "value", spec.dtype)
        for spec in manifest.parameters
    }
    for alias, name in manifest.aliases.items():
        if name not in state:
            raise SnapshotCorrupt(
                f"checkpoint {directory}: {alias} is tied to {name}, which is not there; "
                "use an earlier checkpoint"
            )
        state[alias] = state[name]
    return state


def _shaped(
    directory: Path,
    reader: PieceReader,
    manifest: Manifest,
    spec: ParameterSpec,
    key: str,
    dtype: str,
) -> torch.Tensor:
    """Read a whole tensor and bring it from memory order into its shape, contiguous."""
    flat = reader.read(spec.name, key, 0, math.prod(spec.shape), dtype)
    strides = manifest.layouts.get(spec.name)
    if strides is None:
        return flat.view(spec.shape)
    try:
        return flat.as_strided(spec.shape, strides).contiguous()
    except RuntimeError as error:
        raise SnapshotCorrupt(
            f"checkpoint {directory}: parameter {spec.name}: strides {strides} do not fit shape "
            f"{spec.shape}; use an earlier checkpoint"
        ) from error
