"""Saves a checkpoint of a model with odd tensors; a resumed run goes on and saves the end.

Arguments: a directory for results, the number of steps to make in all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from place import batch, fill

import paradis


class Model(torch.nn.Module):
    """Layouts, dtypes, a tied weight, buffers of all kinds, and nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.turned = torch.nn.Parameter(torch.zeros(3, 5).t())
        self.nothing = torch.nn.Parameter(torch.zeros(0, 4))
        self.brief = torch.nn.Parameter(torch.zeros(70, dtype=torch.bfloat16))
        self.first = torch.nn.Linear(5, 3, bias=False)
        self.second = torch.nn.Linear(5, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.late = torch.nn.Parameter(torch.zeros(6))
        self.register_buffer("phases", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False]))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        """Return a loss that uses everything."""
        x = self.norm(self.conv(batch(rank, step, 2, 3, 5, 5))).square().mean()
        y = (self.second(self.first.weight) @ self.turned.t()[:, :3]).square().sum()
        z = (self.brief * batch(rank, step, 70).bfloat16()).sum().float()
        return x + y + z + self.nothing.sum() + (self.late * batch(rank, step, 6)).sum()


def build() -> tuple[Model, Any]:
    """Return the model and its wrapped optimizer; one parameter joins after `paradis.wrap`."""
    model = fill(Model(), 5 + paradis.rank()).to(memory_format=torch.channels_last)
    members = [p for n, p in model.named_parameters() if n not in ("late", "frozen")]
    optimizer = paradis.wrap(model, torch.optim.Adam(members, lr=0.01))
    optimizer.add_param_group({"params": [model.late], "lr": 0.02})
    return model, optimizer


def main() -> None:
    """Train, save, and keep what plain torch would keep."""
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    model, optimizer = build()
    while optimizer.steps_done < steps:
        model.loss(paradis.rank(), optimizer.steps_done).backward()
        optimizer.step()
        optimizer.zero_grad()
    path = optimizer.save_checkpoint({"done": steps}, wait=True)
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "path": path}
    kept["restored"] = optimizer.restored
    torch.save(kept, directory / f"{paradis.rank()}.pt")


if __name__ == "__main__":
    main()
