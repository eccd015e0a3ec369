"""The host agent: starts, watches and stops the nodes of one host, and speaks for them.

It runs on the launcher's main thread, as one loop over one queue of events: signals, ended
children, messages of the leader. Invariant: the first failure decides what the user sees and the
exit code; and when `HostAgent.__exit__` returns, nothing that was started here is alive.

    starting/running --all workers ended with 0--> finishing --shutdown--> draining --> over
                     --failure----------> settling ----------------------> draining
                     --SIGTERM, SIGHUP--> grace -------------------------> draining
                     --SIGINT (anywhere; a second one kills)-------------> draining
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import queue
import signal
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from paradis.control.client import ControlClient
from paradis.control.settings import ControlConfig
from paradis.errors import ConfigError, Overloaded, ParadisError, PeerUnreachable, UnavailableError
from paradis.ids import LEADER, NodeId, role_of
from paradis.runtime import verdict
from paradis.runtime.arguments import AgentConfig
from paradis.runtime.child import (
    Child,
    Forward,
    NodeCommand,
    adopt_orphans,
    bury,
    kill_descendants,
)
from paradis.runtime.log_tail import failure_text
from paradis.runtime.rundir import RunDirectory, read_address
from paradis.runtime.signals import SignalInbox
from paradis.wire.messages import (
    Announcement,
    Beat,
    CheckpointDone,
    ControlMessage,
    Failed,
    Join,
    NodeExited,
    Refused,
    Shutdown,
    Summary,
)

_EVENTS_MAX: Final = 10_000
_POLL_S: Final = 0.02
_KILL_TIMEOUT_S: Final = 5.0


class Phase(enum.Enum):
    """What the agent is waiting for."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()
    GRACE = enum.auto()
    FINISHING = enum.auto()
    DRAINING = enum.auto()


Event = int | ControlMessage | ParadisError


