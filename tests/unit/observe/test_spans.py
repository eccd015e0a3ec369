"""The recorder of spans and its file."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from paradis.errors import StateError
from paradis.observe.spans import (
    COMPUTE,
    STAGES,
    Span,
    SpanRecorder,
    read_spans,
    span_file,
    span_files,
)


def span(number: int, stage: str = "push") -> Span:
    return Span(stage, "gradient", 0, number, 7, 1, "server-0", number, number + 5, 1 << 40)


def test_the_vocabulary_has_all_stages_with_their_meaning() -> None:
    assert list(STAGES) == ["local reduction", "compression", "aggregation", "update", "push"]
    assert list(COMPUTE) == ["forward", "backward", "wait"]
    assert all({**STAGES, **COMPUTE}.values())


def test_the_newest_spans_are_kept() -> None:
    recorder = SpanRecorder(spans_max=3)
    for number in range(5):
        recorder.add(span(number))
    assert recorder.spans() == (span(2), span(3), span(4))


def test_threads_lose_no_span(tmp_path: Path) -> None:
    recorder = SpanRecorder(spans_max=5000)

    def record(first: int) -> None:
        for number in range(first, first + 2000):
            recorder.add(span(number))

    threads = [threading.Thread(target=record, args=(i * 2000,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({s.shard for s in recorder.spans()}) == 5000
    assert read_spans(recorder.write(tmp_path, "worker-1")).header.dropped == 3000


def test_a_file_reads_back_as_it_was(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    recorder.add(span(3))
    recorder.add(span(4, stage="of a later version"))
    before = time.monotonic_ns(), time.time_ns()
    path = recorder.write(tmp_path / "made" / "anew", "server-0")
    assert path == span_file(tmp_path / "made" / "anew", "server-0")
    held = read_spans(path)
    assert held.spans == recorder.spans()
    assert (held.header.node, held.header.dropped) == ("server-0", 0)
    assert before[0] <= held.header.monotonic_ns <= time.monotonic_ns()
    assert held.header.time_ns >= before[1] - 10**9, "wall clocks may be put back a little"
    assert held.header.host and held.header.clock
    assert sorted(path.parent.iterdir()) == [path], "nothing else is left"


def test_all_files_of_a_run_are_found_in_order(tmp_path: Path) -> None:
    for node in ("worker-1", "server-0"):
        SpanRecorder().write(tmp_path, node)
    (tmp_path / "server-0.log").write_text("")
    assert [p.name for p in span_files(tmp_path)] == ["spans-server-0.jsonl",
                                                      "spans-worker-1.jsonl"]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"push"', b"17", "line 2 is damaged"),
        (b"]\n", b"", "line 2 is damaged"),
        (b'"node"', b'"name"', "line 1 is damaged"),
        (b'"format":1', b'"format":2', "expected format 1, got 2"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, old: bytes, new: bytes, words: str) -> None:
    recorder = SpanRecorder()
    recorder.add(span(3))
    path = recorder.write(tmp_path, "server-0")
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(StateError, match=words):
        read_spans(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = span_file(tmp_path, "server-0")
    path.touch()
    with pytest.raises(StateError, match="line 1 is damaged"):
        read_spans(path)
