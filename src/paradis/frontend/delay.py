"""A step whose gradient is one step late (overlap ``double_buffer``).

``x[t+1] = x[t] - update(g(x[t-1]))``: while the script computes a gradient, the one before travels
and is applied. The collector hands over copies, so that backward may overwrite ``.grad``; updates
land in memory of their own, and `finish` brings them into the parameters, on the script's thread.
Between two calls of ``step()`` the script sees one consistent version.

With curvature h and learning rate lr, momentum b as an exponential average (Adam's form) is stable
without delay for lr * h < 2 (1 + b) / (1 - b), with it for lr * h < 1, whatever b is. SGD's
momentum, which does not average, for lr * h < 1 - b.
"""

from __future__ import annotations

import time

from paradis.errors import ParadisError, StateError
from paradis.frontend.overlap import After, Explain
from paradis.frontend.step_clock import StepClock
from paradis.runtime.worker_memory import GroupMemory
from paradis.runtime.worker_node import WorkerNode

CAVEAT = (
    "overlap double_buffer: from step {step} on each gradient is applied one step late. Training "
    "is then stable only while learning rate * curvature < 1, whatever Adam's first beta is (with "
    "0.9 and no delay: < 38), and < 1 - momentum with SGD. If the loss grows, lower the learning "
    "rate, raise training.delay_warmup_steps, or take training.overlap: layerwise, which has no "
    "delay"
)


class Delay:
    """The late step of one ``wrap`` call.

    Args:
        node: this worker.
        group: number of the call.
        memory: its tensors.
        timeout_s: deadline of the wait.

    Attributes:
        pending: whether a step is on its way, or has arrived and is not in the parameters.
        clock: records the waits, if the job is traced.
    """

    def __init__(
        self, node: WorkerNode, group: int, memory: GroupMemory, *, timeout_s: float
    ) -> None:
        self._node = node
        self._group = group
        self._memory = memory
        self._timeout_s = timeout_s
        self._explain: Explain | None = None
        self._after: After | None = None
        self._arrived = False
        self._wait_s = 0.0
        self.pending = False
        self.clock: StepClock | None = None

    def begin(self, *, explain: Explain, after: After) -> None:
        """Let updates land beside the parameters; the caller commits the step next.

        Args:
            explain: may say more about an error of the step.
            after: called by `finish` with the seconds waited.
        """
        self._explain, self._after = explain, after
        self._wait_s, self._arrived = 0.0, False
        self._memory.land()
        self.pending = True

    def arrive(self) -> None:
        """Wait until all updates have landed; the parameters stay as they are.

        Raises:
            ParadisError: the step failed.
        """
        if not self.pending or self._arrived:
            return
        start_ns = time.monotonic_ns()
        try:
            self._node.wait(self._group, "step", timeout_s=self._timeout_s)
        except ParadisError as error:
            self.drop()
            raise (self._explain(error) if self._explain is not None else error) from None
        finally:
            self._wait_s += (time.monotonic_ns() - start_ns) / 1e9
            if self.clock is not None:
                self.clock.waited(start_ns)
        self._arrived = True

    def finish(self) -> None:
        """Wait for the step, if one is on its way, and bring it into the parameters.

        Raises:
            ParadisError: the step failed.
            StateError: the script changed a parameter meanwhile.
        """
        if not self.pending:
            return
        self.arrive()
        self._check_unchanged()
        self.pending = False
        self._memory.take_landed()
        assert self._after is not None
        self._after(self._wait_s)

    def _check_unchanged(self) -> None:
        changed = self._memory.changed()
        if changed:
            shard, digests = next(iter(changed.items()))
            name = self._memory.name_of_change(shard, digests)
            raise StateError(
                f"step refused: the script changed the value of {name} while a gradient of the "
                "step before was on its way (training.overlap: double_buffer); call "
                "optimizer.wait() first on every worker, then change it"
            )

    def drop(self) -> None:
        """Forget it; the parameters are readable as they are."""
        self.pending = False
        self._memory.stop_landing()
