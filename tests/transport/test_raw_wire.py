"""The yardstick measures what it says; no number of it is judged here."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "raw_wire.py"


@pytest.fixture(scope="module")
def raw_wire() -> ModuleType:
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("raw_wire", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_both_measurements_end(raw_wire: ModuleType, family: str) -> None:
    seconds = raw_wire.measure_raw(family, 1_000_001, 300_000, 2)
    assert len(seconds) == 2 and min(seconds) > 0
    rates = raw_wire.measure_raw_outstanding(family, 5000, 3, 20)
    assert len(rates) == 5 and min(rates) > 0
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_wrong_arguments(raw_wire: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        raw_wire.measure_raw("udp", 1, 1, 1)
    with pytest.raises(ValueError, match="at least 1"):
        raw_wire.measure_raw("tcp", 0, 1, 1)
