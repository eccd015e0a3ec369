"""Any cut of the parameters into pieces and servers reads back bit-equal in any other cut."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.storage.checkpoint import PieceReader, Section, verify, write_part
from paradis.storage.manifest import Manifest, read_manifest, write_manifest
from paradis.wire.messages import ParameterSpec

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "bool": torch.bool,
}


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Return (offset, length) runs that cover 0..size once, some of them empty."""
    bounds = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
    return [(a, b - a) for a, b in zip([0, *bounds], [*bounds, size], strict=True)]


def random_bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    count = size * dtype.itemsize
    return torch.randint(high, (count,), dtype=torch.uint8, generator=generator).view(dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_reads_back_in_any_other_cut(data: st.DataObject) -> None:
    names = data.draw(
        st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True)
    )
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        names = [f"p{i}" for i in range(len(names))]
    servers = data.draw(st.integers(1, 3))
    parts: list[list[Section]] = [[] for _ in range(servers)]
    specs = []
    contents = {}
    for name in names:
        dtype = data.draw(st.sampled_from(sorted(DTYPES)))
        size = data.draw(st.integers(0, 200))
        specs.append(ParameterSpec(name=name, shape=(size,), dtype=dtype, options_group=0))
        for key in data.draw(st.sampled_from([("value",), ("value", "momentum_buffer")])):
            flat = random_bits(size, DTYPES[dtype], data.draw(st.integers(0, 1 << 30)))
            contents[name, key] = (dtype, flat)
            runs = dict(data.draw(cuts(size)))
            runs = runs if sum(runs.values()) == size else {0: size}
            for offset, length in runs.items():
                piece = flat[offset : offset + length]
                owner = data.draw(st.integers(0, servers - 1))
                parts[owner].append(Section(name, key, offset, piece))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        pieces = [p for i, part in enumerate(parts) for p in write_part(directory, f"s{i}", part)]
        manifest = Manifest(
            paradis="0", step=1, group=0, groups=(0,), parameters=tuple(specs), optimizer="SGD",
            options=[{}], scalars={}, extra={}, pieces=tuple(data.draw(st.permutations(pieces))),
        )  # fmt: skip
        write_manifest(directory, manifest)
        assert verify(directory) == []
        reader = PieceReader(directory, read_manifest(directory))
        for (name, key), (dtype, flat) in contents.items():
            for offset, length in data.draw(cuts(flat.numel())):
                got = reader.read(name, key, offset, length, dtype)
                expected = flat[offset : offset + length]
                assert got.dtype == expected.dtype
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
