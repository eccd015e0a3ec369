"""Which server owns which shard: the ring's choice, bounded by a load in bytes per server.

Invariant: the same items, servers and fixed placements give the same decisions in whatever order
they are listed; a fixed placement is kept; a server goes over its cap only by fixed placements or
by an item for which no server had room, and then the decision is marked ``forced``.

Weights set shares of the bytes; the room above its share is the same number of bytes for every
server. A byte too many costs a link the same whoever owns it, and room in proportion would let the
server of the largest share, whose link is the busiest, take the most (`core.colocation`).

Order: largest item first, then by key. Large items find room while there is some and small ones
fill the gaps, so that loads end well under the cap; the order is a function of the items alone.

Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018.
We differ: loads are bytes, not counts, and an item that fits nowhere goes to the server that it
takes least far above its share, since sizes make a perfect packing impossible.

    >>> made = place([Item("a", 8), Item("b", 8)], {"server-0": 1, "server-1": 1})
    >>> sorted(d.server for d in made.values())
    ['server-0', 'server-1']
    >>> made["a"].reason
    'server-0 is its home on the ring'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paradis.core.ring import Ring, check_weights, encode_key
from paradis.errors import ConfigError, LocalProtocolError

EPSILON: Final = 0.1
"""Room above the fair share: 1.13 max/mean at 21 shards a server; less moves more on changes."""


@dataclass(frozen=True, slots=True)
class Item:
    """A shard to place: its unique key and its load in bytes."""

    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a shard lives and why.

    Attributes:
        reason: a sentence for `paradis explain`.
        forced: no server had room, so ``server`` may be over its cap.
    """

    server: str
    reason: str
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """A key whose server differs between two placements."""

    key: str
    source: str
    target: str


def caps(
    items: Sequence[Item], servers: Mapping[str, float], epsilon: float = EPSILON
) -> dict[str, int]:
    """Return the bound of each server's load in bytes, by sorted server name.

    It is the server's share of all bytes by weight and, for all servers alike, ``epsilon`` mean
    shares more; or more than that, where the server of the largest weight could not take the
    largest item otherwise. With equal weights: ``(1 + epsilon)`` shares, at least the largest item.

    Raises:
        ConfigError: no server, a weight that is not positive, or a negative ``epsilon``.
    """
    check_weights(servers)
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ConfigError(f"placement refused: expected epsilon >= 0, got {epsilon}; try 0.1")
    total = sum(item.bytes for item in items)
    largest = max((item.bytes for item in items), default=0)
    shares = _shares(total, servers)
    room = max(epsilon * total / len(shares), largest - max(shares.values()))
    return {server: math.ceil(share + room) for server, share in shares.items()}


def _shares(total: int, servers: Mapping[str, float]) -> dict[str, float]:
    """Return each server's share of ``total`` bytes by weight, by sorted server name."""
    # fsum rounds once, so the sum does not depend on the order of the servers.
    weight_sum = math.fsum(servers.values())
    return {server: servers[server] / weight_sum * total for server in sorted(servers)}


def place(
    items: Sequence[Item],
    servers: Mapping[str, float],
    epsilon: float = EPSILON,
    *,
    fixed: Mapping[str, str] | None = None,
) -> dict[str, Decision]:
    """Decide the server of every item.

    Args:
        items: shards with unique keys, those placed before included, for they are load too.
        servers: server -> relative weight, positive.
        epsilon: room above the fair share, >= 0.
        fixed: key -> server of placements to keep; one on a server that is gone is made anew.

    Returns:
        key -> decision, in the order in which they were made: kept ones by key, then by size.

    Raises:
        ConfigError: no server, a bad weight or ``epsilon``.
        LocalProtocolError: a key twice, a negative size, or a fixed key that is no item.
    """
    fixed = fixed or {}
    _check_items(items, fixed)
    bounds = caps(items, servers, epsilon)
    ring = Ring(servers)
    shares = _shares(sum(item.bytes for item in items), servers)
    load = dict.fromkeys(bounds, 0)
    made: dict[str, Decision] = {}
    sizes = {item.key: item.bytes for item in items}
    for key in sorted(fixed):
        server = fixed[key]
        if server in load:
            load[server] += sizes[key]
            made[key] = Decision(server, f"{server} has it already")
    for item in sorted(items, key=lambda i: (-i.bytes, i.key)):
        if item.key in made:
            continue
        decision = _choose(item, ring, load, bounds, shares)
        if item.key in fixed:
            gone = f"{fixed[item.key]} is gone; {decision.reason}"
            decision = Decision(decision.server, gone, decision.forced)
        load[decision.server] += item.bytes
        made[item.key] = decision
    return made


def _check_items(items: Sequence[Item], fixed: Mapping[str, str]) -> None:
    keys: set[str] = set()
    for item in items:
        if item.key in keys or item.bytes < 0:
            raise LocalProtocolError(
                f"placement refused: item {item.key!r} of {item.bytes} bytes is listed twice or "
                "has a negative size; give each shard its own key and size"
            )
        keys.add(item.key)
    missing = sorted(set(fixed) - keys)
    if missing:
        raise LocalProtocolError(
            f"placement refused: {missing[0]!r} is fixed on {fixed[missing[0]]} but is no item; "
            "list every placed shard, its bytes are needed"
        )


def _choose(
    item: Item,
    ring: Ring,
    load: Mapping[str, int],
    bounds: Mapping[str, int],
    shares: Mapping[str, float],
) -> Decision:
    home = ""
    # The piece number is part of the shard's key already, so the ring's chunk is always 0.
    for server in ring.owners(encode_key(item.key, 0)):
        home = home or server
        if load[server] + item.bytes <= bounds[server]:
            if server == home:
                return Decision(server, f"{server} is its home on the ring")
            return Decision(
                server,
                f"its home {home} holds {load[home]} of {bounds[home]} bytes, no room for "
                f"{item.bytes}; {server} is the next clockwise with room",
            )
    least = min(load, key=lambda s: (load[s] - shares[s], s))
    return Decision(
        least,
        f"no server has room for {item.bytes} bytes under its cap; {least} is then least far above "
        "its share",
        forced=True,
    )


def loads(
    items: Sequence[Item], made: Mapping[str, Decision], servers: Mapping[str, float]
) -> dict[str, int]:
    """Return the bytes that each server holds, by sorted server name."""
    held = dict.fromkeys(sorted(servers), 0)
    for item in items:
        held[made[item.key].server] += item.bytes
    return held


def moves(old: Mapping[str, Decision], new: Mapping[str, Decision]) -> tuple[Move, ...]:
    """Return the keys that are in both placements on different servers, by key."""
    return tuple(
        Move(key, old[key].server, new[key].server)
        for key in sorted(old.keys() & new.keys())
        if old[key].server != new[key].server
    )
