"""Words that have no place in the project: paths of one machine, hosts, taken words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".sh", ""}
FOLDERS = ("src", "tests", "examples", "benchmarks", "docs", ".ci")

HOME_PATHS = re.compile(r"(?<![\w.<*])/(root|home|work|Users|opt|mnt)/\w")
"""Paths of somebody's machine, anywhere in the project."""

TEMPORARY = re.compile(r"(?<![\w.])/(tmp|var/tmp)\b")
"""Fixed temporary paths, in sources: `tempfile` and the run directory are for that."""

INDEX_HOSTS = re.compile(r"\b(pypi|pythonhosted|anaconda|npmjs)\.(org|com)\b")
"""Hosts of package indexes: where packages come from is the user's business."""

OTHER_MEANING = re.compile(r"\b(master|slave)s?\b", re.IGNORECASE)
"""Owner, primary and backup are the words for placement."""


def texts() -> list[Path]:
    """Return the text files of the project."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    caches = {"__pycache__", "paradis-runs"}
    mine = [path for path in found if path != Path(__file__) and path.name != "LICENSE"]
    return sorted(p for p in mine if p.suffix in TEXTS and not caches & set(p.parts))


def matches(pattern: re.Pattern[str], text: str) -> list[str]:
    """Return ``line: word`` of every match."""
    return [
        f"line {number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.finditer(line)
    ]


@pytest.mark.parametrize("path", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_names_a_machine_or_an_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = matches(HOME_PATHS, text) + matches(INDEX_HOSTS, text)
    if path.is_relative_to(ROOT / "src"):
        found += matches(TEMPORARY, text) + matches(OTHER_MEANING, text)
    assert found == []


@pytest.mark.parametrize("text", ["/root/x", "open('/home/me')", "(/opt/wheels)"])
def test_paths_of_a_machine_are_found(text: str) -> None:
    assert matches(HOME_PATHS, text)


@pytest.mark.parametrize("text", ["docs/root/x", "/rooted", "at sea / home", "network/home/", "/"])
def test_other_paths_are_let_through(text: str) -> None:
    assert matches(HOME_PATHS, text) == []


def test_the_other_words_are_found() -> None:
    assert matches(TEMPORARY, "Path('/tmp')") and matches(TEMPORARY, '"/var/tmp/a"')
    assert matches(TEMPORARY, "tmp_path / 'tmp'") == [] and matches(TEMPORARY, "run/tmp") == []
    assert matches(INDEX_HOSTS, "from " + "pypi" + ".org/simple")
    assert matches(INDEX_HOSTS, "our pypi page") == []
    assert matches(OTHER_MEANING, "the Master copy") == ["line 1: Master"]
    assert matches(OTHER_MEANING, "mastered") == []
