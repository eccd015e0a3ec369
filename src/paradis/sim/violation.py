"""How a checker says that something does not hold."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant of the system is broken."""


def demand(condition: bool, checker: object, text: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise Violation(f"{type(checker).__name__}: {text}")
