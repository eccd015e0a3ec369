"""Sizes, docstrings and habits of the code, each a function over one source text.

A limit is never raised for one file: the file is split.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paradis"

FILE_LINES, SWITCHBOARD_LINES, TEST_FILE_LINES = 400, 500, 600
FUNCTION_LINES = 60
PARAMETERS_BEYOND_THE_FIRST = 6
COLUMNS = 100
PRAGMA = re.compile(r"\s*# (type: ignore|noqa).*$")
VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}
CODE_THAT_LOADS_CODE = {"pickle", "cloudpickle", "marshal", "dill", "shelve", "joblib"}
MAY_PRINT = ("cli/", "frontend/progress.py")
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "Not" + "ImplementedError")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield every function of a module, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def long_functions(tree: ast.AST) -> list[str]:
    """Return functions over the limit; docstrings are not counted: none is cut short for it."""
    found = []
    for node in functions(tree):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            text = node.body[0]
            lines -= (text.end_lineno or text.lineno) - text.lineno + 1
        if lines > FUNCTION_LINES:
            found.append(f"line {node.lineno}: {node.name} has {lines} lines")
    return found


def crowded_functions(tree: ast.AST) -> list[str]:
    """Return functions with too many parameters; ``self`` and ``cls`` are not counted."""
    found = []
    for node in functions(tree):
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        count = len(names) + len(node.args.kwonlyargs) - 1
        if count > PARAMETERS_BEYOND_THE_FIRST:
            found.append(f"line {node.lineno}: {node.name} has {count} parameters after the first")
    return found


def wide_lines(source: str) -> list[str]:
    """Return lines over the limit; marks for tools at their end are not counted."""
    lines = [PRAGMA.sub("", line) for line in source.splitlines()]
    wide = [(number, len(line)) for number, line in enumerate(lines, 1) if len(line) > COLUMNS]
    return [f"line {number} is {length} wide" for number, length in wide]


def calls(tree: ast.AST, name: str) -> list[str]:
    """Return calls of a plain name or, with a dot, of an attribute of a plain name."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [f"line {n.lineno} calls {name}" for n in nodes if ast.unparse(n.func) == name]


def bare_excepts(tree: ast.AST) -> list[str]:
    """Return handlers that catch everything without saying so."""
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return [f"line {node.lineno} has a bare except" for node in handlers if node.type is None]


def unsafe_imports(tree: ast.AST) -> list[str]:
    """Return imports of modules whose reading side can run code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            parts = {part for name in names for part in name.split(".")} & CODE_THAT_LOADS_CODE
            found += [f"line {node.lineno} imports {part}" for part in sorted(parts)]
    return found


def unsafe_calls(tree: ast.AST) -> list[str]:
    """Return calls that can run code from a file: eval, exec, torch.load as it unpickles."""
    found = calls(tree, "eval") + calls(tree, "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if given.get("weights_only") != "True":
                found.append(f"line {node.lineno} calls torch.load without weights_only=True")
    return found


def is_public(name: str) -> bool:
    """Whether a name is for others to use."""
    return not name.startswith("_")


def undocumented(tree: ast.Module, inherited: dict[str, set[str]]) -> list[str]:
    """Return the module, public classes, functions and methods that have no docstring.

    Args:
        inherited: class name -> methods that carry their docstring; a method of the same name in
            a class derived from it, or of a `Protocol` (listed under ``""``), is documented there.
    """
    found = [] if ast.get_docstring(tree) else ["the module has no docstring"]
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and is_public(node.name):
            if ast.get_docstring(node) is None:
                found.append(f"line {node.lineno}: {node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                found += _undocumented_methods(node, inherited)
    return found


def _undocumented_methods(cls: ast.ClassDef, inherited: dict[str, set[str]]) -> list[str]:
    bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in cls.bases]
    known = set(inherited.get("", set())).union(*(inherited.get(base, set()) for base in bases))
    found = []
    for node in cls.body:
        if not isinstance(node, Function) or not is_public(node.name) or node.name in known:
            continue
        marks = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
        if ast.get_docstring(node) is None and not marks & {"override", "overload", "setter"}:
            found.append(f"line {node.lineno}: {cls.name}.{node.name} has no docstring")
    return found


def documented_methods(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Return class -> methods with a docstring; those of Protocols also under the empty name."""
    found: dict[str, set[str]] = {"": set()}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {
                    each.name
                    for each in node.body
                    if isinstance(each, Function) and ast.get_docstring(each)
                }
                found.setdefault(node.name, set()).update(names)
                if any(ast.unparse(base).startswith("Protocol") for base in node.bases):
                    found[""] |= names
    return found


def line_limit(path: Path) -> int:
    """Return the most lines that a file may have."""
    if PACKAGE not in path.parents:
        return TEST_FILE_LINES if ROOT / "tests" in path.parents else FILE_LINES
    switchboard = path.parent.name == "roles" or path.name == "messages.py"
    return SWITCHBOARD_LINES if switchboard else FILE_LINES


