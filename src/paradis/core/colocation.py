"""How much of the model dedicated and co-located servers own, so that the busiest link is lightest.

Invariant: the shares of all servers add up to one model, and no other shares make the busiest link
lighter: of unequal ones within a kind, the mean is as good, for the largest of linear loads is
convex in them.

Source: Jiang, Zhu, Lan, Yi, Cui and Guo, "A Unified Architecture for Accelerating Distributed DNN
Training in Heterogeneous GPU/CPU Clusters", OSDI 2020, section 4.1. We differ: our servers run the
optimizer, too, which does not change what travels.

    >>> split(4, 2)
    Split(dedicated=0.3, colocated=0.1, busiest=1.2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paradis.errors import ConfigError

EPSILON_MAX: Final = 0.02
"""Room above a server's share, in mean shares: 0.1, as between equal servers, gives half of what
unequal shares gain away again (1.05 instead of 1.01 times the lightest busiest link)."""


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of the model, by kind of server.

    Attributes:
        dedicated: share of each dedicated server; 0.0 when there is none.
        colocated: share of each co-located server.
        busiest: bytes that the busiest link carries in each direction in a step, in model copies.
    """

    dedicated: float
    colocated: float
    busiest: float


def split(workers: int, dedicated: int) -> Split:
    """Return the shares of ``dedicated`` servers and of one co-located server per worker.

    Let n workers stand on a host each, beside k hosts with a dedicated server that owns x of the
    model; a worker's co-located server owns y, so kx + ny = 1. In a step

    * a dedicated server's link takes the gradients of n workers in and as many updates out: nx in
      each direction;
    * a worker's link carries its gradient to all other owners, 1 - y, and the updates that its
      co-located server sends to the n - 1 other workers, (n - 1)y; as much comes back, for
      gradients and updates mirror each other: 1 + (n - 2)y in each direction.

    More x makes the first heavier and the second not (y falls), so the larger of the two is least
    where they are equal, with d = n^2 + kn - 2k:

        x = 2(n - 1)/d      y = (n - k)/d      busiest = 2n(n - 1)/d

    Without dedicated servers y = 1/n, and the busiest link carries what it does in a ring
    all-reduce. One worker alone has everything beside it, and nothing travels. With two, a worker's
    link carries one copy whatever y is; the shares above are one optimum of several. Shares for
    racks whose dispatcher sums gradients are not computed: there, less travels than assumed.

    Args:
        workers: n, at least 1.
        dedicated: k, at least 0.

    Raises:
        ConfigError: co-located servers would own nothing (k >= n), or there is no worker.
    """
    if workers < 1 or dedicated < 0:
        raise ConfigError(
            f"co-located servers refused: expected at least 1 worker and 0 dedicated servers, got "
            f"{workers} and {dedicated}; correct them"
        )
    if workers == 1 and dedicated:
        raise ConfigError(
            f"co-located servers refused: {dedicated} dedicated servers for 1 worker; expected 0, "
            "for the server beside the only worker owns everything and nothing has to travel"
        )
    if dedicated >= workers:
        raise ConfigError(
            f"co-located servers refused: {dedicated} dedicated servers for {workers} workers; "
            f"expected fewer than {workers}: from there on dedicated servers alone are already "
            "optimal and co-located ones would own nothing; leave them out"
        )
    whole = workers * workers + dedicated * workers - 2 * dedicated
    return Split(
        dedicated=2 * (workers - 1) / whole if dedicated else 0.0,
        colocated=(workers - dedicated) / whole,
        busiest=2 * workers * (workers - 1) / whole,
    )
