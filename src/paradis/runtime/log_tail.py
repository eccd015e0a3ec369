"""What a failed node's log says: its last error or traceback with causes, or its last lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TAIL_BYTES: Final = 256 << 10
_TEXT_CHARS_MAX: Final = 16 << 10
_LINES: Final = 10
_OURS: Final = ("paradis.errors.", "paradis: error: ")
_HEADER: Final = "Traceback (most recent call last):"
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


def failure_text(log: Path) -> str:
    """Return our error that a log ends with, else its last traceback, else its last ten lines.

    Empty when there is no log.
    """
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    last = text.rstrip().splitlines()[-_LINES:]
    if last and last[-1].startswith(_OURS):
        return last[-1]
    return last_traceback(text) or "\n".join(last)


def last_traceback(text: str) -> str:
    """Return the last traceback in a text together with the exceptions that led to it."""
    lines = text.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(_HEADER)]
    if not starts:
        return ""
    start = starts.pop()
    while starts and _is_chained(lines, start):
        start = starts.pop()
    found = "\n".join(lines[start:])
    return found if len(found) <= _TEXT_CHARS_MAX else "...\n" + found[-_TEXT_CHARS_MAX:]


def _is_chained(lines: list[str], start: int) -> bool:
    before = [line for line in lines[max(0, start - 3) : start] if line.strip()]
    return bool(before) and before[-1] in _CHAINED
