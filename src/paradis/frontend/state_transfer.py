"""Optimizer state between a worker's ``torch`` dictionaries and the servers' shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paradis.frontend.binding import Binding
from paradis.numerics.elementwise import Elementwise, elementwise
from paradis.numerics.memory_order import as_bytes, copy_in_order, flat_view, same_order
from paradis.roles import events as ev
from paradis.roles.worker_state import Assignment
from paradis.runtime.bound_tensor import BoundTensor
from paradis.runtime.shard_memory import ShardMemory
from paradis.runtime.shard_store import split_sections

if TYPE_CHECKING:
    from paradis.frontend.optimizer import WrappedOptimizer


def fetch(binding: Binding, optimizer: WrappedOptimizer) -> None:
    """Fill ``optimizer.state`` from the servers, in torch's own form."""
    binding.ask("state", ev.StateAsked(binding.group))
    kept = binding.session.node.kept
    optimizer.state.clear()
    parts: dict[int, dict[str, torch.Tensor]] = {}
    numbers: dict[int, dict[str, float]] = {}
    for shard, memory in binding.memory.shards.items():
        state = kept.pop((binding.group, shard), None)
        if state is None or memory.plan.is_buffer:
            continue
        data = torch.frombuffer(state.data, dtype=torch.uint8) if state.data else None
        columns = (
            split_sections(data, memory.plan, state.keys, state.dtypes) if data is not None else {}
        )
        for index, given in state.scalars.items():
            segment = memory.plan.segments[index]
            bound = memory.tensors[index]
            numbers.setdefault(segment.parameter, {}).update(
                {k: v for k, v in given.items() if not k.startswith("has:")}
            )
            target = parts.setdefault(segment.parameter, {})
            for key in (k.removeprefix("has:") for k in given if k.startswith("has:")):
                column = columns[key]
                whole = target.setdefault(
                    key, torch.zeros(bound.tensor.numel(), dtype=column.dtype)
                )
                stop = segment.start + segment.length
                whole[segment.offset : segment.offset + segment.length] = column[
                    segment.start : stop
                ]
    for index, bound in enumerate(binding.memory.tensors):
        if index in parts or index in numbers:
            optimizer.state[bound.tensor] = _torch_state(
                bound, parts.get(index, {}), numbers.get(index, {})
            )


def _torch_state(
    bound: BoundTensor, tensors: dict[str, torch.Tensor], numbers: dict[str, float]
) -> dict[str, Any]:
    state: dict[str, Any] = {k: torch.tensor(v, dtype=torch.float32) for k, v in numbers.items()}
    for key, flat in tensors.items():
        if bound.staged:
            state[key] = flat.view(bound.shape)
        else:
            state[key] = flat.as_strided(bound.shape, bound.tensor.stride())
    return state


def give(binding: Binding, optimizer: torch.optim.Optimizer) -> None:
    """Replace the servers' optimizer state by ``optimizer.state``.

    Not the values: another worker may still be pulling those that `paradis.wrap` shared. What the
    script changed of them travels with the next step.
    """
    memory = binding.memory
    shards = [s for s, m in memory.shards.items() if m.plan.length and not m.plan.is_buffer]
    give_shards(binding, optimizer, shards, values=False)


def give_shards(
    binding: Binding, optimizer: torch.optim.Optimizer, shards: Sequence[int], *, values: bool
) -> None:
    """Send optimizer state, and values, of these shards to the servers and wait for them."""
    entry = elementwise(binding.optimizer_name)
    entries: dict[int, Assignment] = {}
    for shard in shards:
        memory = binding.memory.shards[shard]
        for bound in memory.tensors:
            bound.stage()
        columns, scalars = _collect(memory, optimizer, entry)
        if not columns and not values:
            # An assignment has a payload; the server ignores a column that no segment claims.
            columns["none"] = torch.zeros(memory.plan.length, dtype=torch.uint8)
        keys, dtypes = (
            list(columns),
            [str(c.dtype).removeprefix("torch.") for c in columns.values()],
        )
        if values:
            keys, dtypes = ["value", *keys], [memory.plan.dtype, *dtypes]
        memory.state = {key: as_bytes(column) for key, column in columns.items()}
        entries[shard] = (tuple(keys), tuple(dtypes), scalars)
    binding.ask("assign", ev.AssignAsked(binding.group, entries))
    for shard in shards:
        binding.memory.shards[shard].state = {}


def _collect(
    memory: ShardMemory, optimizer: torch.optim.Optimizer, entry: Elementwise
) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, float]]]:
    """Return state columns of a shard, and numbers (and which columns exist) per segment.

    A segment without state has an empty entry, so that the server drops what it holds.
    """
    columns: dict[str, torch.Tensor] = {}
    scalars: dict[int, dict[str, float]] = {}
    if memory.plan.is_buffer:
        return columns, scalars
    for index, (segment, bound) in enumerate(
        zip(memory.plan.segments, memory.tensors, strict=True)
    ):
        state = optimizer.state.get(bound.tensor, {})
        given: dict[str, float] = {}
        for key, value in state.items():
            if value is None:
                continue
            if key in entry.scalars:
                given[key] = float(value)
                continue
            given[f"has:{key}"] = 1.0
            column = columns.setdefault(key, torch.zeros(memory.plan.length, dtype=value.dtype))
            column[segment.start : segment.start + segment.length] = _flat(value, bound)[
                segment.offset : segment.offset + segment.length
            ]
        if given or not entry.eager:
            scalars[index] = given
    return dict(sorted(columns.items())), scalars


def has_trained(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer holds state of steps that were done before."""
    return any(float(s.get("step", 1.0)) > 0.0 for s in optimizer.state.values() if s)


def _flat(value: torch.Tensor, bound: BoundTensor) -> torch.Tensor:
    """Return (numel,) of a state tensor in the parameter's memory order; a view where possible."""
    value = value.detach().cpu()
    if not bound.staged and same_order(value, bound.tensor):
        view = flat_view(value)
        if view is not None:
            return view
    flat = torch.empty(value.numel(), dtype=value.dtype)
    if bound.staged:
        flat.copy_(value.reshape(-1))
    else:
        copy_in_order(value, bound.tensor, flat)
    return flat
