"""Case 18 and its kin: a wrapped optimizer is an optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from place import Place, Results, batch, case, mlp, values
from torch.optim import lr_scheduler

SGD = torch.optim.SGD
Adam = torch.optim.Adam


def _run(
    at: Place, model: torch.nn.Module, optimizer: Any, scheduler: Any, steps: int, first: int = 0
) -> list[float]:
    rates = []
    for step in range(first, first + steps):
        loss = model(batch(at.rank, step, 4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@case
def schedulers(at: Place) -> Results:
    results = {}
    makers = {
        "step": lambda o: lr_scheduler.StepLR(o, 2),
        "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
        "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        "sequence": lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)],
            [2],
        ),
        "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
        "constant": lambda o: lr_scheduler.ConstantLR(o, 0.25, total_iters=2),
        "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4, power=2.0),
        "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
        "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        "chained": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, total_iters=3)]
        ),
    }
    for name, make in makers.items():
        model = mlp(at.rank)
        optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert isinstance(optimizer, torch.optim.Optimizer)
        rates = _run(at, model, optimizer, make(optimizer), 5)
        momentum = optimizer.param_groups[0]["momentum"]  # CyclicLR drives it, too
        results[name] = {**values(model), "rates": rates, "momentum": momentum}
    return results


@case
def one_cycle_drives_momentum(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.01))
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    rates = _run(at, model, optimizer, scheduler, 6)
    return {**values(model), "rates": rates, "betas": list(optimizer.param_groups[0]["betas"])}


@case
def plateau(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for step in range(6):
        model(batch(at.rank, step, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1.0)  # a loss that all workers share
    return {**values(model), "rate": optimizer.param_groups[0]["lr"]}


@case
def scheduler_on_the_inner_optimizer(at: Place) -> Results:
    model = mlp(at.rank)
    inner = SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(inner, 2, gamma=0.5)
    optimizer = at.wrap(model, inner)
    rates = _run(at, model, optimizer, None, 1)
    for step in range(1, 4):
        scheduler.step()
        rates += _run(at, model, optimizer, None, 1, first=step)
    return {**values(model), "rates": rates}


@case
def resume(at: Place) -> Results:
    """Save after five steps, load into a new model and optimizer: the very same goes on."""
    model = mlp(at.rank)
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.02, weight_decay=0.01))
    scheduler = lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    _run(at, model, optimizer, scheduler, 5)
    memory = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, memory)
    memory.seek(0)
    saved = torch.load(memory, weights_only=True)
    assert "initial_lr" in saved["optimizer"]["param_groups"][0]
    rates = _run(at, model, optimizer, scheduler, 4, first=5)
    again = mlp(at.rank + 20)
    restored = at.wrap(again, Adam(again.parameters(), lr=0.5))
    again.load_state_dict(saved["model"])
    restored.load_state_dict(saved["optimizer"])
    kept = restored.state_dict()["state"][0]["exp_avg"].clone()
    assert torch.equal(kept, saved["optimizer"]["state"][0]["exp_avg"])
    # torch's schedulers take one step on being built: 4 is the epoch before the present one.
    scheduler = lr_scheduler.StepLR(restored, 3, gamma=0.5, last_epoch=4)
    same_rates = _run(at, again, restored, scheduler, 4, first=5)
    assert rates == same_rates, (rates, same_rates)
    for first, second in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(first, second)
    first, second = (o.state_dict()["state"] for o in (optimizer, restored))
    for index, held in first.items():
        for key, value in held.items():
            assert torch.equal(value, second[index][key]), (index, key)
    return {**values(again), "rates": rates, "state": {str(k): v for k, v in first.items()}}


@case
def state_on_first_rank_only(at: Place) -> Results:
    model = mlp(3)
    optimizer = Adam(model.parameters(), lr=0.02)
    if at.rank == 0:
        start = mlp(3)
        other = Adam(start.parameters(), lr=0.02)
        for step in range(3):
            start(batch(0, step, 4, 8)).square().mean().backward()
            other.step()
            other.zero_grad()
        model.load_state_dict(start.state_dict())
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    wrapped = at.wrap(model, optimizer)
    _run(at, model, wrapped, None, 3)
    steps = [float(s["step"]) for s in wrapped.state_dict()["state"].values()]
    return {**values(model), "steps": steps}


@case
def rates_set_by_hand(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    before = optimizer.state_dict()
    for step, rate in enumerate((0.1, 0.01, torch.tensor(0.25))):
        optimizer.param_groups[0]["lr"] = rate
        _run(at, model, optimizer, None, 1, first=step)
    assert not before["state"] and optimizer.defaults["lr"] == 0.1
    return values(model)


@case
def hooks(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("state"))
    _run(at, model, optimizer, None, 2)
    optimizer.state_dict()
    return {**values(model), "called": called}