def sources(*folders: str) -> list[Path]:
    """Return the Python files below folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


SOURCES = sources("src")
EVERYTHING = sources("src", "tests", "examples", "benchmarks")
INHERITED = documented_methods([ast.parse(path.read_text()) for path in SOURCES])


def label(path: Path) -> str:
    """Return a file's name for a test report."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EVERYTHING, ids=label)
def test_every_file_is_tidy(path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    found = wide_lines(source) + bare_excepts(tree) + long_functions(tree)
    found += [f"holds {word}" for word in UNFINISHED if word in source]
    lines = source.count("\n")
    if lines > line_limit(path):
        found.append(f"has {lines} lines, at most {line_limit(path)}")
    if path.stem.strip("_") in VAGUE_NAMES or path.parent.name in VAGUE_NAMES:
        found.append("has a name that says nothing")
    assert found == []


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_every_source_is_tidy(path: Path) -> None:
    tree = ast.parse(path.read_text())
    found = crowded_functions(tree) + unsafe_imports(tree) + unsafe_calls(tree)
    found += undocumented(tree, INHERITED)
    if not path.relative_to(PACKAGE).as_posix().startswith(MAY_PRINT):
        found += calls(tree, "print")
    assert found == []


def body_of(lines: int) -> str:
    """Return a function of this many lines, its first included."""
    return "def f():\n" + "    pass\n" * (lines - 1)


def test_long_functions_are_found() -> None:
    assert long_functions(ast.parse(body_of(60))) == []
    assert long_functions(ast.parse(body_of(61))) == ["line 1: f has 61 lines"]
    with_text = body_of(60).replace("def f():\n", 'def f():\n    """One.\n\n    Two.\n    """\n')
    assert long_functions(ast.parse(with_text)) == []
    inner = "class C:\n    async def g(self):\n" + "        pass\n" * 60
    assert len(long_functions(ast.parse(inner))) == 1


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f(first, a, b, c, d, e, f): pass", 0),
        ("def f(first, a, b, c, d, e, f, g): pass", 1),
        ("def f(first, *, a, b, c, d, e, f, g): pass", 1),
        ("class C:\n    def f(self, first, a, b, c, d, e, f): pass", 0),
        ("class C:\n    def f(self, first, a, b, c, d, e, f, g): pass", 1),
        ("class C:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n    f: int", 0),
    ],
)
def test_crowded_functions_are_found(source: str, count: int) -> None:
    assert len(crowded_functions(ast.parse(source))) == count


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import dill as d",
        "from marshal import loads",
        "def f():\n    from multiprocessing.reduction import pickle",
        "import joblib.externals.cloudpickle",
    ],
)
def test_unsafe_imports_are_found(source: str) -> None:
    assert unsafe_imports(ast.parse(source))


def test_safe_imports_are_let_through() -> None:
    assert unsafe_imports(ast.parse("import json, msgspec\nfrom .frame import encode")) == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("eval('1')", 1),
        ("exec('a = 1')", 1),
        ("model.eval()", 0),
        ("torch.load(p)", 1),
        ("torch.load(p, weights_only=False)", 1),
        ("torch.load(p, weights_only=True)", 0),
    ],
)
def test_unsafe_calls_are_found(source: str, count: int) -> None:
    assert len(unsafe_calls(ast.parse(source))) == count


def test_prints_and_bare_excepts_and_wide_lines_are_found() -> None:
    assert calls(ast.parse("def f():\n    print(1)"), "print") == ["line 2 calls print"]
    assert calls(ast.parse("console.print(1)\nprinter(1)"), "print") == []
    assert bare_excepts(ast.parse("try:\n    f()\nexcept:\n    pass"))
    assert not bare_excepts(ast.parse("try:\n    f()\nexcept OSError:\n    pass"))
    assert wide_lines("a" * 100 + "  # type: ignore[misc]\n" + "a" * 101) == ["line 2 is 101 wide"]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("a = 1", 1),
        ('"""M."""\ndef f(): pass', 1),
        ('"""M."""\ndef _f(): pass', 0),
        ('"""M."""\nclass C:\n    def f(self): pass', 2),
        ('"""M."""\nclass C:\n    """C."""\n    def f(self): pass\n    def _g(self): pass', 1),
        ('"""M."""\nclass C(Base):\n    """C."""\n    def f(self): pass', 0),
        ('"""M."""\nclass C:\n    """C."""\n    def seam(self): pass', 0),
        ('"""M."""\nclass C:\n    """C."""\n    @override\n    def f(self): pass', 0),
        ('"""M."""\nclass _C:\n    def f(self): pass', 0),
    ],
)
def test_missing_docstrings_are_found(source: str, count: int) -> None:
    inherited = {"Base": {"f"}, "": {"seam"}}
    assert len(undocumented(ast.parse(source), inherited)) == count


def test_documented_methods_are_collected() -> None:
    tree = ast.parse(
        'class P(Protocol[T]):\n    def f(self):\n        """F."""\n    def g(self): 1'
    )
    assert documented_methods([tree]) == {"": {"f"}, "P": {"f"}}
