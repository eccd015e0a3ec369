"""The tree of errors as it is drawn, as it is written, and as gRPC sees it."""

from __future__ import annotations

import inspect

import grpc
import pytest

from paradis import errors
from paradis.errors import InternalError, ParadisError, error_classes, from_name


def drawn_tree(docstring: str) -> dict[str, str]:
    """Return class name -> parent, as the indentation of the docstring draws it."""
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in inspect.cleandoc(docstring).splitlines()[1:]:
        name = line.split()[0] if line.split() else ""
        indent = len(line) - len(line.lstrip())
        if not name or indent == 0:
            if path:
                break
            continue
        while path and path[-1][0] >= indent:
            path.pop()
        parents[name] = path[-1][1] if path else ""
        path.append((indent, name))
    return parents


def written_tree() -> dict[str, str]:
    """Return class name -> parent of the classes defined in the module."""
    own = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, ParadisError)
    ]
    bases = {cls.__name__: [base.__name__ for base in cls.__bases__] for cls in own}
    assert all(len(each) == 1 for each in bases.values())
    return {name: "" if name == "ParadisError" else each[0] for name, each in bases.items()}


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    assert drawn_tree(errors.__doc__ or "") == written_tree()


@pytest.mark.parametrize("cls", error_classes().values(), ids=lambda cls: cls.__name__)
def test_every_class_has_a_status_and_a_meaning(cls: type[ParadisError]) -> None:
    assert cls.grpc_status in grpc.StatusCode.__members__
    assert cls.grpc_status != "OK"
    assert isinstance(cls.retryable, bool)
    assert vars(cls)["__doc__"]


@pytest.mark.parametrize("name", written_tree())
def test_every_class_survives_travelling_by_name(name: str) -> None:
    error = from_name(name, "shard 3 refused")
    assert type(error).__name__ == name
    assert error.message == str(error) == "shard 3 refused"


def test_an_unknown_class_becomes_an_internal_error() -> None:
    assert type(from_name("FromTheFuture", "text")) is InternalError


def test_the_reader_of_the_drawing_sees_depth() -> None:
    drawing = "Title.\n\n  A\n    B   text\n      C\n    D\n\nE is prose."
    assert drawn_tree(drawing) == {"A": "", "B": "A", "C": "B", "D": "A"}
