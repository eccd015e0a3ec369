"""The user's one line."""

from __future__ import annotations

import torch

from paradis.errors import ConfigError
from paradis.frontend import session as sessions
from paradis.frontend.binding import Binding
from paradis.frontend.naming import Named, name_buffers, name_parameters
from paradis.frontend.optimizer import WrappedOptimizer
from paradis.frontend.other_groups import register_parts, split
from paradis.frontend.state_transfer import give_shards, has_trained
from paradis.numerics.elementwise import Options, check_supported, optimizer_name, options_of

COMPRESSIONS = ("none", "bf16", "int8")


def wrap(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, compression: str | None = None
) -> WrappedOptimizer:
    """Train a model through Paradis: one line, after the optimizer is built.

    Every worker calls it alike; it returns when all have, and all hold worker 0's parameters,
    buffers and optimizer state (or those of the checkpoint the job resumes from). Several calls in
    one process are independent of each other.

    Args:
        model: the module; its parameters keep their identity and memory.
        optimizer: a ``torch.optim`` optimizer with an elementwise update over its parameters.
        compression: ``none``, ``bf16`` or ``int8`` for this call; None: as
            ``training.compression`` says. Optimizers of `paradis.optim` have their own.

    Returns:
        The optimizer to use from now on.

    Raises:
        ConfigError: the optimizer or a parameter is not supported; says which and why.
        JoinRefused: workers wrapped different models or settings; the message compares them.
        DeadlineExceeded: not all workers called ``wrap`` in time.
    """
    if isinstance(optimizer, WrappedOptimizer):
        raise ConfigError("paradis.wrap refused: this optimizer is wrapped already; wrap it once")
    if compression not in (None, *COMPRESSIONS):
        raise ConfigError(
            f"paradis.wrap refused: compression {compression!r}; expected one of "
            f"{', '.join(COMPRESSIONS)}, or None for what the configuration says"
        )
    name = optimizer_name(optimizer)
    trained = name_parameters(model, optimizer.param_groups)
    if not trained:
        raise ConfigError(
            "paradis.wrap refused: the optimizer has no parameters; give it model.parameters()"
        )
    _check_state(name, optimizer)
    all_options = [options_of(g) for g in optimizer.param_groups]
    for named in trained:
        _check_supported(name, all_options[named.spec.options_group], named)
    stored, left_out = name_buffers(model, trained)
    session = sessions.current()
    _check_group(session, name, compression)
    binding = Binding(session, model, name, compression or "")
    _announce(model, optimizer, binding, left_out)
    parts = split(trained, session.membership.groups) if session.membership.groups else [trained]
    parts[0] = [*parts[0], *stored]
    plan = register_parts(binding, parts, all_options)
    if plan.restore:
        binding.take_restored(plan, optimizer)
    wrapped = binding.optimizer = WrappedOptimizer(optimizer, binding)
    binding.initialize(
        plan, give=lambda shards: give_shards(binding, optimizer, shards, values=True)
    )
    if binding.others is not None:
        binding.others.refresh()
    return wrapped


def _check_group(session: sessions.Session, optimizer: str, compression: str | None) -> None:
    """Refuse another compression than the worker group's.

    Raises:
        ConfigError: the group says ``onebit``, and the optimizer is another; or both choose.
    """
    group = session.membership.own
    if group.compression == "onebit" and optimizer != "OneBitAdam":
        raise ConfigError(
            f"paradis.wrap refused: the worker group {group.name} has compression onebit, and its "
            f"optimizer is {optimizer}; expected paradis.optim.OneBitAdam; choose one of the two"
        )
    if session.membership.groups and compression is not None:
        raise ConfigError(
            f"paradis.wrap refused: compression {compression!r} in a job with worker groups; "
            "expected None; say it in topology.worker_groups"
        )


def _check_state(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that no server can take over.

    Raises:
        ConfigError: Lion's momentum is each worker's own; a frozen variance has no server.
    """
    frozen = any("inverse" in state for state in optimizer.state.values())
    if frozen or (name == "DistributedLion" and any(optimizer.state.values())):
        raise ConfigError(
            f"paradis.wrap refused: this {name} has been stepped"
            f"{' beyond its freeze' if frozen else ''} on its own, and its state cannot be shared; "
            "wrap it before its first step, and resume from checkpoints of the job"
        )


def _check_supported(optimizer: str, options: Options, named: Named) -> None:
    try:
        check_supported(optimizer, options, named.tensor.dtype)
    except ConfigError as error:
        raise ConfigError(f"paradis.wrap refused: {named.spec.name}: {error.message}") from None


def _announce(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, binding: Binding, left_out: list[str]
) -> None:
    """Say what the user might not expect."""
    node = binding.session.node
    if is_compiled(model):
        node.announce(
            "warning",
            "the whole model is compiled: its gradients appear only when backward ends, so pushes "
            "cannot overlap it; compile each block instead (block.compile())",
            once=True,
        )
    if left_out:
        node.announce(
            "warning",
            f"{', '.join(left_out)}: of a dtype or layout that servers do not hold; it stays each "
            "worker's own and is in no checkpoint; register it with persistent=False",
            once=True,
        )
    if has_trained(optimizer) and binding.session.world_size > 1:
        whose = "counts for all workers" if binding.first else "gives way to worker 0's"
        node.announce(
            "info", f"the optimizer state restored on worker {binding.session.rank} {whose}"
        )


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether a model as a whole went through ``torch.compile``."""
    whole = type(model).__name__ == "OptimizedModule"
    return whole or getattr(model, "_compiled_call_impl", None) is not None
