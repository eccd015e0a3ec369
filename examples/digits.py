"""Handwritten digits, a small network, one line of Paradis.

Alone:      python examples/digits.py
A cluster:  paradis run --workers 2 --servers 2 examples/digits.py

Every worker trains on its own part of the images, with as many batches per pass as every other, and
worker 0 reports the accuracy on images that nobody trained on.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import paradis

PASSES = 20
GLOBAL_BATCH = 60
"""Images per step over all workers, so that any number of workers trains alike."""


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (N, 64) float32 between 0 and 1, and digits (N,) int64, shuffled alike."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit(
            "digits.py: scikit-learn is not installed, which the images come with; "
            "install it with: pip install 'paradis[examples]'"
        )
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.as_tensor(data.data, dtype=torch.float32) / 16
    return images[order], torch.as_tensor(data.target, dtype=torch.int64)[order]


def main() -> None:
    """Train and report."""
    rank, workers = paradis.rank(), paradis.world_size()
    images, digits = load()
    train, test = slice(0, 1440), slice(1440, None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    measure = nn.CrossEntropyLoss()
    optimizer = paradis.wrap(model, torch.optim.Adam(model.parameters(), lr=0.005))

    own_images, own_digits = images[train][rank::workers], digits[train][rank::workers]
    batch = max(1, GLOBAL_BATCH // workers)
    batches = (
        1440 // workers
    ) // batch  # equal counts: nobody waits for a batch that another lacks
    for number in range(1, PASSES + 1):
        shuffle = torch.Generator().manual_seed(number * workers + rank)
        order = torch.randperm(len(own_digits), generator=shuffle)
        for index in range(batches):
            chosen = order[index * batch : (index + 1) * batch]
            loss = measure(model(own_images[chosen]), own_digits[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and number % 5 == 0:
            print(f"pass {number}: loss {float(loss.detach()):.3f}", flush=True)

    if rank == 0:
        with torch.no_grad():
            right = model(images[test]).argmax(1) == digits[test]
        print(f"test accuracy: {100 * float(right.float().mean()):.1f} %", flush=True)


if __name__ == "__main__":
    main()
