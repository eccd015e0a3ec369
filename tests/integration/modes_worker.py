"""A training script whose workers do not go at one speed.

    modes_worker.py OUT WHAT

``slow``: worker 2 waits in its step 1 until the others have called ``step()`` as often as OUT/limit
says; worker 1 ends after 4 of 6 steps. Every worker appends to OUT/story what it does, one line at
a time: ``begin``, ``call`` (just before ``step()``), ``end``. ``fit``: linear regression. ``clip``,
``overflow``, ``change``, ``reload``, ``save``: what the names say.
Writes OUT/<rank>.pt with what it has in the end.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import torch

import paradis

OUT, WHAT = Path(sys.argv[1]), sys.argv[2]
STEPS, DEADLINE_S = 6, 60.0


def say(*words: object) -> None:
    """Append a line to the story: writes of one line do not mix."""
    story = os.open(OUT / "story", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(story, " ".join(map(str, words)).encode() + b"\n")
    os.close(story)


def told() -> list[str]:
    return (OUT / "story").read_text().splitlines()


def wait_for(*lines: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not all(line in told() for line in lines):
        assert time.monotonic() < deadline, f"{lines} not told in {told()}"
        select.select([], [], [], 0.005)


def build() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    return model, paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))


def backward(model: torch.nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(4, 64, generator=generator)).square().mean().backward()


def slow(rank: int) -> dict[str, Any]:
    model, optimizer = build()
    limit = int((OUT / "limit").read_text())
    for step in range(4 if rank == 1 else STEPS):
        say("begin", rank, step)
        backward(model, step, rank)
        if rank == 2 and step == 1:
            wait_for(f"call 0 {limit}", f"call 1 {min(3, limit)}")
        say("call", rank, step)
        optimizer.step()
        optimizer.zero_grad()
    say("end", rank)
    return {"steps": optimizer.steps_done}


def fit(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    wanted, inputs = torch.randn(24, 3), torch.randn(96, 24)
    model = torch.nn.Linear(24, 3)
    optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.2))
    own = inputs[rank :: paradis.world_size()]
    losses = []
    for _ in range(120):
        optimizer.zero_grad()
        (model(own) - own @ wanted).square().mean().backward()
        optimizer.step()
        losses.append((model(inputs) - inputs @ wanted).square().mean().item())
    return {"first": losses[0], "last": losses[-1]}


def clip(rank: int) -> dict[str, Any]:
    model, optimizer = build()
    backward(model, 0, rank)
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    norm = optimizer.clip_grad_norm_(1e-3)
    optimizer.step()
    return {"norm": float(norm), "wanted": float(gradients.double().norm())}


def overflow(rank: int) -> dict[str, Any]:
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 64, generator=generator)).square().mean()
        scaler.scale(loss).backward()
        if rank == 1 and step == 1:
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return {"scale": scaler.get_scale(), "finite": finite, "steps": optimizer.steps_done}


def change(rank: int) -> dict[str, Any]:
    model, optimizer = build()
    for step in range(2):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        model[2].weight.data.clamp_(-0.01, 0.01)  # type: ignore[index, union-attr, operator]
    return {}


def reload(rank: int) -> dict[str, Any]:
    """In the middle of training the lowest worker's optimizer state goes to the servers anew."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    optimizer = paradis.wrap(model, torch.optim.Adam(model.parameters()))
    for step in range(STEPS):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and rank == 0:
            state = optimizer.state_dict()
            for entry in state["state"].values():
                entry["exp_avg"].zero_()
            optimizer.load_state_dict(state)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    counts = {float(e["step"]) for e in optimizer.state_dict()["state"].values()}
    return {"finite": finite, "counts": sorted(counts)}


def save(rank: int) -> dict[str, Any]:
    """Worker 0 saves after 3 of 6 steps, while the others go on; at the start all say what is."""
    model, optimizer = build()
    found = {"start": optimizer.steps_done, "state": optimizer.state_dict()["state"]}
    found["values"] = {k: v.clone() for k, v in model.state_dict().items()}
    found["restored"] = optimizer.restored
    for step in range(optimizer.steps_done, STEPS):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.save_checkpoint({"at": step}, wait=True)
    return found


if __name__ == "__main__":
    result = globals()[WHAT](paradis.rank())
    torch.save(result, OUT / f"{paradis.rank()}.pt")
