"""Codecs against slow twins in plain Python and NumPy, for lengths that nothing divides."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.errors import NonFiniteGradient
from paradis.numerics.codecs import (
    Bfloat16,
    Codec,
    Int8,
    OneBit,
    Uncompressed,
    code_bytes,
    encode_lion,
    encode_momentum,
    majority_vote,
    pack_mask,
)

BLOCKS = (1, 3, 8, 64, 100, 1024, 1500, None)
SPECIAL = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e30, 1.0])
LENGTHS = st.integers(0, 200) | st.sampled_from([1023, 1024, 1025, 2048, 3001])


def draw(length: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of many sizes, a tenth of them special."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-3, 3, (length,), generator=generator)
    picks = SPECIAL[torch.randint(0, len(SPECIAL), (length,), generator=generator)].to(values)
    chosen = torch.rand(length, generator=generator) < 0.1
    return torch.where(chosen, picks, values).to(dtype)


def bits_of(code: torch.Tensor, length: int) -> np.ndarray:
    """The sign bits at the end of a code, one by one."""
    tail = code[code.numel() - code_bytes(length) :].tolist()
    return np.array([tail[k // 8] >> (k % 8) & 1 for k in range(length)], dtype=bool)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def room(codec: Codec, length: int) -> torch.Tensor:
    return torch.full((codec.encoded_bytes(length),), 0xA5, dtype=torch.uint8)


def decoded(codec: Codec, code: torch.Tensor, length: int) -> torch.Tensor:
    out = torch.full((length,), math.nan, dtype=codec.dtype)
    codec.decode(code, out)
    return out


@pytest.mark.parametrize("length", range(1, 66))
def test_every_short_length_packs_and_unpacks(length: int) -> None:
    value = draw(length, length)
    codec, memory = OneBit(block_elements=8), torch.zeros(length)
    code = room(codec, length)
    codec.encode(value, code, memory)
    negative = [v < 0 for v in value.tolist()]
    assert bits_of(code, length).tolist() == negative
    assert code[-1].item() >> ((length - 1) % 8 + 1) == 0  # nothing beyond the last element
    assert [math.copysign(1, v) < 0 for v in decoded(codec, code, length).tolist()] == negative
    momentum = draw(length, length + 1)
    expected = (np.float32(0.9) * momentum.numpy() + np.float32(1 - 0.9) * value.numpy()) < 0
    lion = torch.empty(code_bytes(length), dtype=torch.uint8)
    encode_lion(value, momentum, lion)
    assert bits_of(lion, length).tolist() == expected.tolist()


@settings(max_examples=80, deadline=None)
@given(
    length=LENGTHS,
    block=st.sampled_from(BLOCKS),
    norm=st.sampled_from(["l1", "l2"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    masked=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_one_bit_is_its_twin(
    length: int, block: int | None, norm: str, dtype: torch.dtype, masked: bool, seed: int
) -> None:
    codec = OneBit(block_elements=block, norm=norm, dtype=dtype)  # type: ignore[arg-type]
    value, memory = draw(length, seed, dtype), draw(length, seed + 1, dtype)
    real = torch.rand(length, generator=torch.Generator().manual_seed(seed)) < 0.7
    real = real if masked else torch.ones(length, dtype=torch.bool)
    mask = pack_mask(real) if masked else None
    c = torch.where(real, value + memory, torch.zeros((), dtype=dtype))
    code = room(codec, length)

    codec.encode(value, code, memory, mask)

    wanted = np.zeros(length, dtype=np.float64)
    size = block or max(length, 1)
    for start in range(0, length, size):
        part = c[start : start + size].double()
        count = max(1, int(real[start : start + size].sum()))
        squares = math.fsum(x * x for x in part.tolist())
        total = math.fsum(abs(x) for x in part.tolist())
        wanted[start : start + size] = math.sqrt(squares / count) if norm == "l2" else total / count
    got = torch.full((length,), math.nan, dtype=dtype)
    codec.decode(code, got, mask)
    close = 1e-6 if dtype == torch.float32 else 1e-13
    kept = real.numpy()
    np.testing.assert_allclose(got.abs().numpy()[kept], wanted[kept], rtol=close, atol=1e-44)
    assert bits_of(code, length).tolist() == (c < 0).tolist()
    assert not got[~real].any() and not memory[~real].any()
    assert torch.equal(memory, c - got)  # one rounding, after the scale's
    total = draw(length, seed + 2, dtype)
    expected = total + got
    codec.decode_add(code, total, mask)
    assert same_bits(total, expected)


@settings(max_examples=60, deadline=None)
@given(
    length=LENGTHS,
    block=st.sampled_from([1, 3, 256, 1024, 1500]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**30),
)
def test_int8_is_its_twin(length: int, block: int, dtype: torch.dtype, seed: int) -> None:
    codec = Int8(block_elements=block, dtype=dtype)
    value, memory = draw(length, seed, dtype), draw(length, seed + 1, dtype)
    c = (value + memory).numpy()
    code = room(codec, length)

    codec.encode(value, code, memory)

    got = decoded(codec, code, length)
    for start in range(0, length, block):
        part = slice(start, start + block)
        scale = np.abs(c[part]).max() / c.dtype.type(127)
        scale = scale if scale >= np.finfo(c.dtype).tiny else c.dtype.type(0)
        levels = np.rint(c[part] / scale) if scale > 0 else np.zeros_like(c[part])
        assert np.abs(levels).max() <= 127
        assert np.array_equal(got[part].numpy(), levels * scale)
        assert np.array_equal(memory[part].numpy(), c[part] - levels * scale)
    total = draw(length, seed + 2, dtype)
    expected = total + got
    codec.decode_add(code, total)
    assert same_bits(total, expected)


@settings(max_examples=40, deadline=None)
@given(length=LENGTHS, seed=st.integers(0, 2**30), packed=st.booleans(), half=st.booleans())
def test_momentum_is_fused_with_the_bits_of_separate_steps(
    length: int, seed: int, packed: bool, half: bool
) -> None:
    codec, beta = OneBit(), 0.9
    gradient = draw(length, seed)
    gradient = gradient.bfloat16() if half else gradient
    momentum, memory = draw(length, seed + 1), draw(length, seed + 2)
    given_as = momentum
    if packed:
        given_as = room(codec, length)
        codec.encode(momentum, given_as, torch.zeros(length))
        momentum = decoded(codec, given_as, length)
    g, m = gradient.float().numpy(), momentum.numpy()
    blend = torch.from_numpy(np.float32(beta) * m + np.float32(1 - beta) * g)
    other = memory.clone()
    code, expected = room(codec, length), room(codec, length)

    encode_momentum(codec, gradient, given_as, memory, code, beta=beta)

    codec.encode(blend, expected, other)
    assert torch.equal(code, expected)
    assert same_bits(memory, other)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    codec=st.sampled_from([OneBit(), OneBit(block_elements=24), Int8(), OneBit(norm="l2")]),
    length=st.integers(1, 3000),
    bad=st.sampled_from([math.nan, math.inf, -math.inf, 3e38]),
    where=st.sampled_from(["gradient", "memory", "masked"]),
)
def test_a_refusal_changes_no_memory(
    data: st.DataObject, codec: Codec, length: int, bad: float, where: str
) -> None:
    place = data.draw(st.integers(0, length - 1))
    value, memory = draw(length, length), draw(length, length + 1)
    if bad == 3e38:  # finite, but not the sum
        value[place] = memory[place] = bad
    else:
        (memory if where == "memory" else value)[place] = bad
    real = torch.ones(length, dtype=torch.bool)
    real[place] = where != "masked"
    before, code = memory.clone(), room(codec, length)
    with pytest.raises(NonFiniteGradient, match="encoding refused"):
        if isinstance(codec, OneBit):
            codec.encode(value, code, memory, pack_mask(real))
        else:
            codec.encode(value, code, memory)
    assert same_bits(memory, before)
    if bad != 3e38:
        momentum = memory.clone() if where == "memory" else draw(length, 1)
        kept = momentum.clone()
        with pytest.raises(NonFiniteGradient, match=f"element {place};"):
            encode_lion(value, momentum, torch.empty(code_bytes(length), dtype=torch.uint8))
        assert same_bits(momentum, kept)


@settings(max_examples=60, deadline=None)
@given(length=LENGTHS, seed=st.integers(0, 2**30))
def test_bf16_and_none_round_as_torch_does(length: int, seed: int) -> None:
    value = draw(length, seed)
    for codec, expected in (
        (Bfloat16(), value.bfloat16().float()),
        (Uncompressed(), value),
    ):
        for source in (value, value.bfloat16()):
            code = room(codec, length)
            codec.encode(source, code)
            wanted = expected if source is value else source.float()
            assert same_bits(decoded(codec, code, length), wanted)
            total = draw(length, seed + 1)
            sums = total + wanted
            codec.decode_add(code, total)
            assert same_bits(total, sums)


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(0, 100),
    workers=st.integers(1, 17),
    version=st.integers(0, 9),
    first=st.integers(0, 9),
    seed=st.integers(0, 2**30),
)
def test_the_vote_is_a_count(
    length: int, workers: int, version: int, first: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (workers, code_bytes(length))
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    out = torch.empty(code_bytes(length), dtype=torch.uint8)

    majority_vote(list(codes), out, version=version, first_index=first)

    for k, negative in enumerate(bits_of(out, length)):
        total = sum(-1 if bits_of(code, length)[k] else 1 for code in codes)
        tie = 1 if (version + first + k) % 2 == 0 else -1
        assert (-1 if negative else 1) == (math.copysign(1, total) if total else tie)
