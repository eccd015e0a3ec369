"""Paradis: parameter servers and dispatchers, kept apart, for PyTorch."""

from paradis.errors import ParadisError
from paradis.frontend.optimizer import WrappedOptimizer
from paradis.frontend.progress import Progress
from paradis.frontend.session import close, rank, world_size
from paradis.frontend.wrap import wrap
from paradis.version import VERSION as __version__

__all__ = [
    "ParadisError",
    "Progress",
    "WrappedOptimizer",
    "__version__",
    "close",
    "rank",
    "world_size",
    "wrap",
]
