"""The public names: few, sorted, documented, and nothing private among them."""

from __future__ import annotations

import paradis

LIMIT = 20
NAMES: list[str] = list(getattr(paradis, "__all__", []))


def test_public_names_are_sorted_and_few() -> None:
    assert sorted(NAMES) == NAMES
    assert 0 < len(NAMES) == len(set(NAMES)) <= LIMIT


def test_public_names_exist_and_are_documented() -> None:
    for name in NAMES:
        value = getattr(paradis, name)
        if name == "__version__":
            assert isinstance(value, str)
            continue
        assert not name.startswith("_"), name
        own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        assert own and own.strip(), f"{name} has no docstring of its own"
