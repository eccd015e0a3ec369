"""Leased memory: accumulators first, bounded store, reuse, and payloads that break off."""

from __future__ import annotations

import torch

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


def test_free_memory_of_other_sizes_does_not_come_on_top_of_the_bound() -> None:
    arena = Arena(store_bytes_max=100)
    for size in (60, 50, 40, 60):
        arena.release(arena.place(size).lease)
        assert arena.store_bytes + arena._free_bytes <= 160, "at most one payload above the bound"
    assert arena.store_bytes == 0


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
