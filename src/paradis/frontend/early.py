"""Updates while backward runs (``training.early_update``), as a ``wrap`` call sees them.

The first gradient that may be handed over in a step begins it: the servers are told the options and
the values that the script has changed, and may update whatever is complete. From there on
``step()`` must find everything as it was said. Each worker looks at what it can see itself, so that
a script is refused for what it does and not for how fast the others were; the servers look again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paradis.errors import ConfigError, StateError
from paradis.roles import events as ev
from paradis.runtime.worker_memory import GroupMemory
from paradis.wire.messages import Options, StepCommit

if TYPE_CHECKING:
    from paradis.frontend.binding import Binding
    from paradis.frontend.session import Session

_REMEDY = "or set training.early_update: false"


class EarlyUpdates:
    """What one ``wrap`` call has said ahead of ``step()``.

    Args:
        group: number of the call.
        memory: its tensors.
        post: hands an event to this worker's role.
        options: returns the hyper-parameters per parameter group.
        debug: hash values again in ``step()``, to catch writes that no version counter sees.

    Attributes:
        said: what was said in this step; None until its first gradient may
            be handed over.
    """

    def __init__(
        self, group: int, memory: GroupMemory, post: Callable[[ev.StepBegun], None],
        options: Callable[[], list[Options]], *, debug: bool = False,
    ) -> None:  # fmt: skip
        self._group = group
        self._memory = memory
        self._post = post
        self._options = options
        self._debug = debug
        self._versions: list[int] = []
        self._noted: list[Options] | None = None
        self.said: StepCommit | None = None

    @classmethod
    def where_on(cls, session: Session, binding: Binding) -> EarlyUpdates | None:
        """Return what a ``wrap`` call needs, or None where they are off."""
        if not session.settings.early_update:
            return None
        debug = session.settings.debug_gradients
        options = binding.present_options
        return cls(binding.group, binding.memory, session.node.post, options, debug=debug)

    @property
    def noted(self) -> bool:
        """Whether backward has a gradient of this step."""
        return self._noted is not None

    def note(self) -> None:
        """Backward has its first gradient: these options count; on the thread of backward."""
        if self._noted is None:
            self._noted = self._options()

    def begin(self) -> None:
        """A gradient is about to be handed over; after `note`."""
        if self.said is None:
            assert self._noted is not None
            self.said = StepCommit(
                revisions={}, present=b"", options=self._noted, changed=self._memory.changed()
            )
            self._versions = self._memory.versions()
            self._post(ev.StepBegun(self._group, self.said))

    def changed(self) -> dict[int, list[int]]:
        """Return shard -> digests of what the script changed, as ``step()`` finds it.

        What was said at the first gradient holds unless torch has counted a change since: that
        spares a second hash of the whole model.
        """
        said = self.said
        if said is None or self._debug or self._memory.versions() != self._versions:
            return self._memory.changed()
        return self._memory.changed() if self._memory.follow() else said.changed

    def end(self) -> None:
        """``step()`` commits what was said."""
        self.said = self._noted = None

    def refuse_clipping(self) -> None:
        """Refuse ``clip_grad_norm_``.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "clip_grad_norm_ refused: training.early_update = true, so servers update before the "
            f"norm is known; clip nothing, {_REMEDY}"
        )

    def refuse_within(self, what: str) -> None:
        """Refuse a request for which the servers must be between two steps.

        Raises:
            StateError: the step has begun.
        """
        if self.said is not None:
            raise StateError(
                f"{what} refused between backward and step(): training.early_update = true, so "
                f"values may be those of the next step already; call it after step(), {_REMEDY}"
            )

    def confirm(self, commit: StepCommit, altered: Sequence[str], *, where: str) -> None:
        """Compare what ``step()`` commits with what was said.

        Args:
            commit: as it will be sent.
            altered: names of parameters whose gradient was pushed and has changed since.
            where: names worker and step.

        Raises:
            StateError: they differ.
        """
        if self.said is None:
            return
        why = ""
        value = self._changed_value(self.said, commit)
        if altered:
            why = (
                f"the gradient of {altered[0]} was changed after backward had handed it over; "
                "accumulate under optimizer.no_sync(), leave gradients as backward makes them"
            )
        elif value:
            why = (
                f"the value of {value} was changed after backward had begun; change values "
                "before backward"
            )
        elif repr(commit.options) != repr(self.said.options):
            why = "hyper-parameters were changed after backward had begun; change them after step()"
        if why:
            raise StateError(
                f"{where} refused: {why}, {_REMEDY}: with it servers update while backward runs"
            )

    def _changed_value(self, said: StepCommit, commit: StepCommit) -> str:
        for shard in {**said.changed, **commit.changed}:
            before, now = said.changed.get(shard), commit.changed.get(shard)
            if before != now:
                names = [t.name for t in self._memory.shards[shard].tensors]
                pairs = zip(names, before or [0] * len(names), now or [0] * len(names), strict=True)
                moved = [name for name, a, b in pairs if a != b]
                return moved[0]
        return ""
