"""``paradis checkpoint``: list, verify and export the checkpoints of a run.

Each command prints plain text and returns 0, or 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paradis.errors import ParadisError
from paradis.storage.checkpoint import condition, verify
from paradis.storage.export import export_state_dict
from paradis.storage.manifest import group_directories, read_manifest, resolve, step_directories

Command = Callable[[argparse.Namespace], int]

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add the command ``checkpoint``; the parsed arguments carry the function to call as ``run``.

    ``run(arguments)`` returns the exit code.
    """
    parser = subparsers.add_parser("checkpoint", help="list, verify and export checkpoints")
    commands = parser.add_subparsers(dest="checkpoint_command", required=True, metavar="COMMAND")
    either = "a checkpoint (step-...), or a directory of them: its newest complete one is taken"

    ls = commands.add_parser("ls", help="list the checkpoints of a run")
    ls.add_argument("root", type=Path, metavar="ROOT", help="directory of checkpoints, or one")
    ls.set_defaults(run=_guarded(list_checkpoints))

    check = commands.add_parser("verify", help="check every byte of a checkpoint")
    check.add_argument("directory", type=Path, metavar="DIR", help=either)
    check.set_defaults(run=_guarded(verify_checkpoint))

    export = commands.add_parser("export", help="write the model as a plain state dict")
    export.add_argument("directory", type=Path, metavar="DIR", help=either)
    export.add_argument("output", type=Path, metavar="OUT", help="file.safetensors or file.pt")
    export.set_defaults(run=_guarded(export_checkpoint))


def list_checkpoints(arguments: argparse.Namespace) -> int:
    """Print one line per checkpoint and group: name, condition, step, parameters, bytes."""
    root: Path = arguments.root
    checkpoints = step_directories(root)
    if not checkpoints:
        one = resolve(root)
        checkpoints = (one.parent if group_directories(one) == (one,) else one,)
    for checkpoint in checkpoints:
        state = condition(checkpoint)
        if state != "complete":
            print(f"{checkpoint.name}  {state}")
            continue
        for directory in group_directories(checkpoint):
            manifest = read_manifest(directory)
            names = ", ".join(f"{k}={v}" for k, v in sorted(manifest.extra.items()))
            print(
                f"{checkpoint.name}  {state}  {directory.name}  step {manifest.step}  "
                f"{len(manifest.parameters)} parameters  {_size(directory)}  {manifest.optimizer}"
                + ("" if manifest.mode == "sync" else f"  mode {manifest.mode}")
                + (f"  {names}" if names else "")
            )
    return 0


def verify_checkpoint(arguments: argparse.Namespace) -> int:
    """Check manifest, files, checksums and coverage; print every problem."""
    checkpoint = resolve(arguments.directory)
    problems = verify(checkpoint)
    for problem in problems:
        print(problem)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"{checkpoint}: {count if problems else 'whole'}")
    return 1 if problems else 0


def export_checkpoint(arguments: argparse.Namespace) -> int:
    """Write the state dict and say what it was made of."""
    checkpoint = resolve(arguments.directory)
    names = export_state_dict(checkpoint, arguments.output)
    print(f"{checkpoint} -> {arguments.output}: {len(names)} tensors")
    return 0


def _size(directory: Path) -> str:
    mebibytes = sum(p.stat().st_size for p in directory.iterdir() if p.is_file()) / (1 << 20)
    return f"{mebibytes:.1f} MiB"


def _guarded(command: Command) -> Command:
    """Return the command with a `ParadisError` printed as one line and made exit code 1."""

    @functools.wraps(command)
    def run(arguments: argparse.Namespace) -> int:
        try:
            return command(arguments)
        except ParadisError as error:
            print(f"error: {error.message}", file=sys.stderr)
            return 1

    return run
