"""CityHash64 v1.1: published values, and the pure function against the wheel."""

import random

import pytest

from paradis.core.cityhash import city64, city64_with_seed, hash64

VECTORS = [
    (b"", 0x9AE16A3B2F90404F),
    (b"a", 0xB3454265B6DF75E3),
    (b"abc", 2640714258260161385),
    (b"hello", 0xB48BE5A931380CE8),
    (b"param-server", 0x64DE9F3B32AD3BA4),
    (b"x" * 100, 0x733B2E45254C902D),
    (bytes(range(256)), 0x0C693049D8C2C68D),
]


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_values(data: bytes, expected: int) -> None:
    assert city64(data) == expected
    assert hash64(data) == expected


def test_known_value_with_seed() -> None:
    assert city64_with_seed(b"hello", 7) == 0xA39F2770A56EF342


def test_pure_equals_wheel() -> None:
    wheel = pytest.importorskip("cityhash")
    source = random.Random(20)
    for length in [*range(301), 511, 512, 513, 4096, 65537]:
        data, seed = source.randbytes(length), source.getrandbits(64)
        assert city64(data) == wheel.CityHash64(data), length
        assert city64_with_seed(data, seed) == wheel.CityHash64WithSeed(data, seed), length
