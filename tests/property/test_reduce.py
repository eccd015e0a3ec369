"""The blocked reduction against the plain formula over whole tensors, bit by bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.numerics.reduce import reduce_tree

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SPECIAL = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, 1.0])


def plain_mean(groups: list[list[torch.Tensor]], divisor: int, like: torch.Tensor) -> torch.Tensor:
    """The canonical formula, a whole tensor at a time."""
    total = None
    for group in groups:
        subtotal = None
        for tensor in group:
            subtotal = tensor.clone() if subtotal is None else subtotal + tensor
        if subtotal is not None:
            total = subtotal if total is None else total + subtotal
    assert total is not None
    return total if divisor == 1 else total / divisor


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def contribution(length: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(length, generator=generator) * 10.0 ** torch.randint(
        -6, 6, (length,), generator=generator
    )
    chosen = torch.rand(length, generator=generator) < 0.3
    picks = SPECIAL[torch.randint(0, len(SPECIAL), (length,), generator=generator)]
    return torch.where(chosen, picks, values).to(dtype)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    length=st.integers(0, 700),
    block_bytes=st.sampled_from([64, 256, 1024, 1 << 20]),
    seed=st.integers(0, 2**30),
)
def test_blocked_sum_has_the_bits_of_the_plain_formula_for_every_alias(
    data: st.DataObject,
    dtype: torch.dtype,
    sizes: list[int],
    length: int,
    block_bytes: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = [[contribution(length, dtype, generator) for _ in range(size)] for size in sizes]
    flat = [tensor for group in groups for tensor in group]
    divisor = data.draw(st.sampled_from([1, 2, 3, len(flat), len(flat) + 1]))
    alias = data.draw(st.integers(-1, len(flat) - 1))
    expected = plain_mean(groups, divisor, flat[0])
    before = [tensor.clone() for tensor in flat]
    out = flat[alias] if alias >= 0 else torch.full((length,), float("nan"), dtype=dtype)

    reduce_tree(groups, out, divisor, block_bytes=block_bytes)

    assert same_bits(out, expected)
    for index, tensor in enumerate(flat):
        assert index == alias or same_bits(tensor, before[index])


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    length=st.integers(1, 200),
    seed=st.integers(0, 2**30),
)
def test_partial_sum_equals_the_sum_with_zeros_in_place_of_the_absent(
    data: st.DataObject, dtype: torch.dtype, sizes: list[int], length: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    members = sum(sizes)
    absent = data.draw(st.sets(st.integers(0, members - 1), min_size=1, max_size=members))
    if len(absent) == members:
        absent.discard(min(absent))
    zeros = torch.zeros(length, dtype=dtype)
    full: list[list[torch.Tensor]] = []
    given_only: list[list[torch.Tensor]] = []
    number = 0
    for size in sizes:
        full.append([])
        given_only.append([])
        for _ in range(size):
            tensor = contribution(length, dtype, generator)
            full[-1].append(zeros if number in absent else tensor)
            if number not in absent:
                given_only[-1].append(tensor)
            number += 1
    expected = plain_mean(full, members, zeros)
    out = next(tensor for group in given_only for tensor in group)

    reduce_tree(given_only, out, members, partial=bool(absent), block_bytes=256)

    assert same_bits(out, expected)
