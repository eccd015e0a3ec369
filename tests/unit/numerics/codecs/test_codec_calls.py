"""Formats byte by byte, what is refused, and what happens without Numba."""

from __future__ import annotations

import math
import struct
import sys

import pytest
import torch

from paradis.errors import ConfigError, LocalProtocolError, NonFiniteGradient
from paradis.numerics.codecs import (
    CODECS,
    Bfloat16,
    Codec,
    Int8,
    OneBit,
    Uncompressed,
    code_bytes,
    encode_lion,
    lion_step,
    majority_vote,
    pack_mask,
)
from paradis.numerics.codecs.kernels import kernels


def test_names_and_numbers_are_fixed() -> None:
    assert {name: cls.number for name, cls in CODECS.items()} == {
        "none": 0,
        "bf16": 1,
        "int8": 2,
        "onebit": 3,
    }
    assert [cls().remembers for cls in CODECS.values()] == [False, False, True, True]


@pytest.mark.parametrize(
    ("codec", "length", "expected"),
    [
        (Uncompressed(), 1000, 4000),
        (Bfloat16(), 1000, 2000),
        (Int8(), 0, 0),
        (Int8(), 256, 260),
        (Int8(), 257, 265),
        (OneBit(), 0, 0),
        (OneBit(), 1024, 132),
        (OneBit(), 1025, 137),
        (OneBit(block_elements=None), 9, 6),
        (OneBit(block_elements=1), 9, 38),
    ],
)
def test_lengths_have_a_closed_form(codec: Codec, length: int, expected: int) -> None:
    assert codec.encoded_bytes(length) == expected


def test_one_bit_is_25_times_smaller_with_headers_from_4096_elements_on() -> None:
    headers = 120
    for length in (4096, 1 << 20):
        assert 4 * length >= 25 * (OneBit().encoded_bytes(length) + headers)


def test_one_bit_payload_is_scales_then_bits() -> None:
    codec, memory = OneBit(block_elements=4), torch.zeros(6)
    code = torch.empty(codec.encoded_bytes(6), dtype=torch.uint8)
    codec.encode(torch.tensor([1.0, -2.0, -0.0, 1.0, -8.0, 2.0]), code, memory)
    assert bytes(code.tolist()) == struct.pack("<ffB", 1.0, 5.0, 0b010010)
    assert memory.tolist() == [0.0, -1.0, -1.0, 0.0, -3.0, -3.0]


def test_a_mask_leaves_elements_out_of_the_scale() -> None:
    codec, memory, out = OneBit(block_elements=4), torch.zeros(4), torch.empty(4)
    code = torch.empty(codec.encoded_bytes(4), dtype=torch.uint8)
    mask = pack_mask(torch.tensor([True, False, True, False]))
    codec.encode(torch.tensor([1.0, 100.0, -3.0, -100.0]), code, memory, mask)
    codec.decode(code, out, mask)
    assert out.tolist() == [2.0, 0.0, -2.0, 0.0]
    assert memory.tolist() == [-1.0, 0.0, -1.0, 0.0]


def test_int8_payload_is_scales_then_integers() -> None:
    codec, memory = Int8(block_elements=2), torch.zeros(3)
    code = torch.empty(codec.encoded_bytes(3), dtype=torch.uint8)
    codec.encode(torch.tensor([-127.0, 2.5, 1e-45]), code, memory)
    assert bytes(code.tolist()) == struct.pack("<ffbbb", 1.0, 0.0, -127, 2, 0)
    assert memory.tolist() == [0.0, 0.5, torch.tensor(1e-45).item()]


def test_bf16_refuses_what_would_round_to_infinity() -> None:
    codec, code = Bfloat16(), torch.empty(4, dtype=torch.uint8)
    limit = torch.tensor([0x7F7F7FFF, 0x7F7F8000], dtype=torch.int32).view(torch.float32)
    codec.encode(limit[:1].repeat(2), code)
    assert code.view(torch.bfloat16).isfinite().all()
    with pytest.raises(NonFiniteGradient, match="element 1; expected less than"):
        codec.encode(limit, code)


