"""``paradis run``: reads its options and lets a host agent run the job's nodes on this host.

Everything after the script's path belongs to the script, unchanged. Worker 0's standard output and
error appear live (progress bars, warnings); every node's go to its log in the run directory. An
uncaught error is shown once, at the end, with the number of the worker that raised it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paradis.cli.nodes import JobPlan, dispatcher_command, server_command, worker_command
from paradis.cli.summary import print_nodes, write_nodes
from paradis.config import JobConfig, load_config
from paradis.errors import ConfigError
from paradis.runtime import descriptors
from paradis.runtime.arguments import AgentConfig
from paradis.runtime.child import standard_streams
from paradis.runtime.host_agent import HostAgent
from paradis.runtime.rundir import RunDirectory

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

COLOCATED = "one more server beside each worker; --servers then counts dedicated ones, perhaps 0"
_COUNTS = ("workers", "servers", "dispatchers", "racks")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """What the user typed.

    Attributes:
        options: the options as typed, without ``--resume``, for the resume command.
        overrides: ``section.key`` -> text.
    """

    options: tuple[str, ...]
    config_file: Path | None
    overrides: Mapping[str, str]
    script: str
    arguments: tuple[str, ...]


def add_parser(commands: Subparsers) -> None:
    """Add ``run`` for the sake of ``paradis --help``; `run_command` reads its arguments."""
    commands.add_parser("run", help="train with a script: starts all nodes on this host")


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``--set``."""
    parser.add_argument("--config", type=Path, default=None, metavar="FILE", help="job.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="may be repeated"
    )


def overrides_of(settings: Sequence[str]) -> dict[str, str]:
    """Return ``--set`` options as a mapping.

    Raises:
        ConfigError: one is not ``section.key=value``.
    """
    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or "." not in name:
            raise ConfigError(f"--set refused: expected SECTION.KEY=VALUE, got {setting!r}")
        found[name.strip()] = value
    return found


def run_command(argv: Sequence[str]) -> int:
    """Run a job; return the exit code.

    Raises:
        ParadisError: the job cannot be started.
    """
    request = parse(argv)
    config = load_config(request.config_file, os.environ, request.overrides).config
    _check_script(request.script)
    launch = config.launch
    topology = config.topology
    peers = topology.workers + topology.all_servers + topology.dispatchers
    descriptors.ensure(descriptors.needed(peers))
    run = RunDirectory.create(Path(launch.run_directory))
    try:
        say(f"run directory: {shlex.quote(str(run.path))}")
        return _run(request, config, run)
    finally:
        run.clean()


def _run(request: RunRequest, config: JobConfig, run: RunDirectory) -> int:
    agent_config = AgentConfig(
        heartbeat_interval_s=config.communication.heartbeat_interval,
        grace_period_s=config.launch.grace_period,
        drain_timeout_s=config.launch.drain_timeout,
        connect_timeout_s=config.communication.rpc_timeout,
    )
    with (
        reserved_port() as port,
        HostAgent(agent_config, run, say=say, forward=standard_streams()) as agent,
    ):
        plan = JobPlan(
            config=config,
            run=run,
            config_file=request.config_file,
            overrides=request.overrides,
            environ=os.environ,
            terminal=sys.stdout.isatty(),
            script=(request.script, *request.arguments),
            master_port=port,
        )
        _start(agent, plan)
        code = agent.watch()
    if agent.summary is not None:
        print_nodes(agent.summary.nodes)
        write_nodes(run.path / "nodes.json", agent.summary.nodes)
    if config.observe.trace:
        say(f"to see where the time went: paradis trace {shlex.quote(str(run.path))}")
    if agent.checkpoint is not None:
        say(f"checkpoint of step {agent.checkpoint.step}: {agent.checkpoint.path}")
        say(f"to resume: {shlex.join(resume_command(request, agent.checkpoint.path))}")
    return code


