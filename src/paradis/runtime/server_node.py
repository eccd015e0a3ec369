"""A real server: what its role asks for, done with tensors; and what a rack agent has of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from paradis.errors import ParadisError
from paradis.ids import NodeId
from paradis.numerics.finite import first_non_finite
from paradis.numerics.memory_order import as_bytes
from paradis.numerics.reduce import reduce_tree, square_sum
from paradis.observe.metrics import staleness_counts
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.receiver import Receiver
from paradis.runtime.arena import Placed
from paradis.runtime.node import Node
from paradis.runtime.part_writer import PartWriter
from paradis.runtime.shard_store import ShardStore
from paradis.storage.tensorfile import torch_dtype
from paradis.wire.frame import FrameHeader
from paradis.wire.messages import DataMessage, Push, RackPush, State, Update

_PUSHES = (Push.KIND, RackPush.KIND)


class SummingNode(Node):
    """A node whose role collects contributions: receives into accumulators, reduces."""

    def place(self, peer: NodeId, header: FrameHeader) -> Placed:
        """Receive the first contribution into the accumulator, others into the store."""
        role = self.driver.role
        assert isinstance(role, Receiver)
        shard = -1
        if header.kind in _PUSHES:
            codes = max(1, header.sequence) if header.kind == RackPush.KIND else 1
            wanted = role.payload_bytes(header.fields[2], codec=header.codec, codes=codes)
            if wanted != header.payload_bytes:  # another plan, or of a step in another code
                return self.arena.scratch(header.payload_bytes)
            if not role.collecting(header.fields[2]):
                shard = header.fields[2]
        return self.arena.place(header.payload_bytes, accumulator_of=shard)

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out sums; everything else is not this node's."""
        match effect:
            case fx.Reduce():
                self._reduce(effect)
            case fx.OpenPlan():
                for shard in effect.shards:
                    self._dtypes[shard.shard] = torch_dtype(shard.dtype)
            case _:
                super().carry_own(effect)

    _dtypes: dict[int, torch.dtype]

    def _reduce(self, effect: fx.Reduce) -> None:
        dtype = self._dtypes[effect.shard]
        flat = [lease for group in effect.sources for lease in group]
        # Taken here, under the node's lock, so that no payload is placed into it meanwhile.
        buffer = self.arena.sum_target(effect.shard, flat)
        if self.tracer is not None:
            self.tracer.summing(effect, buffer.numel() * len(flat))
        whole = effect.divisor == 1 and not effect.missing
        if len(flat) == 1 and whole and self.arena.bytes_of(flat[0]) is buffer:
            # One worker's gradient is its own sum, where it lies.
            self.driver.post(ev.Reduced(effect.shard, effect.ticket))
            return
        target = buffer.view(dtype)
        groups = [[self.arena.bytes_of(x).view(dtype) for x in g] for g in effect.sources]

        def job() -> ev.Event:
            reduce_tree(groups, target, effect.divisor, effect.missing)
            return ev.Reduced(effect.shard, effect.ticket)

        work = buffer.numel() * len(flat)
        self.run_job(f"summing shard {effect.shard}", job, nbytes=work)


def copy_of(view: memoryview) -> memoryview:
    """Return a copy of bytes that may change before they are sent.

    In memory from the heap: it is used again and again, while each mapping of its own would be
    paged in anew (4 MiB: 0.13 ms, not 6).
    """
    return memoryview(bytearray(view))


