"""A real worker: the role between the script's thread and the data plane."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from paradis.errors import DeadlineExceeded, InternalError, ParadisError, from_name
from paradis.ids import worker_id
from paradis.numerics.memory_order import copy_bytes
from paradis.roles import effects as fx
from paradis.roles.events import Event, Received
from paradis.roles.worker import WorkerRole
from paradis.runtime.host_group import HostGroup, meeting_point
from paradis.runtime.host_lane import Shards
from paradis.runtime.installer import Installer
from paradis.runtime.node import ControlChannel
from paradis.runtime.part_writer import PartWriter
from paradis.runtime.sharing import Sharing
from paradis.runtime.worker_receiving import WorkerReceiving
from paradis.storage.checkpoint import Section
from paradis.storage.tensorfile import torch_dtype
from paradis.transport.base import Identity, Transport
from paradis.wire.messages import Assign, DataMessage, Update

_log = logging.getLogger("paradis.worker")
_LOOK_S = 0.5
"""How often a waiting script looks for signals and for the end of the node."""


class KeptState(msgspec.Struct, frozen=True):
    """Value and optimizer state of a shard as a server sent them."""

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    scalars: dict[int, dict[str, float]]
    data: bytearray


class WorkerNode(WorkerReceiving):
    """One worker's end of the system, inside the user's process.

    Attributes:
        kept: (group, shard) -> state fetched last.
        parts: writes this worker's part of checkpoints.
        copied: group -> steps done at the last checkpoint whose part was copied here, or could not.
        sharing: the exchange with the other workers of this host, if there is one.
        host_timeout_s: deadline of each wait in it.
    """

    def __init__(
        self,
        role: WorkerRole,
        identity: Identity,
        control: ControlChannel,
        transports: Mapping[str, Transport],
        *,
        store_bytes_max: int,
    ) -> None:
        self.memory = {}
        self._receiving = {}
        self._changed = threading.Condition()
        self.worker_role = role
        self.kept: dict[tuple[int, int], KeptState] = {}
        self._done: dict[tuple[int, str], fx.Complete] = {}
        self.copied: dict[int, int] = {}
        self.sharing: Sharing | None = None
        self._installer = Installer(self._not_installed)
        self.host_timeout_s = 1800.0
        super().__init__(
            role, identity, control, transports, store_bytes_max=store_bytes_max, threads=0
        )
        self.links.on_lost = self._peer_lost
        self.parts = PartWriter(self.identity.node, self.driver.post)

    # ----------------------------------------------------------------- effects

    def carry(self, effect: fx.Effect) -> None:
        """Carry out an effect; leases below zero name a parameter's own memory."""
        if isinstance(effect, fx.Release) and effect.lease < 0:
            self._received(effect.lease)
        else:
            super().carry(effect)

    def carry_own(self, effect: fx.Effect) -> None:
        """Carry out what a worker's role asks for."""
        match effect:
            case fx.Complete(what="failed"):
                self._complete(effect)
            case fx.Install() if effect.lease > 0:
                self._installer.install(lambda: self._install(effect))
            case fx.Complete() | fx.Install() | fx.Keep() | fx.Copy() | fx.Refund():
                self._installer.after(lambda: self._carry_in_turn(effect))
            case fx.TakeMemories():
                self._installer.install(lambda: self._take_memories(effect))
            case fx.OpenHostGroup():
                self._open_host_group(effect)
            case fx.CloseHostGroup() if self.sharing is not None:
                self.sharing.sever()
            case fx.Gather() | fx.HandOver() | fx.Spread() | fx.Expect():
                self._share(effect)
            case fx.KeepState():
                self.kept[effect.group, effect.shard] = KeptState(
                    effect.keys, effect.dtypes, effect.scalars,
                    bytearray(self.arena.bytes_of(effect.lease).numpy().data),
                )  # fmt: skip
                self.arena.release(effect.lease)
            case _:
                super().carry_own(effect)

    def _carry_in_turn(
        self, effect: fx.Complete | fx.Install | fx.Keep | fx.Copy | fx.Refund
    ) -> None:
        """Carry out what must find in the parameters all that came before it."""
        match effect:
            case fx.Complete():
                self._complete(effect)
            case fx.Install():
                self._install(effect)
            case fx.Keep():
                self.memory[effect.group].kept(effect.shard)
                self._wake()
            case fx.Copy():
                # Not under the node's lock. Worker 0 waits for it, so no next step is over before.
                threading.Thread(
                    target=self.run_job, name="paradis-checkpoint", kwargs={"nbytes": 1 << 30},
                    args=("copying for a checkpoint", lambda: self._copy(effect)),
                ).start()  # fmt: skip
            case fx.Refund():
                memory = self.memory[effect.group]
                for shard in memory.shards:
                    memory.forget(shard)

    def _take_memories(self, effect: fx.TakeMemories) -> None:
        held = self.memory[effect.group].shards[effect.shard]
        held.take(self.arena.bytes_of(effect.lease), effect.keys, effect.dtypes)
        self.arena.release(effect.lease)

    def _not_installed(self, error: Exception) -> None:
        self.failed("installing an update", error)
        self.fail(InternalError(f"{self.identity.node} cannot install an update: {error!r}; "
                                "please report it with the node's log"))  # fmt: skip

    def _copy(self, effect: fx.Copy) -> Event:
        try:
            return self.parts.copy(effect, lambda: (self._own_memories(effect), {}))
        finally:
            with self._changed:
                self.copied[effect.group] = max(effect.step, self.copied.get(effect.group, 0))
                self._changed.notify_all()

    def _own_memories(self, effect: fx.Copy) -> list[Section]:
        shards = self.memory[effect.group].shards.values()
        rank = self.worker_role.config.rank
        return [section for shard in shards for section in shard.sections(rank, effect.step)]

    # ----------------------------------------------------------- local reduction

    def _open_host_group(self, effect: fx.OpenHostGroup) -> None:
        rank = self.worker_role.config.rank
        path = meeting_point(effect.name, effect.ranks, self.identity.token)
        shards = Shards(
            dtype=lambda g, s: torch_dtype(self.memory[g].shards[s].plan.dtype),
            nbytes=lambda g, s: sum(map(len, self.memory[g].shards[s].value)),
            claim=self._claim_shared,
            arrived=self._arrived_shared,
            abandon=lambda shard: self._received(-1 - shard),
        )
        self.sharing = Sharing(
            lambda: HostGroup(path, effect.ranks, rank), rank, shards,
            post=self.driver.post, timeout_s=self.host_timeout_s,
        )  # fmt: skip

    def _share(self, effect: fx.Gather | fx.HandOver | fx.Spread | fx.Expect) -> None:
        assert self.sharing is not None
        match effect:
            case fx.Gather():
                self.sharing.gather(effect)
            case fx.HandOver():
                held = self.memory[effect.group].shards[effect.shard]
                views = held.gradient if effect.present else []
                if self.tracer is not None and effect.present:
                    self.tracer.handing_over(effect, sum(map(len, views)))
                self.sharing.hand_over(effect, views)
            case fx.Spread(update=update, lease=lease):
                views = []
                if lease < 0:
                    views = self.memory[update.group].shards[update.shard].value
                elif lease > 0:
                    views = [self.arena.bytes_of(lease).numpy().data]
                self.sharing.spread(update, views)
            case fx.Expect():
                self.sharing.expect(effect)

    def _claim_shared(self, rank: int, update: Update) -> list[memoryview] | None:
        """As `place`, for an update that another worker of this host sends on."""
        group, shard = update.group, update.shard
        if not self.worker_role.wants(group, shard, update.version):
            return None
        held = self.memory[group].shards[shard].value
        views = self._claim(worker_id(rank), group, shard, sum(map(len, held)))
        if views is not None and self.tracer is not None:
            self.tracer.receiving(worker_id(rank), group, shard, update.step)
        return views

    def _arrived_shared(self, rank: int, update: Update, placed: bool) -> None:
        lease = -1 - update.shard if placed else 0
        self.driver.post(Received(worker_id(rank), update, lease))

    def close(self) -> None:
        """Release everything; idempotent."""
        if self.sharing is not None:
            self.sharing.close(orderly=self.error is None)
        super().close()
        self._installer.stop()

    def _install(self, effect: fx.Install) -> None:
        memory = self.memory[effect.group]
        held = memory.shards[effect.shard]
        nbytes = sum(len(v) for v in held.value)
        if effect.code is not None:
            code = self.arena.bytes_of(effect.lease)
            nbytes = code.numel()
            held.step(code, effect.code.present, effect.code.options)
            self.arena.release(effect.lease)
        elif effect.lease > 0:
            data = self.arena.bytes_of(effect.lease).numpy().data
            copy_bytes(memory.receiving(effect.shard), data)
            self.arena.release(effect.lease)
        memory.let_go(effect.shard)
        memory.installed(effect.shard)
        self._received(-1 - effect.shard)
        self.counters.add(pull_bytes=nbytes)
        if self.tracer is not None:
            self.tracer.installed(effect.shard, nbytes)
        self._wake()

    def _wake(self) -> None:
        """Somebody may wait for a parameter that has arrived."""
        with self._changed:
            self._changed.notify_all()

    def resolve(
        self, message: DataMessage, payload: fx.Payload | None
    ) -> tuple[DataMessage, list[memoryview], Callable[[], None] | None]:
        """Find a gradient's bytes, or the values (and state) to assign."""
        match payload:
            case fx.Gradient(group=group, shard=shard):
                views = self.memory[group].shards[shard].gradient
                self.counters.add(push_bytes=sum(map(len, views)))
                return message, views, None
            case fx.HostSum(group=group, shard=shard):
                assert self.sharing is not None
                total = self.sharing.sum_of(group, shard)
                self.counters.add(push_bytes=len(total))
                return message, [total], None
            case fx.Sections(group=group, shard=shard):
                held = self.memory[group].shards[shard]
                assert isinstance(message, Assign)
                views = list(held.value) if "value" in message.keys else []
                views += [held.state[key] for key in message.keys if key != "value"]
                return message, views, None
            case _:
                return super().resolve(message, payload)

    # ----------------------------------------------------------------- waiting

    def _complete(self, effect: fx.Complete) -> None:
        with self._changed:
            if effect.what == "failed" and self.error is None:
                self.error = from_name(effect.error, effect.text)
            self._done[effect.group, effect.what] = effect
            self._changed.notify_all()

    def fail(self, error: ParadisError) -> None:
        """End with an error and wake the script."""
        super().fail(error)
        with self._changed:
            self._changed.notify_all()

    def forget(self, group: int, what: str) -> None:
        """Drop an earlier completion of the same kind, before asking anew."""
        with self._changed:
            self._done.pop((group, what), None)

    def wait(self, group: int, what: str, *, timeout_s: float) -> fx.Complete:
        """Wait for a completion, on the script's thread.

        Raises:
            ParadisError: the job failed, or what was asked for is refused.
            DeadlineExceeded: it did not come; the message says what is missing.
        """
        key = (group, what)
        self.wait_until(lambda: key in self._done, group, what, timeout_s=timeout_s)
        with self._changed:
            done = self._done.pop(key)
        if done.error:
            raise from_name(done.error, done.text)
        return done

    def answered(self, group: int, what: str) -> bool:
        """Return whether `wait` would return or raise at once."""
        with self._changed:
            return (group, what) in self._done or self.error is not None or self.ended.is_set()

    def wait_until(
        self, ready: Callable[[], bool], group: int, what: str, *, timeout_s: float
    ) -> None:
        """Wait for what an event brings about, on any thread but the node's own.

        Args:
            ready: looked at after every event that may bring it about.
            group: number of the ``wrap`` call.
            what: of which completion it is a part, for messages.
            timeout_s: deadline.

        Raises:
            ParadisError: the job failed.
            DeadlineExceeded: it did not come; the message says what is missing.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not ready():
                if self.error is not None:
                    raise self.error
                if self.ended.is_set():
                    raise InternalError(f"{self.identity.node} has ended: {self.reason}")
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"{what} timed out on {self.identity.node} after {timeout_s:.0f} s: "
                        f"{self.worker_role.missing(group)}; look at the servers' logs"
                    )
                self._changed.wait(_LOOK_S)
