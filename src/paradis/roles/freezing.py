"""When a group of 1-bit Adam freezes its variance: what the leader decides, for all nodes.

Invariants:
* the answer is one step number T: steps 0 to T - 1 travel in full, T is the first to travel as
  codes. T never changes once it is in force on a node;
* only norms that all servers of the group sent for the same step are judged, so the decision does
  not depend on the order in which messages arrive, nor on repeats.

T lies ``margin`` steps ahead of the step it was decided on. It has to reach every node before any
of them does step T; a node that is told too late refuses, and then `postpone` names a later step.
That a loss diverges nobody tells the leader: it does not count here.
"""

from __future__ import annotations

from collections.abc import Iterable

from paradis.core.freezing import FreezeRule, FreezeWatch
from paradis.errors import LocalProtocolError
from paradis.roles.held import HeldGroup
from paradis.wire import messages as msg

_MARGIN_STEPS = 100
"""Two checks. A control message takes milliseconds and a step seldom less, so T is refused seldom;
one freeze needs thousands of steps before it, so the delay costs little."""

_OPEN_MAX = 64
"""Steps whose norms are not complete yet; more than any server can be behind another."""


def rule_of(options: msg.Options) -> FreezeRule:
    """Return the rule for a parameter group's hyper-parameters."""
    betas = options.get("betas")
    assert isinstance(betas, list)
    return FreezeRule(beta2=betas[1])


def freezes(optimizer: str, coded_from: int) -> bool:
    """Whether the leader is to decide when a group travels as codes."""
    return optimizer == "OneBitAdam" and coded_from < 0


def measures(group: HeldGroup) -> bool:
    """Whether the leader wants to know how large v is here after the group's present step."""
    wanted = freezes(group.optimizer, group.coded_steps.begin)
    if not wanted or not rule_of(group.options[0]).recorded(group.step + 1):
        return False
    return any(shard.plan.codec for shard in group.shards.values())


def variance(node: str, group: HeldGroup) -> msg.Variance:
    """Return what a server measured in the step before, added up in the order of shards."""
    norms: dict[int, float] = {}
    counts: dict[int, int] = {}
    for shard_id, found in sorted(group.norms_of_v.items()):
        for segment in group.shards[shard_id].plan.segments:
            if segment.parameter in found:
                count = counts.get(segment.parameter, 0) + segment.length
                counts[segment.parameter] = count
        for parameter, norm in found.items():
            norms[parameter] = norms.get(parameter, 0.0) + norm
    return msg.Variance(node=node, group=group.index, step=group.step, norms=norms, counts=counts)


class Freezing:
    """The decision for one group.

    Args:
        rule: when v counts as steady.
        servers: node names of all servers that own some of the group.
        freeze_step: T as the user fixed it; None: decide.
        warm_up_steps: steps of learning-rate warm-up, before which v is not judged.
        margin: steps from a decision to T.

    Attributes:
        step: T, or None while there is none.
    """

    def __init__(
        self, rule: FreezeRule, servers: Iterable[str], *, freeze_step: int | None = None,
        warm_up_steps: int = 0, margin: int = _MARGIN_STEPS,
    ) -> None:  # fmt: skip
        self.step = freeze_step
        self.margin = margin
        self._servers = tuple(sorted(servers))
        self._watch = FreezeWatch(rule, warm_up_steps)
        self._open: dict[int, dict[str, msg.Variance]] = {}
        self._judged = 0

    def extend(self, servers: Iterable[str]) -> None:
        """More parameters have joined the group: these own some of them."""
        self._servers = tuple(sorted({*self._servers, *servers}))

    def on_variance(self, message: msg.Variance) -> int | None:
        """Take a server's norms; return T when they decide it, else None.

        Raises:
            LocalProtocolError: from a node that owns nothing of the group.
        """
        if message.node not in self._servers:
            raise LocalProtocolError(
                f"variance refused: group {message.group} from {message.node}; expected one of "
                f"{', '.join(self._servers)}; register servers with the group's plan"
            )
        if self.step is not None or message.step <= self._judged:
            return None
        given = self._open.setdefault(message.step, {})
        given[message.node] = message
        if len(given) < len(self._servers):
            if len(self._open) > _OPEN_MAX:
                del self._open[min(self._open)]
            return None
        self._judged = message.step
        self._open = {step: kept for step, kept in self._open.items() if step > message.step}
        norms: dict[int, float] = {}
        counts: dict[int, int] = {}
        for server in self._servers:
            for parameter, count in given[server].counts.items():
                norms[parameter] = norms.get(parameter, 0.0) + given[server].norms[parameter]
                counts[parameter] = counts.get(parameter, 0) + count
        if self._watch.observe(message.step, norms, counts):
            self.step = message.step + self.margin
        return self.step

    def postpone(self, reached: int) -> int:
        """Return a later T, as a node was told the last one too late.

        Args:
            reached: the furthest step that any node has begun.
        """
        self.step = max(self.step or 0, reached) + self.margin
        return self.step

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._open) <= _OPEN_MAX
        assert all(step > self._judged for step in self._open)
        assert all(0 < len(given) <= len(self._servers) for given in self._open.values())
