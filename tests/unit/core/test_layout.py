"""Layout: cuts, buckets, empty tensors, priorities, refusals."""

import pytest

from paradis.core.layout import (
    LayoutConfig,
    ParameterInfo,
    SegmentLayout,
    build,
    element_bytes,
    with_order,
)
from paradis.errors import ConfigError

SMALL = LayoutConfig(shard_bytes=65536, bucket_bytes=8192, bucket_small_bytes=1024)


def info(name: str, numel: int, dtype: str = "float32", group: int = 0) -> ParameterInfo:
    return ParameterInfo(name, numel, dtype, element_bytes(dtype), group)


def test_large_tensor_is_cut_near_equal_at_64() -> None:
    layout = build([info("w", 16384 * 2 + 1)], SMALL, group=3, part=1)
    assert [s.key for s in layout.shards] == ["g3/p1/w/0", "g3/p1/w/1", "g3/p1/w/2"]
    assert [s.segments for s in layout.shards] == [
        (SegmentLayout(0, 0, 10944, 0),),
        (SegmentLayout(0, 10944, 10944, 0),),
        (SegmentLayout(0, 21888, 10881, 0),),
    ]


def test_tensor_of_exactly_shard_bytes_is_whole() -> None:
    assert len(build([info("w", 16384)], SMALL).shards) == 1
    assert len(build([info("w", 16385)], SMALL).shards) == 2


def test_bucket_aligns_and_counts_padding() -> None:
    layout = build([info("a", 3), info("b", 20), info("c", 5)], SMALL)
    (shard,) = layout.shards
    assert shard.key == "g0/p0/c/0"
    assert shard.segments == (
        SegmentLayout(2, 0, 5, 0),
        SegmentLayout(1, 0, 20, 16),
        SegmentLayout(0, 0, 3, 48),
    )
    assert shard.length == 51
    assert layout.bytes_of(shard) == 204


def test_bucket_closes_when_full() -> None:
    layout = build([info(f"p{i}", 256) for i in range(9)], SMALL)
    assert [len(s.segments) for s in layout.shards] == [8, 1]


def test_buckets_split_by_dtype_group_and_buffers_come_last() -> None:
    layout = build(
        [info("a", 1), info("b", 1, "float64"), info("c", 1, group=1), info("mean", 1, group=-1)],
        SMALL,
    )
    assert [(s.dtype, s.options_group) for s in layout.shards] == [
        ("float32", 1),
        ("float64", 0),
        ("float32", 0),
        ("float32", -1),
    ]


def test_empty_parameters_have_a_segment() -> None:
    (shard,) = build([info("e", 0), info("f", 0)], SMALL).shards
    assert shard.length == 0
    assert [s.parameter for s in shard.segments] == [1, 0]
    assert build([], SMALL).shards == ()


def test_bucket_takes_the_place_of_its_last_member() -> None:
    layout = build([info("bias0", 1), info("w", 4000), info("bias1", 1)], SMALL)
    assert [s.key for s in layout.shards] == ["g0/p0/w/0", "g0/p0/bias1/0"]


def test_first_parameter_shifts_indices() -> None:
    layout = build([info("a", 1), info("w", 4000)], SMALL, first_parameter=10)
    assert [s.segments[0].parameter for s in layout.shards] == [11, 10]
    layout.check()


def test_learnt_order_changes_priorities_only() -> None:
    layout = build([info("a", 4000), info("b", 40000), info("c", 4000)], SMALL)
    assert [s.key[6:] for s in layout.shards] == ["c/0", "b/0", "b/1", "b/2", "a/0"]
    learnt = with_order(layout, [1, 0])
    assert [s.key[6:] for s in learnt.shards] == ["b/0", "b/1", "b/2", "a/0", "c/0"]
    assert {(s.key, s.segments) for s in learnt.shards} == {
        (s.key, s.segments) for s in layout.shards
    }
    learnt.check()
    for bad in ([1, 1], [3]):
        with pytest.raises(ConfigError, match="admission order"):
            with_order(layout, bad)


@pytest.mark.parametrize(
    "values",
    [
        {"shard_bytes": 65535},
        {"shard_bytes": 65536 + 64},
        {"shard_bytes": 32768},
        {"bucket_bytes": 8 << 10},
        {"bucket_small_bytes": -1},
        {"bucket_small_bytes": 2 << 20},
        {"cut_elements": 63},
        {"cut_elements": 0},
        {"cut_elements": 8192},
        {"alignment_bytes": 48},
        {"alignment_bytes": 0},
    ],
)
def test_bad_config_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="refused"):
        LayoutConfig(**values)


def test_bad_parameters_refused() -> None:
    with pytest.raises(ConfigError, match="'a' is registered twice"):
        build([info("a", 1), info("a", 2)])
    with pytest.raises(ConfigError, match="'a' refused"):
        ParameterInfo("a", -1, "float32", 4, 0)
    with pytest.raises(ConfigError, match="'float3' is unknown"):
        element_bytes("float3")
