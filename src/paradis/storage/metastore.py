"""Metadata store of the leader: small values, compared and changed together, kept for ever.

Every transaction that changes something raises the store's revision by one, and every key remembers
the revision that last wrote it. A transaction compares such revisions first, so whoever acts on an
old view changes nothing. ``True`` from `MetaStore.txn` is a promise: the change survives kill -9
and loss of power (of the process, for `MemoryStore`).

The seam is shaped after what a replicated store offers, so that one can take its place.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from paradis.errors import (
    ConfigError,
    LocalProtocolError,
    ParadisError,
    StateError,
    UnavailableError,
)
from paradis.storage.durable import flush_directory, make_directory

FORMAT: Final = 1
_BUSY_TIMEOUT_S: Final = 5.0
_ADVICE: Final = "free space or check the disk, then start the job again"


class Stored(NamedTuple):
    """A value and the revision of the store that last wrote it (1 or more)."""

    value: bytes
    revision: int


class MetaStore(Protocol):
    """A transactional map from names to bytes. Every method may be called from any thread."""

    def get(self, key: str) -> Stored | None:
        """Return the value of a key, or None where it is absent."""
        ...

    def range(self, prefix: str) -> tuple[tuple[str, Stored], ...]:
        """Return all keys that start with ``prefix``, in the order of their code points."""
        ...

    def txn(
        self, compares: Mapping[str, int], puts: Mapping[str, bytes], deletes: Collection[str] = ()
    ) -> bool:
        """Apply all changes if every compared key has its revision, else change nothing.

        Args:
            compares: key -> revision it must have; 0 for a key that must be absent.
            puts: key -> new value.
            deletes: keys to remove; an absent key is no error.

        Returns:
            Whether the comparisons held. When True the changes are durable.

        Raises:
            LocalProtocolError: a key is both put and deleted, or the store is closed.
            UnavailableError: another program holds the store for the moment.
            StateError: the store cannot be written; nothing was changed unless the disk failed.
        """
        ...

    def revision(self) -> int:
        """Return the number of transactions that changed something."""
        ...

    def close(self) -> None:
        """Release the store; idempotent."""
        ...


def _check_changes(puts: Mapping[str, bytes], deletes: Collection[str]) -> None:
    both = sorted(set(puts) & set(deletes))
    if both:
        raise LocalProtocolError(f"transaction refused: {both} are both put and deleted; choose")


class MemoryStore:
    """A `MetaStore` that lives as long as its process: for tests and the simulator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Stored] = {}
        self._revision = 0

    def get(self, key: str) -> Stored | None:
        """See `MetaStore.get`."""
        with self._lock:
            return self._entries.get(key)

    def range(self, prefix: str) -> tuple[tuple[str, Stored], ...]:
        """See `MetaStore.range`."""
        with self._lock:
            return tuple(sorted((k, v) for k, v in self._entries.items() if k.startswith(prefix)))

    def txn(
        self, compares: Mapping[str, int], puts: Mapping[str, bytes], deletes: Collection[str] = ()
    ) -> bool:
        """See `MetaStore.txn`."""
        _check_changes(puts, deletes)
        with self._lock:
            for key, expected in compares.items():
                held = self._entries.get(key)
                if (held.revision if held else 0) != expected:
                    return False
            present = [k for k in deletes if k in self._entries]
            if puts or present:
                self._revision += 1
            for key in present:
                self._entries.pop(key, None)
            for key, value in puts.items():
                self._entries[key] = Stored(bytes(value), self._revision)
            return True

    def revision(self) -> int:
        """See `MetaStore.revision`."""
        with self._lock:
            return self._revision

    def close(self) -> None:
        """See `MetaStore.close`."""


