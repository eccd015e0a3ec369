"""Backup workers on real processes: the others go on, and who was late gets a whole version."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from conftest import Cluster
from preloaded import Job, Preloaded, preloaded, start_job

from paradis.cli.main import main
from paradis.storage.manifest import group_directory, read_manifest, resolve

SCRIPT = Path(__file__).with_name("backup_worker.py")
SMALL = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
    "communication.retry_interval": "60s",
    "training.backup_workers": "1",
}
END = 12

Start = Callable[..., Job]


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(3)]


WAYS = [("none", "none"), *((w, "layerwise") for w in ("none", "bf16", "int8", "onebit", "lion"))]


@pytest.mark.parametrize(("way", "overlap"), WAYS)
def test_a_held_worker_catches_up(way: str, overlap: str, start_job: Start, tmp_path: Path) -> None:
    """Every version has the same bits on all workers that have had it, momenta included."""
    settings = {**SMALL, "training.overlap": overlap}
    if way in ("bf16", "int8"):
        settings["training.compression"] = way
    job = start_job(SCRIPT, str(tmp_path), way, workers=3, servers=2, settings=settings).succeed()
    found = results(tmp_path)
    assert all(each["failures"] == [] for each in found)
    assert found[2]["late"] >= 1 and found[2]["calls"] < END
    assert all(str(END) in each["versions"] for each in found)
    shared = found[0]["versions"].keys() | found[1]["versions"].keys()
    assert any(v in shared for v in found[2]["versions"] if 4 < int(v) < END), "it came back"
    for version in shared | found[2]["versions"].keys():
        digests = {each["versions"][version] for each in found if version in each["versions"]}
        assert len(digests) == 1, (version, digests)
    assert (found[2]["memories"] > 0) == (way in ("int8", "onebit", "lion"))
    assert "worker 2 was late in 1 of " in job.logs()
    assert "clips each worker's own gradient with" in job.logs()
    if way == "none":
        look_at_checkpoint(Path(found[0]["saved"]), found[0]["versions"], tmp_path)


def look_at_checkpoint(saved: Path, versions: dict[str, str], directory: Path) -> None:
    """It is whole, and of one version that the workers had, though it was saved while they went on.

    Its number of steps is that of the version.
    """
    assert main(["checkpoint", "verify", str(saved)]) == 0
    exported = directory / "model.pt"
    assert main(["checkpoint", "export", str(saved), str(exported)]) == 0
    state = torch.load(exported)
    digest = xxhash.xxh3_64(b"".join(value.numpy().tobytes() for value in state.values()))
    assert (
        versions[str(read_manifest(group_directory(resolve(saved), 0)).step)] == digest.hexdigest()
    )


@pytest.mark.parametrize("way", ["none", "onebit"])
def test_a_job_resumes(way: str, start_job: Start, tmp_path: Path) -> None:
    """From the version that was saved, without what the workers' codes had left out; it says so."""
    settings = dict(SMALL)
    outs = [tmp_path / "first", tmp_path / "again"]
    for out in outs:
        out.mkdir()
        (out / "story").write_text("call 0 7\ncall 1 7\nback 2\n")  # nobody is held
        job = start_job(SCRIPT, str(out), way, workers=3, servers=2, settings=settings).succeed()
        saved = results(out)[0]["saved"]
        assert ("lacks what the codes" in job.logs()) == (way != "none")
        settings = {**settings, "checkpoint.restore": saved}
    begun = read_manifest(group_directory(resolve(Path(results(outs[0])[0]["saved"])), 0)).step
    found = [each["versions"] for each in results(outs[1])]
    assert all(begun < min(map(int, versions)) <= END for versions in found)
    assert len({versions[str(END)] for versions in found}) == 1


RACE = """
import pathlib, select, torch, paradis
model = torch.nn.Linear(4, 1)
optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
while optimizer.steps_done < 8:
    if paradis.rank() == 1 and optimizer.steps_done == 1:
        while not pathlib.Path("gone").exists():
            select.select([], [], [], 0.005)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.wait()
    if paradis.rank() == 0 and optimizer.steps_done == 5:
        pathlib.Path("gone").write_text("")
"""


def test_late_steps_and_dropped_pushes_are_counted(cluster: Cluster) -> None:
    script = cluster.directory / "race.py"
    script.write_text(RACE)
    code, err = cluster.run(
        "--workers", "2", "--servers", "1", "--set", "training.backup_workers=1", str(script)
    )
    assert code == 0, err
    nodes = json.loads((cluster.run_directory / "nodes.json").read_text())
    assert nodes["worker-1"]["late_steps"] >= 1
    assert nodes["worker-1"]["steps"] < 8
    assert nodes["server-0"]["dropped_pushes"] >= 1
