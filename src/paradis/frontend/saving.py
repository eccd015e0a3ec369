"""Asks for checkpoints of one ``wrap`` call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paradis.errors import ConfigError
from paradis.frontend.freeing import wait_until_copied
from paradis.frontend.naming import clean
from paradis.roles import events as ev
from paradis.storage.manifest import group_directory, step_directory
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.frontend.binding import Binding


def save(
    binding: Binding, options: list[msg.Options], extra: dict[str, msg.Scalar], *, wait: bool
) -> str | None:
    """Ask for a checkpoint at the present step (see `WrappedOptimizer.save_checkpoint`)."""
    binding.flight.catch_up()  # on every worker, for all must compute with the same values
    if binding.memory.frees:
        binding.settle()
    if binding.session.rank != 0:
        if binding.memory.frees:
            wait_until_copied(binding)
        return None
    for each in binding.session.bindings:
        each.settle()  # another one may train what this one stores
    binding.check()
    root = Path(binding.session.settings.checkpoint_directory)
    path = step_directory(root, binding.steps_done)
    info = checkpoint_info(
        str(group_directory(path, binding.group)), binding.group, binding.steps_done, options, extra
    )
    info = msgspec.structs.replace(info, workers=binding.codes.savers())
    if binding.session.settings.backup_workers and binding.codes.left_out:
        binding.session.node.announce(
            "warning",
            "a checkpoint with training.backup_workers lacks what the codes of workers have left "
            "out (with Lion: their momenta): workers are at different steps; a resumed run begins "
            "without",
            once=True,
        )
    if info.workers and len(info.workers) < len(binding.session.membership.ranks):
        binding.session.node.announce(
            "warning",
            "a checkpoint lacks what the codes of workers that have left had left out; save before "
            "the first one leaves",
            once=True,
        )
    if binding.session.settings.rack_codes == "recompress" and any(
        m.plan.recompressed for m in binding.memory.shards.values()
    ):
        binding.session.node.announce(
            "warning",
            "a checkpoint with communication.rack_codes = recompress lacks what the codes of rack "
            "agents have left out; a resumed run begins without",
            once=True,
        )
    node = binding.session.node
    node.forget(-1, f"checkpoint {info.checkpoint}")
    buffers = [s for s, m in binding.memory.shards.items() if m.plan.is_buffer and m.plan.length]
    if buffers:
        follow_buffers(binding, buffers)
        for bound in binding.memory.tensors:
            bound.stage()
        binding.give_values(buffers)
    binding.ask("snapshot", ev.SnapshotAsked(binding.group, info))
    if binding.others is not None:
        binding.others.save(path, info, wait=wait)
    if wait:
        done = node.wait(-1, f"checkpoint {info.checkpoint}", timeout_s=600.0)
        return done.path
    return str(path)


def follow_buffers(binding: Binding, shards: Sequence[int]) -> None:
    """A module may have put a new tensor in the place of a buffer: that one is saved.

    Raises:
        ConfigError: it has another shape or dtype.
    """
    now = {clean(name): buffer for name, buffer in binding.model.named_buffers()}
    for index, (named, bound) in enumerate(zip(binding.named, binding.memory.tensors, strict=True)):
        fresh = now.get(bound.name)
        if named.spec.options_group >= 0 or fresh is None or fresh is bound.tensor:
            continue
        if fresh.shape != bound.shape or fresh.dtype != bound.dtype:
            raise ConfigError(
                f"checkpoint refused: buffer {bound.name} is {fresh.dtype} "
                f"{tuple(fresh.shape)} now, but was {bound.dtype} {tuple(bound.shape)} at "
                "paradis.wrap; keep its shape, or make it non-persistent"
            )
        bound.tensor = fresh
        bound.bind()
        binding.named[index] = replace(named, tensor=fresh)
    for shard in shards:
        binding.memory.shards[shard].bind()


def checkpoint_info(
    path: str, group: int, step: int, options: list[msg.Options], extra: dict[str, msg.Scalar]
) -> msg.CheckpointInfo:
    """Return what belongs in a manifest beside the pieces.

    Raises:
        ConfigError: an extra value is not a number, string, boolean or None.
    """
    for key, value in extra.items():
        if not isinstance(value, bool | int | float | str | None):
            raise ConfigError(
                f"checkpoint extra {key!r} refused: expected a number, string, boolean or None, "
                f"got {type(value).__name__}; convert it, or keep it in a file of your own"
            )
    return msg.CheckpointInfo(checkpoint=path, group=group, step=step, options=options, extra=extra)
