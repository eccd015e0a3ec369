"""Leased memory: accumulators first, bounded store, reuse, and payloads that break off."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paradis.runtime.arena import Arena


def test_first_contribution_lands_in_the_accumulator_and_costs_no_store() -> None:
    arena = Arena(store_bytes_max=64)
    first = arena.place(64, accumulator_of=7)
    second = arena.place(64, accumulator_of=7)
    assert first.lease and second.lease
    assert arena.store_bytes == 64
    target = arena.sum_target(7, (first.lease, second.lease))
    assert target.data_ptr() == arena.bytes_of(first.lease).data_ptr()


def test_a_full_store_drops_into_scratch_memory() -> None:
    arena = Arena(store_bytes_max=64)
    assert arena.place(64).lease
    dropped = arena.place(64)
    assert dropped.lease == 0
    assert len(dropped.views[0]) == 64
    assert arena.store_bytes_peak == 64


def test_released_memory_is_used_again_and_counted_back() -> None:
    arena = Arena(store_bytes_max=128)
    first = arena.place(64)
    pointer = arena.bytes_of(first.lease).data_ptr()
    arena.retain(first.lease)
    arena.release(first.lease)
    assert arena.store_bytes == 64, "a send still reads it"
    arena.release(first.lease)
    assert arena.store_bytes == 0
    assert arena.bytes_of(arena.place(64).lease).data_ptr() == pointer


def test_the_sum_outlives_its_sources_until_it_is_released() -> None:
    arena = Arena(store_bytes_max=64)
    source = arena.place(16, accumulator_of=1)
    arena.sum_target(1, (source.lease,)).fill_(3)
    arena.release(source.lease)
    other = arena.place(16, accumulator_of=1)
    arena.bytes_of(other.lease).fill_(9)
    assert arena.sum_of(1).tolist() == [3] * 16
    arena.release_sum(1)
    arena.release(other.lease)
    again = arena.place(16, accumulator_of=1)
    assert arena.bytes_of(again.lease).data_ptr() == arena.sum_of(1).data_ptr()


def test_a_late_payload_in_the_accumulator_keeps_its_memory_and_the_sum_gets_new() -> None:
    arena = Arena(store_bytes_max=64)
    late = arena.place(16, accumulator_of=1)
    source = arena.place(16)
    target = arena.sum_target(1, (source.lease,))
    assert target.data_ptr() != arena.bytes_of(late.lease).data_ptr()
    arena.release(late.lease)
    arena.release(source.lease)
    assert arena.leased == 0
    assert arena.store_bytes == 0


def test_a_payload_that_broke_off_frees_the_accumulator() -> None:
    arena = Arena(store_bytes_max=0)
    broken = arena.place(16, accumulator_of=1)
    arena.release(broken.lease)
    assert arena.place(16, accumulator_of=1).lease
    assert isinstance(arena.sum_of(1), torch.Tensor)


def test_lengths_that_change_in_the_course_of_a_step_use_the_same_memory() -> None:
    """Memory kept by length was made anew with each change: a page fault per page."""
    arena, used = Arena(store_bytes_max=1280), set[int]()
    for step in range(4):
        for size in (640, 400, 200, 640):
            leases = [arena.place(size).lease for _ in range(1280 // size)]
            starts = {arena.bytes_of(lease).data_ptr() for lease in leases}
            assert all(arena.bytes_of(lease).numel() == size for lease in leases)
            assert step == 0 or starts <= used
            used |= starts
            for lease in leases:
                arena.release(lease)
    assert arena.reserved_bytes == 1600
    assert max(used) - min(used) < 1600


def test_what_finds_no_hole_has_memory_of_its_own() -> None:
    arena = Arena(store_bytes_max=1024)
    leases = [arena.place(64).lease for _ in range(16)]
    for lease in leases[1::2]:
        arena.release(lease)
    apart = arena.place(512)
    assert apart.lease and len(apart.views[0]) == 512
    arena.release(apart.lease)
    assert arena.reserved_bytes == 1280


def test_a_raised_bound_brings_more_memory() -> None:
    arena = Arena(store_bytes_max=128)
    first = arena.place(128).lease
    arena.widen(256)
    assert arena.place(256).lease
    assert arena.reserved_bytes == 480
    arena.release(first)
    assert arena.place(100).lease
    assert arena.reserved_bytes == 480


def test_a_late_code_that_lay_in_the_accumulator_is_counted_as_what_it_is() -> None:
    arena = Arena(store_bytes_max=64)
    late = arena.place(2, accumulator_of=1)
    source = arena.place(2)
    arena.sum_target(1, (source.lease,), 16)
    assert arena.store_bytes == 4
    arena.release(late.lease)
    arena.release(source.lease)
    assert arena.store_bytes == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_payloads_stay_within_the_bound_and_no_two_leases_share_any(
    moves: list[tuple[bool, int]],
) -> None:
    arena, held = Arena(store_bytes_max=100), dict[int, int]()
    for release, number in moves:
        if release and held:
            lease = list(held)[number % len(held)]
            assert set(arena.bytes_of(lease).tolist()) == {lease % 251}
            arena.release(lease)
            del held[lease]
        elif not release:
            fits = sum(held.values()) + number <= 100
            placed = arena.place(number)
            assert bool(placed.lease) == fits
            if placed.lease:
                held[placed.lease] = number
                arena.bytes_of(placed.lease).fill_(placed.lease % 251)
        assert arena.store_bytes == sum(held.values())
        assert arena.reserved_bytes <= 125


def test_a_code_leaves_the_accumulator_its_size() -> None:
    """A sum of codes is longer than each of them; no memory is made anew in each step."""
    arena, made = Arena(store_bytes_max=64), set()
    for step in range(3):
        leases = [arena.place(2, accumulator_of=1).lease for _ in range(2)]
        assert all(arena.bytes_of(lease).numel() == 2 for lease in leases)
        assert arena.sum_target(1, leases, 64).numel() == 64
        made.add(arena.sum_of(1).data_ptr())
        for lease in leases:
            arena.release(lease)
        arena.release_sum(1)
        assert arena.store_bytes == 0 and arena.leased == 0, step
    assert len(made) == 1
    assert arena.bytes_of(arena.place(64, accumulator_of=1).lease).data_ptr() in made
