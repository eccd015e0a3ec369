"""A training script that saves, resumes, and writes down what it holds.

    checkpoint_worker.py OUT STEPS [SAVE_AT [HOLD_AT]] [other] [ranked]

Two ``wrap`` calls: a convolutional net (channels last, BatchNorm, Adam with a scheduler) and tied
weights beside a transposed one (SGD with momentum). Every rank sees the same batches, so that one
worker and two train alike; ``ranked`` gives each its own. ``other`` builds another model.
Writes OUT/<rank>-<step>.pt at the start, at SAVE_AT, where it saves a checkpoint too, and at the
end. At HOLD_AT it tells so, waits for a line, and saves again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import paradis


class Tied(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(211, width)
        self.head = torch.nn.Linear(width, 211, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(190, width).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) @ self.turned
        result: torch.Tensor = self.head(hidden @ self.turned.t()) * 0.05
        return result


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 33, 5)
        self.norm = torch.nn.BatchNorm2d(33)
        self.out = torch.nn.Linear(33, 1001)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.norm(self.conv(images)).relu().mean((2, 3)))
        return result


def build(width: int = 101) -> tuple[Net, Tied]:
    return Net(), Tied(width)


def optimizers(net: Net, tied: Tied) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    adam = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
    return adam, torch.optim.SGD(tied.parameters(), lr=0.05, momentum=0.9)


def train_step(seed: int, net: Any, tied: Any, adam: Any, sgd: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(4, 3, 9, 9, generator=generator)
    tokens = torch.randint(0, 211, (16,), generator=generator)
    for optimizer in (adam, sgd):
        optimizer.zero_grad()
    net(images.to(memory_format=torch.channels_last)).square().mean().backward()
    torch.nn.functional.cross_entropy(tied(tokens), tokens).backward()
    adam.step()
    sgd.step()


def held(net: Any, tied: Any, adam: Any, sgd: Any) -> dict[str, Any]:
    """Return copies of everything that a checkpoint holds."""
    everything = {
        "net": net.state_dict(),
        "tied": tied.state_dict(),
        "adam": adam.state_dict(),
        "sgd": sgd.state_dict(),
    }
    return copied(everything)


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list | tuple) else value


def main() -> None:
    numbers = [int(word) for word in sys.argv[2:] if word.isdecimal()]
    steps, save_at, hold_at = (*numbers, -1, -1)[:3]
    out, rank = Path(sys.argv[1]), paradis.rank()
    torch.manual_seed(100 + rank)
    net, tied = build(103 if "other" in sys.argv else 101)
    plain = optimizers(net, tied)
    adam, sgd = paradis.wrap(net, plain[0]), paradis.wrap(tied, plain[1])
    start = sgd.steps_done
    # The rate that a checkpoint holds is the last step's, as the scheduler expects.
    schedule = torch.optim.lr_scheduler.StepLR(adam, 2, 0.5, last_epoch=start - 1)

    def write(step: int) -> None:
        record = held(net, tied, adam, sgd)
        record |= {"restored": sgd.restored, "epoch": schedule.last_epoch}
        torch.save(record, out / f"{rank}-{step}.pt")

    write(start)
    for step in range(start, steps):
        train_step(step + (1000 * rank if "ranked" in sys.argv else 0), net, tied, adam, sgd)
        if step + 1 == hold_at:
            adam.wait()  # what is lost then is lost in the save, not in the step
            sgd.wait()
            print("holding", flush=True)
            with open(out / "go") as file:
                file.readline()
            sgd.save_checkpoint(wait=True)
        if step + 1 == save_at:
            write(save_at)
            adam.save_checkpoint({"name": "first"})
            sgd.save_checkpoint({"epoch": 3, "loss": 0.25})
        schedule.step()
    write(steps)


if __name__ == "__main__":
    main()
