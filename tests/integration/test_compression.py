"""Codes on the wire: real workers and servers do what their coders do on whole tensors."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Job, Preloaded, preloaded, start_job

import paradis
import paradis.optim
from paradis.errors import ConfigError
from paradis.observe.spans import read_spans, span_files

SCRIPT = Path(__file__).with_name("coded_worker.py")
SMALL = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "32KiB",
    "communication.small_tensor": "32KiB",
    "communication.retry_interval": "60s",
}
"""Cuts; and nothing is sent twice only because the machine is slow."""

WAYS = ("bf16", "int8", "onebit", "onebit-free", "lion")
STEPS = 10

Start = Callable[..., Job]


def settings_of(way: str) -> dict[str, str]:
    """Optimizers with a code of their own need no setting."""
    free = {"training.free_gradients": "true"} if way == "onebit-free" else {}
    return SMALL | free | ({"training.compression": way} if way in ("bf16", "int8") else {})


def results(directory: Path, workers: int) -> dict[str, Any]:
    """Return what rank 0 wrote, after checking that nothing differed anywhere."""
    found = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(workers)]
    for rank, result in enumerate(found):
        assert result["failures"] == [], f"rank {rank}"
        assert result["digest"] == found[0]["digest"], f"rank {rank}"
    first: dict[str, Any] = found[0]
    return first


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
@pytest.mark.parametrize("way", WAYS)
def test_same_values(start_job: Start, tmp_path: Path, way: str, overlap: str) -> None:
    """With absent and changed gradients, two workers and two servers, every step, bit for bit."""
    settings = settings_of(way) | {"training.overlap": overlap}
    words = [str(tmp_path), way, str(STEPS)]
    start_job(SCRIPT, *words, workers=2, servers=2, settings=settings).succeed()
    results(tmp_path, 2)


@pytest.mark.parametrize("way", ["int8", "onebit"])
@pytest.mark.parametrize("rack_codes", ["forward", "recompress"])
def test_racks(start_job: Start, tmp_path: Path, way: str, rack_codes: str) -> None:
    """Two workers in one rack, one in another: what agents send on gives the very same values.

    An agent that makes one code of several has its part in what the values are, with 1-bit Adam.
    """
    counts = {"workers": 3, "servers": 2, "dispatchers": 2, "racks": 2}
    settings = settings_of(way) | {
        "communication.rack_aggregation": "on", "communication.rack_codes": rack_codes,
        "observe.trace": "true",
    }  # fmt: skip
    words = ["recompress"] if (way, rack_codes) == ("onebit", "recompress") else []
    job = start_job(SCRIPT, str(tmp_path), way, "9", *words, settings=settings, **counts).succeed()
    results(tmp_path, 3)
    sent = pushes_of(job, 8)
    assert sent and sent.keys() == {"dispatcher-0", "dispatcher-1"}, "workers push to agents alone"
    ratio = sum(sent["dispatcher-0"]) / sum(sent["dispatcher-1"])  # of two workers, and of one
    assert 0.99 < ratio < 1.1 if words else 1.8 < ratio < 2.0, "tensors in full count once"


def pushes_of(job: Job, step: int) -> dict[str, list[int]]:
    """Return the bytes of each push to a server in a step, by the node that sent it."""
    found: dict[str, list[int]] = {}
    for path in span_files(job.run.path):
        file = read_spans(path)
        for span in file.spans:
            pushed = span.stage == "push" and span.what in ("gradient", "sum") and span.step == step
            if pushed and span.peer.startswith("server"):
                found.setdefault(file.header.node, []).append(span.bytes)
    return found


def test_one_scale_per_tensor_needs_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(300, 300, bias=False)

    def wrap() -> None:
        try:
            paradis.wrap(model, paradis.optim.OneBitAdam(model.parameters(), scale="l2"))
        finally:
            paradis.close()

    monkeypatch.setenv("PARADIS_COMMUNICATION_SHARD_SIZE", "256KiB")
    monkeypatch.setenv("PARADIS_COMMUNICATION_BUCKET_SIZE", "256KiB")
    with pytest.raises(ConfigError, match="expected weight in one piece.* to 352KiB or more"):
        wrap()
    monkeypatch.setenv("PARADIS_COMMUNICATION_SHARD_SIZE", "352KiB")
    wrap()


@pytest.mark.parametrize("way", WAYS)
def test_bytes(start_job: Start, tmp_path: Path, way: str) -> None:
    """A step's payload has the length that the closed forms give, up and down alike."""
    words = [str(tmp_path), way, "5"]
    start_job(SCRIPT, *words, workers=1, servers=2, settings=settings_of(way)).succeed()
    result = results(tmp_path, 1)
    padded = 0 if way == "lion" else 4 * (16 + 33)  # 7 and 33 elements in full, 64 bytes apart
    sent, received = result["sizes"][-1]
    assert sent == received == result["codes"] + padded


