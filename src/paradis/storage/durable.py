"""Files that are there whole or not at all, also after a crash.

A file is written under a temporary name, flushed to the disk, renamed, and its directory is
flushed. Whoever opens the final name therefore sees all of the content or the file before it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from paradis.errors import StateError

TEMPORARY_SUFFIX: Final = ".tmp"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def replacing(path: Path, *, what: str, advice: str) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the name ``path`` when the block ends without an error.

    On any error the temporary file is removed and what ``path`` named before stays as it was.

    Args:
        path: final name; its directory must exist.
        what: what is written, for the error text ("checkpoint part").
        advice: what to do when it fails, for the error text.

    Raises:
        StateError: the file could not be written, flushed or renamed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_directory(path.parent)
    except OSError as error:
        raise write_error(what, path, error, advice) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def make_directory(path: Path, *, what: str, advice: str) -> None:
    """Create a directory with its parents and flush every entry that is new.

    Raises:
        StateError: a directory could not be created.
    """
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for created in missing:
            flush_directory(created.parent)
    except OSError as error:
        raise write_error(what, path, error, advice) from error


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_error(what: str, path: Path, error: OSError, advice: str) -> StateError:
    """Return the error that tells a person which file could not be written and why."""
    reason = (error.strerror or str(error)).lower()
    if error.errno in _FULL:
        reason = f"no space left on {path.parent} ({reason})"
    return StateError(f"{what} could not be written: {path}; {reason}; {advice}", path=str(path))
