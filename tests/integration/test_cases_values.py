"""Cases 1-13, 16 and 18 on real processes: the values against plain torch.

All cases run in one job (each wraps models of its own), once per number of workers. One worker must
equal plain torch bit for bit; several must equal the mean of their gradients to 1e-6, and agree
with each other bit for bit.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded, environment, preloaded, start_job  # noqa: F401

SCRIPTS = Path(__file__).parent / "case_scripts"
sys.path.insert(0, str(SCRIPTS))

import cases_gradients  # noqa: E402,F401
import cases_optimizer  # noqa: E402,F401
import cases_tensors  # noqa: E402,F401
from place import CASES, run_plain  # noqa: E402

JOBS = {"one": (1, 1), "two": (2, 2), "four": (4, 3)}
"""Workers and servers; ``alone`` is the script without a launcher."""

OWN = {"losses", "own"}
"""Results that are each worker's own."""

REFUSALS = {
    "lazy": ("1.weight is lazy", "run one forward pass"),
    "complex": ("z is torch.complex64", "two real parameters"),
    "lbfgs": ("LBFGS", "expected one of torch.optim"),
    "subclass": ("subclass of Adam", "expected one of torch.optim"),
    "replaced": ("emb.weight was replaced after paradis.wrap", "change it in place"),
    "module": ("emb.weight was replaced after paradis.wrap", "change it in place"),
    "dtype": ("emb.weight", "torch.bfloat16", "torch.float32", "before wrapping"),
    "resized": ("emb.weight", "(9, 3)", "(4, 3)"),
    "sparse": ("gradient of emb.weight", "sparse=False"),
}


@cache
def plain(world: int) -> list[dict[str, Any]]:
    """Return what plain torch makes of the cases."""
    return run_plain(world)


Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(
    start_job: Callable[..., Any],  # noqa: F811
    preloaded: Preloaded,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Results, str]]:
    """Each rank's results of a job, and what the job's nodes wrote."""

    @cache
    def run(job: str) -> tuple[Results, str]:
        directory = tmp_path_factory.mktemp(job)
        if job == "alone":
            log = directory / "log"
            words = ["python", str(SCRIPTS / "main.py"), str(directory)]
            number = preloaded.start(words, environment({}), directory, log)
            assert preloaded.code(number) == 0, log.read_text()
            return [json.loads((directory / "0.json").read_text())], log.read_text()
        workers, servers = JOBS[job]
        started = start_job(
            SCRIPTS / "main.py", str(directory), workers=workers, servers=servers
        ).succeed()
        ranks = [json.loads((directory / f"{r}.json").read_text()) for r in range(workers)]
        return ranks, started.logs()

    return run


@pytest.mark.parametrize("job", ["alone", "one"])
@pytest.mark.parametrize("name", CASES)
def test_one_worker_equals_plain_torch_bit_for_bit(
    results: Callable[[str], tuple[Results, str]], name: str, job: str
) -> None:
    (ours,), _ = results(job)
    assert _values(ours[name]) == _values(plain(1)[0][name])


@pytest.mark.parametrize("job", ["two", "four"])
@pytest.mark.parametrize("name", CASES)
def test_several_workers_equal_the_mean_and_agree(
    results: Callable[[str], tuple[Results, str]], name: str, job: str
) -> None:
    ranks, _ = results(job)
    expected = plain(len(ranks))
    for rank, ours in enumerate(ranks):
        _assert_close(_values(ours[name]), _values(expected[rank][name]), name)
        shared = [_shared(r[name]) for r in (ours, ranks[0])]
        assert shared[0] == shared[1], f"worker {rank} differs from worker 0"


def _values(case: dict[str, Any]) -> dict[str, Any]:
    """Leave out texts of refusals, which plain torch has not."""
    return {k: v for k, v in case.items() if k not in REFUSALS}


def _shared(case: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.items() if k not in OWN}


def _assert_close(ours: Any, theirs: Any, path: str) -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            _assert_close(ours[key], theirs[key], f"{path}.{key}")
        return
    first, second = _flat(ours), _flat(theirs)
    assert len(first) == len(second), path
    numbers = [abs(n) for n in second if isinstance(n, float)]
    tolerance = 1e-6 * max(numbers, default=0.0)
    for a, b in zip(first, second, strict=True):
        equal = a == b or (isinstance(a, float) and abs(a - b) <= tolerance)
        assert equal, f"{path}: {ours} is not {theirs}"


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


# --------------------------------------------------------------- the numbers that the cases state


def test_stated_values(results: Callable[[str], tuple[Results, str]]) -> None:
    ranks, _ = results("two")
    for rank in ranks:
        micro = rank["branch_in_early_micro_step"]
        assert micro == {"a": pytest.approx(0.8), "b": pytest.approx(0.8)}
        assert rank["unused_by_one"]["w"] == pytest.approx(0.8)
        assert rank["unused_by_all"]["steps"] == [5.0, 2.0]
        assert rank["backward_without_step"]["first"] == pytest.approx(0.9)
        assert rank["zero_length"]["shapes"]["nothing"] == [0, 4]
        assert rank["zero_length"]["shapes"]["1.weight"] == [3, 0]
        assert rank["batch_norm"]["first"] == [1.0] * 4
        assert rank["values_changed_alike"]["seen"][0] == pytest.approx(1.3)
        assert rank["values_changed_alike"]["seen"][1] == 1.0
        assert rank["several_dtypes"]["dtypes"] == [
            "torch.float64", "torch.float32", "torch.bfloat16",
        ]  # fmt: skip
        assert rank["grad_scaler"]["scales"] == [
            1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0,
        ]  # fmt: skip
        assert rank["state_on_first_rank_only"]["steps"] == [6.0] * 4
        betas = rank["one_cycle_drives_momentum"]["betas"]
        assert not math.isclose(betas[0], 0.9)


def test_buffers_are_each_workers_own(results: Callable[[str], tuple[Results, str]]) -> None:
    ranks, _ = results("two")
    assert ranks[0]["batch_norm"]["own"] != ranks[1]["batch_norm"]["own"]


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals_name_the_thing_and_say_what_to_do(
    results: Callable[[str], tuple[Results, str]], what: str
) -> None:
    ranks, _ = results("two")
    for rank in ranks:
        text = {**rank["refusals_on_the_spot"], **rank["refusals_at_step"]}[what]
        for part in REFUSALS[what]:
            assert part in text


def test_announcements_come_once(results: Callable[[str], tuple[Results, str]]) -> None:
    _, logs = results("two")
    worker = logs.split("--- worker-0")[1].split("--- worker-1")[0]
    assert worker.count("use optimizer.clip_grad_norm_(max_norm)") <= 1
    assert logs.count("use optimizer.clip_grad_norm_(max_norm)") >= 1
    assert "optimizer state" in logs