@pytest.mark.parametrize("way", ["int8", "onebit", "onebit-free", "lion"])
@pytest.mark.parametrize("save", [2, 8])
def test_resume(start_job: Start, tmp_path: Path, way: str, save: int) -> None:
    """What codes have left out is saved: on other servers it goes on as if nothing had been."""
    settings, first, second = settings_of(way), tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    words = [way, str(STEPS), "save", str(save)]
    job = start_job(SCRIPT, str(first), *words, workers=2, servers=2, settings=settings)
    job.succeed()
    whole = results(first, 2)
    settings["checkpoint.restore"] = str(job.run.path / "checkpoints")
    words = [way, str(STEPS), "from", str(save)]
    start_job(SCRIPT, str(second), *words, workers=2, servers=3, settings=settings).succeed()
    assert results(second, 2)["digest"] == whole["digest"]


def test_automatic_freeze(start_job: Start, tmp_path: Path) -> None:
    """The dispatcher finds the variance steady; all switch at the same step."""
    words = [str(tmp_path), "auto", "310"]
    start_job(SCRIPT, *words, workers=2, servers=2, settings=SMALL).succeed()
    assert results(tmp_path, 2)["first_coded"] == 300


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
@pytest.mark.parametrize("way", ["bf16", "int8"])
def test_codes_that_make_steps_slower_are_turned_off(
    start_job: Start, tmp_path: Path, way: str, overlap: str
) -> None:
    """All change at one step, nothing is lost, and a resumed job goes on in full, bit for bit."""
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    settings = settings_of(way) | {"training.overlap": overlap}
    words = [str(first), way, "40", "slower"]
    job = start_job(SCRIPT, *words, workers=2, servers=2, settings=settings)
    job.succeed()
    whole = results(first, 2)
    assert whole["ways"].count("10") == 1 and "01" not in whole["ways"]
    said = f"compression {way} of group 0 is off: a step takes 41.0 ms with it and 33.0 ms without"
    assert job.logs().count(said) == 1
    settings["checkpoint.restore"] = str(job.run.path / "checkpoints")
    words = [str(second), way, "40", "from", str(whole["saved"]), whole["ways"][: whole["saved"]]]
    job = start_job(SCRIPT, *words, workers=2, servers=3, settings=settings)
    job.succeed()
    resumed = results(second, 2)
    assert resumed["ways"] == whole["ways"]
    assert resumed["digest"] == whole["digest"]


@pytest.mark.parametrize("way", ["bf16", "int8"])
def test_codes_that_make_steps_faster_come_back(start_job: Start, tmp_path: Path, way: str) -> None:
    """In early updates, too, where a worker hears of it by the confirmation of a step."""
    settings = settings_of(way) | {"training.early_update": "true"}
    words = [str(tmp_path), way, "40", "faster"]
    job = start_job(SCRIPT, *words, workers=2, servers=2, settings=settings)
    job.succeed()
    ways = results(tmp_path, 2)["ways"]
    assert ways.count("10") == ways.count("01") == 1
    assert f"compression {way} of group 0 stays on: a step takes 33.0 ms" in job.logs()