class ServerNode(SummingNode):
    """A server."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._dtypes = {}
        self.store = ShardStore()
        self._parts = PartWriter(self.identity.node, self.driver.post)
        self._queued: dict[tuple[str, int, int, int, int], None] = {}

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out what a server's role asks for."""
        match effect:
            case fx.OpenPlan():
                super().carry_own(effect)
                try:
                    self.store.open(effect.plan, effect.shards)
                except ParadisError as error:
                    self.failed("opening a plan", error)
            case fx.Reduce(coded=True):
                self._sum_codes(effect)
            case fx.Apply():
                self._apply(effect)
            case fx.BeginCodes():
                self.store.begin_codes(effect.group, effect.options)
            case fx.Store():
                self._store(effect)
            case fx.Load():
                self._load(effect)
            case fx.Measure():
                self._measure(effect)
            case fx.Copy():
                self._copy(effect)
            case _:
                super().carry_own(effect)

    def resolve(
        self, message: DataMessage, payload: fx.Payload | None
    ) -> tuple[DataMessage, list[memoryview], Callable[[], None] | None]:
        """Find the bytes of a shard's value or of all its sections."""
        match payload:
            case fx.Sections(shard=shard, keys=("*",) | ("memories",) as wanted, copied=copied):
                what = self.store.sections if wanted == ("*",) else self.store.memory_sections
                keys, dtypes, scalars, buffers = what(shard)
                assert isinstance(message, State)
                buffers = [copy_of(b) for b in buffers] if copied else buffers
                message = msgspec.structs.replace(
                    message, keys=keys, dtypes=dtypes, scalars=scalars
                )
                return message, buffers, None
            case fx.Sections(shard=shard, copied=True):
                return message, [copy_of(self.store.value_bytes(shard))], None
            case fx.Sections(shard=shard):
                return message, [self.store.value_bytes(shard)], None
            case fx.Code(shard=shard):
                return message, [self.store.code_bytes(shard)], None
            case _:
                return super().resolve(message, payload)

    def _send(self, effect: fx.Send) -> None:
        """Queue an answer once: who asks again while it waits to be sent gets that one."""
        message = effect.message
        if not isinstance(message, Update | State) or effect.payload is None:
            super()._send(effect)
            return
        copied = isinstance(effect.payload, fx.Sections) and effect.payload.copied
        # Where others update the value meanwhile, its version does not tell the question.
        place = message.step if copied else message.version
        key = (effect.target, message.KIND, message.shard, place, message.sequence)
        if key in self._queued:
            return
        self._queued[key] = None
        whole, buffers, _ = self.resolve(message, effect.payload)
        on_sent: Callable[[], None] | None = lambda: self._queued.pop(key, None)  # noqa: E731
        if self.tracer is not None:
            on_sent = self.tracer.sending(effect.target, whole, buffers, on_sent)
        self.links.send(effect.target, whole, buffers, on_sent)

    def _sum_codes(self, effect: fx.Reduce) -> None:
        flat = [lease for group in effect.sources for lease in group]
        held = self.store.shards[effect.shard]
        size, each = held.value.nbytes, held.plan.code_bytes
        target = self.arena.sum_target(effect.shard, flat, size)
        # A rack agent sends its workers' codes one after the other.
        sent = [[self.arena.bytes_of(x).view(-1, each) for x in g] for g in effect.sources]
        groups = [[code for codes in g for code in codes.unbind()] for g in sent]
        if self.tracer is not None:
            self.tracer.summing(effect, sum(c.numel() for g in groups for c in g))

        def job() -> ev.Event:
            self.store.sum_codes(effect.shard, groups, target, effect.divisor)
            return ev.Reduced(effect.shard, effect.ticket)

        self.run_job(f"summing codes of shard {effect.shard}", job, nbytes=size * len(flat))

    def _apply(self, effect: fx.Apply) -> None:
        total = self.arena.sum_of(effect.shard)
        if self.tracer is not None:
            self.tracer.updating(effect, total.numel())

        def job() -> ev.Event:
            # Here and not with the sum: the optimizer reads it next anyway.
            if effect.check and not (effect.coded and self.store.refuses(effect.shard)):
                bad = first_non_finite(total.view(self._dtypes[effect.shard]))
                if bad is not None:
                    return ev.Applied(effect.shard, effect.step, bad)
            self.store.apply(effect.shard, total, effect.options, effect.present, effect.clip,
                             coded=effect.coded)  # fmt: skip
            self.counters.add(updates=1)
            if effect.staleness >= 0:
                self.counters.add(**staleness_counts(effect.staleness))
            norms = self.store.norms_of_v(effect.shard) if effect.measure else {}
            return ev.Applied(effect.shard, effect.step, norms=norms)

        self.run_job(f"updating shard {effect.shard}", job, nbytes=total.numel())

    def _store(self, effect: fx.Store) -> None:
        data = self.arena.bytes_of(effect.lease)

        def job() -> ev.Event:
            try:
                self.store.store(effect.shard, data, effect.keys, effect.dtypes, effect.scalars)
            finally:
                self.arena.release(effect.lease)
            return ev.Stored(effect.shard, effect.ticket)

        self.run_job(f"taking over shard {effect.shard}", job, nbytes=data.numel())

    def _load(self, effect: fx.Load) -> None:
        def job() -> ev.Event:
            self.store.load(effect.group, effect.shard, effect.path)
            return ev.Stored(effect.shard, effect.ticket)

        size = as_bytes(self.store.shards[effect.shard].value).nbytes
        self.run_job(f"loading shard {effect.shard}", job, nbytes=size)

    def _measure(self, effect: fx.Measure) -> None:
        def job() -> ev.Event:
            squares = {
                s: square_sum(self.arena.sum_of(s).view(self._dtypes[s])) for s in effect.shards
            }
            return ev.Measured(effect.group, effect.step, squares)

        self.run_job("measuring norms", job, nbytes=1 << 30)

    def _copy(self, effect: fx.Copy) -> None:
        self.run_job(
            "copying for a checkpoint",
            lambda: self._parts.copy(effect, lambda: self.store.copy(effect.group)),
            nbytes=1 << 30,
        )

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._parts.writing

    def close(self) -> None:
        """Finish writing checkpoints, then release everything."""
        self._parts.finish()
        super().close()
