"""Where a worker receives what servers send: into the parameters, or beside them."""

from __future__ import annotations

import threading

from paradis.ids import NodeId
from paradis.roles.worker import WorkerRole
from paradis.runtime.arena import Placed
from paradis.runtime.node import Node
from paradis.runtime.shard_memory import ShardMemory
from paradis.runtime.worker_memory import GroupMemory
from paradis.wire.frame import FrameHeader
from paradis.wire.messages import Update


class WorkerReceiving(Node):
    """The receiving half of a worker; `paradis.runtime.worker_node.WorkerNode` is the whole node.

    Invariant: one shard's own memory is received into by one link at a time.

    Attributes:
        memory: group -> its tensors.
        worker_role: the role, which knows what is wanted.

    All of them are made by the whole node.
    """

    memory: dict[int, GroupMemory]
    worker_role: WorkerRole
    _receiving: dict[int, NodeId]
    _changed: threading.Condition

    def place(self, peer: NodeId, header: FrameHeader) -> Placed:
        """Receive a wanted update straight into the parameters, anything else into the store.

        One ahead of ``step()`` goes into the store, too: backward may still read the parameters.
        """
        if header.kind != Update.KIND:
            return self.arena.place(header.payload_bytes)
        _, group, shard, _, step, version, _, _, asked, _, codec = header.fields
        memory = self.memory.get(group)
        held = memory.shards.get(shard) if memory is not None else None
        if held is None:
            return self.arena.scratch(header.payload_bytes)
        if not self.worker_role.wants(group, shard, version, asked, step):
            return self.arena.scratch(header.payload_bytes)
        if codec:
            return self._place_code(held, peer, header)
        if sum(len(v) for v in held.value) != header.payload_bytes:
            return self.arena.scratch(header.payload_bytes)
        if self.worker_role.takes_aside(group, version):
            aside = self.arena.place(header.payload_bytes)
            if aside.lease and self.tracer is not None and group in self.worker_role.groups:
                self.tracer.receiving(peer, group, shard, step)
            return aside
        views = self._claim(peer, group, shard, header.payload_bytes)
        if views is None:
            return self.arena.scratch(header.payload_bytes)
        # A pull outside of steps is no span.
        if self.tracer is not None and (version == step + 1 or self._clocked(group, asked)):
            self.tracer.receiving(peer, group, shard, step)
        return Placed(-1 - shard, tuple(views))

    def _place_code(self, held: ShardMemory, peer: NodeId, header: FrameHeader) -> Placed:
        """Receive the code of an update beside the parameters, which it will be applied to."""
        shard, nbytes = header.fields[2], header.payload_bytes
        if held.coder is None or held.coder.code_bytes != nbytes:
            return self.arena.scratch(nbytes)
        if self.tracer is not None:
            self.tracer.receiving(peer, header.fields[1], shard, header.fields[4])
        return self.arena.place(nbytes)

    def _clocked(self, group: int, asked: int) -> bool:
        """Whether an update answers a step of a group in which each worker has its own clock."""
        return not asked and self.worker_role.groups[group].clocked

    def _claim(self, peer: NodeId, group: int, shard: int, nbytes: int) -> list[memoryview] | None:
        """Return the memory of a shard's value to receive into; None: it is spoken for."""
        memory = self.memory.get(group)
        held = memory.shards.get(shard) if memory is not None else None
        if memory is None or held is None:
            return None
        with self._changed:
            if shard in self._receiving or sum(len(v) for v in held.value) != nbytes:
                return None
            self._receiving[shard] = peer
        return memory.receiving(shard)

    def abandon(self, placed: Placed) -> None:
        """Take back memory whose payload is not delivered; another copy may be received then."""
        if placed.lease < 0:
            self._received(placed.lease)
        else:
            super().abandon(placed)

    def _peer_lost(self, peer: NodeId) -> None:
        """A link broke in the middle of a value: another copy may be received."""
        with self._changed:
            for shard in [s for s, p in self._receiving.items() if p == peer]:
                del self._receiving[shard]

    def _received(self, lease: int) -> None:
        with self._changed:
            self._receiving.pop(-1 - lease, None)
