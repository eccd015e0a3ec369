"""Cases 3, 14, 15, 17 and the decided ones: workers that differ, on real processes.

A refusal reaches every worker at once, names the thing, and ends every worker with an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Job, Preloaded, preloaded, start_job  # noqa: F401

SCRIPT = Path(__file__).parent / "case_scripts" / "differing.py"
sys.path.insert(0, str(SCRIPT.parent))

from place import batch, fill  # noqa: E402

Start = Callable[..., Job]

REFUSALS = {
    "rates": ("WorkersDisagree", "step 1", "rates differ", "worker 0 0.1", "worker 1 0.05"),
    "changed_values": ("WorkersDisagree", "step 2", "2.bias", "workers 0 and 1", "same change"),
    "loaded_by_one": ("WorkersDisagree", "step 2", "2.bias", "only one of them"),
    "shapes": (
        "JoinRefused", "'0.weight' shape: worker 0 (5, 8), worker 1 (6, 8)",
        "'extra0': registered by worker 0, not by worker 1",
        "group 0 lr: worker 0 0.1, worker 1 1.1",
        "build the same model and optimizer",
    ),
    "order": ("JoinRefused", "order of parameters", "worker 0 'a', worker 1 'b'"),
    "optimizers": ("JoinRefused", "optimizer: worker 0 SGD, worker 1 Adam"),
}  # fmt: skip


def run(
    start_job: Start,  # noqa: F811
    directory: Path,
    what: str,
    **options: Any,
) -> tuple[list[dict[str, Any]], dict[str, int], str]:
    """Run the script on two workers; return what each wrote, exit statuses and logs."""
    job = start_job(SCRIPT, str(directory), what, workers=2, servers=1, **options)
    codes = job.wait()
    results = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    return results, codes, job.logs()


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_on_every_worker(start_job: Start, tmp_path: Path, what: str) -> None:  # noqa: F811
    results, codes, logs = run(start_job, tmp_path, what)
    for rank, result in enumerate(results):
        for part in REFUSALS[what]:
            assert part in result["error"], f"worker {rank}: {result['error']}\n{logs}"
        assert codes[f"worker-{rank}"] != 0


def test_writes_behind_torchs_back_are_caught_in_debug_mode(
    start_job: Start,  # noqa: F811
    tmp_path: Path,
) -> None:
    settings = {"training.debug_gradients": "true"}
    results, codes, _ = run(start_job, tmp_path, "unseen_write", settings=settings)
    for rank, result in enumerate(results):
        assert "gradient of 2.bias was changed" in result["error"], result
        assert "p.grad.mul_" in result["error"] and codes[f"worker-{rank}"] != 0


def test_a_gradient_that_is_not_finite_is_named(
    start_job: Start,  # noqa: F811
    tmp_path: Path,
) -> None:
    results, codes, _ = run(start_job, tmp_path, "non_finite")
    for rank, result in enumerate(results):
        assert "NonFiniteGradient: step 2" in result["error"], result
        assert "2.bias" in result["error"] and codes[f"worker-{rank}"] != 0
    assert "worker 1's own gradient of 2.bias" in results[1]["error"]


def test_batches_run_out_on_one_worker(start_job: Start, tmp_path: Path) -> None:  # noqa: F811
    results, codes, logs = run(start_job, tmp_path, "batches")
    assert not any(codes.values()), logs
    _assert_batches(results[0]["values"])
    assert results[1]["values"] != results[0]["values"]


def test_the_end_of_batches_is_announced(cluster: Any) -> None:
    words = ("--workers", "2", "--servers", "1", str(SCRIPT), str(cluster.directory), "batches")
    code, err = cluster.run(*words)
    assert code == 0, err
    assert err.count("worker 1 finished early, after step 4") == 1, err
    assert "the mean is now over 1 workers: 0" in err
    _assert_batches(json.loads((cluster.directory / "0.json").read_text())["values"])


def _assert_batches(ours: dict[str, Any]) -> None:
    for name, value in _plain_batches().items():
        assert torch.allclose(torch.tensor(ours[name]), value, rtol=1e-6, atol=1e-9), name


def _plain_batches() -> dict[str, torch.Tensor]:
    """Five steps: the mean over two workers, in the last one worker 0's gradient alone."""
    model = fill(torch.nn.Linear(8, 2), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(5):
        ranks = [0, 1] if step < 4 else [0]
        for rank in ranks:
            model(batch(rank, step, 4, 8)).square().mean().div(len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def test_batches_run_out_where_that_is_an_error(start_job: Start, tmp_path: Path) -> None:  # noqa: F811
    settings = {"training.on_early_finish": "fail"}
    results, codes, logs = run(start_job, tmp_path, "batches", settings=settings)
    assert "worker 1" in results[0]["error"], logs
    assert "on_early_finish" in results[0]["error"]
    assert codes["worker-0"] != 0


def test_a_worker_that_skips_a_step_is_named(start_job: Start, tmp_path: Path) -> None:  # noqa: F811
    os.mkfifo(tmp_path / "over")
    settings = {
        "communication.retry_interval": "500ms",
        "communication.straggler_warning": "1s",
        "communication.sync_timeout": "2s",
    }
    results, codes, logs = run(start_job, tmp_path, "skipped_step", settings=settings)
    assert "Gradient sync timeout" in results[0]["error"], logs
    assert "worker 1" in results[0]["error"] and "step 1" in results[0]["error"]
    assert codes["worker-0"] and codes["worker-1"]
