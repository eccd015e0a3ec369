"""Compute spans of a step."""

from __future__ import annotations

import itertools
import time

from paradis.frontend.step_clock import StepClock
from paradis.observe.spans import SpanRecorder


def test_spans_of_a_step_follow_each_other() -> None:
    recorder, step = SpanRecorder(), 0
    clock = StepClock(recorder, group=2, rank=1, step=lambda: step)
    for step in range(2):  # noqa: B007 - the clock reads it
        clock.gradient()
        clock.gradient()
        clock.called()
        clock.waited(time.monotonic_ns())
        clock.returned()
    spans = sorted(recorder.spans(), key=lambda s: (s.enter_ns, s.leave_ns))
    assert [(s.stage, s.step) for s in spans] == [
        ("backward", 0), ("wait", 0), ("forward", 1), ("backward", 1), ("wait", 1),
    ]  # fmt: skip
    assert all(a.leave_ns <= b.enter_ns for a, b in itertools.pairwise(spans))
    assert {(s.group, s.worker, s.shard, s.peer, s.bytes) for s in spans} == {(2, 1, -1, "", 0)}


def test_a_step_without_gradients_only_waits() -> None:
    recorder = SpanRecorder()
    clock = StepClock(recorder, group=0, rank=0, step=lambda: 5)
    clock.called()
    clock.waited(time.monotonic_ns())
    clock.returned()
    assert [(s.stage, s.step) for s in recorder.spans()] == [("wait", 5)]
