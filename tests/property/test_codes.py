"""Closed forms of codes are what codecs write; coded tensors are cut between blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.core.codes import (
    BLOCK_ELEMENTS,
    NUMBERS,
    choose_codec,
    code_bytes,
    first_coded_step,
    needs_all_codes,
    pieces_of_whole,
)
from paradis.core.layout import LayoutConfig, ParameterInfo, build
from paradis.errors import ConfigError
from paradis.numerics.coders import worker_coder
from paradis.wire.frame import CODECS_MAX

NAMES = [name for name in NUMBERS if name]


@pytest.mark.parametrize("codec", NAMES)
@settings(deadline=None)  # the first call loads kernels
@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=4))
def test_closed_forms(codec: str, lengths: list[int]) -> None:
    assert sum(code_bytes(codec, n) for n in lengths) == worker_coder(codec, lengths).code_bytes


def test_numbers_are_distinct_and_known_to_frames() -> None:
    assert sorted(NUMBERS.values()) == list(range(CODECS_MAX + 1))


def test_unknown_codec() -> None:
    with pytest.raises(ConfigError, match="'gzip' is unknown; expected one of bf16, int8"):
        code_bytes("gzip", 3)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60_000), min_size=1, max_size=8),
    coded=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_cuts_and_buckets(sizes: list[int], coded: list[bool]) -> None:
    """No shard mixes coded and whole tensors; coded ones are cut at multiples of the block."""
    infos = [
        ParameterInfo(f"p{i}", n, "float32", 4, 0, "int8" if c else "")
        for i, (n, c) in enumerate(zip(sizes, coded, strict=False))
    ]
    layout = build(infos, LayoutConfig(shard_bytes=64 << 10, bucket_bytes=32 << 10,
                                       bucket_small_bytes=16 << 10))  # fmt: skip
    layout.check()
    for shard in layout.shards:
        assert {infos[s.parameter].codec for s in shard.segments} == {shard.codec}
        if shard.codec:
            assert all(s.offset % BLOCK_ELEMENTS == 0 for s in shard.segments)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("none", "Adam", "float32", 10_000), ""),
        (("int8", "Adam", "float32", 10_000), "int8"),
        (("int8", "Adam", "float32", 4095), ""),
        (("int8", "Adam", "bfloat16", 10_000), ""),
        (("int8", "OneBitAdam", "float32", 10_000), "onebit"),
        (("none", "OneBitAdam", "float32", 100), ""),
        (("none", "DistributedLion", "float64", 1), "lion"),
        (("none", "DistributedLion", "float32", 0), ""),
    ],
)
def test_choice(arguments: tuple[str, str, str, int], wanted: str) -> None:
    assert choose_codec(*arguments, threshold=4096) == wanted


def test_first_coded_step() -> None:
    assert first_coded_step(None, done=0, frozen=False) == -1
    assert first_coded_step(None, done=500, frozen=True) == 0
    assert first_coded_step(100, done=0, frozen=False) == 100
    assert first_coded_step(100, done=30, frozen=False) == 70
    assert first_coded_step(100, done=100, frozen=False) == 0
    assert first_coded_step(100, done=150, frozen=False) == 0


@pytest.mark.parametrize(
    ("mode", "backup", "all_needed"),
    [("sync", 0, True), ("sync", 1, False), ("ssp", 0, False), ("async", 0, False)],
)
def test_a_worker_commits_before_its_codes_are_made_only_where_all_are_needed(
    mode: str, backup: int, all_needed: bool
) -> None:
    assert needs_all_codes(mode=mode, backup_workers=backup) == all_needed


def test_a_tensor_with_one_scale_must_be_whole() -> None:
    shards = [("onebit-tensor", [0, 1]), ("onebit-tensor", [1]), ("onebit", [2]), ("onebit", [2])]
    assert pieces_of_whole(shards) == {1: 2}
