"""What every real node shares: a driver, data links, a control channel, and how it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from paradis.errors import ParadisError, from_name
from paradis.ids import NodeId
from paradis.observe.metrics import Counters
from paradis.roles import effects as fx
from paradis.roles.events import EffectFailed, Event
from paradis.runtime.arena import Arena, Placed
from paradis.runtime.driver import Driver, Role
from paradis.runtime.executor import Executor
from paradis.runtime.links import Links
from paradis.runtime.tracing import Tracer
from paradis.transport.base import Identity, Transport
from paradis.wire.frame import FrameHeader
from paradis.wire.messages import Announcement, ControlMessage, DataMessage, Report

_log = logging.getLogger("paradis.node")

SMALL_BYTES = 64 << 10
"""Numeric jobs below this run in the calling thread: a hop to another costs more."""


class ControlChannel(Protocol):
    """A node's way to the leader."""

    def send(self, message: ControlMessage) -> None:
        """Queue a message for the leader; never blocks."""
        ...

    def close(self) -> None:
        """Send what is queued, then close; idempotent."""
        ...


class Node:
    """One node of any role but the leader's control duty.

    Args:
        role: the pure state machine.
        identity: name, incarnation and token.
        control: the channel to the leader.
        transports: by scheme, in order of preference.
        store_bytes_max: bound of the contribution store.
        threads: numeric threads.
    """

    def __init__(
        self,
        role: Role,
        identity: Identity,
        control: ControlChannel,
        transports: Mapping[str, Transport],
        *,
        store_bytes_max: int,
        threads: int,
    ) -> None:
        self.identity = identity
        self.control = control
        self.counters = Counters()
        self.arena = Arena(store_bytes_max)
        self.executor = Executor(threads)
        self.ended = threading.Event()
        self.error: ParadisError | None = None
        self.reason = ""
        self.on_fail: Callable[[ParadisError], None] | None = None
        self.tracer: Tracer | None = None
        self._spans_into: Path | None = None
        self._announced: dict[str, None] = {}
        self.driver = Driver(identity.node, role, self.carry, self.fail)
        self.links = Links(
            identity,
            transports,
            place=self.place,
            abandon=self.abandon,
            post=self.driver.post,
            counters=self.counters,
        )

    def post(self, event: Event) -> None:
        """Hand the role an event."""
        self.driver.post(event)

    def trace_into(self, directory: Path) -> None:
        """Record spans from now on; `close` writes them into ``directory``."""
        self._spans_into = directory
        self.tracer = Tracer(self.identity.node)
        self.driver.watch = self.tracer.event

    def place(self, peer: NodeId, header: FrameHeader) -> Placed:
        """Name memory for an incoming payload; subclasses know better than leasing."""
        return self.arena.place(header.payload_bytes)

    def abandon(self, placed: Placed) -> None:
        """Take back the memory of a payload whose link broke in the middle."""
        if placed.lease > 0:
            self.arena.release(placed.lease)

    # ------------------------------------------------------------- effects

    def carry(self, effect: fx.Effect) -> None:
        """Carry an effect out; under the node's lock, so it never waits."""
        match effect:
            case fx.Send():
                self._send(effect)
            case fx.SetTimer():
                self.driver.set_timer(effect.name, effect.at_ns)
            case fx.Release():
                self.arena.release(effect.lease)
            case fx.ReleaseSum():
                self.arena.release_sum(effect.shard)
            case fx.Connect():
                self.links.connect(effect.addresses)
            case fx.Announce():
                self.announce(effect.level, effect.text, once=effect.once)
            case fx.Count():
                self.counters.add(**{effect.name: effect.amount})
            case fx.Fail():
                self.fail(from_name(effect.error, effect.text))
            case fx.End():
                self.end(effect.reason)
            case _:
                self.carry_own(effect)

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out an effect that only this kind of node has."""
        raise AssertionError(f"{self.identity.node} cannot carry out {effect!r}")

    def _send(self, effect: fx.Send) -> None:
        if isinstance(effect.message, ControlMessage):
            self.tell_leader(effect.message)
            return
        message, buffers, on_sent = self.resolve(effect.message, effect.payload)
        if self.tracer is not None:
            on_sent = self.tracer.sending(effect.target, message, buffers, on_sent)
        self.links.send(effect.target, message, buffers, on_sent)

    def resolve(
        self, message: DataMessage, payload: fx.Payload | None
    ) -> tuple[DataMessage, list[memoryview], Callable[[], None] | None]:
        """Return the message, its payload's memory, and what to call when that was sent."""
        match payload:
            case None:
                return message, [], None
            case fx.Lease(lease=lease):
                self.arena.retain(lease)
                buffer = self.arena.bytes_of(lease).numpy().data
                return message, [buffer], lambda: self.arena.release(lease)
            case fx.Sum(shard=shard):
                return message, [self.arena.sum_of(shard).numpy().data], None
            case _:
                raise AssertionError(f"{self.identity.node} holds no {payload!r}")

    def tell_leader(self, message: ControlMessage) -> None:
        """Send to the leader; a lost leader is reported by its own event."""
        try:
            self.control.send(message)
        except ParadisError as error:
            _log.info("%s: %s", self.identity.node, error)

    def announce(self, level: str, text: str, *, once: bool = False) -> None:
        """Pass a line for the user to the leader, who passes it to the host agents."""
        if once:
            if text in self._announced:
                return
            self._announced[text] = None
        _log.warning("%s", text)
        self.tell_leader(Announcement(level=level, text=text))

    def run_job(self, what: str, job: Callable[[], Event], *, nbytes: int) -> None:
        """Run a numeric job and post its event; a failure becomes an event, too."""

        def run() -> None:
            try:
                event = job()
            except Exception as error:  # the job must end, not hang
                self.failed(what, error)
            else:
                self.driver.post(event)

        self.executor.submit(run, small=nbytes < SMALL_BYTES)

    def failed(self, what: str, error: Exception) -> None:
        """Tell the role, and so everybody, that something could not be done."""
        if isinstance(error, ParadisError):
            event = EffectFailed(what, type(error).__name__, error.message)
        else:  # a bug, or memory that gave out
            _log.error("%s failed on %s", what, self.identity.node, exc_info=error)
            event = EffectFailed(what, "InternalError", repr(error))
        self.driver.post(event)

    # ----------------------------------------------------------------- end

    def report(self) -> None:
        """Send the counters to the leader."""
        self.counters.set("store_bytes_peak", self.arena.store_bytes_peak)
        self.counters.set("store_bytes_max", self.arena.store_bytes_max)
        self.tell_leader(Report(node=self.identity.node, counters=self.counters.snapshot()))

    def fail(self, error: ParadisError) -> None:
        """End with an error; the first one counts."""
        first = self.error is None and not self.ended.is_set()
        if first:
            self.error = error
        self.ended.set()
        if first and self.on_fail is not None:
            self.on_fail(error)

    def end(self, reason: str) -> None:
        """End with success."""
        self.reason = self.reason or reason
        self.ended.set()

    def close(self) -> None:
        """Release everything; idempotent."""
        self.report()
        self.driver.stop()
        self.links.close()
        self.executor.stop()
        self.control.close()
        self._write_spans()

    def _write_spans(self) -> None:
        directory, self._spans_into = self._spans_into, None
        if directory is None or self.tracer is None:
            return
        try:
            self.tracer.recorder.write(directory, self.identity.node)
        except OSError as error:  # a picture that is missing must not fail a run that is over
            _log.warning("spans of %s are not written: %s", self.identity.node, error)
