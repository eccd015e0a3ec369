"""A server's shards: values, optimizer state, and what travels of them.

Invariant: every tensor here is written by one job at a time, and a value is not written while a
worker may still need the bytes being sent: the next update of a shard needs every worker's commit,
or its word that it has begun the next step, and both need the value installed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from paradis.errors import SnapshotCorrupt
from paradis.numerics.coders import server_coder
from paradis.numerics.memory_order import as_bytes
from paradis.numerics.shard_optimizer import ShardOptimizer
from paradis.runtime.held_value import MEMORY, HeldValue, Scalars
from paradis.runtime.pages import allocate
from paradis.storage.checkpoint import PieceReader, Section
from paradis.storage.manifest import (
    Manifest,
    check_parameters,
    group_directory,
    read_manifest,
    resolve,
)
from paradis.storage.tensorfile import torch_dtype
from paradis.wire.messages import Options, ParameterSpec, Plan, ShardPlan


class ShardStore:
    """The values of one server."""

    def __init__(self) -> None:
        self.shards: dict[int, HeldValue] = {}
        self._group: dict[int, list[int]] = {}
        self._specs: dict[int, list[ParameterSpec]] = {}
        self._trained: dict[int, set[str]] = {}
        self._opening = threading.Lock()
        self._opened: tuple[tuple[int, str], tuple[PieceReader, frozenset[str]]] | None = None

    def open(self, plan: Plan, shards: Sequence[ShardPlan]) -> None:
        """Allocate this server's shards of a plan, zeroed.

        Raises:
            ConfigError: the optimizer's options are refused.
        """
        specs = self._specs.setdefault(plan.group, [])
        specs.extend(plan.parameters)
        trained = self._trained.setdefault(plan.group, set())
        trained.update(s.name for s in plan.parameters if s.options_group >= 0)
        for shard in shards:
            dtype = torch_dtype(shard.dtype)
            value = allocate(shard.length * dtype.itemsize).zero_().view(dtype)
            segments = [value[s.start : s.start + s.length] for s in shard.segments]
            optimizer = None
            if not shard.is_buffer and shard.length:
                options = plan.options[shard.options_group]
                optimizer = ShardOptimizer(plan.optimizer, options, segments)
            owners = tuple(specs[s.parameter] for s in shard.segments)
            coder = None
            if shard.codec:
                spans = [(s.start, s.length) for s in shard.segments]
                offsets = [s.offset for s in shard.segments]
                coder = server_coder(shard.codec, shard.length, spans, segments, offsets)
            self.shards[shard.shard] = HeldValue(shard, owners, value, segments, optimizer, coder)
            self._group.setdefault(plan.group, []).append(shard.shard)

    def apply(
        self,
        shard: int,
        total: torch.Tensor,
        options: Options,
        present: Sequence[bool],
        clip: float,
        *,
        coded: bool = False,
    ) -> None:
        """Run the optimizer on a shard.

        Args:
            total: (nbytes,) uint8, the mean gradient; may be overwritten.
            present: per segment; an absent one is left untouched, its step stands still.
            clip: factor for the gradient.
            coded: make the code of the update, too.
        """
        held = self.shards[shard]
        assert held.optimizer is not None
        grad = total.view(held.value.dtype)
        if clip != 1.0:
            grad.mul_(clip)
        if coded:
            held.ready_coder().update(grad, held.optimizer, present, options)
            return
        grads = [
            grad[s.start : s.start + s.length] if here else None
            for s, here in zip(held.plan.segments, present, strict=True)
        ]
        held.optimizer.apply(grads, options)
        if held.coder is not None:
            held.coder.replaced()  # workers get the values

    def refuses(self, shard: int) -> bool:
        """Whether a coded `apply` refuses a gradient that is not finite by itself."""
        coder = self.shards[shard].coder
        return coder is not None and coder.refuses

    def value_bytes(self, shard: int) -> memoryview:
        """Return the bytes of the value of a shard that workers hold, lent."""
        held = self.shards[shard]
        seen = held.coder.seen() if held.coder is not None else None
        return as_bytes(held.value if seen is None else seen)

    def code_bytes(self, shard: int) -> memoryview:
        """Return the code of the shard's last update, lent until the next one."""
        coder = self.shards[shard].coder
        assert coder is not None
        return as_bytes(coder.code)

    def sum_codes(
        self, shard: int, groups: Sequence[Sequence[torch.Tensor]], total: torch.Tensor,
        divisor: int,
    ) -> None:  # fmt: skip
        """Decode codes and take their mean, in the order of the canonical tree.

        Args:
            groups: per logical group the codes of its ranks, uint8, in order.
            total: (nbytes,) uint8, written in place.
            divisor: number of members.
        """
        held = self.shards[shard]
        coder = held.ready_coder()
        numbers = total.view(held.value.dtype)
        if sum(s.length for s in held.plan.segments) < numbers.numel():
            numbers.zero_()  # padding is part of what norms are taken of
        used = [group for group in groups if group]
        if len(used) == 1:
            coder.mean(used[0], numbers, divisor)
            return
        part = torch.zeros_like(numbers)
        for index, group in enumerate(used):
            target = part if index else numbers
            for place, code in enumerate(group):
                coder.add(code, target, first=not place)
            if index:
                numbers.add_(part)
        numbers.div_(divisor)

    def begin_codes(self, group: int, options: Sequence[Options]) -> None:
        """The group's shards travel as codes from now on, which start from the present state."""
        for shard in self._group.get(group, []):
            held = self.shards[shard]
            if held.coder is not None:
                held.begin_with = options[held.plan.options_group]

    def norms_of_v(self, shard: int) -> dict[int, float]:
        """Return the L1 norm of Adam's bias-corrected v in a shard, per parameter of its group."""
        return self.shards[shard].norms_of_v()

    def memory_sections(
        self, shard: int
    ) -> tuple[tuple[str, ...], tuple[str, ...], Scalars, list[memoryview]]:
        """Return what a shard's codes start from on a worker, as `sections` does."""
        return self.shards[shard].memory_sections()

    def sections(
        self, shard: int
    ) -> tuple[tuple[str, ...], tuple[str, ...], Scalars, list[memoryview]]:
        """Return value and state as they travel: keys, dtypes, scalars, one buffer per key.

        A state that some segments lack is padded with zeros there; ``scalars`` lists exactly the
        segments that have state, with the names of theirs.
        """
        held = self.shards[shard]
        keys, dtypes, buffers = ["value"], [held.plan.dtype], [as_bytes(held.value)]
        scalars: Scalars = {}
        columns: dict[str, torch.Tensor] = {}
        for index, segment in enumerate(held.plan.segments):
            tensors, numbers = held.optimizer.state(index) if held.optimizer else ({}, {})
            if not tensors and not numbers:
                continue
            scalars[index] = {**numbers, **{f"has:{key}": 1.0 for key in tensors}}
            for key, tensor in tensors.items():
                if key not in columns:
                    columns[key] = torch.zeros(held.plan.length, dtype=tensor.dtype)
                columns[key][segment.start : segment.start + segment.length] = tensor
        for key, column in sorted(columns.items()):
            keys.append(key)
            dtypes.append(str(column.dtype).removeprefix("torch."))
            buffers.append(as_bytes(column))
        return tuple(keys), tuple(dtypes), scalars, buffers

    def store(
        self,
        shard: int,
        data: torch.Tensor,
        keys: Sequence[str],
        dtypes: Sequence[str],
        scalars: Mapping[int, Mapping[str, float]],
    ) -> None:
        """Take value and state of a shard from received sections.

        Args:
            data: (nbytes,) uint8, sections in the order of ``keys``. Copied.
            scalars: segment -> its numbers, and which columns hold state of it; what a segment
                that is left out has stays, one with an empty entry loses its state.
        """
        held = self.shards[shard]
        columns = split_sections(data, held.plan, keys, dtypes)
        if "value" in columns:
            held.value.copy_(columns.pop("value"))
            if held.coder is not None:
                held.coder.replaced()
        if not columns and not scalars:
            return
        for index, segment in enumerate(held.plan.segments):
            given = scalars.get(index)
            if given is None:
                continue
            stop = segment.start + segment.length
            tensors = {
                key: column[segment.start : stop]
                for key, column in columns.items()
                if f"has:{key}" in given
            }
            numbers = {k: v for k, v in given.items() if not k.startswith("has:")}
            assert held.optimizer is not None
            held.optimizer.load_state(index, tensors, numbers)

    def load(self, group: int, shard: int, path: str) -> None:
        """Read value and state of a shard from a checkpoint.

        Raises:
            SnapshotCorrupt: damaged, incomplete, or of another model.
        """
        held = self.shards[shard]
        reader, trained = self._open_checkpoint(group, path)
        memories: dict[str, list[torch.Tensor]] = {}
        for index, (segment, spec) in enumerate(zip(held.plan.segments, held.specs, strict=True)):
            for key in reader.keys(spec.name):
                if key == "value":
                    held.segments[index].copy_(
                        reader.read(spec.name, key, segment.offset, segment.length, spec.dtype)
                    )
            if held.optimizer is None or spec.name not in trained:
                continue
            saved = {
                key: reader.read(
                    spec.name, key, segment.offset, segment.length, reader.dtype(spec.name, key)
                )
                for key in reader.keys(spec.name)
                if key != "value" and key.count(MEMORY) < 2  # else a worker's own
            }
            tensors = {key: t for key, t in saved.items() if MEMORY not in key}
            held.optimizer.load_state(index, tensors, reader.scalars(spec.name))
            for key in saved.keys() - tensors.keys():
                memories.setdefault(key, []).append(saved[key])
        held.load_memories(memories)

    def _open_checkpoint(self, group: int, path: str) -> tuple[PieceReader, frozenset[str]]:
        """Return a group's reader and trained parameters; it is read and compared once."""
        with self._opening:
            if self._opened is None or self._opened[0] != (group, path):
                directory = group_directory(resolve(Path(path)), group)
                manifest = read_manifest(directory)
                _check_model(manifest, self._specs[group])
                trained = frozenset(p.name for p in manifest.parameters if p.options_group >= 0)
                self._opened = ((group, path), (PieceReader(directory, manifest), trained))
            return self._opened[1]

    def copy(self, group: int) -> tuple[list[Section], dict[str, dict[str, float]]]:
        """Return copies of everything of a group as checkpoint sections, and its scalars."""
        sections: list[Section] = []
        scalars: dict[str, dict[str, float]] = {}
        for shard in self._group.get(group, []):
            held = self.shards[shard]
            memories = held.saved_memories()
            for index, (segment, spec) in enumerate(
                zip(held.plan.segments, held.specs, strict=True)
            ):
                if held.plan.is_buffer and spec.name in self._trained[group]:
                    continue  # stored at first, joined the optimizer later
                value = held.segments[index].clone()
                sections.append(Section(spec.name, "value", segment.offset, value))
                if held.optimizer is None:
                    continue
                tensors, numbers = held.optimizer.state(index)
                if numbers:
                    scalars[spec.name] = numbers
                for key, tensor in tensors.items():
                    sections.append(Section(spec.name, key, segment.offset, tensor.clone()))
                for key, pieces in memories.items():
                    sections.append(Section(spec.name, key, segment.offset, pieces[index].clone()))
        return sections, scalars

    def state_bytes(self) -> int:
        """Return the bytes of values and optimizer state that are held."""
        total = 0
        for held in self.shards.values():
            total += held.value.numel() * held.value.element_size()
            total += held.optimizer.state_bytes() if held.optimizer else 0
        return total


