"""Flat views, copies in memory order and byte views, for every layout."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.errors import ConfigError, LocalProtocolError
from paradis.numerics.memory_order import (
    as_bytes,
    copy_in_order,
    flat_view,
    from_buffer,
    same_order,
)

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4)


def permuted(shape: list[int], order: list[int], offset: int = 0) -> torch.Tensor:
    """A dense tensor whose dimension ``order[i]`` is the i-th slowest in memory."""
    count = torch.Size(shape).numel()
    base = torch.arange(count + offset, dtype=torch.float32)[offset:]
    inverse = [order.index(dim) for dim in range(len(shape))]
    return base.view([shape[dim] for dim in order]).permute(inverse)


def by_storage(tensor: torch.Tensor) -> list[float]:
    """Slow twin: elements sorted by their address."""
    pairs = []
    for index in torch.cartesian_prod(*[torch.arange(n) for n in tensor.shape]).view(
        -1, max(1, tensor.dim())
    ):
        place = sum(int(i) * s for i, s in zip(index, tensor.stride(), strict=False))
        pairs.append((place, float(tensor[tuple(int(i) for i in index)])))
    return [value for _, value in sorted(pairs)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=SHAPES, offset=st.integers(0, 3))
def test_permuted_dense_tensors_have_a_flat_view(
    data: st.DataObject, shape: list[int], offset: int
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = permuted(shape, list(order), offset)
    flat = flat_view(tensor)
    assert flat is not None and flat.shape == (tensor.numel(),)
    assert flat.data_ptr() == tensor.data_ptr()
    if tensor.dim() and tensor.numel():
        assert flat.tolist() == by_storage(tensor)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_copy_writes_any_source_in_the_order_of_like(data: st.DataObject, shape: list[int]) -> None:
    dims = range(len(shape))
    like = permuted(shape, list(data.draw(st.permutations(dims))))
    source = permuted(shape, list(data.draw(st.permutations(dims))))
    for dim in data.draw(st.sets(st.sampled_from(dims))) if shape else ():
        if shape[dim]:
            source = source.narrow(dim, 0, 1).expand_as(source)
    buffer = torch.full((like.numel() + 2,), -1.0)
    copy_in_order(source, like, buffer[1:-1])
    twin = like.clone(memory_format=torch.preserve_format)
    twin.copy_(source)
    flat = flat_view(twin)
    assert flat is not None
    assert torch.equal(buffer[1:-1], flat)
    assert buffer[0] == -1 and buffer[-1] == -1
    assert not like.numel() or same_order(like, twin)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1).expand(3),
        torch.ones(4, 4)[:, :3],
        torch.ones(6)[::2],
        torch.ones(3, 1).expand(3, 2),
        torch.ones(4, 4).as_strided((3, 3), (1, 1)),
        torch.ones(3).to_sparse(),
    ],
)
def test_no_flat_view_over_gaps_overlaps_and_sparse(tensor: torch.Tensor) -> None:
    assert flat_view(tensor) is None


def test_flat_view_of_a_parameter_is_detached_and_writes_through() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    flat = flat_view(weight)
    assert flat is not None and not flat.requires_grad
    flat[1] = 5.0
    assert weight[0, 1, 0, 0].item() == 5.0


def test_order_ignores_dimensions_of_one_element() -> None:
    weight = torch.zeros(8, 4, 1, 1)
    assert same_order(weight, weight.to(memory_format=torch.channels_last))
    wide = torch.zeros(8, 4, 3, 3)
    assert not same_order(wide, wide.to(memory_format=torch.channels_last))
    assert not same_order(wide, weight)
    assert not same_order(torch.zeros(3), torch.zeros(1).expand(3))
    assert same_order(torch.zeros(0, 3), torch.zeros(3, 0).t())
    assert same_order(torch.tensor(1.0), torch.tensor(2.0))


def test_copy_refusals() -> None:
    like = torch.zeros(2, 2)
    with pytest.raises(ConfigError, match="sparse=False"):
        copy_in_order(torch.eye(2).to_sparse(), like, torch.zeros(4))
    with pytest.raises(ConfigError, match="without overlap or gap"):
        copy_in_order(like, torch.zeros(1, 2).expand(2, 2), torch.zeros(4))
    for source, out in (
        (torch.zeros(4), torch.zeros(4)),
        (like, torch.zeros(5)),
        (like, torch.zeros(4, dtype=torch.float64)),
        (like, torch.zeros(8)[::2]),
    ):
        with pytest.raises(LocalProtocolError, match="copy refused"):
            copy_in_order(source, like, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_bytes_are_a_view_and_come_back(dtype: torch.dtype, count: int) -> None:
    tensor = (torch.arange(count) % 2).to(dtype)
    view = as_bytes(tensor)
    assert view.format == "B" and view.nbytes == count * dtype.itemsize and not view.readonly
    other = from_buffer(view, dtype)
    assert other.dtype == dtype and torch.equal(other, tensor)
    if count:
        assert other.data_ptr() == tensor.data_ptr()
    copy = from_buffer(bytearray(view), dtype)
    assert torch.equal(copy, tensor)


def test_bytes_keep_memory_alive_and_write_through() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    view = as_bytes(weight)
    view[:] = as_bytes(torch.tensor([1.0, 2.0]))
    assert weight.tolist() == [1.0, 2.0]
    del weight
    gc.collect()
    assert from_buffer(view, torch.float32).tolist() == [1.0, 2.0]


def test_buffers_that_cannot_be_tensors_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="read-only"):
        from_buffer(memoryview(b"1234"), torch.float32)
    with pytest.raises(LocalProtocolError, match="multiple of 4 bytes"):
        from_buffer(bytearray(6), torch.float32)
