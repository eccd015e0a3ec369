"""The servers' numbers do not depend on how many threads torch may use."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
import torch

from paradis.numerics.elementwise import options_of
from paradis.numerics.reduce import reduce_tree, square_sum
from paradis.numerics.shard_optimizer import ShardOptimizer
from paradis.runtime.executor import Executor

LENGTH = 100_003
"""Torch splits elementwise work among threads from 32,768 elements on."""


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads that this process is set to, which numeric threads must not heed."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def update(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Reduce four contributions, update with the sum twice; return value and square sum."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(LENGTH, generator=generator).to(dtype)
    parts = [torch.randn(LENGTH, generator=generator).to(dtype) for _ in range(4)]
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.02, momentum=0.9, nesterov=True)
    optimizer = ShardOptimizer("SGD", options_of(plain.param_groups[0]), [value])
    total = torch.empty(LENGTH, dtype=dtype)
    squares = 0.0
    for _ in range(2):
        reduce_tree([parts[:2], parts[2:]], total, 4)
        squares = square_sum(total)
        optimizer.apply([total.clone()], options_of(plain.param_groups[0]))
    return value, squares


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numeric_threads_compute_alone(dtype: torch.dtype, threads: int) -> None:
    """bfloat16 is where torch would round otherwise with several threads."""
    results: queue.SimpleQueue[tuple[int, tuple[torch.Tensor, float]]] = queue.SimpleQueue()
    executor = Executor(2)
    executor.submit(lambda: results.put((torch.get_num_threads(), update(dtype))))
    count, (value, squares) = results.get(timeout=30.0)
    executor.stop()
    torch.set_num_threads(1)
    expected, squares_expected = update(dtype)
    assert count == 1
    assert torch.equal(value.view(torch.uint8), expected.view(torch.uint8))
    assert squares == squares_expected
