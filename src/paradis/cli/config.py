"""``paradis config``: show what a job would use and where each value comes from; print an example.

Both commands only read; they print plain text and return 0, or 1 with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paradis.config import (
    LoadedConfig,
    example_yaml,
    job_keys,
    job_values,
    load_config,
)
from paradis.config_relations import COMBINATIONS
from paradis.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_COLUMNS = ("KEY", "VALUE", "ORIGIN", "UNIT")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command ``config``; the parsed arguments carry the function to call as ``run``.

    ``run(arguments)`` returns the exit code.
    """
    parser = subparsers.add_parser("config", help="show a job's configuration, print an example")
    commands = parser.add_subparsers(dest="config_command", required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="print every key, its value and where it comes from")
    show.add_argument("--config", type=Path, metavar="FILE", help="the job's YAML file")
    show.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="as with `paradis run`; may be repeated",
    )
    show.set_defaults(run=show_config)

    example = commands.add_parser("example", help="print a complete, commented file")
    example.set_defaults(run=print_example)


def show_config(arguments: argparse.Namespace) -> int:
    """Print every key with value, origin, unit and meaning, then the legal combinations."""
    try:
        overrides = parse_overrides(arguments.set)
        loaded = load_config(arguments.config, os.environ, overrides)
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    width = shutil.get_terminal_size((120, 24)).columns
    print("\n".join(describe(loaded, width=width)))
    return 0


def print_example(arguments: argparse.Namespace) -> int:
    """Print a complete configuration file with every key at its default."""
    print(example_yaml(), end="")
    return 0


def parse_overrides(given: list[str]) -> dict[str, str]:
    """Return ``section.key`` -> text from flags of the form ``section.key=text``.

    Raises:
        ConfigError: a flag has another form.
    """
    for each in given:
        if "=" not in each:
            raise ConfigError(
                f"config refused: --set {each}; expected SECTION.KEY=VALUE, such as "
                "communication.failure_timeout=10s; write it so"
            )
    return {name.strip(): text for name, _, text in (each.partition("=") for each in given)}


def describe(loaded: LoadedConfig, *, width: int) -> Iterator[str]:
    """Yield the lines of ``paradis config show``: a table, then the legal combinations.

    Args:
        width: columns of the terminal; meanings are wrapped below their key.
    """
    values = job_values(loaded.config)
    rows = [_COLUMNS]
    for name, key in job_keys().items():
        rows.append((name, key.kind.show(values[name]), loaded.origins[name], key.kind.unit))
    sizes = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    meanings = ["", *(key.meaning for key in job_keys().values())]
    for row, meaning in zip(rows, meanings, strict=True):
        cells = zip(row, sizes, strict=True)
        yield "  ".join(cell.ljust(size) for cell, size in cells).rstrip()
        yield from textwrap.wrap(
            meaning, max(40, width), initial_indent="    ", subsequent_indent="    "
        )
    yield ""
    yield "Legal combinations of mode, compression and overlap:"
    for each in COMBINATIONS:
        backup = " (with backup workers, too)" if each.backup else ""
        yield f"  {each.mode} + {each.compression} + {each.overlap}: {each.promise}{backup}"
