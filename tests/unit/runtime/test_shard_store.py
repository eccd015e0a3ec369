"""Sums of codes over the canonical tree, whichever of its branches are empty."""

from __future__ import annotations

import pytest
import torch

from paradis.core.codes import code_bytes
from paradis.numerics.coders import worker_coder
from paradis.runtime.shard_store import ShardStore, split_sections
from paradis.wire.messages import ParameterSpec, Plan, Segment, ShardPlan

LENGTH = 1500


@pytest.fixture
def store() -> ShardStore:
    """One shard in bf16, which small whole numbers fit without loss."""
    shard = ShardPlan(
        shard=0, server="server-0", dtype="float32", length=LENGTH, options_group=0, priority=0,
        segments=(Segment(0, 0, LENGTH, 0),), codec="bf16", code_bytes=code_bytes("bf16", LENGTH),
    )  # fmt: skip
    spec = ParameterSpec(name="w", shape=(LENGTH,), dtype="float32", options_group=0)
    plan = Plan(
        generation=1, group=0, part=0, first_parameter=0, parameters=(spec,), optimizer="SGD",
        options=[{"lr": 0.1}], shards=(shard,), step=0, coded_from=0,
    )  # fmt: skip
    store = ShardStore()
    store.open(plan, (shard,))
    return store


def code_of(number: float) -> torch.Tensor:
    coder = worker_coder("bf16", [LENGTH])
    code = torch.empty(coder.code_bytes, dtype=torch.uint8)
    coder.encode([torch.full((LENGTH,), number)], code, {})
    return code


@pytest.mark.parametrize(
    "groups",
    [
        [[1, 2, 3]],
        [[1], [2, 3]],
        [[1, 2], [3], []],
        [[], [1, 2], [3]],
        [[], [], [6]],
        [[1], [], [2], [], [3]],
    ],
)
def test_sum_over_the_tree(store: ShardStore, groups: list[list[int]]) -> None:
    total = torch.full((LENGTH,), 99.0)
    codes = [[code_of(float(n)) for n in group] for group in groups]
    store.sum_codes(0, codes, total.view(torch.uint8), 2)
    assert torch.equal(total, torch.full((LENGTH,), 3.0))


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1])
def test_what_codes_start_from_travels_in_sections(length: int) -> None:
    """Two bytes an element of the one, four of the other, and a shard of an odd length."""
    shard = ShardPlan(
        shard=0, server="server-0", dtype="float32", length=length, options_group=0, priority=0,
        segments=(Segment(0, 0, length, 0),), codec="onebit",
        code_bytes=code_bytes("onebit", length),
    )  # fmt: skip
    spec = ParameterSpec(name="w", shape=(length,), dtype="float32", options_group=0)
    options = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    plan = Plan(
        generation=1, group=0, part=0, first_parameter=0, parameters=(spec,),
        optimizer="OneBitAdam", options=[options], shards=(shard,), step=0, coded_from=1,
    )  # fmt: skip
    store = ShardStore()
    store.open(plan, (shard,))
    full = torch.randn(length)
    store.apply(0, full.view(torch.uint8), options, [True], 1.0)
    before = store.state_bytes()
    store.begin_codes(0, [options])
    keys, dtypes, scalars, buffers = store.memory_sections(0)
    assert store.state_bytes() < before, "the coder has taken over what it needs"
    assert dict(zip(keys, dtypes, strict=True)) == {"momentum": "float32", "inverse": "bfloat16"}
    assert not scalars and sum(map(len, buffers)) == length * (4 + 2)
    data = torch.frombuffer(bytearray(b"".join(buffers)), dtype=torch.uint8)
    columns = split_sections(data, shard, keys, dtypes)
    worker = worker_coder("onebit", [length])
    worker.load_memories({key: [column] for key, column in columns.items()})
    variance = full.square()
    expected = 1.0 / variance.clamp(min=1e-3 * float(variance.median())).sqrt()
    assert torch.allclose(columns["inverse"].float(), expected, rtol=0.005)
    assert torch.allclose(columns["momentum"], full * 0.1)
