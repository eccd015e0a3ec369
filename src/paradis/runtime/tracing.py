"""Spans of one node, recorded around the effects and events that exist anyway; roles know nothing.

What is under way is kept per shard, and per peer where there are several, so it is bounded by the
plan. A push that a newer revision overtakes before it is acknowledged has no span; a sum that is
thrown away has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns

from paradis.ids import NodeId, index_of, role_of
from paradis.observe.spans import Span, SpanRecorder
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker_state import SUM_TAG
from paradis.wire.messages import DataMessage, Push, PushAck, RackPush, Update

Report = Callable[[], None] | None


@dataclass(slots=True)
class _Open:
    """A span that has been entered; ``mark`` tells which answer closes it."""

    group: int
    step: int
    enter_ns: int
    mark: int = 0
    bytes: int = 0
    peer: str = ""


class Tracer:
    """Records the spans of one node.

    Methods are called where the driver carries something out: under the node's lock, but for
    `receiving` (a reading thread) and what `sending` returns (a writing thread).

    Args:
        node: whose spans these are.

    Attributes:
        recorder: what has been recorded.
    """

    def __init__(self, node: NodeId) -> None:
        self.recorder = SpanRecorder()
        self._rank = _rank(node)
        self._pushes: dict[tuple[str, int], _Open] = {}
        self._sums: dict[int, _Open] = {}
        self._updates: dict[int, _Open] = {}
        self._arriving: dict[int, _Open] = {}
        self._handed: dict[int, _Open] = {}

    # ----------------------------------------------------------------- events

    def event(self, event: ev.Event) -> None:
        """Look at an event just before the role does."""
        match event:
            case ev.Received(message=PushAck() as ack, source=source):
                self._acknowledged(source, ack)
            case ev.Received(message=Push() | RackPush() as push, lease=lease) if lease:
                self._contributed(push)
            case ev.HostSummed():
                self._summed(event)
            case ev.Reduced():
                self._reduced(event)
            case ev.Applied():
                opened = self._updates.pop(event.shard, None)
                if opened is not None:
                    self._record("update", event.shard, opened)

    def _summed(self, event: ev.HostSummed) -> None:
        opened = self._handed.pop(event.shard, None)
        if opened is not None and opened.step == event.step:
            opened.bytes *= len(event.included)
            self._record("local reduction", event.shard, opened)

    def _acknowledged(self, source: NodeId, ack: PushAck) -> None:
        opened = self._pushes.get((source, ack.shard))
        if opened is not None and (ack.step, ack.revision) == (opened.step, opened.mark):
            del self._pushes[source, ack.shard]
            of_host = ack.revision == SUM_TAG
            what = "sum" if self._rank < 0 or of_host else "gradient"
            self._record("push", ack.shard, opened, what=what, worker=self._rank)

    def _contributed(self, push: DataMessage) -> None:
        opened = self._sums.get(push.shard)
        if opened is None or opened.step < push.step:
            self._sums[push.shard] = _Open(push.group, push.step, monotonic_ns())

    def _reduced(self, event: ev.Reduced) -> None:
        opened = self._sums.get(event.shard)
        if opened is not None and opened.mark == event.ticket:
            del self._sums[event.shard]
            self._record("aggregation", event.shard, opened)

    # ---------------------------------------------------------------- effects

    def sending(
        self, target: NodeId, message: DataMessage, buffers: Sequence[memoryview], on_sent: Report
    ) -> Report:
        """Note a message that is handed to the link; return what to call when it was sent."""
        match message:
            case Push() | RackPush():
                known = self._pushes.get((target, message.shard))
                mark = (message.step, message.revision)
                if known is None or (known.step, known.mark) != mark:  # else it is sent once more
                    self._pushes[target, message.shard] = _Open(
                        message.group, message.step, monotonic_ns(), message.revision,
                        sum(map(len, buffers)), target,
                    )  # fmt: skip
            case Update() if message.version == message.step + 1:  # else an answer outside of steps
                opened = _Open(
                    message.group, message.step, monotonic_ns(), 0, sum(map(len, buffers)), target
                )
                return self._then(on_sent, message.shard, opened)
        return on_sent

    def _then(self, on_sent: Report, shard: int, opened: _Open) -> Report:
        def sent() -> None:
            self._record("push", shard, opened, what="update", worker=_rank(opened.peer))
            if on_sent is not None:
                on_sent()

        return sent

    def handing_over(self, effect: fx.HandOver, nbytes: int) -> None:
        """Note that this worker's gradient of a shard is there, for the sum of its host.

        Only the owner of the shard learns when that is done; on the others nothing closes it.
        """
        self._handed[effect.shard] = _Open(effect.group, effect.step, monotonic_ns(), 0, nbytes)

    def summing(self, effect: fx.Reduce, nbytes: int) -> None:
        """Note that a sum is begun.

        Args:
            nbytes: of all contributions together.
        """
        opened = self._sums.get(effect.shard)
        if opened is not None:
            opened.mark, opened.bytes = effect.ticket, nbytes

    def compressed(self, group: int, step: int, shard: int, start_ns: int, nbytes: int) -> None:
        """Note that a gradient's code of ``nbytes`` is made, begun at ``start_ns``."""
        opened = _Open(group, step, start_ns, 0, nbytes)
        self._record("compression", shard, opened, worker=self._rank)

    def updating(self, effect: fx.Apply, nbytes: int) -> None:
        """Note that the optimizer is about to run on a shard of ``nbytes``."""
        opened = _Open(effect.group, effect.step, monotonic_ns(), 0, nbytes)
        self._updates[effect.shard] = opened

    def receiving(self, peer: NodeId, group: int, shard: int, step: int) -> None:
        """Note that the first bytes of a step's update are here, and nobody else receives it."""
        self._arriving[shard] = _Open(group, step, monotonic_ns(), 0, 0, peer)

    def installed(self, shard: int, nbytes: int) -> None:
        """Note that a received value is the parameters' value now."""
        opened = self._arriving.pop(shard, None)
        if opened is not None:  # None: a pull outside of steps
            opened.bytes = nbytes
            self._record("push", shard, opened, what="update", worker=self._rank)

    def _record(
        self, stage: str, shard: int, opened: _Open, *, what: str = "", worker: int = -1
    ) -> None:
        self.recorder.add(
            Span(stage, what, opened.group, shard, opened.step, worker, opened.peer,
                 opened.enter_ns, monotonic_ns(), opened.bytes)
        )  # fmt: skip


def _rank(node: str) -> int:
    return index_of(NodeId(node)) if role_of(NodeId(node)) == "worker" else -1
