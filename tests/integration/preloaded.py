"""Starts the nodes of jobs by forking from a process that has imported torch.

A node is a process of its own as under ``paradis run``, with the same command line and environment,
but it costs 50 ms instead of 3 s of importing. Run as a program this file is that process: it reads
one request a line and answers with one line for each start and each end.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 90.0
_DEATH_SIGNAL = 1


# ------------------------------------------------------------------------- the preloaded process


def serve() -> dict[str, Any] | None:
    """Fork one child per request; return the request in the child, None at the end of input."""
    children: dict[int, str] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([0, *children], [], [])
        for descriptor in ready:
            if descriptor:
                _answer(end=children.pop(descriptor), code=_status(descriptor))
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return None
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            request: dict[str, Any] = json.loads(line)
            pid = os.fork()
            if not pid:
                for descriptor in children:
                    os.close(descriptor)
                return request
            children[os.pidfd_open(pid)] = request["id"]
            _answer(start=request["id"], pid=pid)


def _status(descriptor: int) -> int:
    result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
    os.close(descriptor)
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _answer(**fields: object) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


def become(request: Mapping[str, Any]) -> None:
    """Run a node's command in this process and end it.

    The interpreter is not finalised: in a forked process gRPC's part of that waits for threads that
    are not there. What Python code does at exit is done.
    """
    code: Any = 0
    try:
        code = _run(request)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run(request: Mapping[str, Any]) -> int:
    import ctypes
    import runpy

    import torch

    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    faulthandler.register(signal.SIGUSR1)
    words: list[str] = request["argv"]
    if "paradis.cli.main" in words:
        from paradis.cli.main import main

        return main(words[words.index("paradis.cli.main") + 1 :])
    sys.argv = words[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def preload() -> None:
    """Import what nodes need, without starting a thread."""
    import torch

    import paradis.cli.main
    import paradis.frontend.progress
    import paradis.frontend.wrap
    import paradis.runtime.local
    import paradis.runtime.process  # noqa: F401

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()  # imports what optimizers need


# ----------------------------------------------------------------------------- the tests' side


class Preloaded:
    """The process that forks; a context manager. Its end is the end of everything it started."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._pids: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._count = 0
        self._pending = b""

    def __enter__(self) -> Preloaded:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> str:
        """Start a command; return its number."""
        self._count += 1
        number = str(self._count)
        request = {"id": number, "argv": list(argv), "env": dict(env)}
        request |= {"cwd": str(cwd), "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return number

    def pid(self, number: str) -> int:
        """Return the pid of a command."""
        self._read_until(lambda: number in self._pids)
        return self._pids[number]

    def code(self, number: str) -> int:
        """Wait for the end of a command; return its exit status, negative for a signal."""
        self._read_until(lambda: number in self._codes)
        return self._codes[number]

    def running(self, number: str) -> bool:
        """Return whether a command has not ended."""
        self._read(0.0)
        return number not in self._codes

    def _read_until(self, done: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline, f"waited {WAIT_S} s in vain"
            self._read(1.0)

    def _read(self, timeout_s: float) -> None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        assert data, "the preloaded process ended"
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "pid" in answer:
                self._pids[answer["start"]] = answer["pid"]
            else:
                self._codes[answer["end"]] = answer["code"]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without what would configure a job."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PARADIS")}
    return {"OMP_NUM_THREADS": "1", **kept, **extra}


@dataclass
class Job:
    """One job: leader, servers, workers, each a process.

    Attributes:
        nodes: name -> number of the command.
    """

    preloaded: Preloaded
    directory: Path
    script: Path
    arguments: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)

    def start(self) -> Job:
        """Start all nodes as ``paradis run`` does."""
        from paradis.cli.nodes import JobPlan, dispatcher_command, server_command, worker_command
        from paradis.config import load_config
        from paradis.runtime.rundir import RunDirectory, read_address

        overrides = {f"topology.{name}": str(count) for name, count in self.counts.items()}
        overrides |= self.settings
        config = load_config(None, {}, overrides).config
        self.run = RunDirectory.create(self.directory / "runs")
        self.run.make_token()
        plan = JobPlan(
            config=config,
            run=self.run,
            config_file=None,
            overrides=overrides,
            environ=environment(self.environ),
            terminal=False,
            script=(str(self.script), *self.arguments),
        )
        self._start(dispatcher_command(plan, 0, ""))
        deadline = time.monotonic() + WAIT_S
        while (address := read_address(self.run.address_file)) is None:
            assert time.monotonic() < deadline and self.preloaded.running(
                self.nodes["dispatcher-0"]
            )
            select.select([], [], [], 0.01)
        topology = config.topology
        for index in range(1, topology.dispatchers):
            self._start(dispatcher_command(plan, index, address))
        for index in range(topology.all_servers):
            self._start(server_command(plan, index, address))
        for rank in range(topology.workers):
            self._start(worker_command(plan, rank, address))
        return self

    def _start(self, command: Any) -> None:
        # Without a host agent each node tells the leader itself that it lives.
        env = {k: v for k, v in command.env.items() if k != "PARADIS_AGENT"}
        log = self.run.log(command.name)
        self.nodes[command.name] = self.preloaded.start(command.argv, env, self.directory, log)

    def kill(self, node: str) -> None:
        """Kill a node, which cannot do anything about it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.preloaded.pid(self.nodes[node]), signal.SIGKILL)

    def until(self, done: Callable[[], bool]) -> None:
        """Wait until something outside of the processes is so."""
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline, f"waited {WAIT_S} s in vain\n{self.logs()}"
            select.select([], [], [], 0.01)

    def wait(self) -> dict[str, int]:
        """Wait for all nodes to end; return their exit statuses."""
        try:
            return {name: self.preloaded.code(number) for name, number in self.nodes.items()}
        except AssertionError as error:
            for number in self.nodes.values():
                if self.preloaded.running(number):
                    os.kill(self.preloaded.pid(number), signal.SIGUSR1)
            select.select([], [], [], 1.0)  # while they write where they are
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def succeed(self) -> Job:
        """Wait for all nodes to end with success."""
        codes = self.wait()
        assert not any(codes.values()), f"{codes}\n{self.logs()}"
        return self

    def log(self, node: str) -> str:
        """Return what a node wrote."""
        return self.run.log(node).read_text()

    def logs(self) -> str:
        """Return what all nodes wrote."""
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self.nodes)


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    """The process that forks."""
    with Preloaded() as process:
        yield process


@pytest.fixture(scope="module")
def start_job(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """A function that starts a job: script, its arguments; counts, settings, environ, directory."""

    def start(script: Path, *arguments: str, **options: Any) -> Job:
        names = ("workers", "servers", "dispatchers", "racks")
        counts = {name: options.pop(name) for name in names if name in options}
        directory = options.pop("directory", None) or tmp_path_factory.mktemp("job")
        return Job(preloaded, directory, script, arguments, counts, **options).start()

    return start


if __name__ == "__main__":
    preload()
    requested = serve()
    if requested is not None:
        become(requested)
