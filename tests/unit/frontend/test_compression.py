"""Codes are made once per gradient, beside backward, and leave no trace of what is dropped."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from paradis.core.codes import code_bytes
from paradis.errors import NonFiniteGradient
from paradis.frontend.compression import Compressor
from paradis.runtime.bound_tensor import BoundTensor
from paradis.runtime.worker_memory import GroupMemory
from paradis.wire.messages import Segment, ShardPlan

LENGTH = 2000
OPTIONS = [{"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.0}]


def memory_of(codec: str) -> GroupMemory:
    memory = GroupMemory(detect_changes=False)
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


def compressor_of(memory: GroupMemory, handed: threading.Event) -> Compressor:
    return Compressor(memory, lambda _: handed.set(), lambda: list(OPTIONS), timeout_s=30.0)


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
