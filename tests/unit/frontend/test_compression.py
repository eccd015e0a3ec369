"""Codes are made once per gradient, beside backward, and leave no trace of what is dropped."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from paradis.core.codes import code_bytes
from paradis.errors import NonFiniteGradient, StateError
from paradis.frontend import compression
from paradis.frontend.compression import Compressor
from paradis.runtime.bound_tensor import BoundTensor
from paradis.runtime.worker_memory import GroupMemory
from paradis.wire.messages import Segment, ShardPlan

LENGTH = 2000
OPTIONS = [{"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.0}]


def memory_of(codec: str, *, frees: bool = False) -> GroupMemory:
    memory = GroupMemory(detect_changes=False, frees=frees)
    memory.tensors.append(BoundTensor("w", torch.nn.Parameter(torch.zeros(LENGTH))))
    memory.add((
        ShardPlan(
            shard=0, server="server-0", dtype="float32", length=LENGTH, options_group=0, priority=0,
            segments=(Segment(0, 0, LENGTH, 0),), codec=codec,
            code_bytes=code_bytes(codec, LENGTH) if codec else 0,
        ),
    ))  # fmt: skip
    memory.coded = True
    return memory


@pytest.fixture
def handed() -> threading.Event:
    return threading.Event()


def compressor_of(
    memory: GroupMemory, handed: threading.Event, failures: queue.Queue[Exception] | None = None
) -> Compressor:
    failed = failures if failures is not None else queue.Queue()
    return Compressor(
        memory, lambda *_: handed.set(), lambda: list(OPTIONS), lambda: 3, fail=failed.put,
        timeout_s=30.0,
    )  # fmt: skip


@pytest.fixture(params=["int8", "lion"])
def memory(request: pytest.FixtureRequest) -> Iterator[GroupMemory]:
    yield memory_of(request.param)


def own(memory: GroupMemory) -> list[torch.Tensor]:
    coder = memory.shards[0].coder
    assert coder is not None
    return [t.clone() for pieces in coder.own().values() for t in pieces]


def test_encoded_beside_backward_and_not_again(
    memory: GroupMemory, handed: threading.Event
) -> None:
    compressor = compressor_of(memory, handed)
    memory.set_gradient(0, [torch.randn(LENGTH)])
    compressor.submit([0])
    assert handed.wait(30.0)
    code = memory.shards[0].gradient[0]
    assert compressor.settle([0], [], OPTIONS)
    assert memory.shards[0].gradient[0] is code
    compressor.stop()


def test_a_changed_gradient_has_a_code_of_its_own(
    memory: GroupMemory, handed: threading.Event
) -> None:
    """The memory that the first code lies in may be on its way: it is not written again."""
    compressor = compressor_of(memory, handed)
    memory.set_gradient(0, [torch.ones(LENGTH)])
    compressor.settle([0], [], OPTIONS)
    first = memory.shards[0].gradient[0]
    before = bytes(first)
    memory.set_gradient(0, [-torch.ones(LENGTH)])
    compressor.settle([0], [0], OPTIONS)
    assert bytes(first) == before != bytes(memory.shards[0].gradient[0])


def test_a_dropped_gradient_leaves_no_trace(memory: GroupMemory, handed: threading.Event) -> None:
    """Another worker has a gradient of it, so an update comes, and what was encoded is kept."""
    compressor = compressor_of(memory, handed)
    before = own(memory)
    memory.set_gradient(0, [torch.randn(LENGTH)])
    compressor.settle([0], [], OPTIONS)
    compressor.settle([], [], OPTIONS)
    shard = memory.shards[0]
    assert shard.coder is not None
    answer = torch.zeros(shard.coder.code_bytes, dtype=torch.uint8)
    shard.step(answer, [True], OPTIONS[0])
    assert all(torch.equal(a, b) for a, b in zip(before, own(memory), strict=True))


def test_nan_is_named_or_looked_at_later(memory: GroupMemory, handed: threading.Event) -> None:
    compressor = compressor_of(memory, handed)
    memory.set_gradient(0, [torch.full((LENGTH,), torch.nan)])
    assert not compressor.settle([0], [], OPTIONS, lenient=True)
    assert not any(bytes(memory.shards[0].gradient[0]))
    with pytest.raises(NonFiniteGradient, match="gradient of w"):
        compressor.settle([0], [], OPTIONS)
    assert compressor.settle([0], [], OPTIONS, empty=True)


def held_back(memory: GroupMemory) -> threading.Lock:
    """Return a lock that the compressing thread waits for."""
    lock = memory.shards[0].lock
    lock.acquire()
    return lock


def test_a_step_is_left_before_its_codes_are_made(
    memory: GroupMemory, handed: threading.Event
) -> None:
    """What is said of its end is the thread's affair; the next step's codes are counted anew."""
    compressor = compressor_of(memory, handed)
    lock = held_back(memory)
    memory.set_gradient(0, [torch.randn(LENGTH)])
    compressor.submit([0])
    assert compressor.leave([0], [], OPTIONS) == (0,)
    compressor.end_step()
    assert not handed.is_set()
    lock.release()
    assert handed.wait(30.0)
    first = memory.shards[0].gradient[0]
    memory.set_gradient(0, [torch.randn(LENGTH)])
    compressor.settle([0], [], OPTIONS)
    assert memory.shards[0].gradient[0] is not first
    compressor.stop()


def test_what_backward_did_not_hand_over_is_left_too(
    memory: GroupMemory, handed: threading.Event
) -> None:
    compressor = compressor_of(memory, handed)
    memory.set_gradient(0, [torch.randn(LENGTH)])
    assert compressor.leave([0], [], OPTIONS) == (0,)
    assert handed.wait(30.0)
    assert compressor.leave([0], [], OPTIONS) == (), "it is made"
    compressor.stop()


def test_a_job_without_codes_has_no_thread_for_them(handed: threading.Event) -> None:
    compressor = compressor_of(memory_of(""), handed)
    before = threading.active_count()
    assert compressor.leave([0], [], OPTIONS) == ()
    assert threading.active_count() == before


@pytest.mark.parametrize(("present", "revised"), [([0], [0]), ([], [])])
def test_a_code_that_does_not_count_is_not_left(
    memory: GroupMemory, handed: threading.Event, present: list[int], revised: list[int]
) -> None:
    compressor = compressor_of(memory, handed)
    memory.set_gradient(0, [torch.ones(LENGTH)])
    compressor.submit([0])
    assert handed.wait(30.0)
    first = memory.shards[0].gradient[0]
    memory.set_gradient(0, [-torch.ones(LENGTH)])
    assert compressor.leave(present, revised, OPTIONS) == ()
    assert (memory.shards[0].gradient[0] is first) == (not present)
    compressor.stop()


def test_nan_in_a_step_that_was_left_fails_the_job(
    memory: GroupMemory, handed: threading.Event
) -> None:
    failures: queue.Queue[Exception] = queue.Queue()
    compressor = compressor_of(memory, handed, failures)
    lock = held_back(memory)
    memory.set_gradient(0, [torch.full((LENGTH,), torch.nan)])
    compressor.submit([0])
    compressor.leave([0], [], OPTIONS)
    lock.release()
    error = failures.get(timeout=30.0)
    assert isinstance(error, NonFiniteGradient) and "gradient of w" in error.message
    assert not handed.is_set()
    compressor.stop()


def test_nan_is_no_failure_before_the_step_is_closed(
    memory: GroupMemory, handed: threading.Event
) -> None:
    """The script may mend its gradient between backward and ``step()``."""
    failures: queue.Queue[Exception] = queue.Queue()
    compressor = compressor_of(memory, handed, failures)
    memory.set_gradient(0, [torch.full((LENGTH,), torch.nan)])
    compressor.submit([0])
    with pytest.raises(NonFiniteGradient):
        compressor.settle([0], [], OPTIONS)
    memory.set_gradient(0, [torch.ones(LENGTH)])
    assert compressor.leave([0], [], OPTIONS) == (0,)
    assert handed.wait(30.0) and failures.empty()
    compressor.stop()


def test_other_threads_keep_their_number_of_threads(
    memory: GroupMemory, handed: threading.Event
) -> None:
    compressor = compressor_of(memory, handed)
    before = torch.get_num_threads()
    memory.set_gradient(0, [torch.randn(LENGTH)])
    compressor.submit([0])
    assert handed.wait(30.0)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join(30.0)
    assert found == [before]
    compressor.stop()


def freeing_memory() -> GroupMemory:
    memory = memory_of("onebit", frees=True)
    coder = memory.shards[0].coder
    assert coder is not None
    coder.load_memories({"momentum": [torch.zeros(LENGTH)],
                         "inverse": [torch.ones(LENGTH, dtype=torch.bfloat16)]})  # fmt: skip
    return memory


def test_a_gradient_is_let_go_with_its_code(handed: threading.Event) -> None:
    """Where codes count as they are made; backward waits where many wait to be."""
    memory, let_go = freeing_memory(), []
    compressor = compressor_of(memory, handed)
    compressor.on_let_go = lambda shard, flats: let_go.append((shard, flats))
    gradient = torch.randn(LENGTH)
    alone = uses(gradient)
    memory.set_gradient(0, [gradient])
    compressor.submit([0])
    assert handed.wait(30.0)
    assert [(shard, flats[0] is gradient) for shard, flats in let_go] == [(0, True)]
    let_go.clear()
    assert compressor.settle([0], [], OPTIONS)
    assert uses(gradient) == alone and not memory.gradients() and not let_go
    shard = memory.shards[0]
    assert shard.encoded_step == 3 and len(shard.gradient[0]) == code_bytes("onebit", LENGTH)
    before = own(memory)
    shard.step(torch.zeros(code_bytes("onebit", LENGTH), dtype=torch.uint8), [True], OPTIONS[0])
    assert torch.equal(before[0], own(memory)[0]) and bool(before[0].any())
    assert [section.key for section in shard.sections(1, 4)] == ["onebit.error.1"]
    with pytest.raises(StateError, match="worker 1 have left out after 3 steps is gone.*step 3;"):
        shard.sections(1, 3)
    compressor.stop()


def test_backward_waits_where_gradients_wait(
    handed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_WAITING_BYTES_MAX", 4 * LENGTH - 1)
    memory = freeing_memory()
    compressor = compressor_of(memory, handed)
    lock = held_back(memory)
    memory.set_gradient(0, [torch.randn(LENGTH)])
    waits, wait_until = threading.Event(), compressor._wait_until

    def told(ready: Callable[[], bool]) -> None:
        waits.set()
        wait_until(ready)

    monkeypatch.setattr(compressor, "_wait_until", told)
    backward = threading.Thread(target=compressor.submit, args=([0],))
    backward.start()
    assert waits.wait(30.0) and backward.is_alive() and not handed.is_set()
    lock.release()
    backward.join(30.0)
    assert not backward.is_alive() and compressor._waiting_bytes == 0
    compressor.stop()


@pytest.mark.parametrize("closing", ["settle", "leave"])
def test_nan_where_codes_count_at_once_fails_the_job(handed: threading.Event, closing: str) -> None:
    """Nothing can be mended then: neither end of the step goes on."""
    failures: queue.Queue[Exception] = queue.Queue()
    memory = freeing_memory()
    compressor = compressor_of(memory, handed, failures)
    memory.set_gradient(0, [torch.full((LENGTH,), torch.nan)])
    compressor.submit([0])
    error = failures.get(timeout=30.0)
    assert isinstance(error, NonFiniteGradient) and "gradient of w" in error.message
    memory.set_gradient(0, [torch.ones(LENGTH)])
    with pytest.raises(NonFiniteGradient, match="gradient of w"):
        getattr(compressor, closing)([0], [], OPTIONS)
    assert not handed.is_set()
    compressor.stop()


@pytest.mark.parametrize("codec", ["", "onebit"])
def test_a_gradient_is_let_go_with_its_update(codec: str) -> None:
    """Coded or in full: the script's own reference is the last one."""
    memory = memory_of(codec)
    shard = memory.shards[0]
    start = {"momentum": [torch.zeros(LENGTH)], "inverse": [torch.ones(LENGTH)]}
    if shard.coder is not None:
        shard.coder.load_memories(start)
    gradient = torch.randn(LENGTH)
    alone = uses(gradient)
    memory.set_gradient(0, [gradient])
    assert list(memory.gradients()) == [0]
    if shard.coder is not None:
        shard.encode(OPTIONS[0], coded=True)
        answer = torch.zeros(shard.coder.code_bytes, dtype=torch.uint8)
        shard.step(answer, [True], OPTIONS[0])
        assert bool(shard.coder.own()["error"][0].any()), "its code counts"
    memory.let_go(0)
    assert uses(gradient) == alone
    assert not memory.gradients() and not shard.gradient


def uses(tensor: torch.Tensor) -> tuple[int, int]:
    """Who holds a tensor, and who its memory."""
    storage = tensor.untyped_storage()._cdata
    return sys.getrefcount(tensor), torch._C._storage_Use_Count(storage)  # type: ignore[attr-defined]


def test_a_step_that_does_not_count_lets_go_too() -> None:
    memory = memory_of("onebit")
    memory.set_gradient(0, [torch.randn(LENGTH)])
    memory.kept(0)
    assert not memory.gradients()
