"""How a worker reads the parameters that another worker group trains.

When a step begins, the worker asks the servers for the versions of what it reads, and waits for
values only where the ones it has lack more updates than the bound allows. What comes later is kept
beside the parameters, which the script reads meanwhile, until its next step begins.

Invariants:
* a step begins with values that lack at most the bound's number of the updates that a shard had
  when its server answered, which was after the step before had ended;
* a shard's version never goes back here;
* between two beginnings nothing is written into what the script reads.

Source: the bound is that of bounded-staleness reads (Ho et al., NIPS 2013, section 3), counted in
updates of the shard read and not in steps of the reader; see docs/design/0004-worker-groups.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paradis.ids import LEADER, NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.worker_pushes import WorkerPushes
from paradis.roles.worker_state import WorkerConfig
from paradis.wire import messages as msg


@dataclass(slots=True)
class ReadShard:
    """A shard that another worker group trains.

    Attributes:
        held: version of the newest value here, -1 for none.
        lease: where that value is kept until the next step begins; 0: it is in the parameters.
        needed: version that a step may begin with.
    """

    plan: msg.ShardPlan
    held: int = -1
    lease: int = 0
    needed: int = 0


@dataclass(slots=True)
class Reading:
    """What a worker reads of one ``wrap`` call.

    Attributes:
        bound: updates that a value may lack.
        round: number of the last question.
        asked: shards whose version is not told yet.
        beginning: a step begins: the script reads nothing, and waits.
        renewed: servers with a new link since the last question: what they sent may be lost.
        snapshot: a checkpoint that is asked for; ``snapshot_from``: servers that have not copied.
    """

    index: int
    bound: int
    shards: dict[int, ReadShard] = field(default_factory=dict)
    round: int = 0
    asked: dict[int, None] = field(default_factory=dict)
    beginning: bool = False
    renewed: dict[str, None] = field(default_factory=dict)
    snapshot: msg.CheckpointInfo | None = None
    snapshot_from: dict[str, None] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Whether the script waits for something."""
        return self.beginning or bool(self.snapshot_from)

    def missing(self) -> list[int]:
        """Return the shards that the step cannot begin without."""
        return [n for n, s in self.shards.items() if n in self.asked or s.needed > s.held]


