"""Makes codes of gradients, on a thread of its own while backward goes on, and beyond ``step()``.

Invariants:
* a shard is handed over with the code of the gradient it was handed in with, or not at all;
* a code that failed before ``step()`` is made again from then on: the script may have changed the
  gradient;
* a step that is left to the thread ends, or the job fails: it is committed;
* where codes count as they are made (`GroupMemory.frees`), a code is made once, or the job fails.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from paradis.errors import DeadlineExceeded, NonFiniteGradient
from paradis.numerics.elementwise import Options
from paradis.runtime.executor import start_on_one_thread
from paradis.runtime.shard_memory import ShardMemory
from paradis.runtime.worker_memory import GroupMemory
from paradis.transport.scheduling import yield_to_compute

Done = Callable[[int, int, int], None]
LetGo = Callable[[int, tuple[torch.Tensor | None, ...]], None]


_WAITING_BYTES_MAX = 64 << 20
"""Gradients that wait to be encoded and let go, before backward waits: it may be the faster one."""


class _Job(NamedTuple):
    """A code to be made: of which step, with which hyper-parameters, where to note it."""

    shard: int
    step: int
    options: Sequence[Options]
    coded: dict[int, None]


class Compressor:
    """The codes of one ``wrap`` call.

    Args:
        memory: its shards.
        hand_over: called with a shard whose code is made and its step, on the compressing thread.
        options: returns the hyper-parameters of each parameter group as they are now.
        step: returns the number of the step in progress.
        fail: called with an error, on the compressing thread, after `leave`.
        timeout_s: deadline of waits for the compressing thread.

    Attributes:
        on_done: called with (shard, begin, bytes) for each code, where spans are recorded.
        on_let_go: called with a shard whose gradients are not needed any more, and these, where
            codes count as they are made.
    """

    def __init__(
        self,
        memory: GroupMemory,
        hand_over: Callable[[tuple[int, ...], int], None],
        options: Callable[[], list[Options]],
        step: Callable[[], int],
        *,
        fail: Callable[[Exception], None],
        timeout_s: float,
    ) -> None:
        self._memory = memory
        self._hand_over = hand_over
        self._options = options
        self._step = step
        self._fail = fail
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._busy: _Job | None = None
        self._waiting_bytes = 0
        self._left = -1  # the last step that was left to the thread
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._now: list[Options] | None = None
        self._coded: dict[int, None] = {}
        self._error: Exception | None = None
        self.on_done: Done | None = None
        self.on_let_go: LetGo | None = None

    def submit(self, shards: Sequence[int]) -> None:
        """Make codes of gradients that backward has finished, and hand them over.

        Where these are let go then, wait until few are left.

        Raises:
            DeadlineExceeded: the compressing thread does not come to an end.
        """
        if self._now is None:
            self._now = self._options()
        with self._changed:
            self._add(shards, self._now)
        if self._memory.frees:
            most = _WAITING_BYTES_MAX
            self._wait_until(lambda: self._waiting_bytes <= most or self._stopped)

    def _add(self, shards: Sequence[int], options: Sequence[Options]) -> None:
        """Queue codes; the caller holds the lock."""
        step = self._step()
        self._waiting.extend(_Job(shard, step, options, self._coded) for shard in shards)
        self._waiting_bytes += sum(map(self._bytes, shards))
        self._changed.notify_all()
        if self._thread is None:
            self._thread = start_on_one_thread(self._run, "paradis-compression")

    def _run(self) -> None:
        yield_to_compute()
        while True:
            with self._changed:
                self._rest()
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                job = self._busy = self._waiting.popleft()
            try:
                self._encode(job)
            except Exception as error:
                with self._changed:
                    left = job.step <= self._left
                    self._rest()
                if left and not self._memory.frees:  # else it is made again in step()
                    self._fail(self._named(job.shard, error))
                continue
            self._hand_over((job.shard,), job.step)

    def _rest(self) -> None:
        """No code is being made any more; the caller holds the lock."""
        if self._busy is not None:
            self._waiting_bytes -= self._bytes(self._busy.shard)
        self._busy = None
        self._changed.notify_all()

    def _encode(self, job: _Job, *, empty: bool = False) -> None:
        shard, start_ns = job.shard, time.monotonic_ns()
        memory = self._memory.shards[shard]
        options = job.options[memory.plan.options_group]
        if self._memory.frees and self._memory.coded:
            self._encode_at_once(job, memory, options)
        else:
            memory.encode(options, coded=self._memory.coded, empty=empty)
        job.coded[shard] = None
        if self.on_done is not None and not empty:
            self.on_done(shard, start_ns, sum(map(len, memory.gradient)))

    def _encode_at_once(self, job: _Job, memory: ShardMemory, options: Options) -> None:
        flats = memory.flats
        try:
            memory.encode(options, coded=True, counts_in=job.step)
        except Exception as error:
            self._error = self._named(job.shard, error)
            self._fail(self._error)  # memories have changed: the script must not go on
            raise
        if self.on_let_go is not None:
            self.on_let_go(job.shard, flats)

    def leave(
        self, present: Sequence[int], revised: Collection[int], options: Sequence[Options]
    ) -> tuple[int, ...]:
        """Leave what is missing to the thread, if all that it has made counts; else `settle`.

        Gradients must stay until they have been handed over. An error is told to ``fail``.

        Args:
            present: as of `settle`.
            revised: as of `settle`.
            options: as of `settle`.

        Returns:
            The shards that will be handed over.

        Raises:
            NonFiniteGradient: as `settle`.
            DeadlineExceeded: as `settle`.
        """
        counted = dict.fromkeys(present)
        if self._error is not None:
            raise self._error
        with self._changed:
            coming = {job.shard: None for job in (self._busy, *self._waiting) if job is not None}
            made = {**self._coded, **coming}
            if not revised and all(shard in counted for shard in made):
                missing = [s for s in present if s not in made and self._memory.codes(s)]
                self._left = self._step()
                if missing:
                    self._add(missing, options)
                return (*coming, *missing)
        self.settle(present, revised, options)
        return ()

    def settle(
        self,
        present: Sequence[int],
        revised: Collection[int],
        options: Sequence[Options],
        *,
        empty: bool = False,
        lenient: bool = False,
    ) -> bool:
        """Make the codes that are missing or out of date: what counts is decided.

        Args:
            present: shards with a gradient.
            revised: those that were handed over with another one.
            options: hyper-parameters of the step.
            empty: the step will be skipped: gradients may hold anything.
            lenient: where a gradient holds NaN or infinity take zeros for now; ``step()`` looks at
                it again.

        Returns:
            Whether all gradients are finite.

        Raises:
            NonFiniteGradient: a gradient holds NaN or infinity; names its parameter.
            DeadlineExceeded: the compressing thread does not come to an end.
        """
        self._drain()
        if self._error is not None:
            raise self._error
        changed, counted = dict.fromkeys(revised), dict.fromkeys(present)
        for shard in [s for s in self._coded if s not in counted]:
            self._memory.forget(shard)  # encoded, and dropped since
            del self._coded[shard]
        finite = True
        for shard in present:
            current = shard in self._coded and shard not in changed and not empty
            if current or not self._memory.codes(shard):
                continue
            job = _Job(shard, self._step(), options, self._coded)
            try:
                self._encode(job, empty=empty)
            except NonFiniteGradient as error:
                if not lenient:
                    raise self._named(shard, error) from None
                finite = False
                self._encode(job, empty=True)
                del self._coded[shard]
        return finite

    def _bytes(self, shard: int) -> int:
        return sum(map(len, self._memory.shards[shard].value))

    def _drain(self) -> None:
        self._wait_until(lambda: not self._waiting and self._busy is None)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            done = self._changed.wait_for(ready, timeout=self._timeout_s)
        if not done:
            raise DeadlineExceeded(
                f"compression timed out after {self._timeout_s:.0f} s: {len(self._waiting)} shards "
                "are left; is the process stopped in a debugger?"
            )

    def _named(self, shard: int, error: Exception) -> Exception:
        if not isinstance(error, NonFiniteGradient):
            return error
        index = error.fields.get("segment", 0)
        assert isinstance(index, int)
        name = self._memory.shards[shard].tensors[index].name
        return NonFiniteGradient(
            f"step refused: gradient of {name}: {error.message} (compressed gradients cannot hold "
            "NaN or infinity: look at the last batch, lower the learning rate, or train without "
            "training.compression)"
        )

    def end_step(self) -> None:
        """Begin the next step; what is left of the last one goes on."""
        self._now = None
        self._coded = {}

    def stop(self) -> None:
        """End the thread; what waits is dropped. A forked child may call it."""
        self._stopped = True
        if self._thread is not None and self._thread.is_alive():
            with self._changed:
                self._changed.notify_all()
            self._thread.join(self._timeout_s)
