"""Spans: what one node did with one shard of one step, from when to when.

A node keeps the last spans in memory and writes them once, at its end, as a file of lines: a header
that ties the node's clock to wall time, then one JSON array for each span.

Invariant: a recorder holds a bounded number of spans, the newest; ``enter_ns <= leave_ns``.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from paradis.errors import StateError

SPANS_MAX: Final = 200_000
"""Spans that a node keeps: 20 MB of file at most, the last 1,000 steps of 40 shards and 4 peers."""

FORMAT: Final = 1

STAGES: Final = {
    "local reduction": "gradients of the workers of one host are summed (worker)",
    "compression": "a gradient or a mean becomes a code (worker, rack agent, server)",
    "aggregation": "from the first contribution of a shard until its sum (rack agent, server)",
    "update": "the optimizer runs on a shard (server)",
    "push": "a payload goes to a peer (any node): see `Span.what`",
}
"""The stages of the gradient path. A stage that this version does not have is not recorded."""

COMPUTE: Final = {
    "forward": "from the end of a step() until the first gradient of the next (worker)",
    "backward": "from the first gradient until step() is called (worker)",
    "wait": "step() waits for the new parameters (worker)",
}
"""What the script's own thread does meanwhile, so that overlap can be seen.

No hook tells where backward begins: the part of it that comes before its first finished gradient is
counted as forward, with data loading, the loss, and whatever else the script does there.
"""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stage of one shard on one node.

    Attributes:
        stage: a name of `STAGES` or `COMPUTE`.
        what: of a push, what goes: ``gradient`` and ``sum`` from when they are handed to the link
            until the peer has acknowledged them, ``update`` on the sender until the link says that
            it was sent, on a worker from its first byte until it is installed; else empty.
        group: number of the ``wrap`` call.
        shard: number of the shard, -1 for compute.
        step: step of this run, from 0.
        worker: rank of the worker whose gradient or copy it is, -1 where it is not one worker's.
        peer: the other end of a push, else empty.
        enter_ns: monotonic clock of the host.
        leave_ns: the same.
        bytes: payload; of an aggregation, of all that was summed.
    """

    stage: str
    what: str
    group: int
    shard: int
    step: int
    worker: int
    peer: str
    enter_ns: int
    leave_ns: int
    bytes: int


class SpanHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a file.

    Attributes:
        format: of the file.
        host: name of the host.
        clock: names the monotonic clock: equal for all processes of one boot of one host.
        monotonic_ns: of that clock, read together with ``time_ns``.
        time_ns: wall time since 1970.
        dropped: spans that were recorded before the first one of the file.
    """

    format: int
    node: str
    host: str
    clock: str
    monotonic_ns: int
    time_ns: int
    dropped: int


class SpanRecorder:
    """The last spans of one node. Thread-safe.

    Args:
        spans_max: how many are kept.
    """

    def __init__(self, *, spans_max: int = SPANS_MAX) -> None:
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=spans_max)
        self._count = 0

    def add(self, span: Span) -> None:
        """Keep a span; the oldest one gives way when there is no room."""
        with self._lock:
            self._count += 1
            self._spans.append(span)

    def spans(self) -> tuple[Span, ...]:
        """Return what is kept, in the order of leaving."""
        with self._lock:
            return tuple(self._spans)

    def write(self, directory: Path, node: str) -> Path:
        """Write the node's file, all of it or nothing; return its path.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            spans, count = tuple(self._spans), self._count
        header = SpanHeader(
            format=FORMAT, node=node, host=socket.gethostname(), clock=_clock_name(),
            monotonic_ns=time.monotonic_ns(), time_ns=time.time_ns(), dropped=count - len(spans),
        )  # fmt: skip
        directory.mkdir(parents=True, exist_ok=True)
        path = span_file(directory, node)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        encoder = msgspec.json.Encoder()
        try:
            with temporary.open("wb") as file:
                file.write(encoder.encode(header) + b"\n")
                for span in spans:
                    file.write(encoder.encode(span) + b"\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path


class SpanFile(msgspec.Struct, frozen=True):
    """What a file holds."""

    header: SpanHeader
    spans: tuple[Span, ...]


def span_file(directory: Path, node: str) -> Path:
    """Return where a node's spans are."""
    return directory / f"spans-{node}.jsonl"


def span_files(directory: Path) -> list[Path]:
    """Return the files of a run, by name."""
    return sorted(directory.glob("spans-*.jsonl"))


def read_spans(path: Path) -> SpanFile:
    """Read a file that `SpanRecorder.write` wrote.

    Raises:
        StateError: it is damaged, or of another version.
        OSError: it cannot be read.
    """
    decoder = msgspec.json.Decoder(Span)
    number = 1
    try:
        with path.open("rb") as file:
            header = msgspec.json.decode(file.readline(), type=SpanHeader)
            if header.format != FORMAT:
                raise StateError(
                    f"span file {path} refused: expected format {FORMAT}, got {header.format}; "
                    "read it with the version of Paradis that wrote it"
                )
            spans = []
            for line in file:
                number += 1
                spans.append(decoder.decode(line))
    except msgspec.MsgspecError as error:
        raise StateError(
            f"span file {path} refused: line {number} is damaged: {error}; remove the file to see "
            "the other nodes' spans"
        ) from error
    return SpanFile(header, tuple(spans))


def _clock_name() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
