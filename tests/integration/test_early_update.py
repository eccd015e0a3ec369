"""Updates while backward runs: the bits of plain PyTorch, or an error that names the parameter."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from preloaded import Job, Preloaded, preloaded, start_job

import paradis
from paradis.errors import ConfigError, StateError

SCRIPT = Path(__file__).with_name("early_worker.py")
EARLY = {
    "training.early_update": "true",
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "2KiB",
    "communication.small_tensor": "1KiB",
}
Start = Callable[..., Job]


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
@pytest.mark.parametrize("workers", [1, 2])
def test_bits_of_plain_pytorch(
    start_job: Start, tmp_path: Path, overlap: str, workers: int
) -> None:
    settings = {**EARLY, "training.overlap": overlap, "checkpoint.every_steps": "2"}
    counts = {"workers": workers, "servers": 2}
    job = start_job(SCRIPT, str(tmp_path), "exact", settings=settings, **counts).succeed()
    names = {path.name for path in (job.run.path / "checkpoints").iterdir()}
    assert names >= {"step-00000004", "step-00000006"}
    for rank in range(workers):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["differs"] == []
        assert found["shards"] > 5 and found["early"] >= 2 * found["shards"]


def test_two_racks_push_directly(start_job: Start, tmp_path: Path) -> None:
    """Rack agents are left out, and the leader says so."""
    counts = {"workers": 4, "servers": 1, "dispatchers": 2, "racks": 2}
    job = start_job(SCRIPT, str(tmp_path), "exact", settings=EARLY, **counts).succeed()
    assert "no rack agent sums for" in job.logs()


def test_a_changed_gradient_is_refused_by_name(start_job: Start, tmp_path: Path) -> None:
    job = start_job(SCRIPT, str(tmp_path), "changed", workers=2, servers=2, settings=EARLY)
    assert all(code for name, code in job.wait().items() if name.startswith("worker"))
    told = "step 3 of worker 1 refused: the gradient of 2.weight was changed after backward"
    assert told in job.log("worker-1")
    assert "training.early_update: false" in job.log("worker-1")


def test_a_change_that_only_servers_notice_ends_the_job(start_job: Start, tmp_path: Path) -> None:
    job = start_job(SCRIPT, str(tmp_path), "unseen", workers=2, servers=2, settings=EARLY)
    codes = job.wait()
    assert codes["worker-0"] != 0 and codes["worker-1"] != 0
    told = "step 3 refused: worker 1 changed the gradient of 2.weight after backward"
    assert told in job.log("worker-0") and told in job.log("worker-1")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.nn.Linear]:
    """A model of a job in this process, past the step whose pushes wait for ``step()``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARADIS_TRAINING_EARLY_UPDATE", "true")
    paradis.close()
    yield torch.nn.Linear(3, 2)
    paradis.close()


def trained(model: torch.nn.Linear) -> paradis.WrappedOptimizer:
    """Return its optimizer, with a backward pass done that has begun a step."""
    optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    return optimizer


def test_between_backward_and_step_servers_answer_nothing(alone: torch.nn.Linear) -> None:
    optimizer = trained(alone)
    for call in (optimizer.state_dict, optimizer.save_checkpoint):
        with pytest.raises(StateError, match=r"between backward and step.*early_update"):
            call()
    with pytest.raises(ConfigError, match=r"clip_grad_norm_ refused.*early_update"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert optimizer.steps_done == 2 and len(optimizer.state_dict()["param_groups"]) == 1


def test_a_changed_rate_or_value_is_refused(alone: torch.nn.Linear) -> None:
    optimizer = trained(alone)
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(StateError, match=r"hyper-parameters were changed after backward"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    with torch.no_grad():
        alone.bias.add_(1.0)
    with pytest.raises(StateError, match=r"the value of bias was changed after backward"):
        optimizer.step()
    with torch.no_grad():
        alone.bias.sub_(1.0)


def test_a_value_changed_behind_the_counters_is_caught_by_a_hash(
    alone: torch.nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARADIS_TRAINING_DEBUG_GRADIENTS", "true")
    optimizer = trained(alone)
    alone.bias.data.add_(1.0)
    with pytest.raises(StateError, match=r"the value of bias was changed after backward"):
        optimizer.step()
    alone.bias.data.sub_(1.0)


def test_accumulation_is_under_no_sync(alone: torch.nn.Linear) -> None:
    optimizer = trained(alone)
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        alone(torch.ones(1, 3)).sum().backward()
    alone(torch.ones(1, 3)).sum().backward()
    before = alone.bias.detach().clone()
    optimizer.step()
    assert torch.allclose(alone.bias, before - 0.2)
    optimizer.zero_grad()
    for _ in range(2):
        alone(torch.ones(1, 3)).sum().backward()
    with pytest.raises(StateError, match=r"step 3 of worker 0 refused.*weight.*no_sync"):
        optimizer.step()
