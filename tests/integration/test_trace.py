"""Spans of real jobs: which node records what, in which order, and nothing unless asked."""
# ruff: noqa: F401, F811 - fixtures are imported, and named as arguments

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from preloaded import Job, preloaded, start_job

from paradis.cli.main import main
from paradis.observe.spans import Span, read_spans, span_files

SCRIPT = """
import sys, torch, paradis

torch.manual_seed(paradis.rank())
model = torch.nn.Sequential(*[torch.nn.Linear(160, 160) for _ in range(4)])
optimizer = paradis.wrap(model, torch.optim.Adam(model.parameters()))
for step in range(2):
    model(torch.randn(4, 160)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if "fail" in sys.argv:  # after a whole step: what came of one that was cut short is not fixed
    raise ValueError("as asked")
"""
SETTINGS = {
    "communication.shard_size": "64KiB",
    "communication.bucket_size": "16KiB",
    "communication.small_tensor": "8KiB",
}
TRACED = SETTINGS | {"observe.trace": "true"}
STEPS = 2

Start = Callable[..., Job]
Spans = dict[str, tuple[Span, ...]]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def traced(start_job: Start, script: Path) -> Job:
    return start_job(script, workers=2, servers=2, settings=TRACED).succeed()


def spans_of(job: Job) -> Spans:
    files = [read_spans(path) for path in span_files(job.run.path)]
    assert len({file.header.clock for file in files}) == 1
    return {file.header.node: file.spans for file in files}


def kinds(spans: tuple[Span, ...]) -> set[str]:
    return {f"{s.stage} {s.what}".strip() for s in spans}


def test_every_stage_is_on_the_nodes_where_it_should_be(traced: Job) -> None:
    found = spans_of(traced)
    assert found.keys() == traced.nodes.keys()
    compute = {"forward", "backward", "wait"}
    for node, spans in found.items():
        assert all(s.enter_ns <= s.leave_ns for s in spans)
        if node.startswith("worker-"):
            assert kinds(spans) == {"push gradient", "push update", *compute}
            assert {s.worker for s in spans} == {int(node[-1])}
        elif node.startswith("server-"):
            assert kinds(spans) == {"aggregation", "update", "push update"}
        else:
            assert spans == (), "without racks a dispatcher has no part in the path"


def test_every_shard_walks_through_every_step(traced: Job) -> None:
    found = spans_of(traced)
    shards = {s.shard for spans in found.values() for s in spans if s.shard >= 0}
    assert len(shards) > 4
    wanted = {(shard, step) for shard in shards for step in range(STEPS)}
    for rank in range(2):
        for what in ("gradient", "update"):
            spans = [s for s in found[f"worker-{rank}"] if s.what == what]
            assert {(s.shard, s.step) for s in spans} == wanted
            assert all(s.bytes > 0 and s.peer.startswith("server-") for s in spans)
    servers = [s for name in ("server-0", "server-1") for s in found[name]]
    for stage in ("aggregation", "update"):
        assert sorted((s.shard, s.step) for s in servers if s.stage == stage) == sorted(wanted)


def test_the_stages_of_a_shard_come_in_order(traced: Job) -> None:
    found = spans_of(traced)
    by_place: dict[tuple[int, int], dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for node, spans in found.items():
        for span in spans:
            side = "up" if node.startswith("worker-") else "down"
            name = f"{span.stage} {span.what} {side}" if span.stage == "push" else span.stage
            by_place[span.shard, span.step][name].append(span)
    for (shard, _), stages in by_place.items():
        if shard < 0:
            continue
        (total,), (update,) = stages["aggregation"], stages["update"]
        assert min(s.enter_ns for s in stages["push gradient up"]) <= total.enter_ns
        assert total.leave_ns <= update.enter_ns
        for sent in stages["push update down"]:
            assert update.leave_ns <= sent.enter_ns
        for received in stages["push update up"]:
            assert update.leave_ns <= received.enter_ns
        assert total.bytes == 2 * update.bytes


def test_pushes_overlap_backward_from_the_second_step_on(traced: Job) -> None:
    spans = spans_of(traced)["worker-0"]
    (backward,) = [s for s in spans if (s.stage, s.step) == ("backward", 1)]
    pushes = [s for s in spans if (s.what, s.step) == ("gradient", 1)]
    assert any(backward.enter_ns <= s.enter_ns < backward.leave_ns for s in pushes)
    (wait,) = [s for s in spans if (s.stage, s.step) == ("wait", 1)]
    updates = [s for s in spans if (s.what, s.step) == ("update", 1)]
    assert max(s.leave_ns for s in updates) <= wait.leave_ns


def test_the_command_shows_a_real_run(
    traced: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, output = str(traced.run.path), tmp_path / "trace.json"
    assert main(["trace", directory, "-o", str(output)]) == 0
    count = sum(map(len, spans_of(traced).values()))
    events = json.loads(output.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == count
    shard = next(s.shard for s in spans_of(traced)["server-0"])
    capsys.readouterr()
    assert main(["trace", directory, "--step", "1", "--bucket", str(shard)]) == 0
    out = capsys.readouterr().out
    for word in ("forward", "backward", "wait", "push", "aggregation", "update"):
        assert f"  {word} " in out


def test_rack_agents_sum_and_push_too(start_job: Start, script: Path) -> None:
    job = start_job(script, workers=4, servers=1, dispatchers=2, racks=2, settings=TRACED)
    found = spans_of(job.succeed())
    for node in ("dispatcher-0", "dispatcher-1"):
        assert kinds(found[node]) == {"aggregation", "push sum", "push update"}
    assert {s.peer for s in found["worker-3"] if s.what} == {"dispatcher-1"}


def test_spans_are_there_when_the_job_fails(start_job: Start, script: Path) -> None:
    job = start_job(script, "fail", workers=1, servers=1, settings=TRACED)
    assert any(job.wait().values())
    found = spans_of(job)
    assert {s.step for s in found["worker-0"] if s.what == "gradient"} == {0, 1}
    assert kinds(found["server-0"]) == {"aggregation", "update", "push update"}


def test_nothing_is_written_unless_asked(start_job: Start, script: Path) -> None:
    job = start_job(script, workers=1, servers=1, settings=SETTINGS).succeed()
    assert span_files(job.run.path) == []


def test_a_worker_without_a_run_directory_says_so(start_job: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('import os\ndel os.environ["PARADIS_RUN_DIR"]\n' + SCRIPT)
    job = start_job(script, workers=1, servers=1, settings=TRACED).succeed()
    assert "worker 0 records no spans: PARADIS_RUN_DIR is not set" in job.log("worker-0")
    assert [p.name for p in span_files(job.run.path)] == ["spans-dispatcher-0.jsonl",
                                                          "spans-server-0.jsonl"]  # fmt: skip


def test_a_script_alone_traces_its_server_too(start_job: Start, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    lines = [
        "import os",
        "for name in ('PARADIS_DISPATCHERS', 'RANK', 'WORLD_SIZE'): del os.environ[name]",
        f"os.environ |= {{'PARADIS_RUN_DIR': {str(tmp_path)!r}, 'PARADIS_OBSERVE_TRACE': 'true'}}",
    ]
    script.write_text("\n".join(lines) + SCRIPT)
    job = start_job(script, workers=1, servers=1, settings=SETTINGS)
    assert job.preloaded.code(job.nodes["worker-0"]) == 0, job.logs()
    for name in ("server-0", "dispatcher-0"):
        job.kill(name)
    job.wait()
    names = [read_spans(path).header.node for path in span_files(tmp_path)]
    assert names == ["server-0", "worker-0"]
