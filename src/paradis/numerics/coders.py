"""The coder of a shard, by the name of its codec."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from paradis.errors import ConfigError
from paradis.numerics.codecs.int8 import Int8
from paradis.numerics.codecs.kernels import require_kernels
from paradis.numerics.codecs.onebit import OneBit
from paradis.numerics.codecs.plain import Bfloat16
from paradis.numerics.coding import ServerCoder, WorkerCoder
from paradis.numerics.delta_coding import DeltaServer, DeltaWorker
from paradis.numerics.elementwise import Options
from paradis.numerics.lion_coding import LionServer, LionWorker
from paradis.numerics.onebit_coding import OneBitAdamServer, OneBitAdamWorker
from paradis.numerics.rack_coding import RackCoder
from paradis.numerics.shard_optimizer import ShardOptimizer

_CODECS = {"bf16": Bfloat16, "int8": Int8}
_SIGNS = {"onebit": OneBit(), "onebit-tensor": OneBit(block_elements=None, norm="l2")}


def worker_coder(
    codec: str, lengths: Sequence[int], dtype: torch.dtype = torch.float32
) -> WorkerCoder:
    """Return the coder of a shard on a worker.

    Args:
        codec: name, as in `paradis.core.codes`.
        lengths: elements of each segment.
        dtype: of the values; another than float32 is for Lion alone.

    Raises:
        ConfigError: unknown codec, or its kernels need Numba, which is not installed.
    """
    _check(codec)
    return _worker(codec, lengths, dtype)


def _worker(codec: str, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> WorkerCoder:
    if codec == "lion":
        return LionWorker(lengths, dtype)
    if codec in _SIGNS:
        return OneBitAdamWorker(lengths, _SIGNS[codec])
    return DeltaWorker(_CODECS[codec](), lengths)


def rack_coder(codec: str, spans: Sequence[tuple[int, int]], length: int) -> RackCoder:
    """Return the coder of a shard in a rack agent that makes one code of several.

    Args:
        codec: one that `paradis.core.codes.recompresses`.
        spans: (start, length) of each segment in the shard, in elements.
        length: of the shard.

    Raises:
        ConfigError: its kernels need Numba, which is not installed.
    """
    _check(codec)
    return RackCoder(spans, length, _SIGNS[codec])


def server_coder(
    codec: str,
    length: int,
    spans: Sequence[tuple[int, int]],
    values: Sequence[torch.Tensor],
    offsets: Sequence[int],
) -> ServerCoder:
    """Return the coder of a shard on its server.

    Args:
        codec: name, as in `paradis.core.codes`.
        length: elements of the shard, padding included.
        spans: (start, length) of each segment.
        values: (length,) of each segment; borrowed, updated in place.
        offsets: place of each segment's first element in its parameter.

    Raises:
        ConfigError: as `worker_coder`.
    """
    _check(codec)
    return _server(codec, length, spans, values, offsets)


def _server(
    codec: str,
    length: int,
    spans: Sequence[tuple[int, int]],
    values: Sequence[torch.Tensor],
    offsets: Sequence[int],
) -> ServerCoder:
    if codec == "lion":
        return LionServer(spans, values, offsets)
    if codec in _SIGNS:
        return OneBitAdamServer(spans, values, _SIGNS[codec])
    return DeltaServer(_CODECS[codec](), length, spans, values)


def _check(codec: str) -> None:
    """Refuse at the start what would fail in the first step."""
    known = (*_CODECS, *_SIGNS, "lion")
    if codec not in known:
        raise ConfigError(
            f"codec {codec!r} is unknown; expected one of {', '.join(known)}; "
            "install the same Paradis version on all hosts"
        )
    if codec != "bf16":
        require_kernels(f"codec {codec}")
    _warm(codec)


@cache
def _warm(codec: str) -> None:
    """Load (or compile) the kernels of a codec now: in the first step others would wait for it."""
    value = torch.zeros(8)
    options: Options = {"lr": 0.0, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
    server = _server(codec, 8, [(0, 8)], [value], [0])
    worker = _worker(codec, [8])
    state = {"exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8)}
    server.begin([(state, {"step": 1.0})], options)
    worker.load_memories(server.start() or worker.memories())
    optimizer = ShardOptimizer("SGD", {"lr": 0.0}, [value])
    code, mean = torch.empty(worker.code_bytes, dtype=torch.uint8), torch.zeros(8)
    for _ in range(2):  # 1-bit Adam's first momentum are numbers, later ones codes
        gradients = [torch.ones(8)]
        worker.encode(gradients, code, options)
        server.add(code, mean, first=True)
        server.add(code, mean, first=False)
        server.update(mean, optimizer, [True], options)
        worker.keep()
        worker.install(server.code, [torch.zeros(8)], [True], options)
