"""Cases 6-13 and their kin: odd tensors, and a set of parameters that changes."""

from __future__ import annotations

import torch
from place import Place, Results, Scalars, batch, case, fill, mlp, values

SGD = torch.optim.SGD
Adam = torch.optim.Adam


@case
def zero_length(at: Place) -> Results:
    model = fill(torch.nn.Sequential(torch.nn.Linear(3, 0), torch.nn.Linear(0, 3)), at.rank)
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 4)))
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.1))
    for step in range(2):
        (model(batch(at.rank, step, 2, 3)).square().sum() + model.nothing.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    shapes = {name: list(p.shape) for name, p in model.state_dict().items()}
    state = optimizer.state_dict()["state"]
    return {**values(model), "shapes": shapes, "stated": sorted(map(int, state))}


@case
def only_zero_length(at: Place) -> Results:
    model = Scalars(nothing=torch.zeros(0, 4))
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model.nothing.sum().backward()
        at.clip(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"shape": list(model.nothing.shape)}


@case
def small_and_empty_groups(at: Place) -> Results:
    model = Scalars(weight=torch.ones(5, 5), bias=torch.ones(2))
    groups = [{"params": [model.weight]}, {"params": []}, {"params": [model.bias], "lr": 0.5}]
    optimizer = at.wrap(model, SGD(groups, lr=0.1))
    for step in range(3):
        loss = (model.bias * batch(at.rank, step, 2)).sum()
        if step:
            loss = loss + (model.weight * batch(at.rank, step, 5, 5)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@case
def groups_with_own_options(at: Place) -> Results:
    model = mlp(at.rank)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {
            "params": [p for p in model.parameters() if p.dim() == 1],
            "lr": 0.02,
            "betas": (0.5, 0.7),
        },
    ]
    optimizer = at.wrap(model, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0, amsgrad=True))
    _train(at, model, optimizer, 3)
    return values(model)


def _train(at: Place, model: torch.nn.Module, optimizer: object, steps: int) -> None:
    for step in range(steps):
        model(batch(at.rank, step, 4, 8)).square().mean().backward()
        optimizer.step()  # type: ignore[attr-defined]
        optimizer.zero_grad()  # type: ignore[attr-defined]


@case
def every_optimizer(at: Place) -> Results:
    results = {}
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
        (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
    ):
        model = mlp(at.rank)
        optimizer = at.wrap(model, kind(model.parameters(), lr=0.01, **options))
        _train(at, model, optimizer, 3)
        results[f"{kind.__name__}{len(results)}"] = values(model)
    return results


@case
def memory_layouts(at: Place) -> Results:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.small = torch.nn.Conv2d(4, 2, 1)
            self.turned = torch.nn.Parameter(torch.zeros(3, 5).t())
            self.spread = torch.nn.Parameter(torch.zeros(6))

    model = fill(Model(), at.rank).to(memory_format=torch.channels_last)
    strides = {name: list(p.stride()) for name, p in model.named_parameters()}
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.1))
    for step in range(3):
        image = batch(at.rank, step, 2, 3, 5, 5).to(memory_format=torch.channels_last)
        loss = model.small(model.conv(image)).square().mean()
        loss = loss + (model.turned @ batch(at.rank, step, 3, 2)).square().sum()
        (loss + model.spread.sum()).backward()  # the gradient of sum() is expanded
        if step == 1:
            model.conv.weight.grad = model.conv.weight.grad.contiguous()
            model.turned.grad = model.turned.grad.t().contiguous().t().contiguous()
            model.spread.grad = torch.ones(1).expand(6)
        optimizer.step()
        optimizer.zero_grad()
    assert strides == {name: list(p.stride()) for name, p in model.named_parameters()}
    state = optimizer.state_dict()["state"][0]["exp_avg"]
    return {**values(model), "state": state}


