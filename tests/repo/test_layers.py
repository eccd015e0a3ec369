"""A module imports only from the layers below it; the table is the architecture, as data.

Imports inside functions and under ``TYPE_CHECKING`` count: a dependency is a dependency.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


PURE = words(
    "time datetime random secrets uuid os sys pathlib shutil tempfile glob io socket select "
    "selectors ssl http urllib threading _thread asyncio concurrent multiprocessing queue "
    "subprocess signal contextvars logging warnings importlib ctypes mmap gc atexit"
)
"""Clock, randomness, environment, files, sockets, threads, logging: nothing that can differ
between two runs of the same events."""

CLOCK_AND_IO = words(
    "time datetime random secrets os pathlib shutil tempfile io socket select selectors ssl "
    "threading asyncio concurrent multiprocessing subprocess signal logging"
)
GROUND = ("errors", "ids", "settings", "quantities", "version")
CONFIG = (
    "config_keys", "config_sections", "config_training", "config_topology", "config_relations",
)  # fmt: skip
ROLES_AND_BELOW = (*GROUND, "core", "numerics", "wire", "roles")
DRIVER_AND_BELOW = (*ROLES_AND_BELOW, *CONFIG, "transport", "control", "storage", "observe")
ANY_PACKAGE = words("torch numpy msgspec grpc xxhash safetensors yaml rich psutil cityhash")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What the modules of a layer may import.

    Attributes:
        project: modules and packages of Paradis, besides the layer itself.
        packages: third-party packages.
        forbidden: standard modules that they may not touch.
    """

    project: tuple[str, ...]
    packages: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()


LAYERS = {
    "errors": Layer(project=(), forbidden=PURE),
    "ids": Layer(project=(), forbidden=PURE),
    "version": Layer(project=(), forbidden=PURE),
    "settings": Layer(project=("errors",), forbidden=PURE),
    "quantities": Layer(project=("errors",), forbidden=PURE),
    "config_keys": Layer(project=GROUND, forbidden=PURE),
    "config_sections": Layer(project=(*GROUND, "config_keys"), forbidden=PURE),
    "config_training": Layer(project=(*GROUND, "config_keys"), forbidden=PURE),
    "config_relations": Layer(project=(*GROUND, *CONFIG, "core.worker_groups"), forbidden=PURE),
    "config_topology": Layer(
        project=(*GROUND, "config_keys", "core.worker_groups"), forbidden=PURE
    ),
    "core": Layer(project=GROUND, packages=frozenset({"cityhash"}), forbidden=PURE),
    "numerics": Layer(
        project=(*GROUND, "core.freezing"),
        packages=words("torch numpy xxhash numba llvmlite"),
        forbidden=CLOCK_AND_IO,
    ),
    "optim": Layer(project=("numerics",)),
    "wire": Layer(
        project=GROUND,
        packages=frozenset({"msgspec", "xxhash"}),
        forbidden=frozenset({"socket", "ssl", "select", "selectors", "asyncio", "threading"}),
    ),
    "roles": Layer(
        project=(*GROUND, "core", "wire.messages"),
        packages=frozenset({"msgspec"}),
        forbidden=PURE,
    ),
    "transport": Layer(project=(*GROUND, "wire"), packages=frozenset({"msgspec", "xxhash"})),
    "control": Layer(project=(*GROUND, "wire"), packages=frozenset({"grpc", "msgspec"})),
    "storage": Layer(
        project=(*GROUND, "wire"),
        packages=frozenset({"torch", "numpy", "msgspec", "safetensors", "xxhash"}),
    ),
    "observe": Layer(project=(*GROUND, "wire"), packages=frozenset({"msgspec", "rich", "psutil"})),
    "runtime": Layer(project=DRIVER_AND_BELOW, packages=ANY_PACKAGE),
    "sim": Layer(project=DRIVER_AND_BELOW, packages=ANY_PACKAGE),
    "config": Layer(project=(*DRIVER_AND_BELOW, "runtime", "sim"), packages=ANY_PACKAGE),
    "frontend": Layer(
        project=(*DRIVER_AND_BELOW, "runtime", "sim", "config"), packages=ANY_PACKAGE
    ),
    "cli": Layer(
        project=(*DRIVER_AND_BELOW, "runtime", "sim", "config", "frontend"), packages=ANY_PACKAGE
    ),
    "": Layer(
        project=("errors", "version", "optim", "frontend", "config", "runtime"),
        packages=frozenset(),
    ),
}
"""Layer by name below ``paradis``; the empty name is ``paradis/__init__.py``."""


