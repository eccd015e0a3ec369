"""What a ``wrap`` call refuses, or does otherwise, where steps do without some workers.

After the first step no step is of all workers (`paradis.core.quorum`), so nothing can be agreed on
at one, and who makes the mean gradient is known only when ``step()`` has been called.
"""

from __future__ import annotations

from paradis.errors import ConfigError


def refuse_adding(backup: int) -> None:
    """Refuse parameters that join later.

    Raises:
        ConfigError: ``backup`` is not 0.
    """
    if backup:
        raise ConfigError(
            f"add_param_group refused: training.backup_workers = {backup}, and parameters join at "
            "a step that all workers come to; give them to the optimizer before paradis.wrap, or "
            "set training.backup_workers: 0"
        )


def refuse_loading(backup: int, steps: int) -> None:
    """Refuse optimizer state from a script after the first step.

    Args:
        backup: workers that a step does without.
        steps: done in this run.

    Raises:
        ConfigError: the state could meet any step.
    """
    if backup and steps > 0:
        raise ConfigError(
            f"load_state_dict refused: training.backup_workers = {backup}, and no step after the "
            "first is of all workers; load before it, or resume from a checkpoint of the job"
        )


def save_is_due(step: int, every: int, saved: int) -> bool:
    """Whether a scheduled checkpoint is due, where a late step's number may jump over it.

    Args:
        step: number of steps done.
        every: steps from one to the next.
        saved: steps done at the last one, or at the start.
    """
    return step // every > saved // every


def own_norm_reason(backup: int, mode: str, optimizer: str) -> str:
    """Return why ``clip_grad_norm_`` clips each worker's own gradient.

    Args:
        backup: workers that a step does without.
        mode: of the group.
        optimizer: name of its class.
    """
    if backup:
        return (
            f"with training.backup_workers = {backup}: whose gradients make the mean is known in "
            "step() only"
        )
    if mode != "sync":
        return f"in mode {mode}: there is no mean gradient, for each is an update by itself"
    return f"with {optimizer}: what travels are momenta or votes, no gradients"
