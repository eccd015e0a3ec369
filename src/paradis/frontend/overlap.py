"""A step that is on its way while the script goes on (overlap ``layerwise``).

Between ``begin`` and ``finish`` every trained parameter is held (`paradis.frontend.reading`) until
its last shard is in. Only one step is on its way: the next one begins with ``finish``.

A signal handler of the script may run at any place of ``step()``, and read parameters there (it
saves the model). Until the step is committed it finds the values of before, and need not wait. From
then on it waits, but not for a commit that its own thread makes when it has returned: so who waits
commits the step, too. The role takes no notice of the second time.

Compiled code holds tensors, not names. So what is on its way is finished before ``torch.compile``
compiles anything, and from then on `begin` refuses.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.utils.hooks import RemovableHandle

from paradis.errors import ParadisError
from paradis.frontend.reading import hold, release, watch_modules
from paradis.frontend.step_clock import StepClock
from paradis.frontend.unseen import UnseenCalls
from paradis.runtime.worker_memory import GroupMemory
from paradis.runtime.worker_node import WorkerNode

After = Callable[[float], None]
Explain = Callable[[ParadisError], ParadisError]


class Overlap:
    """The step of one ``wrap`` call that is on its way.

    Args:
        node: this worker.
        group: number of the call.
        memory: its tensors.
        timeout_s: deadline of every wait.

    Attributes:
        pending: whether a step is on its way.
        wait_s: seconds that readers have waited for it.
        clock: records the waits, if the job is traced.
    """

    def __init__(
        self, node: WorkerNode, group: int, memory: GroupMemory, *, timeout_s: float
    ) -> None:
        self._node = node
        self._group = group
        self._memory = memory
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._left: dict[int, int] = {}
        self._held = 0
        self._shards_of: dict[int, int] = {}
        self._owners: dict[int, tuple[int, ...]] = {}
        self._waits: dict[int, Callable[[], None]] = {}
        self._known = 0
        self._explain: Explain | None = None
        self._after: After | None = None
        self._opener = 0  # the thread that is about to commit the step
        self._post: Callable[[], None] | None = None
        self.pending = False
        self.wait_s = 0.0
        self._modules: RemovableHandle | None = None
        self.clock: StepClock | None = None

    def begin(self, *, explain: Explain, after: After) -> str:
        """Hold the parameters; the caller calls `commit` next.

        Args:
            explain: may say more about an error of the step.
            after: called by `finish` with the seconds waited.

        Returns:
            An empty text if they are held, else the reason why they are not.
        """
        if compiles():
            return "torch.compile has compiled code that reads parameters unseen"
        if self._known != len(self._memory.shards):
            self._learn()
        self._left = dict(self._shards_of)
        self._held = len(self._left)
        self._explain, self._after, self.wait_s = explain, after, 0.0
        self._opener = threading.get_ident()
        bound = None
        try:
            for index, wait in self._waits.items():
                bound = self._memory.tensors[index]
                hold(bound.tensor, wait)
            self.pending = True
            self._memory.on_arrived = self._arrived
            self._modules = watch_modules()
            _UNSEEN.watch()
            _PENDING[id(self)] = self
            _watch_compiler()
        except TypeError:
            self.drop()
            assert bound is not None
            return f"{bound.name} is of {type(bound.tensor).__qualname__}, a class of its own"
        except BaseException:  # a signal handler of the script raised
            self.drop()
            raise
        return ""

    def commit(self, post: Callable[[], None]) -> None:
        """Commit the step that `begin` has prepared.

        Args:
            post: hands the role the step; may be called several times.
        """
        self._post = post
        self._opener = 0
        post()
        self._post = None

    def _committed(self) -> bool:
        """Whether the step is committed, by this call at the latest; False before `commit`."""
        if self._opener == threading.get_ident():
            return False
        post = self._post
        if post is not None:
            post()
        return True

    @property
    def airborne(self) -> bool:
        """Whether `finish` would wait for updates; what servers have yet to say is here soon."""
        return self.pending and self._held > 0 and not self._node.answered(self._group, "step")

    @property
    def trained(self) -> frozenset[int]:
        """The parameters that a step waits for."""
        return frozenset(self._waits)

    def wait_for(self, indices: Iterable[int]) -> None:
        """Wait for some parameters of the step that is on its way.

        Raises:
            ParadisError: the step failed.
        """
        for index in indices:
            self._wait(index)

    def _learn(self) -> None:
        """Note which shards each parameter waits for; they only become more."""
        self._known = len(self._memory.shards)
        self._shards_of = {}
        for shard, memory in self._memory.shards.items():
            if memory.plan.is_buffer or not memory.plan.length:
                continue
            owners = tuple(dict.fromkeys(s.parameter for s in memory.plan.segments))
            self._owners[shard] = owners
            for index in owners:
                self._shards_of[index] = self._shards_of.get(index, 0) + 1
                self._waits[index] = partial(self._wait, index)

    def _arrived(self, shard: int) -> None:
        """A shard has its next value; on the thread that brought it in."""
        for index in self._owners.get(shard, ()):
            self._left[index] -= 1
            if not self._left[index]:
                self._held -= 1
                release(self._memory.tensors[index].tensor)

    def _wait(self, index: int) -> None:
        """Wait until one parameter is in, on whichever thread reads it."""
        if not self._committed():
            return
        start_ns = time.monotonic_ns()
        try:
            self._node.wait_until(
                lambda: self._left.get(index, 0) <= 0 or not self.pending,
                self._group, "step", timeout_s=self._timeout_s,
            )  # fmt: skip
        except ParadisError as error:
            raise self._failed(error) from None
        finally:
            self._count_wait(start_ns)

    def _count_wait(self, start_ns: int) -> None:
        self.wait_s += (time.monotonic_ns() - start_ns) / 1e9
        if self.clock is not None:
            self.clock.waited(start_ns)

    def finish(self) -> None:
        """Wait for the whole step, if one is on its way.

        Raises:
            ParadisError: the step failed; the parameters are readable as they are.
        """
        if not self.pending or not self._committed():
            return
        with self._lock:
            if not self.pending:
                return
            start_ns = time.monotonic_ns()
            try:
                self._node.wait(self._group, "step", timeout_s=self._timeout_s)
            except ParadisError as error:
                raise self._failed(error) from None
            finally:
                self._count_wait(start_ns)
            self.drop()
            assert self._after is not None
            self._after(self.wait_s)

    def _failed(self, error: ParadisError) -> ParadisError:
        self.drop()
        return self._explain(error) if self._explain is not None else error

    def drop(self) -> None:
        """Make all parameters readable as they are. Takes no lock: a forked child may call it."""
        self.pending, self._opener, self._post = False, 0, None
        if _PENDING.pop(id(self), None) is not None:
            _UNSEEN.unwatch()
        self._memory.on_arrived = None
        for index in self._left:
            release(self._memory.tensors[index].tensor)
        if self._modules is not None:
            self._modules.remove()
            self._modules = None


_PENDING: dict[int, Overlap] = {}
"""By id, what is on its way in this process."""


def finish_all(_: Any = None) -> None:
    """Finish every step that is on its way; an error is raised where the script waits next."""
    for overlap in list(_PENDING.values()):
        with contextlib.suppress(ParadisError):
            overlap.finish()


_UNSEEN = UnseenCalls(finish_all)


def compiles() -> bool:
    """Whether ``torch.compile`` has compiled something in this process.

    Compiled code holds tensors, not names: it would read one without a torch function.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return bool(getattr(utils, "counters", None))


def _watch_compiler() -> None:
    """Finish what is on its way before ``torch.compile`` looks at any parameter."""
    module = sys.modules.get("torch._dynamo.callback")
    if module is not None and finish_all not in module.callback_handler.start_callbacks:
        module.callback_handler.register_start_callback(finish_all)
