"""Enough file descriptors for every node, or one error at the start."""

from __future__ import annotations

import resource
from typing import Final

from paradis.errors import ConfigError

_BASE: Final = 100
"""Files of the interpreter, of torch and of a few data-loader children; measured 40."""

_PER_PEER: Final = 3
"""A data connection, its successor while it is replaced, and a control stream."""


def needed(peers: int) -> int:
    """Return how many descriptors a node with this many peers may hold at once."""
    return _BASE + _PER_PEER * peers


def ensure(need: int) -> None:
    """Raise the soft limit, which children inherit, to ``need`` where it is lower.

    Raises:
        ConfigError: the hard limit is lower than ``need``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ConfigError(
            f"too few file descriptors: a node of this job needs {need}, {hard} are allowed; "
            f"raise the limit with 'ulimit -n {need}' (above the hard limit: nofile in "
            "/etc/security/limits.conf or LimitNOFILE= of the service), or start fewer nodes"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