@case
def several_dtypes(at: Place) -> Results:
    model = Scalars(
        wide=torch.ones(3, dtype=torch.float64),
        single=torch.ones(3),
        brief=torch.ones(70, dtype=torch.bfloat16),
    )
    optimizer = at.wrap(model, Adam(model.parameters(), lr=0.1, weight_decay=0.01))
    for step in range(3):
        sum(
            (p * batch(at.rank, step, len(p)).to(p.dtype)).sum() for p in model.parameters()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [s["exp_avg"] for s in optimizer.state_dict()["state"].values()]
    return {**values(model), "dtypes": [str(m.dtype) for m in moments], "moments": moments}


@case
def batch_norm(at: Place) -> Results:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    fill(model, at.rank)
    model[1].running_mean.fill_(float(at.rank + 1))
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    first = model[1].running_mean.clone()
    _train(at, model, optimizer, 3)
    # Buffers are each worker's own: they go on from rank 0's and differ then.
    own = [float(model[1].running_mean.sum()), int(model[1].num_batches_tracked)]
    return {**values(model), "first": first, "own": own}


@case
def frozen_and_unfrozen(at: Place) -> Results:
    model = mlp(at.rank)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    seen = []
    for step in range(9):
        if step in (3, 6):
            for parameter in model[0].parameters():
                parameter.requires_grad_(step == 3)
                parameter.grad = None
        model(batch(at.rank, step, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model[0].weight.detach().clone())
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[5], seen[8])
    assert not torch.equal(seen[2], seen[3])
    return {**values(model), "seen": seen}


@case
def unfrozen_by_one(at: Place) -> Results:
    model = Scalars(w=1.0, other=1.0)
    model.w.requires_grad_(False)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    for step in range(3):
        model.w.requires_grad_(step > 0 and at.rank == 0)
        (model.w * 4.0 + model.other).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@case
def added_group(at: Place) -> Results:
    model = mlp(0)  # alike everywhere: the twin does not share values that are added later
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer = at.wrap(model, SGD(model[2].parameters(), lr=0.1, momentum=0.9))
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        if step == 4:
            optimizer.add_param_group({"params": [extra], "weight_decay": 0.1})
        loss = model(batch(at.rank, step, 4, 8)).square().mean()
        (loss + (extra * batch(at.rank, step, 3)).sum()).backward()
        at.clip(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for parameter in (*model.parameters(), extra):
            parameter.grad = None
    state = optimizer.state_dict()["state"]
    return {**values(model), "extra": extra, "state": {str(k): v for k, v in state.items()}}


@case
def frozen_then_added_group(at: Place) -> Results:
    """Layers that join the optimizer when they are unfrozen, and stand still when frozen again."""
    model = mlp(0)  # alike everywhere: the twin does not share values that are added later
    late = list(model[0].parameters())
    for parameter in late:
        parameter.requires_grad_(False)
    optimizer = at.wrap(model, SGD(model[2].parameters(), lr=0.1, momentum=0.9))
    seen = []
    for step in range(9):
        if step in (3, 6):
            for parameter in late:
                parameter.requires_grad_(step == 3)
                parameter.grad = None
        if step == 3:
            optimizer.add_param_group({"params": late, "lr": 0.05, "weight_decay": 0.1})
        model(batch(at.rank, step, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model[0].weight.detach().clone())
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[5], seen[8])
    assert not torch.equal(seen[2], seen[3])
    state = optimizer.state_dict()["state"]
    return {**values(model), "seen": seen, "state": {str(k): v for k, v in state.items()}}


@case
def values_changed_alike(at: Place) -> Results:
    model = Scalars(w=1.5, v=[0.5, -0.5], still=[1.0])
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    seen = []
    for step in range(6):
        (model.w * 2.0 + (model.v * batch(at.rank, step, 2)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            seen.append(model.w.item())
            model.w.data.clamp_(max=1.0)
        if step == 2:
            torch.nn.init.constant_(model.v, 0.25)
        if step == 3:
            model.v.data = torch.tensor([3.0, 4.0])  # other memory
        if step == 4:
            model.load_state_dict({"w": torch.tensor(7.0), "v": torch.ones(2),
                                   "still": torch.tensor([2.0])})  # fmt: skip
        seen.append(model.w.detach().clone())
    return {**values(model), "seen": seen}


@case
def refusals_on_the_spot(at: Place) -> Results:
    results = {}
    lazy = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LazyLinear(3))
    results["lazy"] = at.refusal(lambda: at.wrap(lazy, SGD(lazy.parameters(), lr=0.1)))
    imaginary = Scalars(z=torch.ones(2, dtype=torch.complex64))
    results["complex"] = at.refusal(lambda: at.wrap(imaginary, SGD(imaginary.parameters(), lr=0.1)))
    model = mlp(0)
    results["lbfgs"] = at.refusal(lambda: at.wrap(model, torch.optim.LBFGS(model.parameters())))

    class MyAdam(torch.optim.Adam):
        pass

    results["subclass"] = at.refusal(lambda: at.wrap(model, MyAdam(model.parameters())))
    return results


@case
def lazy_after_a_forward(at: Place) -> Results:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LazyLinear(3))
    model(torch.zeros(1, 8))
    fill(model, at.rank + 3)
    optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))
    _train(at, model, optimizer, 2)
    return values(model)


class _Embedded(torch.nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(4, 3, sparse=sparse)
        self.head = torch.nn.Linear(3, 2)


@case
def refusals_at_step(at: Place) -> Results:
    """The step is refused before anything is sent, so the process may go on with other models."""
    results = {}

    def wrapped(sparse: bool = False) -> tuple[_Embedded, torch.optim.Optimizer]:
        model = _Embedded(sparse=sparse)
        optimizer = at.wrap(model, SGD(model.parameters(), lr=0.1))

        def work() -> None:
            model.head(model.emb(torch.tensor([1]))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        if not sparse:
            work()
        model.work = work
        return model, optimizer

    model, _ = wrapped()
    model.emb.weight = torch.nn.Parameter(torch.ones(9, 3))
    results["replaced"] = at.refusal(model.work)
    model, _ = wrapped()
    model.emb = torch.nn.Embedding(9, 3)
    results["module"] = at.refusal(model.work)
    model, _ = wrapped()
    model.to(torch.bfloat16)
    results["dtype"] = at.refusal(model.work)
    model, _ = wrapped()
    model.emb.weight.data = torch.ones(9, 3)
    results["resized"] = at.refusal(model.work)
    model, _ = wrapped(sparse=True)
    results["sparse"] = at.refusal(model.work)
    return results
