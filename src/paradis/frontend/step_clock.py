"""When the script computes and when it waits: forward, backward and wait of each step, as spans."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING

from paradis.observe.spans import Span, SpanRecorder

if TYPE_CHECKING:
    from paradis.frontend.binding import Binding


class StepClock:
    """Compute spans of one ``wrap`` call (see `paradis.observe.spans.COMPUTE`).

    Called on the threads that run the script and its backward. The first step has no forward, for
    nothing tells when it began.

    Args:
        recorder: gets the spans.
        group: number of the ``wrap`` call.
        rank: of this worker.
        step: returns the number of the step in progress.
    """

    def __init__(
        self, recorder: SpanRecorder, *, group: int, rank: int, step: Callable[[], int]
    ) -> None:
        self._recorder = recorder
        self._group = group
        self._rank = rank
        self._step = step
        self._number = 0
        self._ended_ns = 0
        self._first_gradient_ns = 0

    def gradient(self) -> None:
        """Backward has finished a gradient; the first one of a step counts."""
        if not self._first_gradient_ns:
            self._first_gradient_ns = monotonic_ns()

    def called(self) -> None:
        """``step()`` was called: all gradients of the step are there."""
        now = monotonic_ns()
        self._number = self._step()
        first = self._first_gradient_ns
        if first:
            if self._ended_ns:
                self._add("forward", self._ended_ns, first)
            self._add("backward", first, now)
        self._first_gradient_ns = 0

    def waited(self, enter_ns: int) -> None:
        """A wait for parameters that began then is over, with their values or with an error."""
        self._add("wait", enter_ns, monotonic_ns())

    def returned(self) -> None:
        """``step()`` returns: forward begins."""
        self._ended_ns = monotonic_ns()

    def _add(self, stage: str, enter_ns: int, leave_ns: int) -> None:
        self._recorder.add(
            Span(stage, "", self._group, -1, self._number, self._rank, "", enter_ns, leave_ns, 0)
        )


def record(binding: Binding, step: Callable[[], int]) -> None:
    """Record the spans of a ``wrap`` call from now on, if the job is traced.

    Args:
        binding: the call.
        step: returns the number of the step in progress.
    """
    tracer = binding.session.node.tracer
    if tracer is None:
        return
    group = binding.group
    clock = StepClock(tracer.recorder, group=group, rank=binding.session.rank, step=step)
    binding.collector.clock = clock
    binding.flight.record(clock)
    binding.compressor.on_done = lambda *done: tracer.compressed(group, step(), *done)
