"""The user's one line."""

from __future__ import annotations

import torch

from paradis.errors import ConfigError
from paradis.frontend import session as sessions
from paradis.frontend.binding import Binding
from paradis.frontend.naming import name_buffers, name_parameters
from paradis.frontend.optimizer import WrappedOptimizer
from paradis.frontend.state_transfer import give_shards
from paradis.numerics.elementwise import check_supported, optimizer_name, options_of


def wrap(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> WrappedOptimizer:
    """Train a model through Paradis: one line, after the optimizer is built.

    Every worker calls it alike; it returns when all have, and all hold worker 0's parameters,
    buffers and optimizer state (or those of the checkpoint the job resumes from). Several calls in one process
    are independent of each other.

    Args:
        model: the module; its parameters keep their identity and memory.
        optimizer: a ``torch.optim`` optimizer with an elementwise update over its parameters.

    Returns:
        The optimizer to use from now on.

    Raises:
        ConfigError: the optimizer or a parameter is not supported; says which and why.
        JoinRefused: workers wrapped different models or settings; the message compares them.
        DeadlineExceeded: not all workers called ``wrap`` in time.
    """
    if isinstance(optimizer, WrappedOptimizer):
        raise ConfigError("paradis.wrap refused: this optimizer is wrapped already; wrap it once")
    name = optimizer_name(optimizer)
    trained = name_parameters(model, optimizer.param_groups)
    if not trained:
        raise ConfigError(
            "paradis.wrap refused: the optimizer has no parameters; give it model.parameters()"
        )
    for named in trained:
        options = options_of(optimizer.param_groups[named.spec.options_group])
        check_supported(name, options, named.tensor.dtype)
    stored = name_buffers(model, trained)
    binding = Binding(sessions.current(), model, name)
    all_options = [options_of(g) for g in optimizer.param_groups]
    _warn_compiled(model, binding)
    plan = binding.register([*trained, *stored], all_options)
    if plan.restore:
        binding.take_restored(plan, optimizer)
    wrapped = WrappedOptimizer(optimizer, binding)
    binding.initialize(plan, give=lambda shards: give_shards(binding, optimizer, shards))
    return wrapped


def _warn_compiled(model: torch.nn.Module, binding: Binding) -> None:
    if type(model).__name__ == "OptimizedModule":
        binding.session.node.announce(
            "warning",
            "the whole model is compiled: its gradients appear only when backward ends, so pushes "
            "cannot overlap it; compile each block instead (block.compile())",
            once=True,
        )
