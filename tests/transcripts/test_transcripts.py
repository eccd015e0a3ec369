"""Roles still do what their transcripts say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("paradis_transcripts", HERE / "runner.py")
assert spec is not None and spec.loader is not None
runner = importlib.util.module_from_spec(spec)
sys.modules["paradis_transcripts"] = runner
spec.loader.exec_module(runner)


@pytest.mark.parametrize("path", runner.transcripts(), ids=lambda p: p.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    assert runner.replay(text) == text, (
        f"{path.name} is out of date; run python {HERE.name}/runner.py and review the difference"
    )
