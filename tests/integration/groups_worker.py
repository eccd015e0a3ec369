"""A training script with two worker groups, ``tick`` and ``tock``.

    groups_worker.py OUT WHAT

The parameter ``tick`` counts the steps of its group: each adds 1 to every element. ``read``: the
workers of ``tick`` append to OUT/story when a step is done; the one of ``tock`` writes down what it
reads, waits in its second step until OUT/limit steps are told, and goes on until it has read the
last value. ``save``: both train, worker 0 saves. ``names``, ``add``: what is refused.
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
STEPS, DEADLINE_S = 12, 60.0


class Pair(torch.nn.Module):
    """Two parameters, each large enough for several shards, and a buffer."""

    def __init__(self, other: str = "tock") -> None:
        super().__init__()
        self.tick = torch.nn.Parameter(torch.zeros(40_000))
        self.register_parameter(other, torch.nn.Parameter(torch.zeros(300, 10).T))
        self.register_buffer("seen", torch.full((3,), float(paradis.rank())))


def say(*words: object) -> None:
    """Append a line to the story: writes of one line do not mix."""
    story = os.open(OUT / "story", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(story, " ".join(map(str, words)).encode() + b"\n")
    os.close(story)


def told() -> list[str]:
    """Return what was told so far."""
    path = OUT / "story"
    return path.read_text().splitlines() if path.exists() else []


def train(model: Pair, optimizer: Any) -> None:
    """Make a step that adds 1 to what this worker trains."""
    (-sum(p.sum() for p in model.parameters())).backward()
    optimizer.step()
    optimizer.zero_grad()


def build() -> tuple[Pair, Any]:
    """Return the model and its optimizer, with momentum, so that there is state."""
    model = Pair()
    return model, paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))


def read() -> dict[str, Any]:
    """Train, and write down what was read."""
    model, optimizer = build()
    found: dict[str, Any] = {"group": paradis.worker_group(), "place": paradis.group_rank()}
    found["trained"] = [n for n, p in model.named_parameters() if p.requires_grad]
    if paradis.worker_group() == "tick":
        for step in range(STEPS):
            train(model, optimizer)
            optimizer.wait()
            say("done", paradis.rank(), step)
        return found
    found["read"] = []
    deadline = time.monotonic() + DEADLINE_S
    limit = int((OUT / "limit").read_text())
    while not found["read"] or found["read"][-1][1] < STEPS:
        while len(found["read"]) == 1 and f"done 0 {limit - 1}" not in told():
            assert time.monotonic() < deadline, told()
            select.select([], [], [], 0.005)
        assert time.monotonic() < deadline, found
        done = sum(line.startswith("done 0") for line in told())
        train(model, optimizer)
        found["read"].append((done, float(model.tick.min()), float(model.tick.max())))
        assert model.tick.grad is None
    found["own"] = float(model.tock.min())  # type: ignore[arg-type, operator]
    return found


def save() -> dict[str, Any]:
    """Train some steps and save; after a resume, say what is there."""
    model, optimizer = build()
    found: dict[str, Any] = {"start": optimizer.steps_done, "restored": optimizer.restored}
    found["values"] = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(4 if paradis.worker_group() == "tick" else 6):
        train(model, optimizer)
    optimizer.save_checkpoint({"at": "end"}, wait=True)
    return found


def names() -> dict[str, Any]:
    """Wrap a model with a parameter that no group trains."""
    model = Pair("tack")
    paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return {}


def add() -> dict[str, Any]:
    """Add parameters later."""
    _, optimizer = build()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    return {}


if __name__ == "__main__":
    result = globals()[WHAT]()
    torch.save(result, OUT / f"{paradis.rank()}.pt")
