"""The training process's place in the job: joined once, left at exit.

Under ``paradis run``, ``torchrun`` or Slurm the environment names the job; alone, the process runs
a server of its own. A forked child (a data loader's) has no session: its hooks do nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, TextIO

import torch

from paradis.config import load_config, shared_settings
from paradis.core.worker_groups import membership
from paradis.errors import ConfigError, ParadisError, StateError
from paradis.ids import NodeId, worker_id
from paradis.roles.events import LeaveAsked
from paradis.runtime import joining
from paradis.runtime.interpreter import hurry_turns
from paradis.runtime.local import LocalJob, make_worker
from paradis.runtime.process import require_assertions
from paradis.runtime.rundir import read_token
from paradis.runtime.worker_node import WorkerNode
from paradis.settings import SharedSettings, settings_from
from paradis.transport.base import Identity
from paradis.wire.messages import Failed

_SETTLE_S = 5.0


class Bound(Protocol):
    """What holds on to the script's tensors until the session ends."""

    def end(self) -> None:
        """Wait for the step that is on its way, if there is one: the session ends."""
        ...

    def settle(self) -> None:
        """Wait for a step that writes into the parameters while the script runs."""
        ...

    def detach(self) -> None:
        """Let go of them."""
        ...


class Session:
    """One worker process in its job.

    Attributes:
        rank: this worker.
        world_size: workers of the job.
        node: the worker's end of the system.
        settings: the job's settings.
        membership: the worker group that this worker is in.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        require_assertions()
        self.rank = rank(environ)
        self.world_size = world_size(environ)
        self._pid = os.getpid()
        self._job: LocalJob | None = None
        self._pulse: joining.Pulse | None = None
        self._closed = False
        self._turns_s = hurry_turns()
        self._agent = "PARADIS_AGENT" in environ
        self.groups = 0
        self.bindings: list[Bound] = []
        if environ.get("PARADIS_DISPATCHERS"):
            self._join(environ)
        elif self.world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE is {self.world_size} but PARADIS_DISPATCHERS is not set; start the "
                "job with `paradis run`, or set PARADIS_DISPATCHERS to the control address of "
                "dispatcher 0 (and PARADIS_TOKEN_FILE)"
            )
        else:
            self._start_alone(environ)
        self.membership = membership(
            self.settings.worker_groups, self.rank, self.world_size,
            wanted=environ.get("PARADIS_WORKER_GROUP", ""),
        )  # fmt: skip
        if self.settings.trace:
            self._trace(environ.get("PARADIS_RUN_DIR", ""))
        self._watch_exit()

    @property
    def alive(self) -> bool:
        """Whether this is the process that joined (not a forked child) and it has not left."""
        return os.getpid() == self._pid and not self._closed

    # ------------------------------------------------------------------ joining

    def _start_alone(self, environ: Mapping[str, str]) -> None:
        threads = torch.get_num_threads()
        config = load_config(None, environ, {}).config
        settings = settings_from(shared_settings(config))
        self._job = LocalJob(_with_local_checkpoints(settings))
        self.node: WorkerNode = self._job.worker
        self.settings = self._job.settings
        # Numeric threads use one thread each; what threads started later use is the script's.
        torch.set_num_threads(threads)

    def _join(self, environ: Mapping[str, str]) -> None:
        token_file = environ.get("PARADIS_TOKEN_FILE", "")
        if not token_file:
            raise ConfigError(
                "PARADIS_DISPATCHERS is set but PARADIS_TOKEN_FILE is not; name the file with the "
                "job's token"
            )
        address = environ["PARADIS_DISPATCHERS"].split(",")[0].strip()
        token = read_token(Path(token_file))
        stream = joining.LeaderStream(address, token, watched=self._agent)
        timeout_s = float(load_config(None, environ, {}).config.communication.join_timeout)
        welcome = stream.join(
            joining.make_join("worker", self.rank, rack=environ.get("PARADIS_RACK", "")),
            connect_timeout_s=min(timeout_s, 30.0),
            welcome_timeout_s=timeout_s,
        )
        self.settings = joining.shared_settings(welcome)
        if welcome.world_size != self.world_size:
            stream.close()
            raise ConfigError(
                f"WORLD_SIZE is {self.world_size} on worker {self.rank}, but the job has "
                f"{welcome.world_size} workers; start as many as dispatcher 0 was told"
            )
        identity = Identity(node=NodeId(welcome.node), incarnation=welcome.incarnation, token=token)
        transports: dict[str, object] = {
            **joining.make_transports(self.settings, remote=joining.is_remote(address))
        }
        self.node = make_worker(
            identity,
            stream,
            self.settings,
            world_size=self.world_size,
            transports=transports,
        )
        stream.bind(self.node.post)
        self._pulse = joining.Pulse(
            identity.node, self.node.counters, self.node.tell_leader,
            interval_s=self.settings.heartbeat_interval_s, beat=not self._agent,
        )  # fmt: skip

    def _trace(self, run_directory: str) -> None:
        if not run_directory:
            self.node.announce(
                "warning",
                f"observe.trace is on, but worker {self.rank} records no spans: PARADIS_RUN_DIR is "
                "not set; set it to a directory for them",
            )
        elif self._job is not None:
            self._job.trace_into(Path(run_directory).absolute())
        else:
            self.node.trace_into(Path(run_directory).absolute())

    # ------------------------------------------------------------------- leaving

    def _watch_exit(self) -> None:
        atexit.register(self._close_at_exit)
        os.register_at_fork(before=self._before_fork, after_in_child=self._forked)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that joined."""
        return os.getpid() != self._pid

    def _before_fork(self) -> None:
        """A child finds finished values; an error of the step is raised where the script waits."""
        if self.alive:
            for binding in self.bindings:
                with contextlib.suppress(ParadisError):
                    binding.settle()

    def _forked(self) -> None:
        self._closed = True
        for binding in self.bindings:
            binding.detach()

    def _close_at_exit(self) -> None:
        """Close; an error of the last step, which nobody waited for, is the process's error."""
        try:
            self.close()
        except ParadisError as error:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def close(self) -> None:
        """Leave the job: with success, or saying that the script raised. Idempotent.

        Raises:
            ParadisError: the last step, which was still on its way, failed.
        """
        if not self.alive:
            return
        # Set by the interpreter when an exception ends the script, whatever hook shows it.
        error: BaseException | None = getattr(sys, "last_value", None)
        failed = None if error is not None else self._finish_steps()
        self._closed = True
        error = error or failed
        if error is None and self.node.error is None:
            self.node.parts.finish()
        if self._pulse is not None:
            self._pulse.stop()
        if error is None and self.node.error is None:
            self.node.post(LeaveAsked())
            self.node.driver.settle(_SETTLE_S)  # another thread may be in the middle of an event
        elif self.node.error is None or self.node.driver.interrupted:
            # The others need not wait for the end of this process, nor the host agent for its code.
            cause = self.node.error if error is None else error
            assert cause is not None
            self.node.tell_leader(_failure(self.rank, cause))
        if self._job is not None:
            self._job.close()
        else:
            self.node.close()
        for binding in self.bindings:
            binding.detach()
        self.bindings.clear()
        sys.setswitchinterval(self._turns_s)
        atexit.unregister(self._close_at_exit)
        if failed is not None:
            raise failed

    def _finish_steps(self) -> ParadisError | None:
        for binding in self.bindings:
            try:
                binding.end()
            except ParadisError as error:
                return error
        return None


