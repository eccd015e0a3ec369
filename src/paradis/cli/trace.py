"""``paradis trace``: where the time of a run went, for a viewer or as the walk of one shard."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paradis.errors import ConfigError
from paradis.observe.trace import NodeSpans, load_run, walk, write_chrome

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add the command ``trace``; the parsed arguments carry the function to call as ``run``.

    ``run(arguments)`` returns the exit code.
    """
    parser = subparsers.add_parser(
        "trace",
        help="show where the time of a run went",
        description="Writes a trace of a run made with observe.trace=true, to be opened in a "
        "viewer; with --step and --shard, prints the walk of that shard instead.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: RUN_DIR/trace.json"
    )
    parser.add_argument("--step", type=int, metavar="N", help="step of the run, from 0")
    parser.add_argument(
        "--shard", "--bucket", type=int, metavar="N", help="number of the shard, as in the trace"
    )
    parser.set_defaults(run=show_trace)


def show_trace(arguments: argparse.Namespace) -> int:
    """Write the trace, or print the walk.

    Raises:
        ConfigError: an option is missing, or there is nothing to show; says what there is.
        StateError: a file of spans is damaged.
    """
    walking = arguments.step is not None or arguments.shard is not None
    if walking and (arguments.step is None or arguments.shard is None or arguments.output):
        raise ConfigError(
            "paradis trace prints the walk of one shard in one step: give --step and --shard "
            "together, and no -o; without both it writes a file"
        )
    nodes = load_run(arguments.directory)
    if walking:
        print("\n".join(walk(nodes, arguments.step, arguments.shard)))
        return 0
    output: Path = arguments.output or arguments.directory / "trace.json"
    write_chrome(nodes, output)
    print(f"{output}: {_content(nodes)}")
    print("open it at https://ui.perfetto.dev or in Chrome at chrome://tracing")
    return 0


def _content(nodes: tuple[NodeSpans, ...]) -> str:
    count = sum(len(node.spans) for node in nodes)
    dropped = sum(node.dropped for node in nodes)
    text = f"{count:,} spans of {len(nodes)} nodes"
    return text + (f"; {dropped:,} earlier ones were not kept" if dropped else "")
