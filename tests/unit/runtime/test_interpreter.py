"""Quick turns of threads, given back when the session ends."""

from __future__ import annotations

import sys

import pytest

from paradis.runtime.interpreter import SWITCH_INTERVAL_S, hurry_turns


@pytest.mark.parametrize("before, after", [(5e-3, SWITCH_INTERVAL_S), (1e-4, 1e-4)])
def test_turns_become_quicker_and_never_slower(before: float, after: float) -> None:
    kept = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        assert hurry_turns() == pytest.approx(before, abs=2e-6)
        assert sys.getswitchinterval() == pytest.approx(after, abs=2e-6)
    finally:
        sys.setswitchinterval(kept)
