"""Trains through every way in which a step can differ among workers; writes what came of it.

    sharing_worker.py OUT [die STEP]

Each rank writes OUT/<rank>.json: a digest of all values after each step, and its counters. With
``die`` rank 1 kills itself in that step, between backward and ``step()``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as distributed
import xxhash

import paradis

STEPS = 14
SIZES = ((40_000,), (300, 7), (5,), (129,), (20_000,), (3,))


class Parts(torch.nn.Module):
    """Parameters of several shards, and small ones that share a bucket."""

    def __init__(self) -> None:
        super().__init__()
        values = [torch.randn(size) for size in SIZES]
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(v) for v in values)

    def backward(self, step: int, rank: int) -> None:
        """Make gradients that depend on step, rank and values; parameter 4 may have none."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        total = torch.zeros(())
        for index, part in enumerate(self.parts):
            absent = (step in (3, 9) and index == 0 and rank % 2) or (step in (4, 9) and index == 4)
            noise = torch.randn(part.shape, generator=generator)
            if not absent:
                total = total + (part * noise).sum() * 0.1 + part.cos().sum()
        total.backward()


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all values."""
    hashed = xxhash.xxh3_64()
    for part in model.parameters():
        hashed.update(part.detach().numpy().tobytes())
    return hashed.hexdigest()


def train(step: int, rank: int, model: Parts, optimizer: paradis.WrappedOptimizer) -> None:
    """Do one step, each in its own way."""
    if step == 10:
        with optimizer.no_sync():
            model.backward(step + 500, rank)
    model.backward(step, rank)
    if step in (5, 6) and rank in (0, 2):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if step == 7 and rank == 3:
        model.parts[0].grad = None
    if step == 8 and rank == 1:
        model.backward(step + 700, rank)
    if step in (2, 9, 11):
        optimizer.clip_grad_norm_(1.0)
        if step == 11 and rank == 2:
            model.parts[4].grad = None
        if step == 11 and rank == 3:
            model.parts[1].grad.mul_(0.5)
    if step == 12:
        with torch.no_grad():
            model.parts[3].clamp_(-0.5, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Train, and write the result."""
    out, rank = Path(sys.argv[1]), paradis.rank()
    dies = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    torch.manual_seed(3)
    model = Parts()
    optimizer = paradis.wrap(model, torch.optim.Adam(model.parameters(), lr=0.01))
    late = random.Random(rank)
    digests = []
    for step in range(STEPS):
        time.sleep(late.random() * 0.01)
        if step == dies and rank == 1:
            model.backward(step, rank)
            os.kill(os.getpid(), signal.SIGKILL)
        train(step, rank, model, optimizer)
        digests.append(digest(model))
    state = optimizer.state_dict()["state"]
    digests.append(xxhash.xxh3_64_hexdigest(state[0]["exp_avg"].numpy().tobytes()))
    result = {
        "digests": digests,
        "metrics": optimizer.metrics(),
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "initialized": distributed.is_initialized(),
    }
    (out / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
