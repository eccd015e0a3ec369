"""Cases 1-5 and their kin: which gradients count."""

from __future__ import annotations

import copy
from typing import Any

import torch
from place import Place, Results, Scalars, batch, case, fill, mlp, values
from torch.utils.checkpoint import checkpoint

SGD = torch.optim.SGD
Adam = torch.optim.Adam


@case
def branch_in_early_micro_step(at: Place) -> Results:
    model = Scalars(a=1.0, b=1.0)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    x = 1.0 if at.rank == 0 else 3.0
    with at.no_sync(optimizer):
        (model.a * x).backward()
    (model.b * x).backward()
    optimizer.step()
    return values(model)


@case
def accumulation(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.01))
    for step in range(3):
        with at.no_sync(optimizer):
            model(batch(at.rank, step, 4, 8)).square().mean().backward()
            model(batch(at.rank, step + 50, 4, 8)).square().mean().backward()
        model(batch(at.rank, step + 99, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # The same without no_sync: each backward hands over, the last state counts.
    for step in range(4):
        model(batch(at.rank, step, 4, 8)).square().mean().backward()
        model(batch(at.rank, step + 50, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@case
def unused_by_all(at: Place) -> Results:
    model = Scalars(used=1.0, unused=1.0)
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.1, weight_decay=0.1, betas=(0.5, 0.9)))
    for step in range(5):
        loss = model.used * 2.0
        if step in (1, 4):
            loss = loss + model.unused * 3.0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    return {**values(model), "steps": [float(state[i]["step"]) for i in (0, 1)]}


@case
def unused_by_one(at: Place) -> Results:
    model = Scalars(w=1.0, other=1.0)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    loss = model.other * 1.0
    if at.rank == 0:
        loss = loss + model.w * 4.0
    loss.backward()
    optimizer.step()
    return values(model)


@case
def zeros_decay(at: Place) -> Results:
    model = Scalars(w=1.0, other=1.0)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, weight_decay=0.5, momentum=0.9))
    for step in range(4):
        loss = model.other * 1.0 if step % 2 else model.other + model.w
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return values(model)


@case
def backward_without_step(at: Place) -> Results:
    model = Scalars(w=1.0)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    (model.w * 5.0).backward()
    optimizer.zero_grad()
    model.w.backward()
    optimizer.step()
    first = model.w.item()
    optimizer.zero_grad()
    for dropped in (7.0, 9.0):  # now that the first step has been made
        (model.w * dropped).backward()
        optimizer.zero_grad()
    (model.w * 2.0).backward()
    optimizer.step()
    optimizer.zero_grad()
    (model.w * 8.0).backward()
    optimizer.zero_grad()
    optimizer.step()  # nothing is left: nothing moves
    return {"first": first, **values(model)}


@case
def gradient_penalty(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.01))
    for step in range(3):
        x = batch(at.rank, step, 4, 8).requires_grad_()
        loss = model(x).square().mean()
        (of_input,) = torch.autograd.grad(loss, x, create_graph=True)
        of_parameters = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = (of_input.norm() - 1).square() + sum(g.square().sum() for g in of_parameters)
        (loss + 0.1 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@case
def reentrant_checkpointing(at: Place) -> Results:
    models = [fill(torch.nn.Linear(6, 6), 5 + at.rank) for _ in range(2)]
    for model, through in zip(models, (True, False), strict=True):
        optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(3):
            x = batch(at.rank, step, 3, 6).requires_grad_()
            for _ in range(6):
                x = (
                    checkpoint(_block, model, x, use_reentrant=True)
                    if through
                    else _block(model, x)
                )
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    # Recomputing may not change the result beyond what plain torch does.
    return {"through": values(models[0]), "direct": values(models[1])}


def _block(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(model(x))


@case
def changed_after_backward(at: Place) -> Results:
    model = Scalars(a=[1.0, 2.0], b=[3.0, 4.0], c=[5.0, 6.0], d=[7.0, 8.0])
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.5))
    for step in range(6):
        x = batch(at.rank, step, 2)
        sum((p * x).sum() for p in model.parameters()).backward()
        model.a.grad.mul_(2.0)
        model.b.grad = torch.full((2,), float(step + at.rank))
        model.c.grad = None
        if step == 3 and at.rank == 0:
            model.d.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@case
