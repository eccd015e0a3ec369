"""``paradis trace``: what it writes and prints, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paradis.cli.main import main
from paradis.observe.spans import Span, SpanRecorder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run with three spans, one of them not kept."""
    recorder = SpanRecorder(spans_max=2)
    for step in (4, 5, 6):
        recorder.add(Span("push", "gradient", 0, 3, step, 0, "server-0", 10**6, 3 * 10**6, 64))
    recorder.write(tmp_path, "worker-0")
    return tmp_path


def test_a_trace_is_written_and_told_how_to_open(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{run / 'trace.json'}: 2 spans of 1 nodes; 1 earlier ones were not kept" in out
    assert "https://ui.perfetto.dev" in out and "chrome://tracing" in out
    assert main(["trace", str(run), "-o", str(run / "other.json")]) == 0
    assert json.loads((run / "trace.json").read_text()) == json.loads(
        (run / "other.json").read_text()
    )


@pytest.mark.parametrize("word", ["--shard", "--bucket"])
def test_a_walk_is_printed(run: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "--step", "5", word, "3"]) == 0
    assert "worker-0 -> server-0  gradient  64 bytes" in capsys.readouterr().out
    assert not (run / "trace.json").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--step", "5"], "give --step and --shard together"),
        (["--shard", "3"], "give --step and --shard together"),
        (["--step", "5", "--shard", "3", "-o", "x"], "and no -o"),
        (["--step", "9", "--shard", "3"], "it has steps 5 to 6"),
        (["--step", "5", "--shard", "1"], "the run has shards 3"),
    ],
)
def test_what_cannot_be_shown_is_told(
    run: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(run), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path / "gone")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_a_run_without_spans_names_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "--set observe.trace=true" in capsys.readouterr().err
    SpanRecorder().write(tmp_path, "worker-0")
    assert main(["trace", str(tmp_path)]) == 2
    assert "--set observe.trace=true" in capsys.readouterr().err


def test_a_damaged_file_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "spans-worker-0.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert main(["trace", str(run)]) == 1
    assert "line 3 is damaged" in capsys.readouterr().err
