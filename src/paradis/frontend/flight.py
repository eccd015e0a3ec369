"""The step that is on its way while the script goes on, in the way that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable

from paradis.core.codes import needs_all_codes
from paradis.errors import ConfigError
from paradis.frontend.collector import Collector
from paradis.frontend.delay import CAVEAT, Delay
from paradis.frontend.freeing import refuse_scaler
from paradis.frontend.overlap import After, Explain, Overlap
from paradis.frontend.reach import reachable_values
from paradis.frontend.step_clock import StepClock
from paradis.runtime.worker_memory import GroupMemory
from paradis.runtime.worker_node import WorkerNode
from paradis.settings import SharedSettings


class Flight:
    """At most one step of a ``wrap`` call.

    Args:
        node: this worker.
        settings: the job's.
        group: number of the call.
        memory: its tensors.
        timeout_s: deadline of every wait.
    """

    def __init__(
        self, node: WorkerNode, settings: SharedSettings, group: int, memory: GroupMemory,
        *, timeout_s: float,
    ) -> None:  # fmt: skip
        self._node = node
        self._mode = settings.overlap
        self._backup_workers = settings.backup_workers
        self._warmup_steps = settings.delay_warmup_steps
        self._watch_views = settings.watch_views
        self._memory = memory
        self._overlap = Overlap(node, group, memory, timeout_s=timeout_s)
        self._delay = Delay(node, group, memory, timeout_s=timeout_s)
        self._told: dict[str, None] = {}

    def record(self, clock: StepClock) -> None:
        """Record waits from now on."""
        self._overlap.clock = self._delay.clock = clock

    @property
    def pending(self) -> bool:
        """Whether a step is on its way."""
        return self._overlap.pending or self._delay.pending

    @property
    def airborne(self) -> bool:
        """Whether updates have yet to be written into the parameters: `settle` would wait."""
        return self._overlap.airborne

    @property
    def late(self) -> bool:
        """Whether the parameters lack the update of a step that is on its way."""
        return self._delay.pending

    def leaves(self, mode: str) -> bool:
        """Whether codes may be made after ``step()``, in a group of a mode (``sync``, say)."""
        backup = self._backup_workers
        return self._mode == "layerwise" and needs_all_codes(mode=mode, backup_workers=backup)

    def delays(self, step: int) -> bool:
        """Whether the gradient of a step, counted from 0 over all runs, is handed over late."""
        return self._mode == "double_buffer" and step >= self._warmup_steps

    def check_scaler(self) -> None:
        """Refuse a GradScaler where overflows would be known too late, or gradients are gone.

        Raises:
            ConfigError: they would, or are.
        """
        refuse_scaler(self._memory)
        if self._mode == "double_buffer":
            raise ConfigError(
                "step refused: a GradScaler with training.overlap: double_buffer; the scaler must "
                "know at once whether a gradient overflowed, and there it is known a step later; "
                "train in bfloat16 without a scaler, or set training.overlap: layerwise"
            )

    def send_off(
        self, post: Callable[[], None], collector: Collector, step: int, *,
        explain: Explain, after: After,
    ) -> bool:  # fmt: skip
        """Commit a step and leave it on its way, if that is wanted and possible.

        Args:
            post: commits it; may be called several times.
            collector: what has been handed over.
            step: its number, counted from 0 over all runs.
            explain: may say more about an error of the step.
            after: called when the step is finished, with the seconds waited for it.

        Returns:
            Whether it is on its way; False: nothing has been done.
        """
        if self.delays(step):
            self._tell("caveat", "warning", CAVEAT.format(step=step))
            self._delay.begin(explain=explain, after=after)
            post()
            return True
        if self._mode == "none":
            return False
        reachable: set[int] = set()
        if self._watch_views:
            reachable = {*self._reachable_values(), *collector.reachable()}
        refused = self._overlap.begin(explain=explain, after=after)
        if refused:
            self._tell("waits", "info", f"step() waits for all updates: {refused}")
            return False
        trained = sorted(self._overlap.trained.intersection(reachable))
        if trained:
            name = self._memory.tensors[trained[0]].name
            self._tell("waits", "info", f"step() waits for the update of {name}: something else "
                       "holds its memory, or its gradient's (p.data, p.grad, a state_dict, a view "
                       "kept from before), and could use it unseen; let go of it, or set "
                       "training.watch_views: false if nobody uses it then")  # fmt: skip
        self._overlap.commit(post)
        self._overlap.wait_for(trained)
        return True

    def _reachable_values(self) -> list[int]:
        others = (m for m in self._node.memory.values() if m is not self._memory)
        return reachable_values(self._memory.tensors, [t for m in others for t in m.tensors])

    def _tell(self, kind: str, level: str, text: str) -> None:
        """Say once of a kind."""
        if kind not in self._told:
            self._told[kind] = None
            self._node.announce(level, text, once=True)

    def settle(self) -> None:
        """Wait for a step that writes into the parameters while the script runs.

        Raises:
            ParadisError: it failed.
        """
        self._overlap.finish()

    def arrive(self) -> None:
        """Wait until the servers have finished the step; a late one is not in the parameters yet.

        Raises:
            ParadisError: it failed.
        """
        self._overlap.finish()
        self._delay.arrive()

    def catch_up(self) -> None:
        """Wait for a late step and bring it into the parameters.

        Raises:
            ParadisError: it failed.
        """
        self._delay.finish()

    def finish(self) -> None:
        """Wait for whatever is on its way, and bring it into the parameters.

        Raises:
            ParadisError: it failed.
        """
        self._overlap.finish()
        self._delay.finish()

    def end(self) -> None:
        """Wait for whatever is on its way; what the script made of a parameter since then stays.

        Raises:
            ParadisError: it failed.
        """
        self.arrive()
        if self._delay.pending and not self._memory.changed():
            self._delay.finish()

    def drop(self) -> None:
        """Make all parameters readable as they are. Takes no lock: a forked child may call it."""
        self._overlap.drop()
        self._delay.drop()
