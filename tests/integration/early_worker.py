"""A training script under early updates that compares every step with plain PyTorch, bit for bit.

    early_worker.py OUT exact|changed|unseen

In every other step ``exact`` calls ``step()`` only when all updates of the step are there already.
``changed`` changes a gradient after backward on worker 1, ``unseen`` so that only servers notice.
Writes OUT/<rank>.json: what differed, and how many updates came ahead of ``step()``.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import paradis
from paradis.frontend.early import EarlyUpdates
from paradis.frontend.session import current
from paradis.roles.worker_early import WorkerEarly

STEPS = 6
DEADLINE_S = 60.0
CHANGED_AT = 3


class Watch:
    """Counts the updates that are kept for ``step()``, and waits for all of a step."""

    def __init__(self) -> None:
        self.count = 0
        self._news = threading.Condition()
        real: Any = WorkerEarly._keep_early

        def keep_early(role: Any, *arguments: Any) -> None:
            real(role, *arguments)
            with self._news:
                self.count += 1
                self._news.notify_all()

        WorkerEarly._keep_early = keep_early  # type: ignore[method-assign]

    def wait_for_all(self) -> None:
        """Return when every shard of the step has its update."""
        group = current().node.worker_role.groups[0]
        with self._news:
            assert self._news.wait_for(lambda: len(group.early) == len(group.shards), DEADLINE_S)


def model() -> torch.nn.Sequential:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(24, 301), torch.nn.Tanh(), torch.nn.Linear(301, 97)]
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(97, 3))


def loss(net: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    result: torch.Tensor = net(inputs).square().mean()
    return result


def reference_step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Do what all workers together should: the mean over ranks, in their order."""
    total: list[torch.Tensor] = []
    for rank in range(paradis.world_size()):
        net.zero_grad()
        loss(net, step, rank).backward()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
    for parameter, grad in zip(net.parameters(), total, strict=True):
        parameter.grad = grad / paradis.world_size()
    optimizer.step()


def main() -> None:
    out, what = Path(sys.argv[1]), sys.argv[2]
    watch = Watch()
    plain = model()
    net = copy.deepcopy(plain)
    optimizer = paradis.wrap(net, torch.optim.Adam(net.parameters(), lr=0.01))
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    if what == "unseen":
        EarlyUpdates.confirm = lambda *_, **__: None  # type: ignore[method-assign]
    differs = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, step, paradis.rank()).backward()
        if step % 2 and step > 1:  # pushes of the first step begin in step()
            watch.wait_for_all()
        if step == CHANGED_AT and what != "exact" and paradis.rank() == 1:
            with torch.no_grad():
                net[2].weight.grad.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step()
        reference_step(plain, reference, step)
        for (name, got), wanted in zip(net.named_parameters(), plain.parameters(), strict=True):
            if not torch.equal(got.detach().view(torch.int32), wanted.detach().view(torch.int32)):
                differs.append(f"step {step}: {name}")
    held = optimizer.state_dict()["state"]
    for index, state in reference.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            if not torch.equal(held[index][key], state[key]):
                differs.append(f"{key} of {index}")
    result = {"differs": differs, "early": watch.count, "shards": len(watch_shards())}
    (out / f"{paradis.rank()}.json").write_text(json.dumps(result))


def watch_shards() -> dict[int, Any]:
    shards: dict[int, Any] = current().node.worker_role.groups[0].shards
    return shards


main()