class WorkerReading(WorkerPushes):
    """Reads; `paradis.roles.worker.WorkerRole` is the whole role."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.readings: dict[int, Reading] = {}

    def _on_read_plan(self, plan: msg.Plan) -> bool:
        """Take over a plan of what others train; return whether it is one."""
        if not plan.ranks or self.config.rank in plan.ranks:
            return False
        reading = self.readings.setdefault(plan.group, Reading(plan.group, plan.reading))
        for shard in plan.shards:
            if shard.length:
                reading.shards.setdefault(shard.shard, ReadShard(shard))
        self._out.append(fx.Complete(plan.group, "plan", plan.step, plan=plan))
        return True

    # ------------------------------------------------------------------- asking

    def _on_read_asked(self, event: ev.ReadAsked) -> None:
        """A step begins: what was kept for it goes in, then the servers are asked."""
        reading = self.readings[event.group]
        reading.round += 1
        reading.beginning = True
        for number, shard in reading.shards.items():
            if shard.lease:
                lease, shard.lease = shard.lease, 0
                self._out.append(fx.Install(reading.index, number, shard.held, lease))
        # Buffers stay each worker's own: they are read once, at the start.
        active = {n: s for n, s in reading.shards.items() if s.held < 0 or not s.plan.is_buffer}
        reading.asked = dict.fromkeys(active)
        self._ask(reading)
        self._begin_if_read(reading)

    def _ask(self, reading: Reading, only: str = "", *, again: bool = False) -> None:
        by_server: dict[str, dict[int, int]] = {}
        for number in reading.missing():
            shard = reading.shards[number]
            by_server.setdefault(shard.plan.server, {})[number] = shard.held
        for server, held in by_server.items():
            if server in self._up and only in ("", server):
                self._send(server, msg.Read(
                    generation=self.view.generation if self.view else 0, group=reading.index,
                    worker=self.config.rank, incarnation=self.incarnation, held=held,
                    version=reading.bound, sequence=reading.round,
                    revision=int(again or server in reading.renewed),
                ))  # fmt: skip
                reading.renewed.pop(server, None)

    def _read_again(self, only: str = "") -> None:
        """Ask once more for what has no answer, over a new link or on a timer."""
        for reading in self.readings.values():
            if only:
                reading.renewed[only] = None
            if reading.beginning:
                self._ask(reading, only, again=True)
            if reading.snapshot is not None:
                self._ask_to_copy(reading, only)

    # ------------------------------------------------------------------ answers

    def _on_read_data(self, reading: Reading, event: ev.Received) -> None:
        match event.message:
            case msg.Update():
                self._on_read_update(reading, event.message, event)
                return
            case msg.Versions():
                self._on_versions(reading, event.message)
            case msg.SnapshotAck():
                self._on_copied_as_is(reading, event.source, event.message)
        if event.lease:
            self._out.append(fx.Release(event.lease))

    def _on_versions(self, reading: Reading, told: msg.Versions) -> None:
        if told.sequence != reading.round or not reading.beginning:
            return
        for number, version in told.versions.items():
            shard = reading.shards.get(number)
            if shard is not None and number in reading.asked:
                del reading.asked[number]
                shard.needed = max(shard.needed, version - reading.bound, 0)
        self._begin_if_read(reading)

    def _on_read_update(self, reading: Reading, update: msg.Update, event: ev.Received) -> None:
        shard = reading.shards.get(update.shard)
        if shard is None or not event.lease or update.version <= shard.held:
            if event.lease:
                self._out.append(fx.Release(event.lease))
            return
        shard.held = update.version
        if reading.beginning:
            install = fx.Install(reading.index, update.shard, update.version, event.lease)
            self._out.append(install)
        else:
            if shard.lease:
                self._out.append(fx.Release(shard.lease))
            shard.lease = event.lease
        self._begin_if_read(reading)

    def _begin_if_read(self, reading: Reading) -> None:
        if reading.beginning and not reading.missing():
            reading.beginning = False
            self._out.append(fx.Complete(reading.index, "read"))

    def reads(self, group: int, shard: int, version: int) -> bool:
        """Return whether a value of what others train is newer than the one that is here."""
        reading = self.readings.get(group)
        found = reading.shards.get(shard) if reading is not None else None
        return found is not None and version > found.held

    def _drop_kept(self) -> None:
        """The script has ended: there is no next step."""
        for reading in self.readings.values():
            for shard in reading.shards.values():
                if shard.lease:
                    self._out.append(fx.Release(shard.lease))
                    shard.lease = 0

    # -------------------------------------------------------------------- saves

    def _on_as_is_asked(self, event: ev.SnapshotAsked) -> None:
        """Worker 0 saves what others train, at whatever step it is."""
        reading = self.readings[event.group]
        assert isinstance(event.info, msg.CheckpointInfo)
        reading.snapshot = event.info
        reading.snapshot_from = dict.fromkeys(s.plan.server for s in reading.shards.values())
        self._send(LEADER, event.info)
        self._ask_to_copy(reading)

    def _ask_to_copy(self, reading: Reading, only: str = "") -> None:
        assert reading.snapshot is not None
        for server in reading.snapshot_from:
            if server in self._up and only in ("", server):
                self._send(server, msg.Snapshot(
                    generation=self.view.generation if self.view else 0, group=reading.index,
                    worker=self.config.rank, incarnation=self.incarnation, as_is=True,
                    checkpoint=reading.snapshot.checkpoint,
                ))  # fmt: skip

    def _on_copied_as_is(self, reading: Reading, source: NodeId, ack: msg.SnapshotAck) -> None:
        if reading.snapshot is None or ack.checkpoint != reading.snapshot.checkpoint:
            return
        reading.snapshot_from.pop(source, None)
        if not reading.snapshot_from:
            reading.snapshot = None
            self._out.append(fx.Complete(reading.index, "snapshot"))

    def _unread(self, reading: Reading) -> str:
        """Return a sentence that says what a reader waits for."""
        if reading.snapshot_from:
            return f"no copies on {', '.join(reading.snapshot_from)}"
        todo = reading.missing()
        shards = reading.shards
        owners = ", ".join(f"shard {n} on {shards[n].plan.server}" for n in todo[:3])
        return f"reading group {reading.index}: {len(todo)} shards are not there ({owners})"
