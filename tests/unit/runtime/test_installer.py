"""The installing thread: everything in turn, and nothing but installing beside it."""

from __future__ import annotations

import threading

import torch

from paradis.runtime.installer import Installer

DEADLINE_S = 30.0


def test_jobs_are_done_in_turn_and_what_comes_after_waits_for_them() -> None:
    errors: list[Exception] = []
    installer = Installer(errors.append)
    let, done, seen = threading.Event(), threading.Event(), []
    own = threading.current_thread().name

    def first() -> None:
        assert let.wait(DEADLINE_S)
        seen.append(threading.current_thread().name)

    installer.install(first)
    installer.after(lambda: seen.append("after"))
    installer.install(lambda: seen.append("second"))
    installer.after(done.set)
    assert not done.is_set() and not seen
    let.set()
    assert done.wait(DEADLINE_S)
    assert seen == ["paradis-install-0", "after", "second"] and own != seen[0]
    installer.stop()
    assert not errors


def test_with_nothing_to_install_nothing_waits() -> None:
    installer = Installer(lambda error: None)
    seen: list[int] = []
    installer.after(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]
    installer.stop()


def test_a_job_that_fails_is_told_and_nothing_follows() -> None:
    errors: list[Exception] = []
    installer = Installer(errors.append)
    seen: list[str] = []

    def fails() -> None:
        raise ValueError("the third shard")

    installer.install(fails)
    installer.install(lambda: seen.append("fourth"))
    installer.after(lambda: seen.append("the step is over"))
    installer.stop()
    installer.after(lambda: seen.append("the next one is over"))
    assert seen == [] and [str(e) for e in errors] == ["the third shard"]


def test_its_operations_use_one_thread_and_the_script_s_keep_theirs() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        installer = Installer(lambda error: None)
        seen: list[int] = []
        installer.install(lambda: seen.append(torch.get_num_threads()))
        installer.stop()
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join(DEADLINE_S)
        assert seen == [1] and later == [2] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_stopping_finishes_what_is_queued_and_may_be_repeated() -> None:
    installer = Installer(lambda error: None)
    seen: list[int] = []
    for number in range(20):
        installer.install(lambda number=number: seen.append(number))  # type: ignore[misc]
    installer.stop()
    assert seen == list(range(20))
    installer.stop()
