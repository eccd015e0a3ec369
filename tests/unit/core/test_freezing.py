"""Norms of the variance over a window: what counts as steady."""

from __future__ import annotations

import math

import pytest

from paradis.core.freezing import (
    FreezeRule,
    FreezeWatch,
    bias_corrected,
    steadiness,
    uncorrected_freeze_step,
)
from paradis.errors import ConfigError


def first_freeze(rule: FreezeRule, norms: list[float]) -> int | None:
    watch = FreezeWatch(rule)
    for step in range(1, len(norms)):
        if watch.observe(step, {0: norms[step]}, {0: 10}):
            return step
    return None


def test_steady_gradients_pass_at_once_with_bias_correction_and_at_the_formula_without() -> None:
    rule = FreezeRule(interval=10, checks=1)
    plain = [1 - rule.beta2**step for step in range(5000)]
    corrected = [0.0] + [bias_corrected(plain[t], t, rule.beta2) for t in range(1, 5000)]
    assert first_freeze(rule, corrected) == 2000
    late = first_freeze(rule, plain)
    assert late == math.ceil(uncorrected_freeze_step(rule.beta2) / 10) * 10 == 3790


def test_the_lag_is_the_window_up_to_a_check() -> None:
    assert FreezeRule().lag == 1000
    assert (FreezeRule(beta2=0.95).window, FreezeRule(beta2=0.95).lag) == (20, 50)
    assert FreezeRule(beta2=0.997).lag == 350


def test_repeats_and_steps_between_checks_are_ignored() -> None:
    watch = FreezeWatch(FreezeRule(beta2=0.9, interval=10))
    calls = [10, 10, 15, 20, 20, 30, 25, 40]
    assert [watch.observe(step, {0: 1.0}, {0: 1}) for step in calls] == [*[False] * 7, True]


def test_a_gap_starts_the_count_again() -> None:
    watch = FreezeWatch(FreezeRule(beta2=0.9, interval=10))
    steps = [10, 20, 30, 50, 60, 70, 80]  # 40 was lost, so 50 has nothing to compare with
    assert [watch.observe(step, {0: 1.0}, {0: 1}) for step in steps] == [*[False] * 6, True]


def test_a_parameter_that_came_later_is_not_steady_yet() -> None:
    watch = FreezeWatch(FreezeRule(beta2=0.9, interval=10, checks=1))
    watch.observe(10, {0: 1.0}, {0: 50})
    assert not watch.observe(20, {0: 1.0, 1: 1.0}, {0: 50, 1: 50})
    assert watch.observe(30, {0: 1.0, 1: 1.0}, {0: 50, 1: 50})


def test_steadiness_of_strange_norms() -> None:
    assert steadiness(0.0, 0.0) == 1.0 and steadiness(0.0, 1.0) == 0.0
    assert steadiness(math.inf, math.inf) == 0.0
    assert steadiness(math.nan, 1.0) == 0.0 == steadiness(1.0, math.nan)
    assert steadiness(2.0, 1.0) == steadiness(1.0, 2.0) == 0.5


@pytest.mark.parametrize("beta2", [0.0, 1.0])
def test_a_rule_needs_a_second_moment(beta2: float) -> None:
    with pytest.raises(ConfigError, match="beta2; expected a number between 0 and 1"):
        FreezeRule(beta2=beta2)
