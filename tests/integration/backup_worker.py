"""A training script of which one worker is held by files, where steps do without one.

    backup_worker.py OUT WAY

WAY is none, bf16, int8, onebit or lion. Worker 2 waits in its step 4 until the others have called
``step()`` for their step 7; they wait before their step 9 until worker 2 has begun a step again.
Everybody trains until ``steps_done`` says END, and notes a digest of what it has at each version:
values, and the momenta that all have alike. Worker 0 saves after its step 5.
Writes OUT/<rank>.json.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import torch
import xxhash

import paradis
import paradis.optim

OUT, WAY = Path(sys.argv[1]), sys.argv[2]
HELD, SAVED, AHEAD, TOGETHER, END = 4, 5, 7, 9, 12
DEADLINE_S = 60.0


def say(*words: object) -> None:
    story = os.open(OUT / "story", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(story, " ".join(map(str, words)).encode() + b"\n")
    os.close(story)


def wait_for(line: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while line not in (told := (OUT / "story").read_text().splitlines()):
        assert time.monotonic() < deadline, f"{line} not told in {told}"
        select.select([], [], [], 0.005)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    if WAY == "lion":
        return paradis.optim.DistributedLion(parameters, lr=1e-3)
    if WAY == "onebit":
        return paradis.optim.OneBitAdam(parameters, lr=1e-3, freeze_step=3, weight_decay=0.1)
    return torch.optim.Adam(parameters, lr=1e-3)


def coders(optimizer: Any) -> list[Any]:
    memory = optimizer._bound.memory
    return [m.coder for _, m in sorted(memory.shards.items()) if m.coder is not None]


def left_out(optimizer: Any) -> list[torch.Tensor]:
    """Return copies of what this worker's codes have left out."""
    return [t.clone() for c in coders(optimizer) for ts in c.own().values() for t in ts]


def digest(model: torch.nn.Module, optimizer: Any) -> str:
    found = xxhash.xxh3_64()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    for coder in coders(optimizer) if WAY == "onebit" else ():
        for piece in coder.memories().get("momentum", ()):
            found.update(piece.numpy().tobytes())
    return found.hexdigest()


def train(rank: int) -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(3)])
    optimizer: Any = paradis.wrap(model, make_optimizer(model.parameters()))
    versions, failures, calls, held, saved = {}, [], 0, False, ""
    while (step := optimizer.steps_done) < END:
        generator = torch.Generator().manual_seed(10 * step + rank)
        if held:
            say("back", rank)
        if rank != 2 and step == TOGETHER:
            wait_for("back 2")
        before = left_out(optimizer)
        model(torch.randn(4, 96, generator=generator)).square().mean().backward()
        if rank == 2 and not held and step >= HELD:
            held = True
            wait_for(f"call 0 {AHEAD}")
            wait_for(f"call 1 {AHEAD}")
        say("call", rank, step)
        late = optimizer.metrics().get("late_steps", 0.0)
        optimizer.step()
        optimizer.wait()
        optimizer.zero_grad()
        calls += 1
        after = left_out(optimizer)
        kept = len(after) == len(before) and all(map(torch.equal, before, after))
        if before and optimizer.metrics().get("late_steps", 0.0) > late and not kept:
            failures.append(f"step {step} was late and has left something in the memories")
        versions[optimizer.steps_done] = digest(model, optimizer)
        if rank == 0 and step >= SAVED and not saved:
            saved = optimizer.save_checkpoint({"at": step}, wait=True)
    counters = optimizer.metrics()
    return {
        "versions": versions, "failures": failures, "calls": calls,
        "late": counters.get("late_steps", 0.0), "memories": len(left_out(optimizer)),
        "saved": saved, "clipped": float(optimizer.clip_grad_norm_(1.0)),
    }  # fmt: skip


if __name__ == "__main__":
    result = train(paradis.rank())
    (OUT / f"{paradis.rank()}.json").write_text(json.dumps(result))
