"""Layout under any list of parameters: every element once, and every rule of shards."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.core.layout import LayoutConfig, ParameterInfo, build, element_bytes, with_order

NUMEL = st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.sampled_from([0, 64, 16384]))
SHAPES = st.lists(
    st.tuples(
        NUMEL,
        st.sampled_from(["float32", "float64", "bfloat16", "uint8", "complex128"]),
        st.sampled_from([-1, 0, 0, 1]),
    ),
    max_size=12,
)
CONFIGS = st.builds(
    lambda shard, bucket, small, cut: LayoutConfig(
        shard_bytes=shard, bucket_bytes=bucket, bucket_small_bytes=small, cut_elements=cut
    ),
    st.sampled_from([65536, 65536 + 512, 131072]),
    st.sampled_from([4096, 5000, 1 << 20]),
    st.sampled_from([0, 100, 4096]),
    st.sampled_from([64, 128, 4096]),
)


def infos(shapes: list[tuple[int, str, int]]) -> list[ParameterInfo]:
    return [
        ParameterInfo(f"p{i}", numel, dtype, element_bytes(dtype), group)
        for i, (numel, dtype, group) in enumerate(shapes)
    ]


@settings(max_examples=150, deadline=None)
@given(SHAPES, CONFIGS)
def test_every_rule(shapes: list[tuple[int, str, int]], config: LayoutConfig) -> None:
    parameters = infos(shapes)
    layout = build(parameters, config)
    layout.check()
    covered: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(parameters))}
    for shard in layout.shards:
        whole = len(shard.segments) == 1
        limit = config.shard_bytes if whole else config.bucket_bytes_max
        assert layout.bytes_of(shard) <= limit
        end = 0
        for s in shard.segments:
            info = parameters[s.parameter]
            assert (info.dtype, info.options_group) == (shard.dtype, shard.options_group)
            assert s.start * info.element_bytes % 64 == 0
            assert (s.start - end) * info.element_bytes < 64  # no more padding than alignment
            assert whole or info.bytes <= config.bucket_small_bytes
            assert s.offset % config.cut_elements == 0
            end = s.start + s.length
            covered[s.parameter].append((s.offset, s.length))
        assert shard.length == end
    for index, pieces in covered.items():
        numel = parameters[index].numel
        assert pieces
        assert sorted(pieces)[0][0] == 0
        starts = [offset for offset, _ in sorted(pieces)] + [numel]
        assert [b - a for a, b in zip(starts, starts[1:], strict=False)] == [
            n for _, n in sorted(pieces)
        ]
        lengths = [length for _, length in pieces]
        assert max(lengths) - min(lengths) < 2 * config.cut_elements
    assert [s.priority for s in layout.shards] == list(range(len(layout.shards)))
    buffers = [s.options_group < 0 for s in layout.shards]
    assert buffers == sorted(buffers)
    assert len({s.key for s in layout.shards}) == len(layout.shards)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.data())
def test_learnt_order_sorts_by_last_member(
    shapes: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    parameters = infos(shapes)
    layout = build(parameters, LayoutConfig(shard_bytes=65536))
    learnt_order = data.draw(st.permutations(range(len(parameters))))
    learnt = with_order(layout, learnt_order)
    learnt.check()
    ready = [
        max(learnt_order.index(s.parameter) for s in shard.segments)
        for shard in learnt.shards
        if shard.options_group >= 0
    ]
    assert ready == sorted(ready)
    expected = with_order(layout, list(reversed(range(len(parameters)))))
    assert expected == layout
