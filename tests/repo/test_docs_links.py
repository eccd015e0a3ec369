"""Every file that a document names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

PATH = re.compile(r"(?<![\w./~<*-])(?:tests|src|benchmarks|examples|docs)/[\w./-]*\w/?(?![\w<*{])")
"""A path from the root of the project; a pattern such as ``tests/*/x`` is none."""

LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)[^)]*\)")
"""The target of a link inside the project, from the document's own directory."""


def broken(text: str, folder: Path) -> list[str]:
    """Return what a document names and nobody finds.

    Args:
        folder: where the document is.
    """
    found = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    return found + [link for link in LINK.findall(text) if not (folder / link).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(path: Path) -> None:
    assert broken(path.read_text(encoding="utf-8"), path.parent) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see `tests/unit/test_gone.py`.", ["tests/unit/test_gone.py"]),
        ("run python examples/gone.py", ["examples/gone.py"]),
        ("[a](docs/gone.md#part)", ["docs/gone.md", "docs/gone.md"]),
        ("[a](gone.md)", ["gone.md"]),
        ("`src/paradis/gone/`", ["src/paradis/gone/"]),
    ],
)
def test_the_check_finds_what_is_gone(text: str, found: list[str]) -> None:
    assert broken(text, ROOT) == found


@pytest.mark.parametrize(
    "text",
    [
        "`src/paradis/errors.py`, tests/repo/.",
        "tests/unit/<layer>/test_x.py",
        "`tests/*/test_x.py`",
        "torch.distributed/docs/x",
        "[a](https://example.org/x.md) [b](#part) [c](README.md#install)",
    ],
)
def test_the_check_lets_the_rest_through(text: str) -> None:
    assert broken(text, ROOT) == []
