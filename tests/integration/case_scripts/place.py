"""Where a case runs: through the system, or plain, with the ranks as threads of one process.

The plain twin is the specification: ``torch.optim`` on the mean of the ranks' gradients, each rank
with its own model. It shares no code with the system.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

DEADLINE_S = 60.0
Results = dict[str, Any]
CASES: dict[str, Callable[[Place], Results]] = {}


def case(function: Callable[[Place], Results]) -> Callable[[Place], Results]:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


class Place:
    """One rank's view of a job."""

    plain = False
    rank = 0
    world = 1

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer to use."""
        raise AssertionError("subclass")

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's value; only plain places know the others."""
        raise AssertionError("subclass")

    @contextlib.contextmanager
    def no_sync(self, optimizer: Any) -> Iterator[None]:
        """Accumulate without handing over."""
        with contextlib.nullcontext() if self.plain else optimizer.no_sync():
            yield

    def clip(self, optimizer: Any, max_norm: float) -> float:
        """Clip the mean gradient; return its norm before."""
        return float(optimizer.clip_grad_norm_(max_norm))

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Step through a GradScaler: one rank's overflow is everybody's."""
        scaler.step(optimizer)

    def refusal(self, action: Callable[[], object]) -> str:
        """Return the text with which the system refuses an action; plain places have none."""
        from paradis import ParadisError

        try:
            action()
        except ParadisError as error:
            return error.message
        return "not refused"


class WrappedPlace(Place):
    """Through `paradis.wrap`."""

    def __init__(self) -> None:
        import paradis

        self.rank, self.world = paradis.rank(), paradis.world_size()

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Wrap it."""
        import paradis

        return paradis.wrap(model, optimizer)


class Meeting:
    """Where the threads of a plain job exchange values."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.values: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=DEADLINE_S)


class PlainPlace(Place):
    """Plain torch with averaged gradients."""

    plain = True

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world, self._meeting = rank, meeting.world, meeting

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's value."""
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Take rank 0's values and state; average gradients around each step."""
        own = [*model.parameters(), *model.buffers()]
        first = self.gather([t.detach().clone() for t in own])[0]
        with torch.no_grad():
            for mine, theirs in zip(own, first, strict=True):
                mine.copy_(theirs)
        optimizer.load_state_dict(copy.deepcopy(self.gather(optimizer.state_dict())[0]))
        if self.world > 1:
            optimizer.register_step_pre_hook(lambda o, *_: self._average(o))
            optimizer.register_step_post_hook(lambda o, *_: self._restore(o))
        return optimizer

    def _average(self, optimizer: Any) -> None:
        parameters = list(_parameters(optimizer))
        self._own = [p.grad for p in parameters]
        everybody = self.gather([None if g is None else g.detach().clone() for g in self._own])
        for index, parameter in enumerate(parameters):
            parameter.grad = self._mean([rank[index] for rank in everybody], parameter)

    def _mean(self, given: list[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor | None:
        present = [g for g in given if g is not None]
        if not present:
            return None
        total = torch.zeros_like(like)
        for gradient in present:
            total += gradient
        return total / self.world

    def _restore(self, optimizer: Any) -> None:
        for parameter, gradient in zip(_parameters(optimizer), self._own, strict=True):
            parameter.grad = gradient

    def clip(self, optimizer: Any, max_norm: float) -> float:
        """Scale every rank's gradients by the factor that the mean gradient's norm asks for."""
        parameters = list(_parameters(optimizer))
        if self.world == 1:
            return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
        everybody = self.gather([None if p.grad is None else p.grad.clone() for p in parameters])
        means = [self._mean([r[i] for r in everybody], p) for i, p in enumerate(parameters)]
        norm = sum(float(m.double().square().sum()) for m in means if m is not None) ** 0.5
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Share the overflow before the scaler decides."""
        state = scaler._per_optimizer_states[id(optimizer)]
        if not state["found_inf_per_device"]:
            scaler.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            state["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(())}
        (found,) = state["found_inf_per_device"].values()
        found.fill_(max(self.gather(float(found))))
        scaler.step(optimizer)

    def refusal(self, action: Callable[[], object]) -> str:
        """Plain torch refuses nothing here."""
        return "plain"


def _parameters(optimizer: Any) -> Iterable[torch.nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def run_plain(world: int) -> list[dict[str, Results]]:
    """Run all cases on as many threads; return each rank's results by case."""
    torch.set_num_threads(1)
    meeting = Meeting(world)
    results: list[dict[str, Results]] = [{} for _ in range(world)]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        place = PlainPlace(rank, meeting)
        try:
            for name, function in CASES.items():
                results[rank][name] = as_numbers(function(place))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def as_numbers(value: Any) -> Any:
    """Return results as what JSON can hold exactly."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().tolist()
    if isinstance(value, dict):
        return {key: as_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_numbers(item) for item in value]
    return value


def fill(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Initialise parameters from a seed, without the global generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Return a rank's input of a step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank + 7))


class Scalars(torch.nn.Module):
    """Named parameters of a few numbers."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, torch.nn.Parameter(torch.as_tensor(value)))


def mlp(seed: int) -> torch.nn.Module:
    """Return a small network; the seed differs among ranks on purpose."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4, bias=True)
    )
    return fill(model, seed)


def values(model: torch.nn.Module) -> Results:
    """Return all values of a model by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