def layer_of(module: str) -> str:
    """Return the layer of a module name: ``paradis.core.ring`` is in ``core``."""
    return module.partition(".")[2].partition(".")[0]


def imports_of(source: str, module: str, *, package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) of every import, names imported from packages included."""
    parts = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) - node.level + (1 if package else 0)] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def breaches(source: str, module: str, *, package: bool = False) -> list[str]:
    """Return a line for each import that the table does not allow."""
    name = layer_of(module)
    if name not in LAYERS:
        return [f"{module} is in no layer of the table"]
    layer, found = LAYERS[name], []
    for line, target in imports_of(source, module, package=package):
        top, _, rest = target.partition(".")
        if top == "__future__":
            continue
        if top == "paradis":
            allowed = [name, *layer.project] if name else layer.project
            legal = any(rest == each or rest.startswith(f"{each}.") for each in allowed if each)
            legal = legal or (name == "cli" and rest in ("", "__version__"))
        elif top in sys.stdlib_module_names:
            legal = top not in layer.forbidden
        else:
            legal = top in layer.packages
        if not legal:
            found.append(
                f"{module}:{line} imports {target}, which layer {name or 'paradis'} may not"
            )
    return found


def modules() -> list[tuple[str, Path]]:
    """Return (module name, file) of all sources."""
    named = []
    for path in sorted((SRC / "paradis").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        named.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return named


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: str(value)[-60:])
def test_imports_point_downwards(module: str, path: Path) -> None:
    assert breaches(path.read_text(), module, package=path.name == "__init__.py") == []


def test_runtime_and_simulator_do_not_know_each_other() -> None:
    assert "sim" not in LAYERS["runtime"].project
    assert "runtime" not in LAYERS["sim"].project


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paradis.core.ring", "import time"),
        ("paradis.core.ring", "from os import environ"),
        ("paradis.core.ring", "def f():\n    import random"),
        ("paradis.core.ring", "import concurrent.futures"),
        ("paradis.core.ring", "import torch"),
        ("paradis.core.ring", "from paradis.wire import messages"),
        ("paradis.core.ring", "from ..wire.messages import Push"),
        ("paradis.core.ring", "import paradis.roles.server"),
        ("paradis.roles.server", "from paradis.wire import frame"),
        ("paradis.roles.server", "from paradis.wire.frame import encode"),
        ("paradis.roles.server", "import numpy as np"),
        ("paradis.roles.server", "import logging"),
        ("paradis.numerics.reduce", "from paradis.core import tree"),
        ("paradis.numerics.reduce", "import socket"),
        ("paradis.wire.frame", "import torch"),
        ("paradis.wire.frame", "import socket"),
        ("paradis.transport.tcp", "from paradis.control import client"),
        ("paradis.control.client", "from paradis.core import ring"),
        ("paradis.runtime.driver", "from paradis.sim import network"),
        ("paradis.sim.driver", "from paradis.runtime import driver"),
        ("paradis.runtime.driver", "from paradis.config import JobConfig"),
        ("paradis.runtime.driver", "if TYPE_CHECKING:\n    from paradis.frontend import hooks"),
        ("paradis.frontend.hooks", "from paradis.cli import main"),
        ("paradis.ids", "import paradis.errors"),
        ("paradis.storage.manifest", "import pandas"),
        ("paradis.unheard_of", ""),
    ],
)
def test_the_check_finds_breaches(module: str, source: str) -> None:
    assert len(breaches(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paradis.core.ring", "from __future__ import annotations\nimport bisect"),
        ("paradis.core.ring", "from paradis.ids import NodeId\nfrom .cityhash import hash64"),
        ("paradis.roles.server", "from paradis.wire.messages import Push\nimport msgspec"),
        (
            "paradis.roles.server",
            "from paradis.wire import messages\nfrom paradis.core import ring",
        ),
        ("paradis.runtime.driver", "import time, socket\nfrom paradis.roles.server import Server"),
        ("paradis.sim.driver", "from paradis.roles.server import Server"),
        ("paradis.cli.main", "from paradis import __version__"),
        ("paradis", "from paradis.frontend.optimizer import wrap"),
    ],
)
def test_the_check_lets_the_rest_through(module: str, source: str) -> None:
    assert breaches(source, module) == []


def test_relative_imports_are_resolved_from_packages_too() -> None:
    assert breaches("from .ring import owner", "paradis.core", package=True) == []
    assert breaches("from .. import wire", "paradis.core", package=True) != []
