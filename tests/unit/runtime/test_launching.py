"""Verdicts, tracebacks in logs, run directories and descriptor limits."""

from __future__ import annotations

import os
import resource
import socket
import stat
from pathlib import Path

import pytest

from paradis.errors import ConfigError
from paradis.runtime import descriptors, verdict
from paradis.runtime.log_tail import failure_text, last_traceback
from paradis.runtime.rundir import RunDirectory, read_address, read_token, write_address

PLAIN = "Traceback (most recent call last):\n  File 'a', line 1\nValueError: no\nof two lines"
CHAIN = (
    "Traceback (most recent call last):\n  File 'a'\nKeyError: 1\n\n"
    "During handling of the above exception, another exception occurred:\n\n" + PLAIN
)


def test_the_least_kind_wins_and_then_the_first() -> None:
    judged = verdict.Verdict()
    assert not judged.any
    gone = "Traceback\nparadis.errors.PeerUnreachable: server-0 is gone"
    judged.add(verdict.of_node("worker-0", 1, gone, "w0"))
    assert not judged.decisive
    judged.add(verdict.of_leader("JobFailed", "server-0 is lost"))
    assert judged.first().message == "server-0 is lost (JobFailed)"
    judged.add(verdict.of_node("server-0", -11, "", "s0"))
    judged.add(verdict.of_node("worker-1", 3, PLAIN, "w1"))
    assert judged.decisive
    assert judged.first().message == "server 0 was killed by signal 11 (SIGSEGV); its log: s0"
    assert judged.first().exit_code == 139


def test_a_node_s_text_is_prefixed() -> None:
    failure = verdict.of_node("worker-12", 3, "a\nb", "/x")
    expected = "worker 12 exited with code 3; its log: /x\n[worker 12] a\n[worker 12] b"
    assert (failure.message, failure.exit_code) == (expected, 3)
    early = verdict.of_node("dispatcher-0", 0, "", "/x")
    assert (early.exit_code, "ended before the job" in early.message) == (1, True)
    assert verdict.signal_name(200) == "unknown"


def test_the_last_traceback_is_found_with_what_led_to_it() -> None:
    old = "Traceback (most recent call last):\nKeyError: handled\nstep 1 done\n"
    assert last_traceback(old + PLAIN + "\n\n") == PLAIN
    assert last_traceback(old + CHAIN) == CHAIN
    assert last_traceback("all is well") == ""
    assert len(last_traceback(PLAIN + "x" * 100_000)) < 20_000


def test_a_log_without_traceback_gives_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 400_000 + b"\n" + b"".join(b"line %d\n" % i for i in range(20)))
    assert failure_text(log).splitlines() == [f"line {i}" for i in range(10, 20)]
    assert failure_text(tmp_path / "none") == ""


def test_a_run_directory_is_private_and_cleans_up(tmp_path: Path) -> None:
    one, two = (RunDirectory.create(tmp_path / "runs") for _ in range(2))
    assert one.path != two.path
    assert stat.S_IMODE(one.path.stat().st_mode) == 0o700
    token = one.make_token()
    assert read_token(one.token_file) == token != two.make_token()
    assert stat.S_IMODE(one.token_file.stat().st_mode) == 0o600
    assert read_address(one.address_file) is None
    write_address(one.address_file, "127.0.0.1:7")
    assert read_address(one.address_file) == "127.0.0.1:7"
    one.log("worker-0").write_text("kept")
    here = os.getcwd()
    os.chdir(one.path)  # a socket's path may be too long otherwise
    try:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind("left")
    finally:
        os.chdir(here)
    one.clean()
    one.clean()
    assert [path.name for path in one.path.iterdir()] == ["worker-0.log"]


def test_bad_directories_and_tokens_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("  \n")
    with pytest.raises(ConfigError, match=r"launch\.run_directory"):
        RunDirectory.create(file)
    with pytest.raises(ConfigError, match="is empty"):
        read_token(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")


@pytest.mark.parametrize(
    ("soft", "hard", "new"),
    [(1024, 4096, None), (100, 4096, 200), (100, -1, 200), (-1, -1, None)],
)
def test_the_soft_limit_is_raised_when_it_is_low(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, new: int | None
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    descriptors.ensure(200)
    assert calls == ([] if new is None else [(new, hard)])


def test_a_low_hard_limit_is_an_error_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 128))
    with pytest.raises(ConfigError, match="needs 139, 128 are allowed.*ulimit -n 139"):
        descriptors.ensure(descriptors.needed(13))


def test_the_case_of_256_descriptors_fits() -> None:
    assert descriptors.needed(8 + 3 + 2) < 256


def test_of_errors_of_ours_the_longest_is_shown_in_one_line() -> None:
    judged = verdict.Verdict()
    short = "paradis.errors.NonFiniteGradient: step 2: NaN"
    judged.add(verdict.of_leader("NonFiniteGradient", "step 2: NaN"))
    judged.add(verdict.of_node("worker-0", 1, short, "w0"))
    judged.add(verdict.of_node("worker-1", 1, short + " in a.weight", "w1"))
    assert not judged.decisive
    expected = "worker 1: step 2: NaN in a.weight (NonFiniteGradient); its log: w1"
    assert judged.first().message == expected
    lost = "paradis.errors.JobFailed: server-0 is gone"
    assert verdict.of_node("worker-0", 1, lost, "w0").kind == verdict.CONSEQUENCE
    refused = verdict.of_node("dispatcher-0", 2, "paradis: error: port in use", "d0")
    assert refused.message == "dispatcher 0: port in use; its log: d0"
    assert refused.kind == verdict.OWN_REASON


def test_what_was_seen_is_not_said_again() -> None:
    seen = verdict.of_node("worker-0", 3, "a\nb", "/x", seen=True)
    assert seen.message == "worker 0 exited with code 3; its log: /x"
