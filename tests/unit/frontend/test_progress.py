"""The progress line: what stands in it, and when it is printed."""

from __future__ import annotations

import io
from typing import cast

import pytest

from paradis.frontend import progress as module
from paradis.frontend.optimizer import WrappedOptimizer
from paradis.frontend.progress import Progress


class Stub:
    """An optimizer's counters, and a clock."""

    def __init__(self) -> None:
        self.steps_done = 0
        self.counters: dict[str, float] = {"cpu_s": 1.0}
        self.now_s = 100.0

    def metrics(self) -> dict[str, float]:
        return dict(self.counters)

    def perf_counter(self) -> float:
        return self.now_s

    def step(self, *, seconds: float, wait_s: float, pushed: float, pulled: float) -> None:
        """Finish a step."""
        self.steps_done += 1
        self.now_s += seconds
        more = {"steps": 1.0, "wait_s": wait_s, "push_bytes": pushed, "pull_bytes": pulled}
        for name, amount in more.items():
            self.counters[name] = self.counters.get(name, 0.0) + amount


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Worker 0 of two, on no terminal."""
    made = Stub()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("PARADIS_TTY", raising=False)
    monkeypatch.setattr(module, "time", made)
    return made


def progress(stub: Stub, stream: io.StringIO, total: int = 0) -> Progress:
    return Progress(cast(WrappedOptimizer, stub), total=total, stream=stream)


def test_the_line_names_step_loss_rate_bytes_and_where_time_goes(stub: Stub) -> None:
    out = io.StringIO()
    shown = progress(stub, out, total=40)
    for loss in (3.0, 2.34567):
        stub.step(seconds=4.0, wait_s=1.0, pushed=1_500_000, pulled=400)
        shown.update(loss, 16)
    shown.close()
    assert out.getvalue() == (
        "step 2/40  loss 2.3457  8 samples/s  pushed 3.0 MB  pulled 800 B  "
        "step 4000 ms = 3000 compute + 1000 wait\n"
    )


def test_the_next_line_tells_of_the_steps_since_the_last_one(stub: Stub) -> None:
    out = io.StringIO()
    shown = progress(stub, out)
    stub.step(seconds=10.0, wait_s=9.0, pushed=2e9, pulled=2000)
    shown.update(1.0, 10)
    stub.step(seconds=5.0, wait_s=0.5, pushed=2e9, pulled=2000)
    shown.update(0.5, 50)
    first, second = out.getvalue().splitlines()
    assert first.startswith("step 1  loss 1.0000  2 samples/s")
    assert second == (
        "step 2  loss 0.5000  20 samples/s  pushed 4.0 GB  pulled 4.0 KB  "
        "step 5000 ms = 4500 compute + 500 wait"
    )


def test_lines_keep_their_distance_but_the_last_step_is_shown(stub: Stub) -> None:
    out = io.StringIO()
    shown = progress(stub, out, total=3)
    for _ in range(3):
        stub.step(seconds=0.1, wait_s=0.0, pushed=0, pulled=0)
        shown.update(1.0, 1)
    assert out.getvalue().count("\n") == 1 and out.getvalue().startswith("step 3/3")


def test_a_terminal_line_is_written_over(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARADIS_TTY", "1")
    out = io.StringIO()
    shown = progress(stub, out)
    for loss in (1000.0, 1.0):
        stub.step(seconds=1.0, wait_s=0.0, pushed=0, pulled=0)
        shown.update(loss, 1)
    shown.close()
    shown.close()
    text = out.getvalue()
    _, long, short = text.removesuffix("\n").split("\r")
    assert text.count("\n") == 1 and len(short) == len(long)
    assert long.startswith("step 1  loss 1000.0000") and short.startswith("step 2  loss 1.0000")


def test_other_workers_print_nothing(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    out = io.StringIO()
    shown = progress(stub, out, total=1)
    stub.step(seconds=60.0, wait_s=0.0, pushed=0, pulled=0)
    shown.update(1.0, 1)
    shown.close()
    assert out.getvalue() == ""
