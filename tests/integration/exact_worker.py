"""A training script that compares every step with plain PyTorch, bit for bit.

    exact_worker.py OUT one|some|mean|few|batch [slow]

``one`` trains all cases alone, ``some`` every third; ``mean`` (or ``few`` of it) trains on four
workers and computes the canonical mean of all ranks' gradients beside it; ``batch`` compares
several workers with one large batch.
Writes OUT/<rank>.json: failures, a digest per case, the rack agents in use.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

import paradis

STEPS = 10
MEAN_STEPS = 6
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SHAPES = ((33_001,), (7,), (), (130, 97), (0,))
"""Several shards of 64 KiB; alone in one; empty; small ones that share buckets."""

COMMON: list[dict[str, Any]] = [{}, {"foreach": True, "maximize": True}]
DECAY: list[dict[str, Any]] = [{"weight_decay": 0.1}, {"weight_decay": 0.1, "foreach": True}]
FUSED: list[dict[str, Any]] = [{"fused": True}, {"fused": True, "weight_decay": 0.1}]
AMSGRAD: list[dict[str, Any]] = [
    {"amsgrad": True, "lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6},
    {"amsgrad": True, "foreach": True},
    {"amsgrad": True, "fused": True, "maximize": True},
]
OWN: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "foreach": True, "nesterov": True},
        {"momentum": 0.9, "fused": True, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.1, "maximize": True, "fused": True},
        *FUSED,
    ],
    "Adam": [*AMSGRAD, *FUSED, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "AdamW": [*AMSGRAD, *FUSED],
    "Adagrad": [{"initial_accumulator_value": 0.5, "lr_decay": 0.1}, *FUSED],
    "RMSprop": [
        {"momentum": 0.9},
        {"momentum": 0.9, "centered": True, "alpha": 0.5},
        {"momentum": 0.9, "centered": True, "foreach": True},
    ],
    "Adadelta": [{"rho": 0.5, "lr": 0.3}],
    "Adamax": [{"betas": (0.5, 0.9)}],
    "NAdam": [{"momentum_decay": 0.1}],
    "RAdam": [{"betas": (0.5, 0.6)}],
    "Rprop": [{"etas": (0.4, 1.3), "step_sizes": (1e-5, 0.1)}],
    "ASGD": [{"t0": 1.0, "lambd": 0.01}, {"t0": 1.0, "foreach": True}],
}
MEAN = (
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {}),
    ("AdamW", {"amsgrad": True, "foreach": True}),
    ("Adagrad", {"fused": True}),
    ("RMSprop", {"centered": True}),
)

Case = tuple[str, dict[str, Any], torch.dtype]


def cases(stride: int) -> Iterator[Case]:
    """Cases in float32, every other one in each further dtype; of these every ``stride``-th."""
    count = 0
    for name, own in OWN.items():
        decay = [] if name == "Rprop" else DECAY
        for number, arguments in enumerate([*COMMON, *decay, *own]):
            for dtype in (DTYPES[0], DTYPES[1 + number % 2]):
                # torch's fused SGD skips elements of half-precision parameters; wrap refuses it.
                if not (name == "SGD" and arguments.get("fused") and dtype == torch.bfloat16):
                    count += 1
                    if count % stride == 0:
                        yield name, arguments, dtype


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (first, second))
    return torch.equal(first, second)


class Parts(torch.nn.Module):
    """Parameters of odd sizes in a layout that a transposed one breaks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]
        values[3] = values[3].t()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(v) for v in values)

    def optimizer(self, name: str, arguments: dict[str, Any]) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, name)
        parts = list(self.parts)
        options = {"lr": 0.02} if name == "SGD" else {}
        groups = [{"params": parts[:4]}, {"params": parts[4:], "lr": 0.003}]
        made: torch.optim.Optimizer = kind(groups, **{**options, **arguments})
        return made

    def backward(self, step: int, rank: int) -> None:
        """Make bounded gradients that depend on step, rank and values."""
        at = 97 * step + 1009 * rank
        total = torch.zeros((), dtype=self.parts[0].dtype)
        for index, part in enumerate(self.parts):
            if step == 3 and index == 1:
                continue  # no gradient in this step
            factors = NOISE[part.dtype][at : at + part.numel()].view(part.shape)
            total = total + (part * factors).sum() + part.cos().sum()
            at += part.numel()
        total.backward()


NOISE = {d: torch.randn(60_000, generator=torch.Generator().manual_seed(7)).to(d) for d in DTYPES}


def zero(model: Parts) -> None:
    for part in model.parts:
        part.grad = None


def mean_gradients(model: Parts, step: int) -> None:
    """Leave ((g0 + g1) + (g2 + g3)) / 4 in ``.grad``."""
    found: list[list[torch.Tensor | None]] = []
    for rank in range(4):
        zero(model)
        model.backward(step, rank)
        found.append([p.grad for p in model.parts])
    for part, *grads in zip(model.parts, *found, strict=True):
        g0, g1, g2, g3 = grads
        part.grad = None if g0 is None else ((g0 + g1) + (g2 + g3)) / 4


