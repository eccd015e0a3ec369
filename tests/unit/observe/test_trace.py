"""Spans of several nodes on one axis: rows, the Chrome trace, the walk of a shard."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradis.errors import ConfigError
from paradis.observe.spans import Span, SpanFile, SpanHeader
from paradis.observe.trace import on_one_axis, ranges, rows, walk, write_chrome

MS = 10**6


def header(node: str, *, clock: str = "a", monotonic_ns: int = 0, time_ns: int = 0) -> SpanHeader:
    return SpanHeader(format=1, node=node, host="h", clock=clock, monotonic_ns=monotonic_ns,
                      time_ns=time_ns, dropped=0)  # fmt: skip


def of_shard(
    stage: str, enter_ms: int, leave_ms: int, *, what: str = "", peer: str = "", shard: int = 3,
    step: int = 1,
) -> Span:  # fmt: skip
    return Span(stage, what, 0, shard, step, -1, peer, enter_ms * MS, leave_ms * MS, 64)


def compute(stage: str, enter_ms: int, leave_ms: int) -> Span:
    return Span(stage, "", 0, -1, 1, 0, "", enter_ms * MS, leave_ms * MS, 0)


WORKER = SpanFile(
    header("worker-0", monotonic_ns=0, time_ns=1000 * MS),
    (
        compute("forward", 100, 120),
        compute("backward", 120, 150),
        of_shard("push", 130, 140, what="gradient", peer="server-0"),
        of_shard("push", 125, 141, what="gradient", peer="server-0", shard=4),
        of_shard("push", 230, 240, what="gradient", peer="server-0", step=2),
        of_shard("push", 160, 162, what="update", peer="server-0"),
        compute("wait", 150, 163),
    ),
)
SERVER = SpanFile(
    header("server-0", monotonic_ns=5 * MS, time_ns=1007 * MS),
    (
        of_shard("aggregation", 135, 145),
        of_shard("update", 155, 158),
        of_shard("push", 158, 159, what="update", peer="worker-0"),
    ),
)
SHORT = st.tuples(st.integers(0, 30), st.integers(0, 8))


@given(st.lists(SHORT, max_size=40))
def test_spans_of_a_lane_never_overlap_and_lanes_are_few(pairs: list[tuple[int, int]]) -> None:
    spans = [of_shard("push", a, a + d) for a, d in pairs]
    spans.sort(key=lambda s: (s.enter_ns, s.leave_ns))
    found = rows(spans)
    by_row: dict[int, list[Span]] = defaultdict(list)
    for span, row in zip(spans, found, strict=True):
        by_row[row].append(span)
    for of in by_row.values():
        for one, other in itertools.pairwise(of):
            assert one.leave_ns <= other.enter_ns
    at_once = [1 + sum(s.leave_ns > t.enter_ns for s in spans[:i]) for i, t in enumerate(spans)]
    assert len(by_row) == max(at_once, default=0)
    assert sorted(by_row) == list(range(len(by_row)))


def test_nodes_of_one_clock_keep_their_relations_whatever_wall_time_did() -> None:
    worker, server = on_one_axis([WORKER, SERVER])
    assert worker.shift_ns == server.shift_ns == -100 * MS
    assert [s.stage for s in worker.spans[:2]] == ["forward", "backward"]
    assert [s.shard for s in worker.spans[2:4]] == [4, 3], "in order of entering"


def test_other_clocks_are_put_beside_by_wall_time() -> None:
    far = SpanFile(
        header("server-1", clock="b", monotonic_ns=9000 * MS, time_ns=1110 * MS),
        (of_shard("update", 9001, 9002),),
    )
    worker, other = on_one_axis([WORKER, far])
    assert worker.spans[0].enter_ns + worker.shift_ns == 0
    assert other.spans[0].enter_ns + other.shift_ns == 11 * MS


def chrome(tmp_path: Path, *files: SpanFile) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    write_chrome(on_one_axis(files), path)
    trace = json.loads(path.read_text())
    assert trace.keys() == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_a_chrome_trace_has_every_span_and_names_for_all(tmp_path: Path) -> None:
    events = chrome(tmp_path, WORKER, SERVER)
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(WORKER.spans) + len(SERVER.spans)
    assert {e["ph"] for e in events} == {"X", "M"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    nodes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert nodes == {1: "worker-0", 2: "server-0"}
    assert [n for (pid, _), n in sorted(names.items()) if pid == 1] == [
        "compute", "push gradient 1", "push gradient 2", "push update",
    ]  # fmt: skip
    rows_used: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in spans:
        assert (event["pid"], event["tid"]) in names
        assert event["dur"] >= 0 and event["ts"] >= 0
        rows_used[event["pid"], event["tid"]].append(event)
    for of in rows_used.values():
        of.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(of))
    push = next(e for e in spans if e["name"] == "push gradient 3")
    assert (push["ts"], push["dur"]) == (30_000, 10_000), "microseconds from the first span"
    assert push["args"] == {"step": 1, "group": 0, "worker": -1, "shard": 3, "bytes": 64,
                            "peer": "server-0"}  # fmt: skip


def test_a_trace_without_spans_is_well_formed(tmp_path: Path) -> None:
    events = chrome(tmp_path, SpanFile(header("worker-0"), ()))
    assert {e["name"] for e in events} == {"process_name", "process_sort_index"}


def test_the_walk_of_a_shard_is_in_order_of_time() -> None:
    title, *lines = walk(on_one_axis([WORKER, SERVER]), 1, 3)
    assert title.split() == ["+ms", "took", "ms", "stage", "where"]
    assert [" ".join(line.split()) for line in lines] == [
        "0.000 20.000 forward worker-0",
        "20.000 30.000 backward worker-0",
        "30.000 10.000 push worker-0 -> server-0 gradient 64 bytes",
        "35.000 10.000 aggregation server-0 64 bytes",
        "50.000 13.000 wait worker-0",
        "55.000 3.000 update server-0 64 bytes",
        "58.000 1.000 push server-0 -> worker-0 update 64 bytes",
        "60.000 2.000 push worker-0 <- server-0 update 64 bytes",
    ]


@pytest.mark.parametrize(
    ("step", "shard", "words"),
    [(1, 9, "the run has shards 3 to 4"), (7, 3, "it has steps 1 to 2")],
)
def test_the_walk_says_what_there_is(step: int, shard: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        walk(on_one_axis([WORKER, SERVER]), step, shard)


def test_numbers_are_told_as_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0 to 2, 5, 7 to 8"
    assert ranges([]) == ""
