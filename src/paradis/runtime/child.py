"""One supervised node process: started, logged, signalled, buried with its descendants.

Invariant: a node leads a session of its own, so that keys typed in a terminal reach the launcher
only; it dies with the launcher (`exec_child.py`); and nothing it started outlives `kill_tree`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import psutil

from paradis.runtime import exec_child

_PR_SET_CHILD_SUBREAPER: Final = 36
_READ_BYTES: Final = 64 << 10
_PUMP_TIMEOUT_S: Final = 1.0

_TAIL_BYTES: Final = 64 << 10

Forward = Callable[[int, bytes], None]
"""Takes what a node wrote to stream 1 or 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCommand:
    """How to start one node.

    Attributes:
        name: node name, such as ``worker-0``.
        argv: program and arguments.
        env: the whole environment.
        cwd: working directory.
        forward: whether its standard output and error also go to the terminal.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    forward: bool = False


class Child:
    """A running or ended node. Made on the main thread: the kernel ties its life to that thread.

    Args:
        command: what to run.
        log: file for standard output and error, appended to.
        forward: takes output, from a thread for each stream, when ``command.forward``.
    """

    def __init__(self, command: NodeCommand, log: Path, forward: Forward) -> None:
        self.name = command.name
        self.log = log
        self.code: int | None = None
        """Exit code once ended; minus the signal's number if killed."""
        bootstrap = [sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid())]
        with log.open("ab", buffering=0) as file:
            self._process = subprocess.Popen(
                [*bootstrap, *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if command.forward else file,
                stderr=subprocess.PIPE if command.forward else file,
                env=dict(command.env),
                cwd=command.cwd,
                start_new_session=True,
            )
        self.pid = self._process.pid
        pipes = (self._process.stdout, self._process.stderr)
        self._pumps = [
            _Pump(pipe, log, functools.partial(forward, stream))
            for stream, pipe in enumerate(pipes, 1)
            if pipe is not None
        ]

    def poll(self) -> bool:
        """Return whether the process has ended, and take its exit code."""
        if self.code is None:
            self.code = self._process.poll()
            if self.code is not None:
                for pump in self._pumps:
                    pump.close()
        return self.code is not None

    def shown(self, text: str) -> bool:
        """Return whether the ended node's lines have gone to the terminal already."""
        tails = [pump.tail.decode("utf-8", "replace") for pump in self._pumps]
        return all(any(line in tail for tail in tails) for line in text.splitlines())

    def terminate(self) -> None:
        """Send SIGTERM to the node itself, not to what it started."""
        if not self.poll():
            self._process.send_signal(signal.SIGTERM)

    def kill_tree(self) -> None:
        """Send SIGKILL to the node and everything that it started."""
        if not self.poll():
            for process in _descendants(self.pid):
                _kill(process)
            self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class _Pump:
    """Copies a pipe to a log and to the terminal, until its end or `close`.

    Attributes:
        tail: the last bytes copied.
    """

    def __init__(self, pipe: IO[bytes], log: Path, forward: Callable[[bytes], None]) -> None:
        self.tail = b""
        self._pipe = pipe
        self._log = log
        self._forward = forward
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="paradis-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy what is in the pipe by now, then stop.

        Something that the node started may hold the pipe open, so its end cannot be waited for.
        """
        os.close(self._stop_write)
        self._thread.join(_PUMP_TIMEOUT_S)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._pipe, select.POLLIN)
        poller.register(self._stop_read, select.POLLIN)
        with self._log.open("ab", buffering=0) as log, self._pipe as pipe:
            stopping = False
            while True:
                ready = {fd for fd, _ in poller.poll(0 if stopping else None)}
                if pipe.fileno() in ready:
                    if not self._copy(pipe, log):
                        break
                elif stopping:
                    break
                if self._stop_read in ready:
                    stopping = True
        os.close(self._stop_read)

    def _copy(self, pipe: IO[bytes], log: IO[bytes]) -> bool:
        data = os.read(pipe.fileno(), _READ_BYTES)
        log.write(data)
        if data:
            self._forward(data)
            self.tail = (self.tail + data)[-_TAIL_BYTES:]
        return bool(data)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none gets away."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury(known: set[int]) -> None:
    """Take the exit status of ended children that nobody else waits for.

    Args:
        known: pids left alone: their `Child` polls them.
    """
    for process in _descendants(os.getpid(), recursive=False):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid not in known and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def kill_descendants() -> None:
    """Kill everything below this process and wait for its end."""
    for _ in range(10):  # what is being killed may be forking
        found = _descendants(os.getpid())
        if not found:
            return
        for process in found:
            _kill(process)
        psutil.wait_procs(found, timeout=1.0)


def _descendants(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.Error:
        return []


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def standard_streams() -> Forward:
    """Return a function that writes to standard output or error until nobody reads it any more.

    It writes past Python's buffers, whose locks a blocked thread would hold at exit.
    """
    broken = {1: threading.Event(), 2: threading.Event()}

    def forward(stream: int, data: bytes) -> None:
        try:
            while data and not broken[stream].is_set():
                data = data[os.write(stream, data) :]
        except OSError:
            broken[stream].set()

    return forward
