"""How parameters become shards: large ones are cut, small ones share buckets, others stand alone.

Invariant: every element of every parameter lies in exactly one segment, every parameter (an empty
one too) has at least one; a bucket holds one dtype, one options group and
one codec; cuts are at multiples
of `LayoutConfig.cut_elements` within the parameter, so that vectorised kernels see the same tails
as on the whole tensor; a segment starts at a multiple of `LayoutConfig.alignment_bytes` in its
shard. Elements of a shard that no segment covers are padding: always zero, counted in its length.

Priority is the place in admission order, the order in which backward yields shards: that of a
bucket is set by its last member. Until it is learnt, backward is expected to run through the
parameters in reverse registration order. Module buffers have no gradient and come last.

Source: tensor partitioning and priority as in Peng et al. (ByteScheduler), SOSP 2019; buckets as
in Li et al. (PyTorch DDP), VLDB 2020. We differ: cuts keep the tails of vectorised kernels.

    >>> names = [("fc.weight", 30_000_000), ("fc.bias", 10), ("norm.weight", 20)]
    >>> layout = build([ParameterInfo(n, size, "float32", 4, 0) for n, size in names])
    >>> len(layout.shards), layout.shards[0].key, layout.shards[0].length
    (30, 'g0/p0/norm.weight/0', 42)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from paradis.errors import ConfigError

_ELEMENT_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8,
    "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}  # fmt: skip


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype, named as torch does, without ``torch.``.

    Raises:
        ConfigError: unknown dtype.
    """
    try:
        return _ELEMENT_BYTES[dtype]
    except KeyError:
        raise ConfigError(
            f"dtype {dtype!r} is unknown; expected one of {', '.join(sorted(_ELEMENT_BYTES))}"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConfig:
    """How large shards are.

    Attributes:
        shard_bytes: most bytes of a shard; 4 MiB hides the cost per message on a 25 Gb/s link and
            still gives a model of 100 MB enough shards to balance.
        bucket_bytes: most bytes of a bucket of small tensors, and never more than `shard_bytes`;
            a bucket waits for its last member, so it is smaller than a shard.
        bucket_small_bytes: a tensor of at most these bytes that fits a bucket goes into one.
        cut_elements: cuts are at multiples of this; 64 covers AVX-512 on every dtype.
        alignment_bytes: segment starts, a cache line.
    """

    shard_bytes: int = 4 << 20
    bucket_bytes: int = 1 << 20
    bucket_small_bytes: int = 256 << 10
    cut_elements: int = 64
    alignment_bytes: int = 64

    def __post_init__(self) -> None:
        if self.shard_bytes < 64 << 10 or self.shard_bytes % 512:
            raise ConfigError(
                f"shard_bytes refused: expected a multiple of 512 from 65536 on, got "
                f"{self.shard_bytes}; try 4 MiB"
            )
        if not 0 <= self.bucket_small_bytes <= self.bucket_bytes:
            raise ConfigError(
                "bucket sizes refused: expected 0 <= bucket_small_bytes <= bucket_bytes, got "
                f"{self.bucket_small_bytes} and {self.bucket_bytes}; try 256 KiB and 1 MiB"
            )
        # 16 bytes is the largest element: one cut must fit into the smallest shard.
        if self.cut_elements < 64 or self.cut_elements % 64 or self.cut_elements > 4096:
            raise ConfigError(
                "cut_elements refused: expected a multiple of 64 in [64, 4096], got "
                f"{self.cut_elements}; 64 is right for all known CPUs"
            )
        if self.alignment_bytes < 1 or self.alignment_bytes & (self.alignment_bytes - 1):
            raise ConfigError(
                f"alignment_bytes refused: expected a power of two, got {self.alignment_bytes}; "
                "try 64"
            )

    @property
    def bucket_bytes_max(self) -> int:
        """The bound of a bucket that holds."""
        return min(self.bucket_bytes, self.shard_bytes)


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter or module buffer, as far as the layout cares.

    Attributes:
        numel: number of elements, 0 allowed.
        dtype: name without ``torch.``.
        element_bytes: bytes of one element, 1 to 16.
        options_group: index of its parameter group; -1 for a module buffer.
        codec: how it travels, empty: in full.
    """

    name: str
    numel: int
    dtype: str
    element_bytes: int
    options_group: int
    codec: str = ""

    def __post_init__(self) -> None:
        if self.numel < 0 or not 1 <= self.element_bytes <= 16 or self.options_group < -1:
            raise ConfigError(
                f"parameter {self.name!r} refused: {self.numel} elements of {self.element_bytes} "
                f"bytes in options group {self.options_group}; register a plain tensor"
            )

    @property
    def bytes(self) -> int:
        """Size without padding."""
        return self.numel * self.element_bytes


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """A piece of one parameter inside a shard; all numbers in elements.

    Attributes:
        parameter: index within the group of the ``wrap`` call, over all parts.
        offset: first element within the parameter.
        start: first element within the shard.
    """

    parameter: int
    offset: int
    length: int
    start: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One shard.

    Attributes:
        key: unique and stable, ``g<group>/p<part>/<first parameter>/<piece>``.
        length: elements, padding between segments included.
        priority: place in admission order within the part, 0 first.
    """

    key: str
    dtype: str
    length: int
    segments: tuple[SegmentLayout, ...]
    options_group: int
    priority: int
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """The shards of one registered part, by priority.

    Attributes:
        first_parameter: index of ``parameters[0]`` within the group.
    """

    parameters: tuple[ParameterInfo, ...]
    first_parameter: int
    shards: tuple[ShardLayout, ...]

    def bytes_of(self, shard: ShardLayout) -> int:
        """Return the size of a shard of this layout, padding included."""
        first = self.parameters[shard.segments[0].parameter - self.first_parameter]
        return shard.length * first.element_bytes

    def check(self) -> None:
        """Assert the invariants of the module."""
        pieces: dict[int, list[tuple[int, int]]] = {}
        for place, shard in enumerate(self.shards):
            assert shard.priority == place and shard.segments
            end = 0
            for s in shard.segments:
                info = self.parameters[s.parameter - self.first_parameter]
                assert (info.dtype, info.options_group) == (shard.dtype, shard.options_group)
                assert info.codec == shard.codec
                assert s.start >= end and s.length >= 0
                end = s.start + s.length
                pieces.setdefault(s.parameter, []).append((s.offset, s.length))
            assert shard.length == end
        assert len({shard.key for shard in self.shards}) == len(self.shards)
        for index, info in enumerate(self.parameters, self.first_parameter):
            reached = 0
            for offset, length in sorted(pieces[index]):
                assert offset == reached
                reached += length
            assert reached == info.numel


@dataclass(slots=True)
class _Draft:
    """A shard in the making; ``last`` is the largest place of a member in expected order."""

    key: str
    info: ParameterInfo
    segments: list[SegmentLayout]
    length: int
    last: int


def build(
    parameters: Sequence[ParameterInfo],
    config: LayoutConfig | None = None,
    *,
    group: int = 0,
    part: int = 0,
    first_parameter: int = 0,
) -> Layout:
    """Return the shards of one registered part.

    Args:
        parameters: in registration order, names unique.
        config: sizes; the defaults if None.
        group: number of the ``wrap`` call, for the keys.
        part: number of the registration within the group, for the keys.
        first_parameter: index of the first parameter within the group.

    Raises:
        ConfigError: a name is there twice.
    """
    config = config or LayoutConfig()
    _check_names(parameters)
    drafts: list[_Draft] = []
    open_buckets: dict[tuple[str, int, str], _Draft] = {}
    for place, local in enumerate(reversed(range(len(parameters)))):
        info = parameters[local]
        index = first_parameter + local
        prefix = f"g{group}/p{part}/{info.name}"
        if info.bytes > min(config.bucket_small_bytes, config.bucket_bytes_max):
            drafts += _cut(info, index, place, prefix=prefix, config=config)
            continue
        kind = (info.dtype, info.options_group, info.codec)
        bucket = open_buckets.get(kind)
        if bucket is None or not _join(bucket, info, index, place, config=config):
            segment = SegmentLayout(index, 0, info.numel, 0)
            bucket = _Draft(f"{prefix}/0", info, [segment], info.numel, place)
            open_buckets[kind] = bucket
            drafts.append(bucket)
    # Stable: the pieces of one parameter stay in the order of their offsets.
    drafts.sort(key=lambda d: (d.info.options_group < 0, d.last))
    shards = tuple(
        ShardLayout(
            d.key,
            d.info.dtype,
            d.length,
            tuple(d.segments),
            d.info.options_group,
            place,
            d.info.codec,
        )  # fmt: skip
        for place, d in enumerate(drafts)
    )
    return Layout(tuple(parameters), first_parameter, shards)


def _check_names(parameters: Sequence[ParameterInfo]) -> None:
    seen: set[str] = set()
    for info in parameters:
        if info.name in seen:
            raise ConfigError(
                f"layout refused: parameter {info.name!r} is registered twice; give each tensor "
                "its own name"
            )
        seen.add(info.name)


def _cut(
    info: ParameterInfo, index: int, place: int, *, prefix: str, config: LayoutConfig
) -> list[_Draft]:
    """Cut a parameter into the fewest pieces that fit, whose sizes differ by one unit at most."""
    unit = config.cut_elements
    units = -(-info.numel // unit)
    units_max = config.shard_bytes // (unit * info.element_bytes)
    if info.bytes <= config.shard_bytes:
        units_max = units
    count = -(-units // units_max)
    drafts = []
    for piece in range(count):
        offset = units * piece // count * unit
        length = min(units * (piece + 1) // count * unit, info.numel) - offset
        segment = SegmentLayout(index, offset, length, 0)
        drafts.append(_Draft(f"{prefix}/{piece}", info, [segment], length, place))
    return drafts


def _join(
    bucket: _Draft, info: ParameterInfo, index: int, place: int, *, config: LayoutConfig
) -> bool:
    """Put a small parameter into a bucket of its kind if it still fits."""
    step = config.alignment_bytes // math.gcd(config.alignment_bytes, info.element_bytes)
    start = -(-bucket.length // step) * step
    if (start + info.numel) * info.element_bytes > config.bucket_bytes_max:
        return False
    bucket.segments.append(SegmentLayout(index, 0, info.numel, start))
    bucket.length = start + info.numel
    bucket.last = place
    return True


def with_order(layout: Layout, order: Sequence[int]) -> Layout:
    """Return the same shards with the priorities of a learnt order.

    Shards keep their keys and contents, so nothing has to move.

    Args:
        layout: the layout in force.
        order: indices of parameters within the group, in the order in which their gradients were
            ready; those that are not named come after, in their present order.

    Raises:
        ConfigError: an index twice or not in the layout.
    """
    first = layout.first_parameter
    known = range(first, first + len(layout.parameters))
    places = {index: place for place, index in enumerate(order)}
    if len(places) != len(order) or not all(index in known for index in order):
        raise ConfigError(
            f"admission order refused: expected distinct indices in [{known.start}, {known.stop}), "
            f"got {list(order)[:8]}; report each parameter once"
        )

    def rank(shard: ShardLayout) -> tuple[bool, int, int]:
        ready = max(places.get(s.parameter, len(order)) for s in shard.segments)
        return (shard.options_group < 0, ready, shard.priority)

    ordered = sorted(layout.shards, key=rank)
    shards = tuple(replace(shard, priority=place) for place, shard in enumerate(ordered))
    return Layout(layout.parameters, first, shards)
