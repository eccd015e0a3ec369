"""The coder of a shard, by the name of its codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paradis.errors import ConfigError
from paradis.numerics.codecs.int8 import Int8
from paradis.numerics.codecs.kernels import kernels
from paradis.numerics.codecs.plain import Bfloat16
from paradis.numerics.coding import ServerCoder, WorkerCoder
from paradis.numerics.delta_coding import DeltaServer, DeltaWorker

_CODECS = {"bf16": Bfloat16, "int8": Int8}


def worker_coder(codec: str, lengths: Sequence[int]) -> WorkerCoder:
    """Return the coder of a shard on a worker.

    Args:
        codec: name, as in `paradis.core.codes`.
        lengths: elements of each segment.

    Raises:
        ConfigError: unknown codec, or its kernels need Numba, which is not installed.
    """
    _check(codec)
    return DeltaWorker(_CODECS[codec](), lengths)


def server_coder(
    codec: str, length: int, spans: Sequence[tuple[int, int]], values: Sequence[torch.Tensor]
) -> ServerCoder:
    """Return the coder of a shard on its server.

    Args:
        codec: name, as in `paradis.core.codes`.
        length: elements of the shard, padding included.
        spans: (start, length) of each segment.
        values: (length,) of each segment; borrowed, updated in place.

    Raises:
        ConfigError: as `worker_coder`.
    """
    _check(codec)
    return DeltaServer(_CODECS[codec](), length, spans, values)


def _check(codec: str) -> None:
    """Refuse at the start what would fail in the first step."""
    if codec not in _CODECS:
        raise ConfigError(
            f"codec {codec!r} is unknown; expected one of {', '.join(_CODECS)}; "
            "install the same Paradis version on all hosts"
        )
    if codec != "bf16":
        kernels("int8")