def clipping_of_own_gradient(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    norms = []
    for step in range(5):
        model(batch(at.rank, step, 4, 8)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {**values(model), "norms": norms}


@case
def clipping_by_value(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(5):
        model(batch(at.rank, step, 4, 8)).square().sum().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@case
def clipped_then_dropped(at: Place) -> Results:
    """The factor of clipped gradients that are thrown away does not scale later ones."""
    model = mlp(at.rank)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    norms = []
    for step in range(4):
        model(batch(at.rank, step, 4, 8)).square().sum().backward()
        norms.append(at.clip(optimizer, 0.01))
        optimizer.zero_grad()
        model(batch(at.rank, step + 50, 4, 8)).square().mean().backward()
        if step == 2:
            norms.append(at.clip(optimizer, 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return {**values(model), "norms": norms}


@case
def clipping_of_the_mean(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    norms = []
    for step, max_norm in enumerate((0.5, 100.0, 0.5, 0.5, 2.0)):
        model(batch(at.rank, step, 4, 8)).square().sum().backward()
        norms.append(at.clip(optimizer, max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return {**values(model), "norms": norms}


@case
def conditional_by_rank(at: Place) -> Results:
    model = torch.nn.ModuleList([fill(torch.nn.Linear(3, 3), 9 + i) for i in range(3)])
    optimizer = at.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    for step in range(5):
        chosen = model[(step + at.rank) % 3]
        chosen(batch(at.rank, step, 2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@case
def tied_weights(at: Place) -> Results:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    model = fill(Model(), at.rank)
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.1))
    for step in range(3):
        model(torch.tensor([step, at.rank + 4])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.head.weight is model.embedding.weight
    return values(model)


@case
def closure(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(at.rank, step, 4, 8)).square().mean()
            loss.backward()
            return loss

        if at.plain:  # the mean is taken before the step
            losses.append(evaluate().item())
            optimizer.step()
        else:
            losses.append(optimizer.step(evaluate).item())
    return {**values(model), "losses": losses}


def _scaled(at: Place, model: torch.nn.Module, optimizer: Any, *, clip: bool, bad: int) -> Results:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales = []
    for step in range(7):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not clip):
            loss = model(batch(at.rank, step, 4, 8)).float().square().mean()
        if step == bad and at.rank == at.world - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            at.clip(optimizer, 0.5)
        at.scaler_step(scaler, optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {**values(model), "scales": scales}


@case
def grad_scaler(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.01))
    return _scaled(at, model, optimizer, clip=False, bad=2)


@case
def grad_scaler_with_clipping(at: Place) -> Results:
    model = mlp(at.rank)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    return _scaled(at, model, optimizer, clip=True, bad=4)


@case
def grad_scaler_without_gradients(at: Place) -> Results:
    """Rank 0 has no gradient, once while another rank overflows."""
    model = Scalars(w=1.0)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.125))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scales = []
    for step in range(4):
        if step == 0 or at.rank > 0:
            factor = float("inf") if step == 2 else 1.0
            scaler.scale(model.w * factor).backward()
        at.scaler_step(scaler, optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {**values(model), "scales": scales}


@case
def moving_average_and_two_models(at: Place) -> Results:
    generator, critic = mlp(at.rank), mlp(at.rank + 10)
    first = at.wrap(generator, Adam(generator.parameters(), lr=0.01))
    second = at.wrap(critic, SGD(critic.parameters(), lr=0.05))
    average = copy.deepcopy(generator)
    swa = torch.optim.swa_utils.AveragedModel(generator)
    for step in range(4):
        x = batch(at.rank, step, 4, 8)
        critic(x).square().mean().backward()
        second.step()
        second.zero_grad()
        if step % 2:
            (generator(x) - critic(x)).square().mean().backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
            swa.update_parameters(generator)
            with torch.no_grad():
                for kept, new in zip(average.parameters(), generator.parameters(), strict=True):
                    kept.lerp_(new, 0.5)
    return {
        "generator": values(generator),
        "critic": values(critic),
        "average": values(average),
        "swa": values(swa.module),
    }
