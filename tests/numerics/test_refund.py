"""A late worker's code is taken back: its memories are what they were, however often it is late."""

from __future__ import annotations

import pytest
import torch

from paradis.numerics.coders import worker_coder
from paradis.numerics.coding import WorkerCoder
from paradis.numerics.elementwise import Options

pytest.importorskip("numba")
OPTIONS: Options = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
LENGTH = 1500


def begun(codec: str) -> tuple[WorkerCoder, torch.Tensor]:
    """Return a coder after a step that it has made, and room for codes."""
    coder = worker_coder(codec, [LENGTH])
    if codec == "onebit":
        coder.load_memories({"momentum": [torch.ones(LENGTH)], "inverse": [torch.ones(LENGTH)]})
    code = torch.empty(coder.code_bytes, dtype=torch.uint8)
    gradients = [torch.linspace(-1.0, 1.0, LENGTH)]
    coder.encode(gradients, code, OPTIONS)
    coder.keep()
    return coder, code


@pytest.mark.parametrize("codec", ["int8", "onebit", "lion"])
def test_a_worker_that_is_always_late_keeps_its_memories(codec: str) -> None:
    coder, code = begun(codec)
    before = {name: [t.clone() for t in pieces] for name, pieces in coder.own().items()}
    assert any(bool(t.abs().max() > 0) for pieces in before.values() for t in pieces)
    for step in range(30):
        coder.encode([torch.full((LENGTH,), 1.0 + step)], code, OPTIONS)
        coder.forget()
    for name, pieces in coder.own().items():
        assert all(map(torch.equal, pieces, before[name])), name
