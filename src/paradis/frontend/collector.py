"""Hands gradients over as backward produces them, and finds out which count in the end.

A hook per parameter (`torch.Tensor.register_post_accumulate_grad_hook`) hands a shard over when
all its parameters have fired; while the step before is on its way, it is put off until the next
gradient, or ``step()``. That push is tentative: a gradient is what it was when handed over if
it is the same tensor with the same version counter. ``step()`` compares, and hands over what is
missing.

With ``training.free_gradients`` a gradient that travels as a code is taken instead: ``.grad`` is
None from then on, its memory goes when its codes are made, and it counts. So nothing may come after
it in its step, and what could not be noticed then is refused in all steps.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

import torch
import xxhash

from paradis.errors import ConfigError
from paradis.frontend.freeing import (
    refuse_after_backward,
    refuse_rewriting,
    refuse_second,
)
from paradis.frontend.handed import GONE, Handed
from paradis.frontend.reach import reachable_gradients
from paradis.frontend.step_clock import StepClock
from paradis.numerics.memory_order import as_bytes
from paradis.runtime.worker_memory import GroupMemory

_REVISED_STEPS_MAX = 2
"""After this many steps whose gradients mostly changed after backward, pushes start in step()."""


class Collector:
    """Gradients of one ``wrap`` call.

    Args:
        memory: shards and tensors.
        ready: called with the shards whose gradients a hook has handed over.
        begin: called by the hooks before anything of a step is handed over; returns whether it may
            be: not while the step before is on its way, but with True it waits for that first.
        late: whether this step's gradient travels during the next one: copied, in ``step()``.
        debug: hash gradients, to catch writes that no version counter sees.

    Attributes:
        pushing: hooks hand over; off under ``no_sync``.
        yielded: shards that backward handed over in the step closed last, in order.
        deferred: pushes start in ``step()``: in the first step, where a GradScaler may be in use
            (what it unscales bumps no version counter), from then on if one is, and where the
            script changes most gradients after backward (clips them, say). Never where gradients
            are taken, for none of that is allowed there.
        clock: is told of each gradient, where spans are recorded.
        altered: names of parameters whose gradient was pushed and was found changed by `close`.
        rewritten: the script itself changed a gradient after the last backward of this step.
    """

    def __init__(
        self, memory: GroupMemory, ready: Callable[[tuple[int, ...]], None],
        begin: Callable[[bool], bool], *, late: Callable[[], bool] = bool, debug: bool = False,
    ) -> None:  # fmt: skip
        self._memory = memory
        self._ready = ready
        self._begin = begin
        self._late = late
        self._debug = debug
        self.pushing = True
        self.deferred = not memory.frees
        self.rewritten = False
        self.altered: list[str] = []
        self.clock: StepClock | None = None
        self._scaled = False
        self._revised_steps = 0
        self._again: dict[int, None] = {}
        self._handed: list[Handed | None] = []
        self._shards_of: list[list[int]] = []
        self._missing: dict[int, int] = {}
        self._postponed: deque[int] = deque()  # hooks of several devices run at the same time
        self._versions: list[int] = []
        self._handed_shards: dict[int, None] = {}
        self._yielding: list[int] = []
        self.yielded: tuple[int, ...] = ()
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}

    # ------------------------------------------------------------------- hooks

    def extend(self) -> None:
        """Take over tensors and shards that were added to the memory."""
        self._shards_of = [[] for _ in self._memory.tensors]
        for shard, memory in self._memory.shards.items():
            if memory.plan.is_buffer:
                continue
            for segment in memory.plan.segments:
                self._shards_of[segment.parameter].append(shard)
        self.reset()
        self.attach()

    def attach(self) -> None:
        """Put hooks on parameters that require gradients and have none (unfrozen ones, too)."""
        for index, bound in enumerate(self._memory.tensors):
            if index in self._hooks or not self._shards_of[index]:
                continue
            if bound.tensor.requires_grad and bound.tensor.is_leaf:
                hook = self._make_hook(index)
                self._hooks[index] = bound.tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    hook
                )

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self.clock is not None:
                self.clock.gradient()
            if self._handed[index] is not None:
                refuse_second(self._memory, index)
                self._again[index] = None
            elif self.pushing and not self.deferred and not self._late():
                self._hand_over(index)

        return hook

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def end_step(self, *, scaled: bool) -> None:
        """Decide when the next step's pushes start, and begin it.

        Args:
            scaled: a GradScaler was used in this step.
        """
        self._versions = [-1 if each is None else each.flat._version for each in self._handed]
        self._scaled = self._scaled or scaled
        self.deferred = self._scaled or self._revised_steps >= _REVISED_STEPS_MAX
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.rewritten = False
        self._again = {}
        self._postponed.clear()
        self._handed = [None] * len(self._memory.tensors)
        self._handed_shards = {}
        self._yielding = []
        self._missing = {
            shard: len(m.plan.segments)
            for shard, m in self._memory.shards.items()
            if not m.plan.is_buffer
        }

    def _hand_over(self, index: int) -> None:
        begun = self._begin(self._overwrites(index))
        handed = self._look(index)
        if handed is None:
            return
        self._handed[index] = handed
        for shard in self._shards_of[index]:
            self._missing[shard] -= 1
            if not self._missing[shard]:
                self._postponed.append(shard)
        if begun:
            self._hand_over_shards(self._take_postponed())

    def _take_postponed(self) -> list[int]:
        """Take the shards that are complete and not handed over."""
        complete: list[int] = []
        with contextlib.suppress(IndexError):
            while True:
                complete.append(self._postponed.popleft())
        return complete

    def flush(self) -> None:
        """Hand over what had to wait for the step before, which is finished."""
        complete = self._take_postponed()
        if complete:
            self._begin(True)
            self._hand_over_shards(complete)

    def _overwrites(self, index: int) -> bool:
        """Whether backward has added this gradient to that of the step before, which is sent yet.

        Then the others must not be added before theirs are sent.
        """
        for shard in self._shards_of[index]:
            memory = self._memory.shards[shard]
            for segment, flat in zip(memory.plan.segments, memory.flats, strict=False):
                if segment.parameter == index and flat is not None:
                    return bool(flat._version != self._versions[index])
        return False

    def _hand_over_shards(self, complete: list[int]) -> None:
        complete = [shard for shard in complete if not self._before_codes(shard)]
        for shard in complete:
            self._hand_over_shard(shard)
        ready = tuple(s for s in complete if self._memory.shards[s].plan.length)
        if ready:
            self._ready(ready)

    def _before_codes(self, shard: int) -> bool:
        """Whether a gradient was not taken, for codes had not begun: ``step()`` does both then."""
        if not (self._memory.frees and self._memory.codes(shard)):
            return False
        handed = (self._handed[s.parameter] for s in self._memory.shards[shard].plan.segments)
        return any(each is not None and not each.taken for each in handed)

    def _takes(self, index: int) -> bool:
        """Whether a parameter's gradient is taken: all of it travels as codes, which count."""
        memory = self._memory
        return memory.frees and all(memory.codes(shard) for shard in self._shards_of[index])

    def encoded(self, shard: int, flats: tuple[torch.Tensor | None, ...]) -> None:
        """Let go of gradients that were taken, where all their codes are made.

        Args:
            shard: whose code has just been made, on any thread, perhaps of the step before.
            flats: per segment what it was made of.
        """
        every = self._handed
        for segment, flat in zip(self._memory.shards[shard].plan.segments, flats, strict=True):
            index = segment.parameter
            handed = every[index]
            if handed is None or not handed.taken or handed.flat is not flat:
                continue
            shards = self._shards_of[index]
            if all(s in self._handed_shards and not self._memory.shards[s].flats for s in shards):
                every[index] = GONE

    def refuse_taken(self, what: str) -> None:
        """Refuse what cannot be done any more where a gradient of this step has been taken.

        Raises:
            StateError: one has; names its parameter.
        """
        for index, handed in enumerate(self._handed):
            if handed is not None and handed.taken:
                refuse_after_backward(what, self._memory.tensors[index].name)

    def _hand_over_shard(self, shard: int) -> None:
        flats: list[torch.Tensor | None] = []
        for segment in self._memory.shards[shard].plan.segments:
            handed = self._handed[segment.parameter]
            assert handed is not None
            flats.append(handed.flat)
        self._memory.set_gradient(shard, flats)
        self._handed_shards[shard] = None
        self._yielding.append(shard)

    def _look(self, index: int) -> Handed | None:
        """Return the parameter's gradient as it is now; its value may be on its way."""
        bound = self._memory.tensors[index]
        try:
            with torch._C.DisableTorchFunctionSubclass():
                grad = bound.tensor.grad
                flat = bound.gradient()
        except ValueError:
            raise ConfigError(
                f"gradient of {bound.name} refused: it is sparse; build the embedding with "
                "sparse=False"
            ) from None
        if grad is None or flat is None:
            return None
        if self._late():
            flat = bound.set_aside(flat)
        if self._takes(index):
            with torch._C.DisableTorchFunctionSubclass():
                bound.tensor.grad = None
            return Handed(grad, grad._version, flat, taken=True)
        digest = xxhash.xxh3_64_intdigest(as_bytes(flat)) if self._debug else 0
        return Handed(grad, grad._version, flat, digest)

    # -------------------------------------------------------------------- step

    def close(self, *, all_changed: bool = False) -> tuple[bytes, tuple[int, ...], tuple[int, ...]]:
        """Say which gradients count.

        Args:
            all_changed: whatever was handed over has changed unseen (a GradScaler unscaled it).

        Returns:
            Presence bits of all parameters, shards with a gradient, and those of them that were
            handed over with other bytes.
        """
        self.attach()
        self._postponed.clear()  # what counts is handed over below
        self.yielded = tuple(self._yielding)
        count = len(self._memory.tensors)
        bits = bytearray((count + 7) // 8)
        changed: dict[int, None] = {}
        self.altered = []
        for index in range(count):
            if not self._shards_of[index]:
                continue
            present = self._settle(index, changed, all_changed)
            if index in changed and any(s in self._handed_shards for s in self._shards_of[index]):
                self.altered.append(self._memory.tensors[index].name)
            if present:
                bits[index >> 3] |= 1 << (index & 7)
        present_shards, revised = self._settle_shards(bits, changed)
        self._learn(len(revised))
        return bytes(bits), tuple(present_shards), tuple(revised)

    def _settle(self, index: int, changed: dict[int, None], all_changed: bool) -> bool:
        """Compare one gradient with what was handed over; return whether there is one."""
        bound = self._memory.tensors[index]
        grad = bound.tensor.grad
        handed = self._handed[index]
        if handed is not None and handed.taken:
            if grad is not None:
                refuse_second(self._memory, index)
            return True
        if grad is None:
            if handed is not None:
                refuse_rewriting(self._memory, index)
                changed[index] = None
                self._handed[index] = None
            return False  # dropped, as zero_grad() does: that is no rewriting
        if handed is None:
            changed[index] = None
            self._handed[index] = self._look(index)
        elif all_changed or grad is not handed.grad or grad._version != handed.version:
            refuse_rewriting(self._memory, index)
            changed[index] = None
            self.rewritten = self.rewritten or not (all_changed or index in self._again)
            self._handed[index] = self._look(index)
        elif self._takes(index):  # codes had not begun when backward yielded it
            self._handed[index] = self._look(index)
        elif self._debug:
            handed.check_digest(bound.name)
        return True

    def _settle_shards(
        self, bits: bytearray, changed: dict[int, None]
    ) -> tuple[list[int], list[int]]:
        present_shards: list[int] = []
        revised: list[int] = []
        for shard, memory in self._memory.shards.items():
            if memory.plan.is_buffer:
                continue
            owners = [s.parameter for s in memory.plan.segments]
            if not any(bits[i >> 3] >> (i & 7) & 1 for i in owners):
                continue
            present_shards.append(shard)
            if shard in self._handed_shards and not any(i in changed for i in owners):
                continue
            flats = [h.flat if (h := self._handed[i]) is not None else None for i in owners]
            self._memory.set_gradient(shard, flats)
            if shard in self._handed_shards:
                revised.append(shard)
            self._handed_shards[shard] = None
        return present_shards, revised

    def _learn(self, revised: int) -> None:
        """Count the steps in which most of what was pushed during backward was void."""
        if revised * 2 > len(self._memory.shards):
            self._revised_steps += 1

    def learnt_order(self) -> tuple[int, ...]:
        """Return the shards in the order in which backward yielded them; empty: as planned."""
        shards = self._memory.shards.items()
        planned = [s for s, m in shards if m.plan.length and not m.plan.is_buffer]
        learnt = tuple(dict.fromkeys([*self.yielded, *planned]))
        return () if learnt == tuple(planned) else learnt

    def reachable(self) -> list[int]:
        """Return the parameters whose gradients something else could write; call after `close`."""
        sent = [(i, h) for i, h in enumerate(self._handed) if h is not None and h is not GONE]
        return reachable_gradients(sent)

    def non_finite(self) -> str:
        """Return the name of the first parameter with NaN or infinity in its gradient, or "".

        After `end_step` that is the gradient of the step on its way, where it has no update yet.
        """
        handed = {index: each.flat for index, each in enumerate(self._handed) if each is not None}
        gradients = self._memory.gradients() or handed
        for index in sorted(gradients):
            if not bool(torch.isfinite(gradients[index]).all()):
                return self._memory.tensors[index].name
        return ""
