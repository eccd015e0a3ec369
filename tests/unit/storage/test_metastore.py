"""The metadata store: one contract for both implementations, and what SQLite adds to it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paradis.errors import ConfigError, LocalProtocolError, StateError
from paradis.storage.metastore import MemoryStore, MetaStore, SqliteStore

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MetaStore]:
    made: MetaStore = (
        MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "new" / "meta.db")
    )
    yield made
    made.close()


# ---------------------------------------------------------------------------------------- contract


def test_absent_key_is_none(store: MetaStore) -> None:
    assert store.get("job") is None
    assert store.revision() == 0


def test_value_carries_the_revision_that_wrote_it(store: MetaStore) -> None:
    assert store.txn({}, {"a": b"1", "b": b""})
    assert store.txn({}, {"a": b"2"})
    assert store.get("a") == (b"2", 2)
    assert store.get("b") == (b"", 1)
    assert store.revision() == 2


def test_failed_comparison_changes_nothing(store: MetaStore) -> None:
    assert store.txn({"a": 0}, {"a": b"1"})
    assert not store.txn({"a": 0}, {"a": b"2", "b": b"2"})
    assert not store.txn({"a": 1, "b": 5}, {"a": b"2"})
    assert store.get("a") == (b"1", 1)
    assert store.get("b") is None
    assert store.revision() == 1


def test_comparison_with_the_current_revision_holds(store: MetaStore) -> None:
    store.txn({}, {"a": b"1"})
    assert store.txn({"a": 1, "b": 0}, {"a": b"2"})
    assert not store.txn({"a": 1}, {"a": b"3"})


def test_delete_makes_a_key_absent_for_comparisons(store: MetaStore) -> None:
    store.txn({}, {"a": b"1"})
    assert store.txn({"a": 1}, {}, ["a", "never"])
    assert store.get("a") is None
    assert store.revision() == 2
    assert store.txn({"a": 0}, {"a": b"2"})
    assert store.get("a") == (b"2", 3)


def test_transaction_without_changes_keeps_the_revision(store: MetaStore) -> None:
    store.txn({}, {"a": b"1"})
    assert store.txn({"a": 1}, {})
    assert store.txn({}, {}, ["never"])
    assert store.revision() == 1


def test_range_returns_a_prefix_in_order(store: MetaStore) -> None:
    keys = ["n/b", "n/a", "n", "n/\U0010ffff", "n/é", "m/z", "o", "n/a/1", "n%", "n/_"]
    store.txn({}, {key: key.encode() for key in keys})
    wanted = tuple((k, (k.encode(), 1)) for k in sorted(keys) if k.startswith("n/"))
    assert store.range("n/") == wanted
    assert [k for k, _ in store.range("")] == sorted(keys)
    assert store.range("p") == ()


def test_key_both_put_and_deleted_is_refused(store: MetaStore) -> None:
    with pytest.raises(LocalProtocolError, match="both put and deleted"):
        store.txn({}, {"a": b"1"}, ["a"])
    assert store.revision() == 0


def test_threads_that_compare_and_set_lose_no_count(store: MetaStore) -> None:
    store.txn({}, {"count": b"0"})
    failures: list[BaseException] = []

    def count() -> None:
        try:
            for _ in range(25):
                while True:
                    held = store.get("count")
                    assert held is not None
                    new = str(int(held.value) + 1).encode()
                    if store.txn({"count": held.revision}, {"count": new}):
                        break
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    held = store.get("count")
    assert held is not None and held.value == b"100"
    assert store.revision() == 101


def test_close_is_idempotent(store: MetaStore) -> None:
    store.close()
    store.close()


# ------------------------------------------------------------------------------------------ sqlite


def test_reopening_finds_everything(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "meta.db")
    first.txn({}, {"a": b"\x00\xff"})
    first.close()
    second = SqliteStore(tmp_path / "meta.db")
    assert second.get("a") == (b"\x00\xff", 1)
    assert second.revision() == 1
    second.close()


def test_transactions_are_on_the_disk_when_they_return(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "meta.db")
    connection = store._connection
    assert connection is not None
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL: synced on commit"
    store.close()


def test_second_opener_is_told_file_and_holder(tmp_path: Path) -> None:
    path = tmp_path / "meta.db"
    first = SqliteStore(path)
    with pytest.raises(ConfigError, match=f"{path}.*process {os.getpid()}.*another directory"):
        SqliteStore(path)
    first.txn({}, {"a": b"1"})
    first.close()
    SqliteStore(path).close()


def test_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meta.db"
    first = SqliteStore(path)
    code = (
        "import sys; from paradis.storage.metastore import SqliteStore\n"
        "try: SqliteStore(sys.argv[1])\n"
        "except Exception as e: print(type(e).__name__)\n"
    )
    done = run_child(code, str(path))
    first.close()
    assert done.stdout == "ConfigError\n", done.stderr


def test_use_after_close_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "meta.db")
    store.close()
    with pytest.raises(LocalProtocolError, match="after close"):
        store.get("a")


def test_file_of_another_kind_is_refused_and_released(tmp_path: Path) -> None:
    path = tmp_path / "meta.db"
    path.write_bytes(b"not a database" * 100)
    for _ in range(2):
        with pytest.raises(ConfigError, match="expected a SQLite database"):
            SqliteStore(path)


def test_other_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meta.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE store SET format = 99")
    connection.close()
    with pytest.raises(ConfigError, match="expected format 1, got 99"):
        SqliteStore(path)


def test_path_below_a_file_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match="metadata store could not be written"):
        SqliteStore(tmp_path / "file" / "meta.db")


def test_full_database_is_a_state_error_and_keeps_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "meta.db"
    store = SqliteStore(path)
    store.txn({}, {"a": b"1"})
    connection = store._connection
    assert connection is not None
    connection.execute("PRAGMA max_page_count = 1").fetchone()
    with pytest.raises(StateError, match=f"{path}.*full.*free space"):
        store.txn({"a": 1}, {"a": b"2", "big": bytes(1 << 20)})
    assert store.get("a") == (b"1", 1)
    assert store.txn({"a": 1}, {"a": b"2"})
    store.close()


COMMIT_FOR_EVER = """
import sys
from paradis.storage.metastore import SqliteStore
store = SqliteStore(sys.argv[1])
number = 0
while True:
    assert store.txn({f"k{number}": 0}, {f"k{number}": str(number).encode(), "last": b"x" * number})
    print(number, flush=True)
    number += 1
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "meta.db"
    acknowledged = []
    with start_child(COMMIT_FOR_EVER, str(path)) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                acknowledged.append(int(line))
                if len(acknowledged) == 50:
                    break
        finally:
            child.kill()
        acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
    assert len(acknowledged) >= 50
    store = SqliteStore(path)
    for number in acknowledged:
        assert store.get(f"k{number}") == (str(number).encode(), number + 1)
    # At most the one transaction in progress may be there without its acknowledgement.
    assert store.revision() - len(acknowledged) in (0, 1)
    store.close()


def start_child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


def run_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )
