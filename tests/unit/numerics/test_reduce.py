"""Reduction: errors, real block size, square sums."""

from __future__ import annotations

import math

import pytest
import torch

from paradis.errors import LocalProtocolError
from paradis.numerics.reduce import BLOCK_BYTES, SQUARE_BLOCK_ELEMENTS, reduce_tree, square_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_several_blocks_of_the_default_size(dtype: torch.dtype) -> None:
    length = 2 * BLOCK_BYTES // dtype.itemsize + 77
    parts = [torch.randn(length).to(dtype) for _ in range(4)]
    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])) / 4
    reduce_tree([parts[:2], parts[2:]], parts[3], 4)
    assert torch.equal(parts[3], expected)


def test_one_contribution_alone_is_the_sum() -> None:
    accumulator = torch.tensor([1.0, -0.0])
    reduce_tree([[], [accumulator]], accumulator, 1)
    assert accumulator.tolist() == [1.0, 0.0] and math.copysign(1, accumulator[1].item()) == -1
    reduce_tree([[accumulator]], accumulator, 1, partial=True)
    assert math.copysign(1, accumulator[1].item()) == 1


def test_parameters_that_require_grad_and_non_finite_values_pass() -> None:
    parts = [torch.tensor([1.0, math.inf, 3e38], requires_grad=True) for _ in range(2)]
    out = torch.empty(3)
    reduce_tree([parts], out, 2)
    assert out.tolist() == [1.0, math.inf, math.inf]


@pytest.mark.parametrize(
    ("groups", "divisor", "text"),
    [
        ([[], []], 2, "at least one contribution"),
        ([[torch.zeros(4)]], 0, "divisor of 1 or more, got 0"),
        ([[torch.zeros(5)]], 1, r"expected \(4,\) torch.float32, got \(5,\)"),
        ([[torch.zeros(4, dtype=torch.float64)]], 1, "got .* torch.float64"),
        ([[torch.zeros(2, 2)]], 1, r"got \(2, 2\)"),
    ],
)
def test_refusals(groups: list[list[torch.Tensor]], divisor: int, text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        reduce_tree(groups, torch.zeros(4), divisor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_square_sum_is_exact_to_float64_and_independent_of_threads(dtype: torch.dtype) -> None:
    values = torch.randn(2 * SQUARE_BLOCK_ELEMENTS + 13).to(dtype)
    expected = math.fsum(value * value for value in values.tolist())
    result = square_sum(values)
    assert result == pytest.approx(expected, rel=1e-14)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert square_sum(values) == result
    finally:
        torch.set_num_threads(threads)


def test_square_sum_does_not_overflow_float32_and_takes_nothing() -> None:
    assert square_sum(torch.tensor([1e30, 1e30])) == pytest.approx(2e60)
    assert square_sum(torch.empty(0)) == 0.0
    assert math.isnan(square_sum(torch.tensor([math.nan, 1.0])))
