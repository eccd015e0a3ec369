"""Memory in huge pages: as long as asked for, aligned, writable, its own."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import psutil
import pytest
import torch

from paradis.runtime import pages
from paradis.runtime.pages import HUGE_PAGE_BYTES, allocate

SIZES = [0, 1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 4, 5 << 20]


@pytest.mark.parametrize("nbytes", SIZES)
def test_memory_is_whole_and_its_own(nbytes: int) -> None:
    first, second = allocate(nbytes).fill_(1), allocate(nbytes).fill_(2)
    assert first.numel() == second.numel() == nbytes
    assert bool((first == 1).all()) and bool((second == 2).all())
    if nbytes >= HUGE_PAGE_BYTES:
        assert first.data_ptr() % HUGE_PAGE_BYTES == 0


def test_it_outlives_the_name_that_it_was_made_under() -> None:
    value = allocate(3 << 20).zero_()[1 << 20 :].view(torch.float32)
    others = [allocate(3 << 20).fill_(255) for _ in range(4)]
    assert len(others) == 4 and not bool(value.any())


def test_a_system_without_huge_pages_still_gives_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_ADVICE", None)
    assert allocate(4 << 20).fill_(3).sum().item() == 3 * (4 << 20)
    monkeypatch.setattr(pages, "_ADVICE", 10_000)
    with pytest.raises(OSError):
        mmap.mmap(-1, 4096).madvise(10_000)
    assert allocate(4 << 20).fill_(3).sum().item() == 3 * (4 << 20)


def test_freed_memory_goes_back_when_it_has_become_much(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(pages, "give_back", lambda: calls.append(None))
    returns = pages.Returns(every_bytes=10)
    counts = []
    for nbytes in (4, 5, 1, 9, 30):
        returns.freed(nbytes)
        counts.append(len(calls))
    assert counts == [0, 0, 1, 1, 2]


def test_giving_back_needs_no_c_library_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pages.give_back()
    monkeypatch.setattr(pages.ctypes, "CDLL", lambda _: object())
    pages.give_back()


def test_pages_are_huge_where_the_system_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel makes no huge pages")
    value = allocate(8 << 20).fill_(1)
    mapping = next(m for m in psutil.Process().memory_maps(grouped=False) if holds(m.addr, value))
    assert mapping.anonymous >= 8 << 20, "shared memory has none unless the administrator wants it"


def holds(addresses: str, value: torch.Tensor) -> bool:
    start, stop = (int(part, 16) for part in addresses.split("-"))
    return start <= value.data_ptr() < stop


def test_a_forked_child_writes_into_its_own_copy() -> None:
    value = allocate(3 << 20).fill_(1)
    child = os.fork()
    if not child:
        ctypes.memset(value.data_ptr(), 2, value.numel())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((value == 1).all())