def _check_model(manifest: Manifest, specs: Sequence[ParameterSpec]) -> None:
    """Check names, shapes, dtypes and layouts; the worker knows which groups may differ, and how.

    Raises:
        SnapshotCorrupt: with the differences by parameter name.
    """
    saved = {p.name: p for p in manifest.parameters}
    expected = {
        s.name: msgspec.structs.replace(s, options_group=saved[s.name].options_group)
        if s.name in saved
        else s
        for s in specs
    }
    known = tuple(p for p in manifest.parameters if p.name in expected)
    check_parameters(
        msgspec.structs.replace(manifest, parameters=known),
        tuple(expected.values()),
        {s.name: s.strides for s in specs if s.strides},
    )


def split_sections(
    data: torch.Tensor, plan: ShardPlan, keys: Sequence[str], dtypes: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return key -> (length,) view of received sections.

    Raises:
        SnapshotCorrupt: the sections do not have the lengths that the shard says.
    """
    names = tuple(dtypes) or (plan.dtype,) * len(keys)
    columns: dict[str, torch.Tensor] = {}
    start = 0
    for key, name in zip(keys, names, strict=True):
        dtype = torch_dtype(name)
        stop = start + plan.length * dtype.itemsize
        if stop > data.numel():
            raise SnapshotCorrupt(
                f"shard {plan.shard} refused: section {key!r} needs {stop} bytes, got "
                f"{data.numel()}; sender and receiver have different plans"
            )
        columns[key] = data[start:stop].view(dtype)
        start = stop
    return columns
