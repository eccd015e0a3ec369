"""Paradis: parameter servers and dispatchers, kept apart, for PyTorch.

The public names are imported when first used, so that the command line need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paradis.errors import ParadisError
from paradis.version import VERSION as __version__

if TYPE_CHECKING:
    from paradis import optim
    from paradis.frontend.membership import group_rank, group_size, worker_group
    from paradis.frontend.optimizer import WrappedOptimizer
    from paradis.frontend.progress import Progress
    from paradis.frontend.session import close, rank, world_size
    from paradis.frontend.wrap import wrap

__all__ = [
    "ParadisError",
    "Progress",
    "WrappedOptimizer",
    "__version__",
    "close",
    "group_rank",
    "group_size",
    "optim",
    "rank",
    "worker_group",
    "world_size",
    "wrap",
]

_HOMES = {
    "Progress": "paradis.frontend.progress",
    "WrappedOptimizer": "paradis.frontend.optimizer",
    "close": "paradis.frontend.session",
    "group_rank": "paradis.frontend.membership",
    "group_size": "paradis.frontend.membership",
    "rank": "paradis.frontend.session",
    "worker_group": "paradis.frontend.membership",
    "wrap": "paradis.frontend.wrap",
    "world_size": "paradis.frontend.session",
}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module("paradis.optim")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paradis' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
