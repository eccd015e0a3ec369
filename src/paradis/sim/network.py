"""The simulated network: latency, loss, repetition, overtaking, links that break and come back.

Invariant: a control stream delivers everything once and in order; a data link delivers nothing that
was sent before it broke.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from paradis.ids import NodeId
from paradis.sim.job import Job


@dataclass(slots=True)
class Link:
    """The data link of two nodes.

    Attributes:
        epoch: counts how often it came up; what is under way in an old epoch is lost.
        closed_until_ns: connecting fails before.
        opening: somebody is connecting.
    """

    up: bool = False
    epoch: int = 0
    closed_until_ns: int = 0
    opening: bool = False


class Network:
    """Decides when, and whether, a message arrives.

    Args:
        job: the weather is in there.
        source: the simulation's only source of randomness.
    """

    def __init__(self, job: Job, source: random.Random) -> None:
        self.weather = job.weather
        self.source = source
        self.links: dict[tuple[NodeId, NodeId], Link] = {}
        self._last: dict[tuple[str, str, bool], int] = {}
        self.lost = 0
        self.repeated = 0

    def link(self, a: NodeId, b: NodeId) -> Link:
        """Return the link between two nodes; it is the same in both directions."""
        key = (a, b) if a < b else (b, a)
        if key not in self.links:
            self.links[key] = Link()
        return self.links[key]

    def stormy(self, now_ns: int) -> bool:
        """Whether the weather is bad at this time."""
        return not self.weather.fair and now_ns < self.weather.calm_ns

    def arrivals(self, source: NodeId, target: NodeId, now_ns: int, *, data: bool) -> list[int]:
        """Return the times at which a message arrives: none, one or two."""
        storm = data and self.stormy(now_ns)
        times = [self._time(source, target, now_ns, data=data, overtake=storm)]
        if storm:
            draw = self.source.random()
            if draw < self.weather.loss:
                self.lost += 1
                return []
            if draw < self.weather.loss + self.weather.repeat:
                self.repeated += 1
                late = self._time(source, target, now_ns, data=True, overtake=True)
                times.append(late + int(self.source.random() * 20 * self.weather.jitter_ns))
        return times

    def _time(
        self, source: NodeId, target: NodeId, now_ns: int, *, data: bool, overtake: bool
    ) -> int:
        weather = self.weather
        at = now_ns + weather.latency_ns + int(self.source.random() * weather.jitter_ns)
        if overtake and weather.reorder:
            return at + int(self.source.random() * 4 * weather.jitter_ns)
        key = (source, target, data)
        at = max(at, self._last.get(key, 0) + 1)
        self._last[key] = at
        return at

    def no_memory(self, now_ns: int) -> bool:
        """Whether a payload finds no memory at its receiver."""
        chance = self.weather.no_memory
        return bool(chance) and now_ns < self.weather.calm_ns and self.source.random() < chance
