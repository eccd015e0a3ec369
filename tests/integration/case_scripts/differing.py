"""Workers that differ in one way each: how the job refuses, or goes on without one of them.

Writes what this rank ended with: its error's text, or its parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from place import Scalars, batch, fill, mlp

import paradis

RANK = paradis.rank()
DIRECTORY = Path(sys.argv[1])
SGD = torch.optim.SGD


def train(
    model: torch.nn.Module, optimizer: Any, steps: int, before: Callable[[int], None] | None = None
) -> None:
    """Make a few steps."""
    for step in range(steps):
        model(batch(RANK, step, 4, 8)).square().mean().backward()
        if before is not None:
            before(step)
        optimizer.step()
        optimizer.zero_grad()


def rates() -> torch.nn.Module:
    """ReduceLROnPlateau on each worker's own loss."""
    model = mlp(0)
    optimizer = paradis.wrap(model, SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    train(model, optimizer, 4, lambda step: scheduler.step(step if RANK else -step))
    return model


def changed_values() -> torch.nn.Module:
    """Another value on each worker."""
    model = mlp(0)
    optimizer = paradis.wrap(model, SGD(model.parameters(), lr=0.1))

    def change(step: int) -> None:
        if step == 2:
            model[2].bias.data.fill_(float(RANK))

    train(model, optimizer, 4, change)
    return model


def loaded_by_one() -> torch.nn.Module:
    """A checkpoint of the script's own, loaded on worker 1 only."""
    model = mlp(0)
    optimizer = paradis.wrap(model, SGD(model.parameters(), lr=0.1))
    other = mlp(1)

    def change(step: int) -> None:
        if step == 2 and RANK == 1:
            model.load_state_dict(other.state_dict())

    train(model, optimizer, 4, change)
    return model


def unseen_write() -> torch.nn.Module:
    """A gradient changed behind torch's back."""
    model = mlp(0)
    optimizer = paradis.wrap(model, SGD(model.parameters(), lr=0.1))

    def change(step: int) -> None:
        if step == 2:
            model[2].bias.grad.data.mul_(0.5)

    train(model, optimizer, 4, change)
    return model


def non_finite() -> torch.nn.Module:
    """Worker 1's gradient of one parameter overflows."""
    model = mlp(0)
    optimizer = paradis.wrap(model, SGD(model.parameters(), lr=0.1))

    def change(step: int) -> None:
        if step == 2 and RANK == 1:
            model[2].bias.grad[3] = float("nan")

    train(model, optimizer, 4, change)
    return model


def shapes() -> torch.nn.Module:
    """Another width, another name, another optimizer setting."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 5 + RANK), torch.nn.Linear(5 + RANK, 4))
    model.register_parameter(f"extra{RANK}", torch.nn.Parameter(torch.ones(2)))
    paradis.wrap(model, SGD(model.parameters(), lr=0.1 + RANK, momentum=0.5))
    return model


def order() -> torch.nn.Module:
    """The same parameters in another order."""
    names = ("a", "b") if RANK == 0 else ("b", "a")
    model = Scalars(**{name: torch.ones(3) for name in names})
    paradis.wrap(model, SGD(model.parameters(), lr=0.1))
    return model


def optimizers() -> torch.nn.Module:
    """Another class."""
    model = mlp(0)
    kind = torch.optim.Adam if RANK else torch.optim.SGD
    paradis.wrap(model, kind(model.parameters(), lr=0.1))
    return model


def batches() -> torch.nn.Module:
    """Worker 1 has one batch less than worker 0."""
    model = fill(torch.nn.Linear(8, 2), 0)
    optimizer = paradis.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.5))
    train(model, optimizer, 5 - RANK)
    return model


def skipped_step() -> torch.nn.Module:
    """Worker 1 leaves out a step and is busy until worker 0 has given up."""
    model = mlp(0)
    optimizer = paradis.wrap(model, SGD(model.parameters(), lr=0.1))

    try:
        train(model, optimizer, 1)
        if RANK == 1:
            (DIRECTORY / "over").open().close()
        train(model, optimizer, 2)
    finally:
        if RANK == 0:
            (DIRECTORY / "over").open("w").close()
    return model


def main() -> None:
    """Run the function named."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {"error": ""}
    try:
        model = globals()[sys.argv[2]]()
        result["values"] = {n: p.tolist() for n, p in model.named_parameters()}
    except paradis.ParadisError as error:
        result["error"] = f"{type(error).__name__}: {error.message}"
        raise
    finally:
        (DIRECTORY / f"{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
