"""A whole job in one process: leader, one server and the worker, over the memory transport.

``python train.py`` without a launcher runs on this; the roles are the same as everywhere.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, replace
from pathlib import Path

from paradis.ids import NodeId, server_id, worker_id
from paradis.roles.worker import WorkerRole
from paradis.roles.worker_state import WorkerConfig
from paradis.runtime.joining import make_join
from paradis.runtime.leader_node import LeaderNode, LocalChannel
from paradis.runtime.process import leader_config, make_server, quota_bytes
from paradis.runtime.server_node import ServerNode
from paradis.runtime.worker_node import WorkerNode
from paradis.settings import SharedSettings
from paradis.storage.metastore import MemoryStore
from paradis.transport.base import Identity
from paradis.transport.memory import MemoryNetwork, MemoryTransport
from paradis.wire.messages import Beat, Listening, Scalar


class LocalJob:
    """One worker with its own server and leader.

    Args:
        settings: the job's settings.
    """

    def __init__(self, settings: SharedSettings) -> None:
        settings = replace(settings, heartbeat_interval_s=60.0, failure_timeout_s=1e9)
        self.settings = settings
        shared: dict[str, Scalar] = asdict(settings)
        token = secrets.token_bytes(16)
        network = MemoryNetwork()
        self.leader = LeaderNode(
            leader_config(settings, shared, counts=(1, 1, 0), job="local"), MemoryStore()
        )
        self.server = self._server(token, network)
        self.worker = self._worker(token, network)
        self.server.on_fail = self.worker.fail

    def _server(self, token: bytes, network: MemoryNetwork) -> ServerNode:
        node = server_id(0)
        channel = LocalChannel(self.leader, node)
        identity = Identity(node=node, incarnation=1, token=token)
        server = make_server(
            identity,
            channel,
            self.settings,
            world_size=1,
            transports={"memory": MemoryTransport(network)},
        )
        addresses = server.links.listen(["memory://"])
        channel.bind(server.post)
        channel.send(make_join("server", 0, rack=""))
        channel.send(Listening(node=node, addresses=addresses))
        return server

    def _worker(self, token: bytes, network: MemoryNetwork) -> WorkerNode:
        node = worker_id(0)
        channel = LocalChannel(self.leader, node)
        worker = make_worker(
            Identity(node=node, incarnation=2, token=token),
            channel,
            self.settings,
            world_size=1,
            transports={"memory": MemoryTransport(network)},
        )
        channel.bind(worker.post)
        channel.send(make_join("worker", 0, rack=""))
        channel.send(Beat(nodes=(node,)))
        return worker

    def trace_into(self, directory: Path) -> None:
        """Record spans of the worker and its server; `close` writes them into ``directory``."""
        self.worker.trace_into(directory)
        self.server.trace_into(directory)

    def close(self) -> None:
        """End everything, servers last; waits for a checkpoint being written."""
        self.leader.ended.wait(30.0 if self.server.writing else 0.0)
        self.worker.close()
        self.server.close()
        self.leader.close()


def make_worker(
    identity: Identity,
    control: LocalChannel | object,
    settings: SharedSettings,
    *,
    world_size: int,
    transports: dict[str, MemoryTransport] | dict[str, object],
) -> WorkerNode:
    """Return a worker node, not yet bound to its control channel."""
    rank = int(NodeId(identity.node).rpartition("-")[2])
    role = WorkerRole(
        WorkerConfig(
            rank=rank,
            quota_bytes=quota_bytes(settings, world_size),
            retry_ns=int(settings.retry_interval_s * 1e9),
            early_update=settings.early_update,
        )
    )
    node = WorkerNode(
        role,
        identity,
        control,  # type: ignore[arg-type]
        transports,  # type: ignore[arg-type]
        # Answers to state_dict() land here: value and up to four states of some shards. For early
        # updates each plan widens it.
        store_bytes_max=max(64 << 20, 40 * settings.shard_bytes),
    )
    node.host_timeout_s = settings.sync_timeout_s
    return node
