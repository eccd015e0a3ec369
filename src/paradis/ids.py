"""Names of the things Paradis talks about: nodes, shards, steps, versions, generations.

Invariant: a node's name is unique in its job, its incarnation is never reused, and the pair
(node, incarnation) identifies one start of one process for ever.
"""

from __future__ import annotations

from typing import Final, Literal, NewType, Protocol

NodeId = NewType("NodeId", str)
"""``worker-0``, ``server-1``, ``dispatcher-0`` or ``agent-<host>``."""

Role = Literal["worker", "server", "dispatcher", "agent"]

ShardId = int
"""Number of a shard, unique in the job, given by the leading dispatcher."""

Step = int
"""Number of training steps a worker has finished; the step in progress has this number."""

Version = int
"""Number of updates applied to a shard."""

Generation = int
"""Number of the membership and placement view: the fencing token of the data plane."""

Incarnation = int
"""One start of a node; given by the leading dispatcher, never reused."""

LEADER: Final = NodeId("dispatcher-0")
"""With the embedded metadata store the first dispatcher is the leader."""


def worker_id(rank: int) -> NodeId:
    """Return the node name of the worker with this rank."""
    return NodeId(f"worker-{rank}")


def server_id(index: int) -> NodeId:
    """Return the node name of the server with this index."""
    return NodeId(f"server-{index}")


def dispatcher_id(index: int) -> NodeId:
    """Return the node name of the dispatcher with this index."""
    return NodeId(f"dispatcher-{index}")


def role_of(node: NodeId) -> str:
    """Return the role part of a node name."""
    return node.partition("-")[0]


def index_of(node: NodeId) -> int:
    """Return the rank of a worker, the index of a server or dispatcher.

    Raises:
        ValueError: the name does not end in a number.
    """
    return int(node.rpartition("-")[2])


class RandomSource(Protocol):
    """What pure code may ask of randomness: it arrives as an argument, never from a module."""

    def random(self) -> float:
        """Return a float in [0, 1)."""
        ...
