"""The command ``paradis``: reads arguments, calls, prints.

Errors of ours are one line on standard error, never a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paradis.cli import run
from paradis.config import load_config, shared_settings
from paradis.errors import ConfigError, ParadisError
from paradis.runtime.arguments import DispatcherArguments, ServerArguments
from paradis.settings import settings_from

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

_LAZY: Final = {
    "checkpoint": "list, verify and export checkpoints",
    "config": "show a job's configuration, print an example",
    "trace": "show where the time of a run went",
}
"""Commands whose modules are imported when used: some need torch, which takes a second."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    Args:
        argv: arguments without the program's name; None takes those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _call(given)
        sys.stdout.flush()
        return code
    except ParadisError as error:
        print(f"paradis: error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `paradis ... | head`
        _drop_output()
        return EXIT_FAILED
    except OSError as error:
        _drop_output()
        where = f": {error.filename}" if error.filename else ""
        print(f"paradis: error: {error.strerror}{where}", file=sys.stderr, flush=True)
        return EXIT_FAILED


def _call(given: list[str]) -> int:
    if given[:1] == ["run"]:
        return run.run_command(given[1:])
    arguments = _parser("".join(given[:1])).parse_args(given)
    command: Callable[[argparse.Namespace], int] = arguments.run
    return command(arguments)


def _drop_output() -> None:
    """Send what is still buffered nowhere: the interpreter would fail on it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(wanted: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paradis",
        description="Trains PyTorch models with parameter servers and dispatchers.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paradis {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run.add_parser(commands)
    _add_server(commands)
    _add_dispatcher(commands)
    for name, text in _LAZY.items():
        if name == wanted:
            importlib.import_module(f"paradis.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=text)
    return parser


def _version() -> str:
    try:
        return metadata.version("paradis")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dispatchers", default="", metavar="HOST:PORT", help="control address of dispatcher 0"
    )
    parser.add_argument(
        "--token-file", type=Path, required=True, metavar="FILE", help="file with the job's token"
    )
    parser.add_argument(
        "--listen", default="127.0.0.1", metavar="HOST[:PORT]", help="where to take data"
    )
    parser.add_argument("--run-dir", type=Path, default=Path(), help="logs, sockets, checkpoints")


def _add_server(commands: Subparsers) -> None:
    parser = commands.add_parser("server", help="start one server of a job", allow_abbrev=False)
    _add_node_options(parser)
    parser.add_argument("--index", type=int, default=None, help="default: the next free one")
    parser.add_argument(
        "--beside", type=int, default=-1, metavar="RANK",
        help="in place of --index: the co-located server of this worker, on its host",
    )  # fmt: skip
    parser.add_argument("--rack", default="", help="rack that this host stands in")
    parser.set_defaults(run=_server)


def _add_dispatcher(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "dispatcher", help="start one dispatcher of a job; number 0 leads", allow_abbrev=False
    )
    _add_node_options(parser)
    parser.add_argument("--index", type=int, default=0, help="0 (default) leads the job")
    parser.add_argument("--rack", default="rack-0", help="rack whose traffic it carries")
    parser.add_argument("--racks", default="rack-0", help="all racks in order, by comma")
    for name in ("workers", "servers", "dispatcher-count"):
        parser.add_argument(f"--{name}", type=int, help="default: as the configuration says")
    parser.add_argument("--colocated", action="store_true", help=run.COLOCATED)
    parser.add_argument("--control-address", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--address-file", type=Path, default=None, help="gets the control address")
    parser.add_argument("--job", default="", help="name of the job, for messages")
    run.add_config_options(parser)
    parser.set_defaults(run=_dispatcher)


def _server(given: argparse.Namespace) -> int:
    if given.beside >= 0 and given.index is not None:
        raise ConfigError("a server has --index N or --beside RANK, not both; leave one out")
    arguments = ServerArguments(
        dispatchers=given.dispatchers,
        token_file=given.token_file.absolute(),
        index=given.index,
        beside=given.beside,
        listen=given.listen,
        rack=given.rack,
        run_directory=given.run_dir.absolute(),
    )
    if not arguments.dispatchers:
        raise ConfigError(
            "a server needs --dispatchers HOST:PORT, the control address of dispatcher 0"
        )
    # Imports torch, for which `--help` and `run` need not wait.
    from paradis.runtime import process

    return process.run_server(arguments)


def _dispatcher(given: argparse.Namespace) -> int:
    overrides = run.overrides_of(given.set)
    counts = {
        "workers": given.workers,
        "servers": given.servers,
        "dispatchers": given.dispatcher_count,
    }
    for name, count in counts.items():
        if count is not None:
            overrides[f"topology.{name}"] = str(count)
    if given.colocated:
        overrides["topology.colocated"] = "true"
    config = load_config(given.config, os.environ, overrides).config
    topology = config.topology
    groups = topology.reduction_groups
    arguments = DispatcherArguments(
        token_file=given.token_file.absolute(),
        index=given.index,
        workers=topology.workers,
        servers=topology.all_servers,
        colocated=topology.colocated,
        dispatchers_count=topology.dispatchers,
        racks=tuple(given.racks.split(",")),
        rack=given.rack,
        control_address=given.control_address,
        dispatchers=given.dispatchers,
        address_file=given.address_file,
        listen=given.listen,
        run_directory=given.run_dir.absolute(),
        settings=settings_from(shared_settings(config)),
        tree=() if isinstance(groups, str) else groups,
        job=given.job,
    )
    if arguments.index > 0 and not arguments.dispatchers:
        raise ConfigError(
            f"dispatcher {arguments.index} needs --dispatchers HOST:PORT, the control address of "
            "dispatcher 0"
        )
    # Listens before it imports torch: the other nodes start meanwhile.
    from paradis.runtime.leader_control import open_control

    control = None
    if arguments.index == 0:
        control = open_control(
            arguments.control_address, arguments.token_file, arguments.address_file
        )
    from paradis.runtime import process

    return process.run_dispatcher(arguments, control)


if __name__ == "__main__":
    sys.exit(main())
