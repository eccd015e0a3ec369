"""What a shard of 1-bit Adam holds: nothing before the freeze, then one error and a little more."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradis.errors import LocalProtocolError, NonFiniteGradient
from paradis.numerics.codecs.onebit import Blend, OneBit, pack_mask
from paradis.numerics.codecs.onebit_adam import frozen_step, inverse_denominator
from paradis.numerics.coding import State
from paradis.numerics.elementwise import Options
from paradis.numerics.frozen_shard import FrozenShard
from paradis.numerics.onebit_coding import OneBitAdamServer, OneBitAdamWorker

OPTIONS: Options = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
LENGTHS = (4096, 1500)
COUNT = sum(LENGTHS)


def draw(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def adam_states() -> list[State]:
    return [
        ({"exp_avg": draw(n, n), "exp_avg_sq": draw(n, n + 1).square()}, {"step": 50.0})
        for n in LENGTHS
    ]


def held_bytes(shard: FrozenShard) -> int:
    """Bytes of every tensor that a shard holds, each memory once."""
    found: dict[int, int] = {}
    for value in vars(shard).values():
        for each in value if isinstance(value, list) else [value]:
            parts = each if isinstance(each, tuple) else (each,)
            for tensor in (t for t in parts if isinstance(t, torch.Tensor)):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class Pair:
    """A worker and a server of one shard."""

    def __init__(self) -> None:
        self.values = [draw(n, 7) for n in LENGTHS]
        self.copies = [value.clone() for value in self.values]
        spans = [(0, LENGTHS[0]), (LENGTHS[0], LENGTHS[1])]
        self.server = OneBitAdamServer(spans, self.values)
        self.worker = OneBitAdamWorker(LENGTHS)
        self.shards = [self.server._shard, self.worker._shard]

    def begin(self) -> None:
        self.server.begin(adam_states(), OPTIONS)
        self.worker.load_memories(self.server.start())

    def step(self, seed: int) -> None:
        gradients = [draw(n, seed + n) for n in LENGTHS]
        code = torch.empty(self.worker.code_bytes, dtype=torch.uint8)
        self.worker.encode(gradients, code, OPTIONS)
        total, unused = torch.empty(COUNT), None
        self.server.add(code, total, first=True)
        self.server.update(total, unused, [True, True], OPTIONS)  # type: ignore[arg-type]
        self.worker.keep()
        self.worker.install(self.server.code, self.copies, [True, True], OPTIONS)
        assert all(map(same_bits, self.copies, self.values))


def test_what_is_held_before_at_and_after_the_freeze() -> None:
    pair = Pair()
    assert [held_bytes(shard) for shard in pair.shards] == [0, 0]
    pair.begin()
    assert [held_bytes(shard) for shard in pair.shards] == [COUNT * (4 + 2)] * 2
    where = [[m.data_ptr() for m in shard._momenta] for shard in pair.shards]
    for step in range(3):
        pair.step(step)
        for shard, momenta in zip(pair.shards, where, strict=True):
            assert held_bytes(shard) == COUNT * (4 + 2) + shard.code_bytes
            # The momentum's numbers were needed once: their memory is the error's.
            assert [e.data_ptr() for e in shard._errors if e is not None] == momenta


def test_a_restored_momentum_is_held_as_a_code() -> None:
    pair, other = Pair(), Pair()
    pair.begin()
    pair.step(0)
    other.server.load_memories(pair.server.memories())
    other.worker.load_memories(pair.worker.memories())
    for shard in other.shards:  # an error of zeros is not held
        assert held_bytes(shard) <= COUNT * (4 + 2) + shard.code_bytes
    for mine, theirs in zip([*other.values, *other.copies], [*pair.values, *pair.copies],
                            strict=True):  # fmt: skip
        mine.copy_(theirs)
    for each in (pair, other):
        each.step(1)
    assert all(map(same_bits, pair.values, other.values))
    for name, pieces in pair.worker.memories().items():
        assert all(map(same_bits, pieces, other.worker.memories()[name]))


def test_encoding_changes_nothing_and_keep_everything() -> None:
    pair = Pair()
    pair.begin()
    pair.step(0)
    before = [t.clone() for ts in pair.worker.memories().values() for t in ts]
    code = torch.empty(pair.worker.code_bytes, dtype=torch.uint8)
    gradients = [draw(n, 3) for n in LENGTHS]
    pair.worker.encode(gradients, code, OPTIONS)
    assert all(map(same_bits, before, [t for ts in pair.worker.memories().values() for t in ts]))
    pair.worker.keep()
    after = pair.worker.memories()["error"]
    assert not any(map(same_bits, before, after))
    with pytest.raises(AssertionError, match="settle or forget first"):
        pair.worker.encode(gradients, code, OPTIONS)
        pair.worker.install(code, pair.copies, [True, True], OPTIONS)


# ------------------------------------------------------------------------ the codec's halves


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 200) | st.sampled_from([1023, 1024, 1025, 3001]),
    block=st.sampled_from([1, 8, 100, 1024, 1500, None]),
    momentum=st.sampled_from(["none", "numbers", "code"]),
    masked=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_no_error_is_an_error_of_zeros_and_memory_is_used_again(
    length: int, block: int | None, momentum: str, masked: bool, seed: int
) -> None:
    codec = OneBit(block_elements=block)
    mask = pack_mask(draw(length, seed) < 0.5) if masked else None
    last: torch.Tensor | None = None
    if momentum != "none":
        last = draw(length, seed + 1)
    if momentum == "code":
        numbers, last = last, torch.empty(codec.encoded_bytes(length), dtype=torch.uint8)
        assert numbers is not None
        codec.signs(Blend(numbers, None), last)
    gradient = draw(length, seed + 2)
    gradient[::3] = -0.0
    codes, errors = [], []
    for error in (None, torch.zeros(length)):
        blend = Blend(gradient, error, last, 0.9, mask)
        code = torch.empty(codec.encoded_bytes(length), dtype=torch.uint8)
        scales = codec.signs(blend, code)
        # In the error's memory, or in that of a momentum in numbers.
        target = error if error is not None else torch.empty(length)
        codec.leave(blend, scales, target)
        codes.append(code)
        errors.append(target)
    assert same_bits(codes[0], codes[1]) and same_bits(errors[0], errors[1])
    if momentum == "numbers":
        assert last is not None
        blend = Blend(gradient, None, last, 0.9, mask)
        codec.leave(blend, codec.signs(blend, codes[1]), last)
        assert same_bits(last, errors[0]) and same_bits(codes[0], codes[1])


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(0, 200) | st.sampled_from([1023, 1024, 1025, 3001]),
    block=st.sampled_from([1, 8, 100, 1024, 1500, None]),
    norm=st.sampled_from(["l1", "l2"]),
    dtypes=st.sampled_from(
        [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.float64,) * 2]
    ),
    momentum=st.sampled_from(["none", "numbers", "code"]),
    where=st.sampled_from(["error", "momentum", "new"]),
    masked=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_one_pass_has_the_bits_of_two(
    length: int, block: int | None, norm: Literal["l1", "l2"], momentum: str,
    dtypes: tuple[torch.dtype, torch.dtype], where: str, masked: bool, seed: int,
) -> None:  # fmt: skip
    """In the memory of the error, or of a momentum in numbers, or beside them."""
    dtype, given_in = dtypes
    codec = OneBit(block_elements=block, norm=norm, dtype=dtype)
    mask = pack_mask(draw(length, seed) < 0.5) if masked else None
    last: torch.Tensor | None = None if momentum == "none" else draw(length, seed + 1).to(dtype)
    if momentum == "code":
        numbers, last = last, torch.empty(codec.encoded_bytes(length), dtype=torch.uint8)
        assert numbers is not None
        codec.signs(Blend(numbers, None), last)
    gradient = draw(length, seed + 2).to(given_in)
    gradient[::3] = -0.0
    error = draw(length, seed + 3).to(dtype) if where == "error" else None
    target = torch.empty(length, dtype=dtype)
    if error is not None:
        target = error
    elif where == "momentum" and momentum == "numbers":
        assert last is not None
        target = last
    code = torch.empty(codec.encoded_bytes(length), dtype=torch.uint8)
    once, left = code.clone(), torch.empty(length, dtype=dtype)
    blend = Blend(gradient, error, last, 0.9, mask)
    codec.leave(blend, codec.signs(blend, code), left)
    codec.signs_and_leave(blend, once, target)
    assert same_bits(code, once) and same_bits(left, target)


@pytest.mark.parametrize("block", [100, 1024, 1500])
def test_one_pass_leaves_the_block_that_is_refused(block: int) -> None:
    """And those after it; those before have what they would have."""
    codec, gradient, error = OneBit(block_elements=block), draw(5000, 1), draw(5000, 2)
    code = torch.empty(codec.encoded_bytes(5000), dtype=torch.uint8)
    blend, left = Blend(gradient, error.clone()), torch.empty(5000)
    codec.leave(blend, codec.signs(blend, code), left)
    for bad in (float("nan"), float("-inf")):
        gradient[2 * block + 60] = bad
        target = error.clone()
        with pytest.raises(NonFiniteGradient, match=f"gradient, element {2 * block + 60};"):
            codec.signs_and_leave(Blend(gradient, target), code, target)
        assert same_bits(target[: 2 * block], left[: 2 * block])
        assert same_bits(target[2 * block :], error[2 * block :])


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 200) | st.sampled_from([1024, 1025]),
    block=st.sampled_from([1, 8, 100, 1024, None]),
    masked=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_decoded_numbers_become_their_code_again(
    length: int, block: int | None, masked: bool, seed: int
) -> None:
    codec = OneBit(block_elements=block)
    mask = pack_mask(draw(length, seed) < 0.5) if masked else None
    code = torch.empty(codec.encoded_bytes(length), dtype=torch.uint8)
    codec.signs(Blend(draw(length, seed + 1), None, mask=mask), code)
    numbers, again = torch.empty(length), torch.empty(length)
    codec.decode(code, numbers, mask)
    found = codec.code_of_decoded(numbers, mask)
    assert found is not None
    codec.decode(found, again, mask)
    assert same_bits(numbers, again)


def test_other_numbers_have_no_code() -> None:
    codec, numbers = OneBit(block_elements=4), torch.tensor([1.0, -1.0, 1.0, 1.0, 2.0, -2.0])
    assert codec.code_of_decoded(numbers) is not None
    for place, other in ((1, 0.5), (4, 2.5), (0, float("nan")), (5, float("inf"))):
        spoiled = numbers.clone()
        spoiled[place] = other
        assert codec.code_of_decoded(spoiled) is None
    real = torch.tensor([True, False, True, True, True, True])
    numbers[1] = 0.0
    assert codec.code_of_decoded(numbers) is None
    assert codec.code_of_decoded(numbers, pack_mask(real)) is not None


# ----------------------------------------------------------------- denominators in two bytes


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_takes_the_rounded_denominators(packed: bool) -> None:
    length = 2500
    variance = draw(length, 1).square() * 10.0 ** torch.randint(-6, 3, (length,))
    inverse = inverse_denominator(variance, 1e-8)
    exact = 1.0 / (variance.double().sqrt() + 1e-8)
    assert inverse.dtype == torch.bfloat16
    assert float(((inverse.double() - exact) / exact).abs().max()) <= 2.0**-8
    assert inverse_denominator(variance.double(), 1e-8).dtype == torch.float64
    codec, value = OneBit(), draw(length, 2)
    code, momentum = torch.empty(codec.encoded_bytes(length), dtype=torch.uint8), draw(length, 3)
    codec.signs(Blend(momentum, None), code)
    codec.decode(code, momentum)
    x, m = value.numpy().copy(), momentum.numpy()
    x = x - np.float32(0.1) * (m * inverse.float().numpy() + np.float32(0.5) * x)
    wide = value.clone()
    given_as = code if packed else momentum
    frozen_step(codec, given_as, value, inverse, lr=0.1, weight_decay=0.5)
    frozen_step(codec, given_as, wide, inverse.float(), lr=0.1, weight_decay=0.5)
    assert value.numpy().tobytes() == x.tobytes() == wide.numpy().tobytes()
    with pytest.raises(LocalProtocolError, match="inverse denominator"):
        frozen_step(codec, given_as, value, inverse.double(), lr=0.1, weight_decay=0.5)


def test_denominators_of_an_older_checkpoint_are_rounded() -> None:
    pair = Pair()
    pair.begin()
    start: dict[str, Any] = dict(pair.server.start())
    fine = [torch.rand(n) + 0.5 for n in LENGTHS]
    pair.worker.load_memories({**start, "inverse": fine})
    found = pair.worker.memories()["inverse"]
    assert all(same_bits(a, b.to(torch.bfloat16)) for a, b in zip(found, fine, strict=True))