def _failure(rank: int, error: BaseException) -> Failed:
    said = error.message if isinstance(error, ParadisError) else str(error)
    text = f"worker {rank} raised {type(error).__name__}: {said}"
    return Failed(error="JobFailed", text=text)


def _with_local_checkpoints(settings: SharedSettings) -> SharedSettings:
    from dataclasses import replace

    directory = str(Path(settings.checkpoint_directory or "checkpoints").absolute())
    # Alone, one process trains everything.
    return replace(settings, checkpoint_directory=directory, worker_groups="")


_lock = threading.Lock()
_session: Session | None = None


def current() -> Session:
    """Return this process's session, joining the job on the first call.

    Raises:
        ConfigError: the environment does not describe a job.
        PeerUnreachable, JoinRefused: the job cannot be joined.
        StateError: this is a forked child of a worker, which must not join under its name.
    """
    global _session
    if _session is not None and _session.forked:
        raise StateError(
            "paradis was called in a forked child of a worker, such as a data loader's; call it in "
            "the process that called paradis.wrap"
        )
    with _lock:
        if _session is None or not _session.alive:
            _session = Session(os.environ)
        return _session


def close() -> None:
    """Leave the job now instead of at exit. A later ``wrap`` starts or joins one anew.

    Raises:
        ParadisError: the last step, which was still on its way, failed.
    """
    global _session
    with _lock:
        session, _session = _session, None
    if session is not None:
        session.close()


def rank(environ: Mapping[str, str] | None = None) -> int:
    """Return this worker's number, from 0: RANK, SLURM_PROCID, or 0.

    Raises:
        ConfigError: it is not a number.
    """
    return _number(os.environ if environ is None else environ, "RANK", "SLURM_PROCID", 0)


def world_size(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of workers: WORLD_SIZE, SLURM_NTASKS, or 1.

    Raises:
        ConfigError: it is not a number.
    """
    return _number(os.environ if environ is None else environ, "WORLD_SIZE", "SLURM_NTASKS", 1)


def _number(environ: Mapping[str, str], name: str, other: str, default: int) -> int:
    if name not in environ and "PARADIS_DISPATCHERS" in environ and other in environ:
        name = other
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} refused: expected a number from 0 on, got {text!r}; unset it")
    return int(text)


# -------------------------------------------------------------------------- uncaught errors


def _show_errors() -> None:
    """Show an uncaught error of ours as one line: it says what to do, its traceback does not.

    Under a launcher it goes to the node's log alone, for the launcher shows the first one.
    """
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with _error_stream(os.environ) as stream, contextlib.redirect_stderr(stream):
            if not isinstance(error, ParadisError):
                previous(kind, error, trace)
                return
            agent = "PARADIS_AGENT" in os.environ
            lead = f"{kind.__module__}.{kind.__name__}" if agent else "paradis: error"
            stream.write(f"{lead}: {error.message}\n")
            stream.flush()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            show(kind, error, trace)
        except Exception:  # a signal handler raised in here, as a data loader's does
            show(kind, error, trace)

    sys.excepthook = hook


def _error_stream(environ: Mapping[str, str]) -> contextlib.AbstractContextManager[TextIO]:
    if "PARADIS_AGENT" in environ and environ.get("RANK", "").isdecimal():
        log = Path(environ.get("PARADIS_RUN_DIR", "")) / f"{worker_id(int(environ['RANK']))}.log"
        with contextlib.suppress(OSError):
            return log.open("a", encoding="utf-8", errors="backslashreplace")
    return contextlib.nullcontext(sys.stderr)


_show_errors()
