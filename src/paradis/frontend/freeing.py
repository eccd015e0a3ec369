"""Gradients that are let go in the hook that backward calls (``training.free_gradients``).

In steps of 1-bit Adam that travel as codes a worker then holds value, error memory and inverse
denominator, 10 bytes an element, and of gradients those in flight. The price: a code counts as it
is made, so nothing can be undone. This module says what that rules out, and how checkpoints are
made nevertheless.

Invariant: what would be lost silently once codes begin is refused from the first step on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from paradis.errors import ConfigError, DeadlineExceeded, StateError
from paradis.runtime.worker_memory import GroupMemory

if TYPE_CHECKING:
    from paradis.frontend.binding import Binding
    from paradis.frontend.session import Session

_REMEDY = "or set training.free_gradients: false"


def frees_gradients(session: Session, optimizer: str) -> bool:
    """Return whether a ``wrap`` call lets gradients go; say so where it is set in vain.

    Args:
        session: with the job's settings.
        optimizer: name of its class.
    """
    if not session.settings.free_gradients:
        return False
    if optimizer != "OneBitAdam":
        session.node.announce(
            "warning",
            f"training.free_gradients has no effect on {optimizer}: only "
            "paradis.optim.OneBitAdam needs no gradient once its code is made",
            once=True,
        )
    return optimizer == "OneBitAdam"


def refuse_second(memory: GroupMemory, index: int) -> None:
    """Refuse a gradient that comes after the one that was handed over in this step.

    Raises:
        StateError: gradients are let go.
    """
    if memory.frees:
        raise StateError(
            f"gradient of {memory.tensors[index].name} refused: it has one in this step already, "
            "which training.free_gradients lets go as soon as backward makes it; call step() after "
            "each backward, accumulate by putting all backward calls but the last into "
            f"optimizer.no_sync(), {_REMEDY}"
        )


def refuse_rewriting(memory: GroupMemory, index: int) -> None:
    """Refuse a gradient that the script has changed or dropped after backward.

    Raises:
        StateError: gradients are let go.
    """
    if memory.frees:
        raise StateError(
            f"step refused: the gradient of {memory.tensors[index].name} was changed or dropped "
            "after backward; with training.free_gradients it is gone by then, from the freeze on; "
            f"leave gradients as backward makes them, {_REMEDY}"
        )


def refuse_after_backward(what: str, name: str) -> NoReturn:
    """Refuse what needs the state of the last step when backward has begun the next one.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"{what} refused between backward and step(): with training.free_gradients the gradient of "
        f"{name} counts already; call it after step(), {_REMEDY}"
    )


def refuse_scaler(memory: GroupMemory) -> None:
    """Refuse a GradScaler, which unscales gradients after backward and may skip the step.

    Raises:
        ConfigError: gradients are let go.
    """
    if memory.frees:
        raise ConfigError(
            "step refused: a GradScaler with training.free_gradients = true; it looks at gradients "
            f"after backward, and they are gone; train in bfloat16 without a scaler, {_REMEDY}"
        )


def refuse_clipping(binding: Binding) -> None:
    """Refuse ``clip_grad_norm_`` where gradients, or their mean, are out of reach by then.

    Raises:
        ConfigError: they are.
    """
    if binding.early is not None:
        binding.early.refuse_clipping()
    if binding.memory.frees:
        raise ConfigError(
            "clip_grad_norm_ refused: training.free_gradients = true, so gradients are gone when "
            f"their norm would be known; clip nothing, {_REMEDY}"
        )


def wait_until_copied(binding: Binding) -> None:
    """Wait, on a rank other than 0, until this worker's part of a checkpoint is copied.

    The next backward changes in place what belongs in it. Worker 0 asks for it at the same step.

    Raises:
        DeadlineExceeded: worker 0 did not ask.
        ParadisError: the job failed.
    """
    node, group, rank = binding.session.node, binding.group, binding.session.rank
    step = binding.steps_done - binding.steps_before
    if not binding.session.alive or rank not in binding.codes.savers():
        return
    # Half of it: else worker 0, in its next step, gives up first and does not know why.
    limit = binding.session.settings.sync_timeout_s / 2
    try:
        node.wait_until(
            lambda: node.copied.get(group, -1) >= step or 0 not in binding.members(),
            group, "save_checkpoint", timeout_s=limit,
        )  # fmt: skip
    except DeadlineExceeded:
        raise DeadlineExceeded(
            f"save_checkpoint timed out on worker {rank} after {limit:.0f} s: worker 0 did not ask "
            f"for what codes have left out after step {binding.steps_done}; with "
            f"training.free_gradients call it on every worker at the same step, {_REMEDY}"
        ) from None