def run_case(case: Case, *, mean: bool, slow: bool) -> tuple[list[str], str]:
    """Train one case; return what differed, and a digest of values and state."""
    name, arguments, dtype = case
    plain = Parts(dtype)
    model = copy.deepcopy(plain)
    reference = plain.optimizer(name, arguments)
    optimizer = paradis.wrap(model, model.optimizer(name, arguments))
    failures = []
    for step in range(MEAN_STEPS if mean else STEPS):
        if step % 3 == 2:
            for group in (*reference.param_groups, *optimizer.param_groups):
                group["lr"] *= 0.5
        for part in model.parts:
            part.grad = None
        if slow:
            time.sleep(random.random() * 0.01)
        model.backward(step, paradis.rank())
        optimizer.step()
        if mean:
            mean_gradients(plain, step)
        else:
            zero(plain)
            plain.backward(step, 0)
        reference.step()
        for index, (got, wanted) in enumerate(zip(model.parts, plain.parts, strict=True)):
            if not same(got, wanted):
                failures.append(f"{label(case)}: step {step}: value {index}")
    failures += compare_state(case, optimizer, reference)
    return failures, digest(model)


def compare_state(case: Case, optimizer: Any, reference: torch.optim.Optimizer) -> list[str]:
    got, wanted = optimizer.state_dict(), reference.state_dict()
    failures = []
    if got["param_groups"] != wanted["param_groups"]:
        failures.append(f"{label(case)}: groups {got['param_groups']}")
    empty = {i for i, shape in enumerate(SHAPES) if 0 in shape}  # torch keeps a step for those
    filled = {
        i: s
        for i, s in wanted["state"].items()
        if any(v is not None for v in s.values()) and i not in empty
    }
    if got["state"].keys() != filled.keys():
        return [*failures, f"{label(case)}: state of {got['state'].keys()}, not {filled.keys()}"]
    for index, state in filled.items():
        for key, value in state.items():
            if value is None:
                continue
            held = got["state"][index].get(key)
            if not isinstance(value, torch.Tensor):
                equal = held is not None and float(held) == float(value)
            else:
                equal = held is not None and held.shape == value.shape and same(held, value)
            if not equal:
                failures.append(f"{label(case)}: state {key} of {index}: {held} not {value}"[:300])
    return failures


def label(case: Case) -> str:
    name, arguments, dtype = case
    return f"{name} {arguments} {dtype}"


def digest(model: torch.nn.Module) -> str:
    total = xxhash.xxh3_64()
    for tensor in model.state_dict().values():
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def compare_batches(dtype: torch.dtype, limit: float) -> tuple[list[str], str]:
    """Train four workers on quarters of a batch beside plain torch on the whole one."""
    torch.manual_seed(5)
    plain = torch.nn.Sequential(torch.nn.Linear(40, 301), torch.nn.Tanh(), torch.nn.Linear(301, 9))
    plain.to(dtype)
    model = copy.deepcopy(plain)
    optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    reference = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    rank, count = paradis.rank(), paradis.world_size()
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8 * count, 40, generator=generator, dtype=dtype)
        for net, stepper, batch in (
            (model, optimizer, inputs[8 * rank : 8 * (rank + 1)]),
            (plain, reference, inputs),
        ):
            stepper.zero_grad()
            net(batch).square().mean().backward()
            stepper.step()
    worst = max(
        float((a - b).abs().max() / b.abs().max())
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return ([] if worst <= limit else [f"{dtype}: off by {worst}, expected {limit}"], digest(model))


def main() -> None:
    out, what = Path(sys.argv[1]), sys.argv[2]
    failures: list[str] = []
    digests = {}
    if what == "batch":
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            found, digests[str(dtype)] = compare_batches(dtype, limit)
            failures += found
    else:
        mean, stride = what in ("mean", "few"), 3 if what == "some" else 1
        chosen = [(n, a, d) for n, a in MEAN for d in DTYPES] if mean else list(cases(stride))
        chosen = chosen[:2] if what == "few" else chosen
        for case in chosen:
            found, digests[label(case)] = run_case(case, mean=mean, slow="slow" in sys.argv)
            failures += found
    result = {"failures": failures, "digests": digests, "threads": torch.get_num_threads()}
    result["agents"] = agents()
    (out / f"{paradis.rank()}.json").write_text(json.dumps(result))


def agents() -> list[str]:
    """Return the rack agents that this job's view names."""
    from paradis.frontend.session import current

    view = current().node.worker_role.view
    return sorted(agent for agent, _ in view.racks.values()) if view is not None else []


main()
