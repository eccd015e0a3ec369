"""What the worker's side of a resumed job takes over from its checkpoint.

Parameters that ``add_param_group`` adds before the first step of the run are taken from the
checkpoint, too; those added later start from worker 0's values, as in a run that was not resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from paradis.errors import ConfigError
from paradis.storage.manifest import (
    Manifest,
    check_parameters,
    group_directory,
    read_manifest,
    resolve,
)
from paradis.wire.messages import ParameterSpec


def open_manifest(checkpoint: str, group: int, specs: Sequence[ParameterSpec]) -> Manifest:
    """Return the manifest of a checkpoint, if it is of this model.

    Args:
        checkpoint: as the plan names it.
        group: number of the ``wrap`` call.
        specs: what the call registered. Its optimizer may have had more groups when it was saved.

    Raises:
        SnapshotCorrupt: it is of another model, damaged or incomplete.
    """
    manifest = read_manifest(group_directory(resolve(Path(checkpoint)), group))
    count = 1 + max((s.options_group for s in specs), default=-1)
    names = {s.name for s in specs}
    joining = {p.name: p.options_group for p in manifest.parameters if p.options_group >= count}
    known = tuple(p for p in manifest.parameters if p.name in names or p.name not in joining)
    expected = [
        msgspec.structs.replace(s, options_group=joining[s.name])
        if s.options_group < 0 and s.name in joining
        else s
        for s in specs
    ]
    check_parameters(
        msgspec.structs.replace(manifest, parameters=known),
        expected,
        {s.name: s.strides for s in specs if s.strides},
    )
    return manifest


def check_added(manifest: Manifest, specs: Sequence[ParameterSpec]) -> None:
    """Check that parameters added before the first step are trained ones in the checkpoint.

    Raises:
        ConfigError: one is not; names it.
    """
    trained = {p.name: p for p in manifest.parameters if p.options_group >= 0}
    for spec in specs:
        saved = trained.get(spec.name)
        if saved is None or (saved.shape, saved.dtype) != (spec.shape, spec.dtype):
            raise ConfigError(
                f"add_param_group refused: {spec.name} is not trained in the checkpoint of step "
                f"{manifest.step} that this job resumes from; add it at the step at which the "
                "earlier run added it, after the first step of this one"
            )


def take_options(manifest: Manifest, optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint's hyper-parameters into the optimizer's groups."""
    for group, options in zip(optimizer.param_groups, manifest.options, strict=False):
        for key, value in options.items():
            group[key] = tuple(value) if isinstance(value, list) else value
