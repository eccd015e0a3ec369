"""Odd tensors in checkpoints and exports, and a parameter that joined late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Job, Preloaded, preloaded, start_job  # noqa: F401

from paradis.storage.export import export_state_dict, optimizer_state_dict, read_state_dict

SCRIPT = Path(__file__).parent / "case_scripts" / "stored.py"
Start = Callable[..., Job]
Kept = dict[str, Any]


def run(start_job: Start, directory: Path, steps: int, **options: Any) -> tuple[list[Kept], Job]:  # noqa: F811
    """Run the script on two workers; return what each kept."""
    directory.mkdir()
    job = start_job(SCRIPT, str(directory), str(steps), workers=2, servers=2, **options).succeed()
    return [torch.load(directory / f"{r}.pt", weights_only=True) for r in range(2)], job


@pytest.fixture(scope="module")
def saved(
    start_job: Start,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[Kept], Path]:
    kept, _ = run(start_job, tmp_path_factory.mktemp("saved") / "results", 2)
    return kept, Path(kept[0]["path"])


def test_export_equals_the_first_workers_state_dict(
    saved: tuple[list[Kept], Path], tmp_path: Path
) -> None:
    (kept, other), path = saved
    exported = read_state_dict(path)
    expected = {k: v for k, v in kept["model"].items() if k != "phases"}  # announced as left out
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        assert exported[name].shape == value.shape and exported[name].dtype == value.dtype, name
        assert torch.equal(exported[name], value), name
    assert not torch.equal(other["model"]["norm.running_mean"], exported["norm.running_mean"])
    export_state_dict(path, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(loaded["turned"], expected["turned"])


def test_optimizer_state_equals_the_workers(saved: tuple[list[Kept], Path]) -> None:
    (kept, _), path = saved
    exported, expected = optimizer_state_dict(path)["state"], kept["optimizer"]["state"]
    assert len(exported) == len(expected)
    for index, held in expected.items():
        for key, value in held.items():
            assert torch.equal(exported[index][key], value), (index, key)


def test_a_resumed_run_goes_on_with_the_same_bits(
    saved: tuple[list[Kept], Path],
    start_job: Start,  # noqa: F811
    tmp_path: Path,
) -> None:
    _, path = saved
    resumed, job = run(
        start_job, tmp_path / "resumed", 4, settings={"checkpoint.restore": str(path)}
    )
    whole, _ = run(start_job, tmp_path / "whole", 4)
    assert resumed[0]["restored"] == {"done": 2}
    for name, value in whole[0]["model"].items():
        own_buffer = name.startswith("norm.") and "running" in name
        assert own_buffer or torch.equal(resumed[0]["model"][name], value), name
    for index, held in whole[0]["optimizer"]["state"].items():
        for key, value in held.items():
            assert torch.equal(resumed[0]["optimizer"]["state"][index][key], value), (index, key)
