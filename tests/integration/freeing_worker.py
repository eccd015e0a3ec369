"""Checkpoints of a job whose gradients are let go: who must call for one, and when.

    freeing_worker.py OUT alone | one | every STEPS

``alone``: worker 0 saves by itself when worker 1 has begun the next step, then after the last one.
``one``: worker 1 saves by itself. ``every``: checkpoints are scheduled.
Writes OUT/<rank>.json: what was refused, and a digest of the values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import xxhash

import paradis
import paradis.optim
from paradis.errors import DeadlineExceeded, StateError

FREEZE, AT = 2, 4


def backward(model: torch.nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(8, 200, generator=generator)).square().mean().backward()


def main() -> None:
    out, what, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, refused = paradis.rank(), ""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 100))
    optimizer = paradis.wrap(
        model, paradis.optim.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=FREEZE)
    )
    for step in range(optimizer.steps_done, steps):
        if step == AT and what == "alone" and rank == 0:
            with (out / "ahead").open("rb") as ahead:
                ahead.read()
            try:
                optimizer.save_checkpoint(wait=True)
            except StateError as error:
                refused = error.message
        if step == AT and what == "one" and rank == 1:
            try:
                optimizer.save_checkpoint()
            except DeadlineExceeded as error:
                refused = error.message
        optimizer.zero_grad()
        backward(model, step, rank)
        if step == AT and what == "alone" and rank == 1:
            optimizer._binding.compressor._drain()
            (out / "ahead").open("wb").close()
        optimizer.step()
    if rank == 0 and what != "one":
        assert optimizer.save_checkpoint(wait=True) is not None
    if what == "alone" and rank == 0:
        (out / "saved").open("wb").close()
    elif what == "alone":  # whoever has left has no part in a checkpoint
        (out / "saved").read_bytes()
    optimizer.wait()
    total = xxhash.xxh3_64()
    for part in model.parameters():
        total.update(part.detach().reshape(-1).view(torch.uint8).numpy())
    (out / f"{rank}.json").write_text(
        json.dumps({"refused": refused, "digest": total.hexdigest()}), encoding="utf-8"
    )


main()