@pytest.mark.parametrize("codec", [cls() for cls in CODECS.values()], ids=lambda codec: codec.name)
def test_calls_that_do_not_fit_are_refused(codec: Codec) -> None:
    value = torch.ones(10)
    memory = torch.zeros(10) if codec.remembers else None
    code = torch.empty(codec.encoded_bytes(10), dtype=torch.uint8)
    for wrong in (code[:-1], code.to(torch.int8)):
        with pytest.raises(LocalProtocolError, match="code; expected"):
            codec.encode(value, wrong, memory)
        with pytest.raises(LocalProtocolError, match="code; expected"):
            codec.decode(wrong, value)
    for wrong in (torch.ones(10, dtype=torch.float64), torch.ones(2, 5), torch.ones(20)[::2]):
        with pytest.raises(LocalProtocolError, match="gradient; expected"):
            codec.encode(wrong, code, memory)
        with pytest.raises(LocalProtocolError, match="expected"):
            codec.decode_add(code, wrong)
    with pytest.raises(LocalProtocolError, match="error memory"):
        codec.encode(value, code, None if codec.remembers else torch.zeros(10))
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteGradient, match="gradient, element 3; expected a finite"):
            codec.encode(torch.tensor([1.0, 1.0, 1.0, bad]), code[: codec.encoded_bytes(4)],
                         torch.zeros(4) if codec.remembers else None)  # fmt: skip


@pytest.mark.parametrize("codec", [Int8(), OneBit()], ids=lambda codec: codec.name)
def test_a_code_with_a_scale_that_is_not_finite_is_refused(codec: Codec) -> None:
    code = torch.zeros(codec.encoded_bytes(2000), dtype=torch.uint8)
    code[4:8] = torch.tensor([math.inf]).view(torch.uint8)
    total = torch.ones(2000)
    with pytest.raises(NonFiniteGradient, match="block 1 has the scale inf"):
        codec.decode_add(code, total)
    assert torch.equal(total, torch.ones(2000))


@pytest.mark.parametrize("block", [0, -1])
def test_settings_that_make_no_sense_are_refused(block: int) -> None:
    for kind in (Int8, OneBit):
        with pytest.raises(ConfigError, match="expected blocks of 1 or more"):
            kind(block_elements=block)
    with pytest.raises(ConfigError, match="norm l1 or l2"):
        OneBit(norm="max")  # type: ignore[arg-type]


def test_nobody_to_hear_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="got none"):
        OneBit().mean([], torch.ones(4))
    with pytest.raises(LocalProtocolError, match="got none"):
        majority_vote([], torch.empty(1, dtype=torch.uint8), version=0)


def test_lion_moves_momentum_and_value() -> None:
    momentum, code = torch.tensor([1.0, -1.0, 0.0]), torch.empty(1, dtype=torch.uint8)
    encode_lion(torch.tensor([-1.0, -1.0, 0.0]), momentum, code)
    assert code.tolist() == [0b010]  # 0.9 - 0.1 > 0, and the sign of 0 is +1
    assert momentum.tolist() == pytest.approx([0.98, -1.0, 0.0])
    value = torch.tensor([1.0, 1.0, 1.0])
    lion_step(code, value, lr=0.5, weight_decay=0.5)
    assert value.tolist() == [0.25, 1.25, 0.25]
    assert code_bytes(9) == 2


def test_without_numba_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.endswith("_kernels") or name == "paradis.numerics.codecs.compiled":
            monkeypatch.delitem(sys.modules, name)
    for name in ("numba", "llvmlite"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    kernels.cache_clear()
    memory = torch.zeros(4)
    with pytest.raises(ConfigError, match=r"pip install 'paradis\[codecs\]'"):
        OneBit().encode(torch.ones(4), torch.empty(5, dtype=torch.uint8), memory)
    assert not memory.any()
    Bfloat16().encode(torch.ones(4), torch.empty(8, dtype=torch.uint8))
    kernels.cache_clear()
