"""Reach the compiled kernels, or say how to install what they need.

Invariant: importing the package needs no Numba; only using a kernel does. Importing Numba takes
about a second, so that too waits for the first use.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any, Literal

from paradis.errors import ConfigError


@cache
def kernels(name: Literal["sign", "decode", "int8", "lion"]) -> Any:
    """Return the module of some kernels; each kernel is compiled at its first call.

    Raises:
        ConfigError: Numba is not installed.
    """
    try:
        return importlib.import_module(f"paradis.numerics.codecs.{name}_kernels")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        raise ConfigError(
            f"codec refused: its kernels need Numba; expected the package {error.name}, found "
            "none; pip install 'paradis[codecs]', or choose the codec none or bf16"
        ) from error


def require_kernels(what: str) -> None:
    """Refuse early what needs kernels, without importing them.

    Raises:
        ConfigError: Numba is not installed.
    """
    if importlib.util.find_spec("numba") is None:
        raise ConfigError(
            f"{what} refused: its kernels need Numba; expected the package numba, found none; "
            "pip install 'paradis[codecs]', or choose another optimizer"
        )
