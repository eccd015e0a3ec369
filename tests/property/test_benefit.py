"""The benefit of codes: a clear difference is found, noise decides nothing twice, and it ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.core.benefit import (
    BenefitRule,
    BenefitTrial,
    Comparison,
    StepMeter,
    benefit_text,
    standard_error,
)
from paradis.core.codes import CodedSteps

MS = 1_000_000
RULE = BenefitRule()

Durations = st.lists(st.integers(1, 100 * MS), min_size=1, max_size=20)


def run(
    trial: BenefitTrial, coded_ns: float, full_ns: float, *, noise: float, seed: int, ranks: int = 2
) -> int:
    """Feed a trial until it has decided; return how often the group changed."""
    source = random.Random(seed)
    changes = 0
    for _ in range(2 * RULE.rounds + 1):
        if trial.decision:
            break
        middle = coded_ns if trial.coded else full_ns
        for rank in range(ranks):
            times = [int(middle * (1 + noise * (2 * source.random() - 1))) for _ in range(16)]
            trial.take(rank, coded=trial.coded, times_ns=times)
            last = rank == ranks - 1
            changed = trial.turn(tuple(range(ranks)))
            trial.check()
            assert last or not changed
            changes += changed
    return changes


@given(
    full=st.integers(MS, 10_000 * MS), ratio=st.floats(1.25, 10.0), noise=st.floats(0.0, 0.05),
    seed=st.integers(0, 10**6), ranks=st.integers(1, 4),
)  # fmt: skip
def test_a_clear_difference_is_found_at_once(
    full: int, ratio: float, noise: float, seed: int, ranks: int
) -> None:
    slower, faster = BenefitTrial(RULE), BenefitTrial(RULE)
    assert run(slower, full * ratio, full, noise=noise, seed=seed, ranks=ranks) == 1
    assert (slower.decision, slower.coded) == ("off", False)
    assert run(faster, full, full * ratio, noise=noise, seed=seed, ranks=ranks) == 2
    assert (faster.decision, faster.coded) == ("on", True)


def test_noise_alone_seldom_turns_codes_off() -> None:
    """Both kinds take the same, give or take a third: three in a hundred by mistake at most."""
    wrong = 0
    for seed in range(400):
        trial = BenefitTrial(RULE)
        assert run(trial, 30 * MS, 30 * MS, noise=0.33, seed=seed) <= 2 * RULE.rounds
        wrong += trial.decision == "off"
    assert wrong <= 12


@given(windows=st.lists(Durations, min_size=2 * RULE.rounds, max_size=2 * RULE.rounds))
def test_whatever_is_measured_it_ends_and_stays(windows: list[list[int]]) -> None:
    """Never more changes than windows, and none after the decision."""
    trial = BenefitTrial(RULE)
    changes = 0
    for window in windows:
        trial.take(0, coded=trial.coded, times_ns=window)
        changes += trial.turn((0,))
    assert trial.decision in ("on", "off")
    assert changes <= 2 * RULE.rounds
    for coded in (True, False):
        trial.take(0, coded=coded, times_ns=[1])
        assert not trial.turn((0,))
    assert trial.coded == (trial.decision == "on")


def test_what_is_within_noise_is_measured_again_on_all_windows() -> None:
    trial = BenefitTrial(RULE)
    noisy = [(20 + i) * MS for i in range(16)]
    for _ in range(RULE.rounds):
        trial.take(0, coded=True, times_ns=noisy)
        assert trial.turn((0,)) and not trial.coded
        trial.take(0, coded=False, times_ns=noisy)
        assert trial.turn((0,)) and trial.coded
    assert trial.decision == "on"
    assert trial.comparison() == Comparison(27.5 * MS, 27.5 * MS, trial.comparison().error_ns)


def test_the_slowest_worker_counts_in_either_kind() -> None:
    trial = BenefitTrial(RULE)
    for coded, times in ((True, (10, 50)), (False, (40, 12))):
        for rank, time in enumerate(times):
            trial.take(rank, coded=coded, times_ns=[time * MS] * 16)
        trial.turn((0, 1))
    found = trial.comparison()
    assert (found.coded_ns, found.full_ns) == (50 * MS, 40 * MS)
    assert trial.decision == "off"


def test_a_worker_that_leaves_is_not_waited_for_and_does_not_count() -> None:
    trial = BenefitTrial(RULE)
    for rank, time in enumerate((10, 90)):
        trial.take(rank, coded=True, times_ns=[time * MS] * 16)
    assert trial.turn((0, 1))
    trial.take(0, coded=False, times_ns=[20 * MS] * 16)
    assert not trial.turn((0, 1)) and not trial.decision
    trial.turn((0,))
    assert trial.decision == "on"
    assert trial.comparison().coded_ns == 10 * MS


def test_a_late_window_of_the_other_kind_is_dropped() -> None:
    trial = BenefitTrial(RULE)
    trial.take(0, coded=False, times_ns=[MS])
    assert not trial.turn((0,)) and trial.coded


def test_a_decision_that_is_taken_over_is_not_made_again() -> None:
    trial = BenefitTrial(RULE, taken="off")
    assert run(trial, 10 * MS, 50 * MS, noise=0.0, seed=0) == 0
    assert not trial.coded


def test_where_there_is_no_choice_both_kinds_are_compared_and_nothing_is_changed() -> None:
    """1-bit Adam is in full before its freeze and in codes after it, whatever that takes."""
    trial = BenefitTrial(RULE, judged=False)
    trial.take(0, coded=False, times_ns=[33 * MS])
    assert not trial.turn((0,)) and not trial.decision
    trial.take(0, coded=True, times_ns=[41 * MS])
    assert not trial.turn((0,)) and trial.decision == "on"


def test_the_line_for_people() -> None:
    found = Comparison(41.04 * MS, 33 * MS, 0.0)
    off = "compression int8 of group 0 is off: a step takes 41.0 ms with it and 33.0 ms without"
    assert benefit_text("compression int8", 0, found, "off") == off
    assert "group 2 stays on: a step takes" in benefit_text("1-bit Adam", 2, found, "on")
    unclear = benefit_text("compression int8", 0, Comparison(41 * MS, 33 * MS, 5 * MS), "on")
    assert unclear.endswith("33.0 ms without, which may be chance")


def test_a_slow_machine_with_much_noise_is_judged_at_last() -> None:
    """A third longer, with steps that vary by as much: not clear at once, but in the end."""
    found = []
    for seed in range(50):
        trial = BenefitTrial(RULE)
        run(trial, 66 * MS, 49 * MS, noise=0.5, seed=seed)
        found.append(trial.decision)
    assert found.count("off") >= 45


@given(times=Durations)
def test_standard_error_is_that_of_the_middle(times: list[int]) -> None:
    error = standard_error(times)
    assert 0 <= error <= 1.86 * (max(times) - min(times))
    assert standard_error([t * 3 for t in times]) == pytest.approx(3 * error)


@given(settle=st.integers(0, 4), window=st.integers(1, 5), switch=st.integers(1, 60))
def test_a_meter_gives_one_window_for_each_period(settle: int, window: int, switch: int) -> None:
    """Step k takes k; the first one has no beginning, and those after a change do not count."""
    meter = StepMeter(settle, window)
    found: list[tuple[bool, tuple[int, ...]]] = []
    now = 0
    for step in range(80):
        now += step
        times = meter.closed(now, coded=step < switch)
        if times:
            found.append((step < switch, times))
    start = max(1, 4 * settle)
    wanted = [(True, start)] if start + window <= switch else []
    late = switch + settle
    wanted += [(False, late)]
    assert found == [(c, tuple(range(at, at + window))) for c, at in wanted if at + window <= 80]


Told = st.tuples(st.integers(-1, 6), st.integers(-1, 6)).map(lambda t: CodedSteps(*t))


@settings(max_examples=300)
@given(
    start=st.sampled_from((CodedSteps(), CodedSteps(0), CodedSteps(3))),
    commits=st.lists(st.lists(Told, min_size=1, max_size=3), min_size=1, max_size=14),
)
def test_commits_change_later_steps_only(
    start: CodedSteps, commits: list[list[CodedSteps]]
) -> None:
    """Whatever is told, both numbers only grow, and how a step travels is known when it begins."""
    now = start
    ways = {0: 0 in now}
    for step, told in enumerate(commits):
        after = now.agreed(told, step)
        assert after.later(now) == after, "a late message must not undo a newer one"
        assert (step in after) == ways[step]
        assert after == now or len(set(told)) == 1
        assert after == after.agreed(told, step), "said twice is said once"
        now = after
        ways[step + 1] = step + 1 in now


def test_what_all_were_told_holds_from_the_step_named_or_the_next() -> None:
    back = [CodedSteps(0, 5)] * 2
    assert CodedSteps(0).agreed(back, 1) == CodedSteps(0, 5)
    assert CodedSteps(0).agreed(back, 7) == CodedSteps(0, 8)
    assert CodedSteps(0).agreed([CodedSteps(0, 5), CodedSteps()], 7) == CodedSteps(0)
    assert CodedSteps(0, 8).agreed([CodedSteps(9, 5)] * 2, 8) == CodedSteps(9, 8)
    assert CodedSteps(0, 8).agreed([CodedSteps(9, 5)] * 2, 7) == CodedSteps(0, 8), "first the end"
    ways = [step in CodedSteps(2, 4) for step in range(6)]
    assert ways == [False, False, True, True, False, False]
