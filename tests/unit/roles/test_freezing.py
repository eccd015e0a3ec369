"""The leader names the step at which 1-bit Adam freezes: late enough, and whatever the order."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from paradis.core.freezing import FreezeRule
from paradis.errors import LocalProtocolError
from paradis.roles.freezing import Freezing, measures
from paradis.roles.held import HeldGroup, HeldShard
from paradis.wire import messages as msg

SERVERS = ("server-0", "server-1")
RULE = FreezeRule()


def variance(server: str, step: int, norms: dict[int, float]) -> msg.Variance:
    counts = {0: 600, 1: 300} if server == "server-0" else {1: 50, 2: 50}
    return msg.Variance(
        node=server, group=0, step=step, norms={p: norms[p] for p in counts}, counts=counts
    )


def decided(norm: Callable[[int, int], float], **arguments: int) -> tuple[int, int] | None:
    """Return (step of the decision, T); norm(parameter, step) is half of v's where it is shared."""
    freezing = Freezing(RULE, SERVERS, warm_up_steps=arguments.get("warm_up", 0))
    for step in range(50, 6001, 50):
        for server in SERVERS:
            found = freezing.on_variance(
                variance(server, step, {p: norm(p, step) for p in range(3)})
            )
            freezing.check()
            if found is not None:
                assert freezing.step == found
                return step, found
    return None


def test_a_steady_variance_freezes_at_the_third_check() -> None:
    assert decided(lambda p, step: 5.0) == (2100, 2200)
    assert decided(lambda p, step: 5.0, warm_up=3000) == (3150, 3250)


def test_growth_and_decay_both_count_as_unsteady() -> None:
    assert decided(lambda p, step: 1.0001**step) is None
    assert decided(lambda p, step: 0.9999**step) is None
    assert decided(lambda p, step: 1.00003**step) == (2100, 2200)


def test_steadiness_is_weighed_by_elements() -> None:
    assert decided(lambda p, step: 1.001**step if p == 2 else 1.0) == (2100, 2200)  # 5 %
    assert decided(lambda p, step: 1.001**step if p == 1 else 1.0) is None  # 35 %


def test_checks_must_pass_running() -> None:
    def norm(p: int, step: int) -> float:
        return 9.0 if step in (2100, 2150) else 1.0

    assert decided(norm) == (2300, 2400)


def test_a_fixed_step_passes_through() -> None:
    freezing = Freezing(RULE, SERVERS, freeze_step=7)
    assert freezing.step == 7
    assert freezing.on_variance(variance("server-0", 50, {0: 1.0, 1: 1.0})) is None
    assert freezing.step == 7


@pytest.mark.parametrize("seed", range(5))
def test_order_and_repeats_of_messages_change_nothing(seed: int) -> None:
    chance = random.Random(seed)
    freezing = Freezing(RULE, SERVERS, margin=10)
    steps = {server: list(range(50, 2501, 50)) for server in SERVERS}
    found = []
    while any(steps.values()):
        server = chance.choice([s for s in SERVERS if steps[s]])
        message = variance(server, steps[server].pop(0), {0: 1.0, 1: 2.0, 2: 3.0})
        for _ in range(chance.randint(1, 3)):
            answer = freezing.on_variance(message)
            freezing.check()
            found += [answer] if answer is not None else []
    assert found == [2110]


def test_a_server_that_stays_silent_is_bounded() -> None:
    freezing = Freezing(RULE, SERVERS)
    for step in range(50, 50_000, 50):
        assert freezing.on_variance(variance("server-0", step, {0: 1.0, 1: 1.0})) is None
        freezing.check()


def test_too_late_is_postponed_and_strangers_are_refused() -> None:
    freezing = Freezing(RULE, SERVERS, freeze_step=100, margin=30)
    assert freezing.postpone(reached=150) == 180 == freezing.step
    assert freezing.postpone(reached=20) == 210
    with pytest.raises(LocalProtocolError, match="from server-9; expected one of server-0"):
        freezing.on_variance(variance("server-9", 50, {1: 1.0, 2: 1.0}))


def test_only_servers_with_coded_shards_measure() -> None:
    """One that owns nothing but small tensors, which never travel as codes, has no say."""
    group = HeldGroup(0, 49)
    group.optimizer = "OneBitAdam"
    group.options = [{"betas": [0.9, 0.99]}]
    segments = (msg.Segment(0, 0, 8, 0),)
    plain = msg.ShardPlan(
        shard=1, server="server-0", dtype="float32", length=8, segments=segments, options_group=0,
        priority=0,
    )  # fmt: skip
    group.shards[1] = HeldShard(plain, 49)
    assert not measures(group)
    coded = msgspec.structs.replace(plain, shard=2, codec="onebit", code_bytes=5)
    group.shards[2] = HeldShard(coded, 49)
    assert measures(group)
    group.step = 50
    assert not measures(group)


def test_servers_of_later_parts_count() -> None:
    freezing = Freezing(FreezeRule(beta2=0.9), ["server-0"])
    freezing.extend(["server-1"])
    message = msg.Variance(node="server-1", group=0, step=50, norms={}, counts={})
    assert freezing.on_variance(message) is None
