"""Calls that C++ answers wait for held tensors, and are themselves again afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed
from torch import nn

from paradis.frontend.reading import hold, release
from paradis.frontend.unseen import UnseenCalls

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct", "ignore:`torch.jit")


class Watched:
    """A held parameter, and what has been waited for."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.ones(3))
        self.waits = self.finishes = 0
        self.calls = UnseenCalls(self._finish)
        hold(self.parameter, self._wait)

    def _wait(self) -> None:
        self.waits += 1
        release(self.parameter)

    def _finish(self) -> None:
        self.finishes += 1


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    tensor = torch.tensor
    made.calls.watch()
    yield made
    release(made.parameter)
    made.calls.unwatch()
    assert torch.tensor is tensor


def test_a_constructor_waits(watched: Watched) -> None:
    torch.tensor([1.0])
    assert not watched.waits
    torch.tensor(watched.parameter)
    assert watched.waits == 1


def test_a_transform_waits(watched: Watched) -> None:
    torch.func.grad(lambda w: w.sum())(watched.parameter)
    assert watched.waits == 1


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo here")
def test_a_collective_waits(watched: Watched) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.distributed.broadcast(watched.parameter, 0)
    finally:
        torch.distributed.destroy_process_group()
    assert watched.waits == 1


def test_a_compiler_finishes_the_step(watched: Watched) -> None:
    torch.jit.script(torch.nn.ReLU())
    assert watched.finishes


def test_the_last_step_takes_them_away_and_keeps_what_came_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, before, asarray = UnseenCalls(lambda: None), torch.tensor, torch.asarray
    calls.watch()
    calls.watch()
    calls.unwatch()
    assert torch.tensor is not before
    monkeypatch.setattr(torch, "asarray", print)
    calls.unwatch()
    assert torch.tensor is before
    assert torch.asarray is print
    monkeypatch.setattr(torch, "asarray", asarray)
