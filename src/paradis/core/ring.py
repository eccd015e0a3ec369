"""Who owns a key: a consistent-hash ring with virtual nodes, one more or fewer as weights say.

Invariant: the owner of a key depends on the set of (node, weight) pairs and the key's bytes alone;
a node that joins or leaves moves only keys that go to it or come from it.

Source: Karger et al., "Consistent Hashing and Random Trees", STOC 1997, with virtual nodes. The
spread of a node's share is about 1/sqrt(virtual nodes): 8 % at 160. Bounded loads are added in
`placement.py`, for with few shards no number of virtual nodes balances bytes.

    >>> ring = Ring({"server-0": 1.0, "server-1": 1.0})
    >>> ring.owner(encode_key("fc.weight", 0))
    'server-1'
    >>> list(ring.owners(encode_key("fc.weight", 0)))
    ['server-1', 'server-0']
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from paradis.core.cityhash import hash64
from paradis.errors import ConfigError

VIRTUAL_NODES: Final = 160
"""Points of a node of weight 1.0."""

_LAST: Final = (1 << 64) - 1


def encode_key(name: str, chunk: int) -> bytes:
    """Return the bytes that are hashed for a key: UTF-8 name, ``/``, chunk as LE u32.

    Raises:
        ConfigError: the chunk is not in [0, 2**32), or the name is not valid Unicode.
    """
    try:
        return name.encode() + b"/" + chunk.to_bytes(4, "little")
    except (OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"ring key refused: {name!r} chunk {chunk}: {error}; "
            "use a valid Unicode name and a chunk in [0, 2**32)"
        ) from error


def check_weights(weights: Mapping[str, float]) -> None:
    """Check that there is a node and that every weight is positive and finite.

    Raises:
        ConfigError: otherwise; the message names the node.
    """
    if not weights:
        raise ConfigError("ring refused: no node is given; start at least one server")
    for node, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"weight of {node} refused: expected a positive finite number, got {weight}; "
                "leave the node out instead of giving it no weight"
            )


@dataclass(frozen=True, slots=True)
class Arc:
    """Hashes h with ``after < h <= upto``, whose owner differs between two rings."""

    after: int
    upto: int
    source: str
    target: str


class Ring:
    """Sorted virtual points of weighted nodes; immutable.

    Args:
        weights: node -> relative weight, positive.
        virtual_nodes: points of a node of weight 1.0; a node has at least one.

    Raises:
        ConfigError: no node, or a weight or ``virtual_nodes`` that is not positive.
    """

    __slots__ = ("_hashes", "_nodes", "weights")

    def __init__(self, weights: Mapping[str, float], virtual_nodes: int = VIRTUAL_NODES) -> None:
        check_weights(weights)
        if virtual_nodes < 1:
            raise ConfigError(f"ring refused: expected virtual_nodes >= 1, got {virtual_nodes}")
        self.weights = {node: float(weights[node]) for node in sorted(weights)}
        # Equal hashes are ordered by node name, so that ties depend on nothing else.
        points = sorted(
            (hash64(encode_key(node, replica)), node)
            for node, weight in self.weights.items()
            for replica in range(max(1, round(virtual_nodes * weight)))
        )
        self._hashes = [h for h, _ in points]
        self._nodes = [node for _, node in points]

    def __len__(self) -> int:
        """Return the number of virtual points."""
        return len(self._hashes)

    def points(self) -> Iterator[tuple[int, str]]:
        """Yield (hash, node) of every virtual point, in ring order."""
        return zip(self._hashes, self._nodes, strict=True)

    def owner_of_hash(self, value: int) -> str:
        """Return the node of the first point whose hash is not below ``value``, wrapping round."""
        at = bisect_left(self._hashes, value)
        return self._nodes[at if at < len(self._nodes) else 0]

    def owner(self, key: bytes) -> str:
        """Return the owner of an encoded key (`encode_key`)."""
        return self.owner_of_hash(hash64(key))

    def owners(self, key: bytes) -> Iterator[str]:
        """Yield every node once, in clockwise order from the key; the first is its owner."""
        start = bisect_left(self._hashes, hash64(key))
        seen: set[str] = set()
        for i in range(len(self._nodes)):
            node = self._nodes[(start + i) % len(self._nodes)]
            if node not in seen:
                seen.add(node)
                yield node
                if len(seen) == len(self.weights):
                    return

    def check(self) -> None:
        """Assert the invariants: sorted points, every node present."""
        assert self._hashes == sorted(self._hashes)
        assert len(self._hashes) == len(self._nodes)
        assert set(self._nodes) == set(self.weights)


def difference(old: Ring, new: Ring) -> tuple[Arc, ...]:
    """Return the arcs whose owner changes from ``old`` to ``new``, in ring order, merged."""
    bounds = sorted({h for h, _ in old.points()} | {h for h, _ in new.points()} | {_LAST})
    arcs: list[Arc] = []
    after = -1
    for upto in bounds:
        source, target = old.owner_of_hash(upto), new.owner_of_hash(upto)
        if source != target:
            last = arcs[-1] if arcs else None
            if last and (last.upto, last.source, last.target) == (after, source, target):
                arcs[-1] = Arc(last.after, upto, source, target)
            else:
                arcs.append(Arc(after, upto, source, target))
        after = upto
    return tuple(arcs)
