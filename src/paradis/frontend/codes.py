"""When a ``wrap`` call's gradients travel as codes, and what a worker's codes start from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from paradis.core.codes import CodedSteps, first_coded_step, pieces_of_whole
from paradis.errors import ConfigError
from paradis.numerics.coding import WorkerCoder
from paradis.numerics.elementwise import elementwise
from paradis.roles import events as ev
from paradis.runtime.pages import give_back
from paradis.runtime.shard_memory import ShardMemory, own_key
from paradis.runtime.shard_store import split_sections
from paradis.storage.checkpoint import PieceReader
from paradis.storage.manifest import group_directory, read_manifest, resolve
from paradis.wire.messages import Options, Plan, Register

if TYPE_CHECKING:
    from paradis.frontend.binding import Binding

_BATCH = 8
"""Shards whose memories are fetched at a time, which bounds what is held twice."""


class Codes:
    """The codes of one ``wrap`` call.

    Args:
        binding: the call.

    Attributes:
        ready: servers hold the group's values.
    """

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._begun: dict[int, None] = {}
        self._followed = (-1, -1)
        self._kept = False  # what the last steps in full have freed is still this process's
        self.ready = False

    def describe(self, request: Register) -> Register:
        """Return a registration that says how its parameters are to travel.

        Raises:
            ConfigError: parameter groups differ in what holds for the whole call.
        """
        coded = self._steps(request.options)
        return msgspec.structs.replace(
            request, coded_from=coded.begin, coded_until=coded.end, benefit=self._benefit(),
            compression=self._binding.compression,
        )  # fmt: skip

    def _steps(self, options: Sequence[Options]) -> CodedSteps:
        """Return which steps of this run may travel as codes; none: the leader says so."""
        binding = self._binding
        self._check_mode()
        onebit = binding.optimizer_name == "OneBitAdam"
        if onebit:
            self._check_onebit(options)
        role = binding.session.node.worker_role.groups.get(binding.group)
        if role is not None and role.parts:
            return role.coded_steps
        if not onebit:
            return CodedSteps(-1 if self._benefit() == "off" else 0)
        done, frozen = self._saved()
        fixed = options[0].get("freeze_step")
        assert fixed is None or isinstance(fixed, int)
        return CodedSteps(first_coded_step(fixed, done=done, frozen=frozen))

    def _check_onebit(self, options: Sequence[Options]) -> None:
        """Refuse groups of 1-bit Adam that differ, and parameters that come after its freeze."""
        binding = self._binding
        for key in ("freeze_step", "scale"):
            if len({str(o.get(key)) for o in options}) > 1:
                raise ConfigError(
                    f"paradis.wrap refused: {key} of OneBitAdam differs between parameter groups; "
                    "all freeze at once and alike: give it to the optimizer, not to a group"
                )
        role = binding.session.node.worker_role.groups.get(binding.group)
        before = binding.steps_done == binding.steps_before
        restored = binding.session.settings.restore and before
        if role is not None and role.parts and role.coded and not restored:
            raise ConfigError(
                "add_param_group refused: OneBitAdam has frozen its variance, and new parameters "
                "have none; add them before the freeze, or wrap them in an optimizer of their own"
            )

    def checked(self, plan: Plan | None) -> Plan:
        """Return a plan if its shards are what codes are for.

        Raises:
            ConfigError: a tensor is cut, and each is to have one scale (``scale="l2"``).
        """
        assert plan is not None
        cut = pieces_of_whole((s.codec, [p.parameter for p in s.segments]) for s in plan.shards)
        for parameter, count in cut.items():
            bound = self._binding.memory.tensors[parameter]
            needed = -(-bound.tensor.numel() * bound.dtype.itemsize // 1024)
            raise ConfigError(
                f'paradis.wrap refused: OneBitAdam(scale="l2") has one scale per tensor; expected '
                f"{bound.name} in one piece, got {count}; set communication.shard_size to "
                f'{needed}KiB or more, or use scale="l1"'
            )
        return plan

    def _benefit(self) -> str:
        """Return what an earlier run has found of the same codes, ``on`` or ``off``, or nothing."""
        settings = self._binding.session.settings
        used = self._binding.compression or settings.compression
        if used == "none" or not settings.restore or settings.compression_benefit != "measured":
            return ""
        directory = group_directory(resolve(Path(settings.restore)), self._binding.group)
        codec, _, found = read_manifest(directory).benefit.partition(" ")
        return found if codec == used else ""

    def _check_mode(self) -> None:
        """Refuse codes where workers have clocks of their own.

        Raises:
            ConfigError: a code is made for the value before, which is another on each worker there.
        """
        binding = self._binding
        mode = binding.session.membership.own.mode or binding.session.settings.mode
        own = self._own_code
        if not own and binding.compression in ("", "none"):
            return
        what = binding.optimizer_name if own else f"compression {binding.compression}"
        if binding.session.settings.overlap == "double_buffer":
            raise ConfigError(
                f"paradis.wrap refused: {what} with training.overlap = double_buffer; expected "
                "layerwise or none: what codes leave out is counted step by step"
            )
        if mode != "sync":
            raise ConfigError(
                f"paradis.wrap refused: {what} with training.mode = {mode}; expected sync, because "
                "a code leads from one version to the next, and workers hold different ones; "
                "choose mode sync, or gradients in full"
            )

    def _take_own(self, shards: Iterable[ShardMemory]) -> None:
        """Take what this worker's codes had left out from the checkpoint.

        Where other workers saved it, everybody takes the mean, so that the sum is what it was.
        """
        binding = self._binding
        directory = group_directory(resolve(Path(binding.session.settings.restore)), binding.group)
        manifest = read_manifest(directory)
        keys: dict[str, dict[str, None]] = {}
        for piece in manifest.pieces:
            keys.setdefault(piece.parameter, {})[piece.key] = None
        reader = PieceReader(directory, manifest)
        for memory in shards:
            if memory.coder is not None and memory.coder.own():
                self._load_own(memory, memory.coder, reader, keys)

    def _load_own(
        self, memory: ShardMemory, coder: WorkerCoder, reader: PieceReader,
        keys: Mapping[str, Mapping[str, None]],
    ) -> None:  # fmt: skip
        members = self._binding.members()
        loaded = dict(coder.memories())
        for name, pieces in coder.own().items():
            found: list[torch.Tensor] = []
            for segment, bound, piece in zip(
                memory.plan.segments, memory.tensors, pieces, strict=True
            ):
                here = keys.get(bound.name, {})
                saved = saved_ranks(memory.plan.codec, name, here)
                rank = self._binding.session.rank
                wanted = [rank] if tuple(saved) == members else [*saved]
                total = torch.zeros_like(piece)
                dtype = str(piece.dtype).removeprefix("torch.")
                for each in wanted:
                    total += reader.read(
                        bound.name, saved[each], segment.offset, segment.length, dtype
                    )
                found.append(total.div_(max(1, len(wanted))))
            loaded[name] = found
        coder.load_memories(loaded)

    def _saved(self) -> tuple[int, bool]:
        """Return the steps behind the checkpoint that the job resumes from; is it frozen there?"""
        restore = self._binding.session.settings.restore
        if not restore:
            return 0, False
        manifest = read_manifest(group_directory(resolve(Path(restore)), self._binding.group))
        return manifest.step, any(piece.key.endswith(".inverse") for piece in manifest.pieces)

    @property
    def no_gradients(self) -> bool:
        """Whether what travels in this step are no gradients: momenta or votes."""
        return self._binding.memory.coded and self._own_code

    @property
    def _own_code(self) -> bool:
        return elementwise(self._binding.optimizer_name).coded

    def savers(self) -> tuple[int, ...]:
        """Return the workers that have a part of their own in a checkpoint.

        With backup workers nobody has: they are at different steps, and to wait for the last of
        them is what one does not want. What codes have left out is lost with a resume.
        """
        if self._binding.session.settings.backup_workers:
            return ()
        return self._binding.members() if self.left_out else ()

    @property
    def left_out(self) -> bool:
        """Whether codes keep something on the workers that no server has."""
        coders = (m.coder for m in self._binding.memory.shards.values() if m.coder is not None)
        return any(c.own() for c in coders)

    def follow(self) -> None:
        """See whether the next step travels as codes, and prepare for it once."""
        binding = self._binding
        group = binding.session.node.worker_role.groups.get(binding.group)
        if group is None or (group.step, group.parts) == self._followed:
            return  # every gradient of a step asks
        coded = group.coded
        if self.ready:
            self._followed = (group.step, group.parts)
        if self._kept:
            self._kept = False
            give_back()
        if self.ready and binding.session.alive:
            self._begin({
                s: m for s, m in binding.memory.shards.items()
                if m.coder is not None and s not in self._begun
                and (coded or not m.plan.codec.startswith("onebit"))
            })  # fmt: skip
        binding.memory.coded = coded

    def _begin(self, shards: Mapping[int, ShardMemory]) -> None:
        """Give coders what they start from, once each."""
        binding = self._binding
        self._begun.update(dict.fromkeys(shards))
        frozen = [s for s, m in shards.items() if m.plan.codec.startswith("onebit")]
        for start in range(0, len(frozen), _BATCH):
            self._fetch(tuple(frozen[start : start + _BATCH]))
        if frozen:
            give_back()
            # Gradients of the last step in full go with this one, and none comes in their place.
            self._kept = binding.memory.frees
        restored = binding.session.settings.restore
        if shards and restored and binding.steps_done == binding.steps_before:
            self._take_own(shards.values())

    def _fetch(self, shards: tuple[int, ...]) -> None:
        binding = self._binding
        binding.ask("state", ev.StateAsked(binding.group, shards, memories=True), beginning=True)
        for shard in shards:
            kept = binding.session.node.kept.pop((binding.group, shard))
            memory = binding.memory.shards[shard]
            data = torch.frombuffer(kept.data, dtype=torch.uint8)
            columns = split_sections(data, memory.plan, kept.keys, kept.dtypes)
            assert memory.coder is not None
            memory.coder.load_memories(
                {
                    key: [column[s.start : s.start + s.length] for s in memory.plan.segments]
                    for key, column in columns.items()
                }
            )


def saved_ranks(codec: str, name: str, keys: Iterable[str]) -> dict[int, str]:
    """Return rank -> key of a worker's own memory among a parameter's keys, by rank."""
    prefix = own_key(codec, name, 0)[:-1]
    ranks = {k.removeprefix(prefix): k for k in keys if k.startswith(prefix)}
    return {int(r): ranks[r] for r in sorted(ranks, key=int) if r.isdecimal()}
