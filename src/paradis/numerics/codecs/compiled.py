"""How kernels are compiled: by Numba, at first use, kept on disk, each operation rounded once.

Invariant: no flag lets the compiler reorder, fuse or approximate arithmetic, so a kernel's bits
depend on its source alone, not on the CPU that it was compiled for. Numba's cache
watches a kernel's own file, not the files of what it calls: `run_kernels` says what that means.

This module and those named ``*_kernels`` import Numba, an optional dependency; everything else
reaches them through `paradis.numerics.codecs.kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

_njit: Any = functools.partial(numba.njit, nogil=True, fastmath=False, error_model="numpy")


def emitted(function: Callable[..., Any]) -> Any:
    """Return what kernels call to get the instructions that a function writes; see Numba."""
    return intrinsic(function)


def inlined(function: Function) -> Function:
    """Return a function that becomes part of the kernels that call it: a call would cost more."""
    return cast(Function, _njit(forceinline=True)(function))


def compiled(function: Function) -> Function:
    """Return a function that is compiled when it is first called with arguments of some types.

    Machine code is kept beside the source, or in the user's cache folder where that cannot be
    written; where neither can, each process compiles anew.
    """
    try:
        return cast(Function, _njit(cache=True)(function))
    except RuntimeError:  # no place for the cache
        return cast(Function, _njit()(function))