class HostAgent:
    """Use as a context manager, on the main thread of a process that has no other children.

    Args:
        config: deadlines.
        run: the run's directory.
        say: shows a line to the user.
        forward: takes forwarded output of a node, on other threads.

    Attributes:
        summary: the leader's last `Summary`, or None.
        checkpoint: the last finished checkpoint, or None.
    """

    def __init__(
        self,
        config: AgentConfig,
        run: RunDirectory,
        *,
        say: Callable[[str], None],
        forward: Forward,
    ) -> None:
        self.summary: Summary | None = None
        self.checkpoint: CheckpointDone | None = None
        self._config = config
        self._run = run
        self._say = say
        self._forward = forward
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._signals = SignalInbox(self._events.put)
        self._children: dict[str, Child] = {}
        self._ended: set[str] = set()
        self._client: ControlClient | None = None
        self._verdict = verdict.Verdict()
        self._phase = Phase.RUNNING
        self._deadline = math.inf
        self._services_deadline = math.inf
        self._next_beat = math.inf
        self._signal = 0
        self._shutdown = False
        self._orderly = False
        self._orphans = False
        self._early: dict[str, float] = {}
        self._losses: dict[str, verdict.Failure] = {}

    def __enter__(self) -> HostAgent:
        adopt_orphans()
        self._signals.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill_all()
        if self._client is not None:
            self._client.close()
        self._signals.__exit__(kind, value, trace)

    # ------------------------------------------------------------------------------- for the CLI

    def start(self, command: NodeCommand) -> None:
        """Start a node, unless the job is being stopped already.

        Raises:
            ConfigError: the system refuses.
        """
        if self._phase is Phase.RUNNING and not self._verdict.any:
            log = self._run.log(command.name)
            try:
                self._children[command.name] = Child(command, log, self._forward)
            except OSError as error:
                raise ConfigError(f"{command.name} cannot be started: {error}") from error

    def wait_for_leader(self, timeout_s: float) -> str | None:
        """Return the address that the leader wrote; None when the job is ending instead.

        Raises:
            PeerUnreachable: it is not there within ``timeout_s`` seconds.
        """
        until = time.monotonic() + timeout_s
        while self._phase is Phase.RUNNING and not self._verdict.any:
            address = read_address(self._run.address_file)
            if address is not None:
                return address
            if time.monotonic() > until:
                raise PeerUnreachable(
                    f"dispatcher 0 did not start within {timeout_s:g} s; see its log: "
                    f"{self._run.log('dispatcher-0')}"
                )
            self._turn(time.monotonic() + _POLL_S)
        return None

    def join_leader(self, address: str, token: bytes) -> None:
        """Open the control stream on which this agent speaks for its nodes.

        A leader that does not answer is a failure of the job; it may yet say why by its end.
        """
        control = ControlConfig(keepalive_s=self._config.heartbeat_interval_s)
        host = socket.gethostname()
        self._client = ControlClient(address, token, self, control)
        try:
            self._client.connect(self._config.connect_timeout_s)
        except ParadisError as error:
            self._client = None
            self._verdict.add(verdict.of_leader(type(error).__name__, error.message))
            return
        self._send(Join(node=f"agent-{host}", role="agent", host=host, pid=os.getpid()))
        self._next_beat = time.monotonic()

    def watch(self) -> int:
        """Watch until all nodes have ended; return the launcher's exit code."""
        while not (self._phase is Phase.DRAINING and not self._alive()):
            self._turn(min(self._deadline, self._services_deadline))
        if self._signal:
            return 128 + self._signal
        return self._verdict.first().exit_code if self._verdict.any else 0

    # ----------------------------------------------------- Receiver: on the client's own thread

    def received(self, message: ControlMessage) -> None:
        """Take a message of the leader."""
        if self._events.qsize() > _EVENTS_MAX:
            raise Overloaded(f"host agent refused a message: {_EVENTS_MAX} wait already")
        self._events.put(message)

    def lost(self, error: ParadisError) -> None:
        """Take the end of the control stream."""
        self._events.put(error)

    # ------------------------------------------------------------------------------- the loop

    def _turn(self, until: float) -> None:
        """Handle one event, or wait for one until the given time, then act on what is due."""
        wait = min(until, self._next_beat) - time.monotonic()
        try:
            event = self._events.get(timeout=min(max(wait, 0.0), 1.0))
        except queue.Empty:
            pass
        else:
            self._handle(event)
        self._poll()
        now = time.monotonic()
        if now >= self._next_beat:
            self._send(Beat(nodes=tuple(child.name for child in self._alive())))
            self._next_beat = now + self._config.heartbeat_interval_s
        self._advance(now)

    def _handle(self, event: Event) -> None:
        match event:
            case signal.SIGCHLD:
                self._orphans = True  # nodes are polled in every turn
            case int():
                self._signalled(event)
            case Announcement(level=level, text=text):
                grave = level.lower() in ("warning", "error", "critical")
                self._say(f"{level.lower()}: {text}" if grave else text)
            case CheckpointDone(error=""):
                self.checkpoint = event
                self._say(f"checkpoint of step {event.step} written: {event.path}")
            case CheckpointDone():
                self._say(f"warning: checkpoint {event.checkpoint} failed: {event.error}")
            case Failed(error=error, text=text) | Refused(error=error, text=text):
                self._verdict.add(self._losses.get(text) or verdict.of_leader(error, text))
            case Summary():
                self.summary = event
            case Shutdown():
                self._shutdown = True
            case ParadisError() if not self._shutdown:
                self._verdict.add(verdict.of_leader(type(event).__name__, event.message))
            case _:
                pass

    def _signalled(self, number: int) -> None:
        if number == signal.SIGINT and not self._verdict.any:
            self._signal = number
        if number == signal.SIGINT and self._phase is Phase.DRAINING:
            self._say("interrupted while stopping: killing everything")
            self._kill_all()
        elif number == signal.SIGINT:
            limit = f"{self._config.drain_timeout_s:g} s"
            self._say(f"interrupted: stopping within {limit}; again to kill at once")
            self._drain(time.monotonic())
        elif self._phase is not Phase.GRACE and self._phase is not Phase.DRAINING:
            self._signal = number
            limit = f"{self._config.grace_period_s:g} s"
            self._say(f"{verdict.signal_name(number)}: workers have {limit} to end")
            self._enter(Phase.GRACE, time.monotonic() + self._config.grace_period_s)
            for child in self._alive("worker"):
                child.terminate()

    def _poll(self) -> None:
        for child in self._children.values():
            if child.name not in self._ended and child.poll():
                self._ended.add(child.name)
                self._exited(child)
        if self._orphans:
            self._orphans = False
            bury({child.pid for child in self._alive()})

    def _exited(self, child: Child) -> None:
        assert child.code is not None
        if self._phase in (Phase.GRACE, Phase.DRAINING):
            # It was told to end, however it did: that is an early finish and no failure.
            name = verdict.signal_name(self._signal) if self._signal else "the order to stop"
            self._send(NodeExited(node=child.name, code=0, text=f"ended on {name}"))
            return
        text = failure_text(child.log) if child.code else ""
        failure = verdict.of_node(
            child.name, child.code, text, str(child.log), seen=child.shown(text)
        )
        if _role(child.name) == "dispatcher" and child.name != LEADER and not self._shutdown:
            # The leader decides: it goes on without a rack agent, or says this text as a failure.
            line = failure.message.partition("\n")[0]
            self._losses[line] = failure
            self._send(NodeExited(node=child.name, code=child.code, text=line))
            return
        self._send(NodeExited(node=child.name, code=child.code, text=text))
        if child.code:
            self._verdict.add(failure)
        elif _role(child.name) != "worker":
            # Too early, unless the leader's Shutdown is on its way to us.
            self._early[child.name] = time.monotonic() + self._config.settle_s

    def _judge_early(self, now: float) -> None:
        for name, until in list(self._early.items()):
            if self._shutdown or self._phase is not Phase.RUNNING:
                del self._early[name]
            elif now >= until:
                del self._early[name]
                self._verdict.add(verdict.of_node(name, 0, "", str(self._run.log(name))))

    def _advance(self, now: float) -> None:
        self._judge_early(now)
        due = now >= self._deadline
        workers = self._alive("worker")
        match self._phase:
            case Phase.RUNNING | Phase.FINISHING if self._verdict.any and not self._signal:
                self._enter(Phase.SETTLING, now + self._config.settle_s)
                self._advance(now)
            case Phase.RUNNING if not workers and self._has_workers():
                self._enter(Phase.FINISHING, now + self._config.finish_timeout_s)
                self._advance(now)
            case Phase.SETTLING if (
                self._verdict.decisive or due or (self._has_workers() and not workers)
            ):
                for child in workers:
                    self._verdict.add_dying(child.name, child.log)
                self._say(f"error: {self._verdict.first().message}")
                self._drain(now)
            case Phase.GRACE if due or not workers:
                for child in workers:
                    self._say(f"warning: {child.name} did not end in time and is killed")
                    child.kill_tree()
                self._enter(Phase.FINISHING, now + self._config.drain_timeout_s)
                self._advance(now)
            case Phase.FINISHING if self._shutdown or self._client is None:
                self._drain(now)
            case Phase.FINISHING if due or self._verdict.any:
                self._say("warning: the leader did not end the job in order")
                self._drain(now)
            case Phase.DRAINING if due:
                self._kill_all()
            case Phase.DRAINING if now >= self._services_deadline or (
                not self._orderly and not workers
            ):
                self._services_deadline = math.inf
                self._orderly = True
                for child in self._alive():
                    child.terminate()
            case _:
                pass

    # ------------------------------------------------------------------------------- stopping

    def _enter(self, phase: Phase, deadline: float) -> None:
        self._phase = phase
        self._deadline = deadline

    def _drain(self, now: float) -> None:
        if self._phase is Phase.DRAINING:
            return
        # After the leader's Shutdown servers end by themselves; otherwise they are told to when
        # the workers have ended. In any case they get half of the time for it.
        self._orderly = self._shutdown
        self._enter(Phase.DRAINING, now + self._config.drain_timeout_s)
        self._services_deadline = now + self._config.drain_timeout_s / 2
        for child in self._alive("worker"):
            child.terminate()
        self._advance(now)

    def _kill_all(self) -> None:
        self._phase = Phase.DRAINING
        self._services_deadline = math.inf
        for child in self._alive():
            child.kill_tree()
        until = time.monotonic() + _KILL_TIMEOUT_S
        while not all(child.poll() for child in self._alive()) and time.monotonic() < until:
            time.sleep(_POLL_S / 10)
        kill_descendants()

    # ------------------------------------------------------------------------------- small parts

    def _alive(self, role: str = "") -> list[Child]:
        """Return the nodes whose end has not been handled: no decision runs ahead of `_exited`."""
        return [
            child
            for child in self._children.values()
            if child.name not in self._ended and (not role or _role(child.name) == role)
        ]

    def _has_workers(self) -> bool:
        return any(_role(name) == "worker" for name in self._children)

    def _send(self, message: ControlMessage) -> None:
        if self._client is None:
            return
        with contextlib.suppress(UnavailableError):  # `lost` tells, or has told
            self._client.send(message)


def _role(name: str) -> str:
    return role_of(NodeId(name))