class SqliteStore:
    """A `MetaStore` in one SQLite file that one process holds at a time.

    Args:
        path: the database file; it and its directory are created when missing.

    Raises:
        ConfigError: another process holds the file, or it is not such a file.
        StateError: the file cannot be opened or created.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).absolute()
        self._mutex = threading.Lock()
        make_directory(self._path.parent, what="metadata store", advice=_ADVICE)
        self._lock_file = _hold(self._path)
        try:
            self._connection: sqlite3.Connection | None = self._open()
        except BaseException:
            os.close(self._lock_file)
            raise

    def get(self, key: str) -> Stored | None:
        """See `MetaStore.get`."""
        with self._using() as connection:
            query = "SELECT value, revision FROM entries WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
        return Stored(*row) if row else None

    def range(self, prefix: str) -> tuple[tuple[str, Stored], ...]:
        """See `MetaStore.range`."""
        query = "SELECT key, value, revision FROM entries WHERE key >= ? ORDER BY key"
        found: list[tuple[str, Stored]] = []
        with self._using() as connection:
            for key, value, revision in connection.execute(query, (prefix,)):
                if not key.startswith(prefix):
                    break
                found.append((key, Stored(value, revision)))
        return tuple(found)

    def txn(
        self, compares: Mapping[str, int], puts: Mapping[str, bytes], deletes: Collection[str] = ()
    ) -> bool:
        """See `MetaStore.txn`."""
        _check_changes(puts, deletes)
        with self._using() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if not self._holds(connection, compares):
                connection.execute("ROLLBACK")
                return False
            revision = self._revision_of(connection) + 1
            changed = len(puts)
            for key in deletes:
                query = "DELETE FROM entries WHERE key = ?"
                changed += connection.execute(query, (key,)).rowcount
            connection.executemany(
                "INSERT OR REPLACE INTO entries (key, value, revision) VALUES (?, ?, ?)",
                [(key, bytes(value), revision) for key, value in puts.items()],
            )
            if changed:
                connection.execute("UPDATE store SET revision = ?", (revision,))
            connection.execute("COMMIT")
        return True

    def revision(self) -> int:
        """See `MetaStore.revision`."""
        with self._using() as connection:
            return self._revision_of(connection)

    def close(self) -> None:
        """See `MetaStore.close`."""
        with self._mutex:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            try:
                connection.close()
            except sqlite3.Error as error:
                raise _translated(error, self._path) from error
            finally:
                os.close(self._lock_file)

    def _open(self) -> sqlite3.Connection:
        connection = None
        try:
            connection = sqlite3.connect(
                self._path, _BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            _prepare(connection, self._path)
            flush_directory(self._path.parent)
            return connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, (sqlite3.Error, OSError)):
                raise _translated(error, self._path) from error
            raise

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            connection = self._connection
            if connection is None:
                raise LocalProtocolError(f"metadata store {self._path} used after close")
            try:
                yield connection
            except sqlite3.Error as error:
                raise _translated(error, self._path) from error
            finally:
                if connection.in_transaction:
                    _roll_back(connection)

    @staticmethod
    def _holds(connection: sqlite3.Connection, compares: Mapping[str, int]) -> bool:
        for key, expected in compares.items():
            query = "SELECT revision FROM entries WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
            if (row[0] if row else 0) != expected:
                return False
        return True

    @staticmethod
    def _revision_of(connection: sqlite3.Connection) -> int:
        return int(connection.execute("SELECT revision FROM store").fetchone()[0])


def _hold(path: Path) -> int:
    """Lock the file beside the database; SQLite's own locks end with each transaction."""
    lock = path.with_name(path.name + ".lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _translated(error, path) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise ConfigError(
            f"metadata store {path} is in use by another job: process {holder} holds {lock}; "
            "stop that job or choose another directory for this one"
        ) from error
    except OSError as error:
        os.close(handle)
        raise _translated(error, path) from error
    return handle


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA journal_mode = WAL").fetchone()
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS store (format INTEGER, revision INTEGER)")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS entries "
        "(key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID"
    )
    row = connection.execute("SELECT format FROM store").fetchone()
    if row is None:
        connection.execute("INSERT INTO store VALUES (?, 0)", (FORMAT,))
    elif row[0] != FORMAT:
        raise ConfigError(
            f"metadata store {path} cannot be used: expected format {FORMAT}, got {row[0]}; "
            "use the Paradis version that wrote it or choose another directory"
        )
    connection.execute("COMMIT")


def _roll_back(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        # A failed disk has already ended the transaction; the first error is the one to report.
        return


def _translated(error: sqlite3.Error | OSError, path: Path) -> ParadisError:
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return UnavailableError(
            f"metadata store {path} is held by another program for more than {_BUSY_TIMEOUT_S:g} s "
            f"({error}); close that program"
        )
    if primary == sqlite3.SQLITE_NOTADB:
        return ConfigError(
            f"metadata store {path} cannot be used: expected a SQLite database, got another file; "
            "choose another directory"
        )
    return StateError(f"metadata store failed: {path}; {error}; {_ADVICE}", path=str(path))
