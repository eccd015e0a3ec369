"""A training script with late gradients on several workers, and its twin in plain PyTorch.

    delayed_worker.py OUT [unlike|uneven]

Writes OUT/<rank>.pt: the parameters after each step and in the end. Rank 0 also computes the twin,
from every rank's gradients, and writes OUT/twin.pt. With ``unlike`` rank 0 alone waits for the late
step, with ``uneven`` rank 1 has a batch less.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import paradis

STEPS, WARMUP, MAX_NORM = 6, 2, 0.05
Bits = list[torch.Tensor]


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 6))


def sample(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def values(model: nn.Module) -> Bits:
    return [p.detach().clone() for p in model.parameters()]


def train(out: Path, steps: int, *, unlike: bool) -> None:
    model = build()
    optimizer = paradis.wrap(model, torch.optim.Adam(model.parameters(), lr=0.01))
    seen = []
    for step in range(steps):
        model(sample(step, paradis.rank())).square().mean().backward()
        if step % 2:
            optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if unlike and paradis.rank() == 0:
            optimizer.wait()
        seen.append(values(model))
    optimizer.wait()
    seen.append(values(model))
    torch.save(seen, out / f"{paradis.rank()}.pt")


def mean_of(model: nn.Module, step: int, ranks: int) -> Bits:
    """Return the mean gradient, clipped in every other step as the servers do it."""
    total: Bits = []
    for rank in range(ranks):
        model.zero_grad()
        model(sample(step, rank)).square().mean().backward()
        own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        total = [a + b for a, b in zip(total, own, strict=True)] if total else own
    mean = [t / ranks for t in total]
    if step % 2:
        norm = float(sum(float(m.double().square().sum()) for m in mean)) ** 0.5
        factor = min(1.0, MAX_NORM / (norm + 1e-6))
        mean = [m * factor for m in mean]
    return mean


def twin(out: Path, ranks: int, *, uneven: bool) -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    late: Bits = []
    for step in range(STEPS):
        fresh = mean_of(model, step, 1 if uneven and step == STEPS - 1 else ranks)
        queue = [late, fresh] if step < WARMUP else [late]
        late = [] if step < WARMUP else fresh
        for gradients in queue:
            if gradients:
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
        seen.append(values(model))
    for parameter, gradient in zip(model.parameters(), late, strict=True):
        parameter.grad = gradient
    optimizer.step()
    seen.append(values(model))
    torch.save(seen, out / "twin.pt")


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    uneven = "uneven" in sys.argv
    train(directory, STEPS - (uneven and paradis.rank() == 1), unlike="unlike" in sys.argv)
    if paradis.rank() == 0:
        twin(directory, paradis.world_size(), uneven=uneven)
