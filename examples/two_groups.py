"""Reads handwritten digits with two worker groups: one trains the backbone, one the head.

    paradis run --config examples/two_groups.yaml examples/two_groups.py

The images are scikit-learn's (1,797 of 8 x 8 pixels), as in digits.py. Every worker has the whole
model and computes with all of it; it trains its group's half and reads the other as the other group
makes it. Within a group each worker takes every n-th image. Alone, one process trains both halves:

    python examples/two_groups.py
"""

from __future__ import annotations

import torch
from digits import load
from torch import nn

import paradis

PASSES = 10
BATCH = 20
"""Images per step of one worker."""


class Net(nn.Module):
    """Two layers that make features of an image, and one that names the digit."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores (N, 10) of images (N, 64)."""
        scores: torch.Tensor = self.head(self.backbone(images))
        return scores


def main() -> None:
    """Train and report."""
    rank, group = paradis.group_rank(), paradis.worker_group() or "both"
    images, digits = load()
    train, test = slice(0, 1440), slice(1440, None)
    torch.manual_seed(0)
    model = Net()
    measure = nn.CrossEntropyLoss()
    optimizer = paradis.wrap(model, torch.optim.Adam(model.parameters(), lr=0.005))

    chosen = slice(rank, None, paradis.group_size())
    own_images, own_digits = images[train][chosen], digits[train][chosen]
    for number in range(1, PASSES + 1):
        order = torch.randperm(len(own_digits), generator=torch.Generator().manual_seed(number))
        for batch in order.split(BATCH):
            loss = measure(model(own_images[batch]), own_digits[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if paradis.rank() == 0 and number % 5 == 0:
            print(f"pass {number} of {group}: loss {float(loss.detach()):.3f}", flush=True)

    optimizer.save_checkpoint(wait=True)
    with torch.no_grad():
        right = model(images[test]).argmax(1) == digits[test]
    print(f"test accuracy: {100 * float(right.float().mean()):.1f} %", flush=True)


if __name__ == "__main__":
    main()
