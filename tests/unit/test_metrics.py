"""The counters of a node."""

from __future__ import annotations

import threading

import pytest

from paradis.observe.metrics import NAMES, Counters


def test_counters_add_up_and_can_be_replaced() -> None:
    counters = Counters()
    assert counters.get("steps") == 0.0
    counters.add(steps=1)
    counters.add(steps=2)
    counters.set("store_bytes_peak", 7)
    counters.set("store_bytes_peak", 5)
    assert (counters.get("steps"), counters.get("store_bytes_peak")) == (3, 5)


def test_every_name_has_a_meaning_and_others_are_refused() -> None:
    assert all(NAMES.values())
    counters = Counters()
    with pytest.raises(AssertionError, match="unheard_of"):
        counters.add(unheard_of=1)
    with pytest.raises(AssertionError, match="unheard_of"):
        counters.set("unheard_of", 1)


def test_a_snapshot_is_a_copy_with_the_process_in_it() -> None:
    counters = Counters()
    counters.add(updates=2)
    snapshot = counters.snapshot()
    assert set(snapshot) == {"updates", "cpu_s", "wall_s", "rss_bytes"} <= set(NAMES)
    assert snapshot["updates"] == 2
    assert snapshot["wall_s"] >= 0 and snapshot["cpu_s"] >= 0
    assert snapshot["rss_bytes"] > 1 << 20
    counters.add(updates=1)
    assert snapshot["updates"] == 2
    assert counters.snapshot()["wall_s"] >= snapshot["wall_s"]


def test_threads_lose_no_count() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(2000):
            counters.add(push_bytes=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.get("push_bytes") == 8000