def _start(agent: HostAgent, plan: JobPlan) -> None:
    """Start the leader, then everything else."""
    token = plan.run.make_token()
    agent.start(dispatcher_command(plan, 0, ""))
    address = agent.wait_for_leader(plan.config.communication.join_timeout)
    if address is None:
        return
    agent.join_leader(address, token)
    topology = plan.config.topology
    for index in range(1, topology.dispatchers):
        agent.start(dispatcher_command(plan, index, address))
    for index in range(topology.all_servers):
        agent.start(server_command(plan, index, address))
    for rank in range(topology.workers):
        agent.start(worker_command(plan, rank, address))


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Hold a free TCP port of this host, so that no other job is given it.

    It is bound but never listened on, so worker 0 can listen there (torch reuses addresses).
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def say(line: str) -> None:
    """Print a line for the user; where nobody reads any more, do without."""
    try:
        print(f"paradis: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def resume_command(request: RunRequest, checkpoint: str) -> list[str]:
    """Return the command that goes on from a checkpoint."""
    beside = Path(sys.executable).with_name("paradis")
    program = [sys.executable, "-m", "paradis.cli.main"]
    if beside.exists():
        program = ["paradis" if shutil.which("paradis") == str(beside) else str(beside)]
    resume = ["--resume", checkpoint]
    return [*program, "run", *request.options, *resume, request.script, *request.arguments]


# ------------------------------------------------------------------------------------ arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see paradis run --help")


def parse(argv: Sequence[str]) -> RunRequest:
    """Read the arguments of ``paradis run``.

    Raises:
        ConfigError: they are not understood.
    """
    parser = _run_parser()
    options, rest = split_script(parser, argv)
    given = parser.parse_args(options)
    if not rest:
        raise ConfigError("no script given; usage: paradis run [options] script.py [arguments]")
    overrides = overrides_of(given.set)
    for name in _COUNTS:
        if getattr(given, name) is not None:
            overrides[f"topology.{name}"] = str(getattr(given, name))
    if given.colocated:
        overrides["topology.colocated"] = "true"
    if given.resume is not None:
        if not given.resume.is_dir():
            raise ConfigError(
                f"--resume {given.resume}: no such directory; give a checkpoint or a directory of "
                "checkpoints"
            )
        overrides["checkpoint.restore"] = str(given.resume.absolute())
    return RunRequest(
        options=tuple(_without_resume(options)),
        config_file=None if given.config is None else given.config.absolute(),
        overrides=overrides,
        script=rest[0],
        arguments=tuple(rest[1:]),
    )


def _run_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="paradis run",
        usage="paradis run [options] script.py [arguments of the script]",
        description="Starts servers, dispatchers and workers on this host and trains. Shows worker "
        "0's output and the first error of any node; logs of all are in the run directory.",
        allow_abbrev=False,
    )
    for name in _COUNTS:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"number of {name}")
    parser.add_argument("--colocated", action="store_true", help=COLOCATED)
    parser.add_argument("--resume", type=Path, metavar="DIR", help="checkpoint to start from")
    add_config_options(parser)
    return parser


def split_script(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Cut arguments before the script's path, which is the first that is no option or its value.

    argparse alone would take ``--`` and known options out of the script's arguments.
    """
    takes_value = {name for a in parser._actions if a.nargs != 0 for name in a.option_strings}
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return list(argv[:at]), list(argv[at + 1 :])
        if not word.startswith("-") or word == "-":
            break
        at += 2 if word in takes_value else 1
    return list(argv[:at]), list(argv[at:])


def _without_resume(options: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in options:
        if not skip and word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
        skip = word == "--resume" and not skip
    return kept


def _check_script(script: str) -> None:
    if not Path(script).is_file():
        raise ConfigError(
            f"script {script!r} is not a file; paths are taken from {Path.cwd()}; "
            "usage: paradis run [options] script.py [arguments]"
        )
