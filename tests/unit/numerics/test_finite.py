"""Search for NaN and infinity."""

from __future__ import annotations

import math

import pytest
import torch

from paradis.numerics.finite import BLOCK_ELEMENTS, first_non_finite

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS])
def test_first_of_several_is_found(dtype: torch.dtype, bad: float, place: int) -> None:
    values = torch.ones(2 * BLOCK_ELEMENTS + 3, dtype=dtype)
    values[place] = bad
    values[-1] = -bad
    assert first_non_finite(values) == place


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_values_whose_sum_overflows_are_clean(dtype: torch.dtype) -> None:
    values = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert first_non_finite(values) is None
    assert first_non_finite(torch.empty(0, dtype=dtype)) is None


def test_infinities_that_cancel_are_found() -> None:
    assert first_non_finite(torch.tensor([1.0, math.inf, -math.inf], requires_grad=True)) == 1
