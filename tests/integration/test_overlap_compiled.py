"""Overlap where code is compiled, and where a checkpoint is due."""
# ruff: noqa: F811 - fixtures are imported, and named as arguments

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_overlap import Bits, Holding, same, sessions_end  # noqa: F401
from test_overlap_readers import perceptron, said, wrapped  # noqa: F401
from torch import nn

import paradis
from paradis.frontend.reading import Held
from paradis.storage.export import read_state_dict
from paradis.storage.manifest import group_directory, read_manifest, step_directory


@pytest.fixture
def compiler() -> Iterator[None]:
    """What was compiled is forgotten afterwards."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Block(nn.Module):
    """A module of the script's own: the compiler leaves those of torch as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def compile_in_the_middle(how: str) -> Bits:
    """Compile in the third step, while the second one is on its way; read what it computes."""
    torch.manual_seed(5)
    model, x = nn.Sequential(Block(), Block()), torch.randn(8, 6)
    optimizer = wrapped(model)
    parameters = list(model.parameters())
    run: Any = model
    seen = []
    for step in range(5):
        if step == 2:
            if how == "a block":
                model[0].compile(backend="eager")
            elif how == "the model":
                run = torch.compile(model, backend="eager")
            else:
                run = torch.compile(
                    lambda y: (
                        nn.functional.linear(y, parameters[0]).square().mean()
                        + model(y).square().mean()
                    ),
                    backend="eager",
                )
        result = run(x)
        seen.append(result.detach())
        result.square().mean().backward()
        optimizer.step()
        if step >= 2:
            assert not any(isinstance(p, Held) for p in parameters)
        optimizer.zero_grad()
    paradis.close()
    return [*seen, *(p.detach().clone() for p in parameters)]


@pytest.mark.parametrize("how", ["a block", "the model", "a function"])
def test_compiling_while_a_step_is_on_its_way(
    how: str, compiler: None, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "none")
    expected = compile_in_the_middle(how)
    assert not said, "the user chose to wait"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", "layerwise")
    Holding(monkeypatch)
    assert same(compile_in_the_middle(how), expected)
    assert len(said) == 1 and "torch.compile" in said[0] and "step() waits" in said[0]


def test_a_model_compiled_as_a_whole_is_announced_with_the_remedy(said: list[str]) -> None:
    model, _ = perceptron()
    model.compile(backend="eager")
    wrapped(model)
    assert len(said) == 1
    assert "the whole model is compiled" in said[0] and "block.compile()" in said[0]


def save_on_schedule(directory: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Save in the second of three steps; buffers and rates change right after each of them."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    optimizer = wrapped(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    paradis.close()
    saved = group_directory(step_directory(directory, 2), 0)
    rates = [float(options["lr"]) for options in read_manifest(saved).options]
    return rates, read_state_dict(saved.parent)


def test_a_scheduled_checkpoint_is_of_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARADIS_CHECKPOINT_EVERY_STEPS", "2")
    found = []
    for overlap in ("none", "layerwise"):
        monkeypatch.setenv("PARADIS_TRAINING_OVERLAP", overlap)
        monkeypatch.setenv("PARADIS_CHECKPOINT_DIRECTORY", str(tmp_path / overlap))
        found.append(save_on_schedule(tmp_path / overlap))
    (rates, values), (other_rates, other_values) = found
    assert rates == other_rates == [0.05]
    assert values.keys() == other_values.keys()
    assert all(torch.equal(values[name], other_values[name]) for name in values)
    assert int(values["1.num_batches_tracked"]) == 2
