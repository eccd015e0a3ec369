"""Spans of all nodes of a run on one axis: as a Chrome trace, or as the walk of one shard.

Nodes of one host share a monotonic clock, so their spans are on one axis as exactly as that clock
is read. Hosts are brought together through their wall clocks, so between them the axis is as good
as those agree: about a millisecond with NTP in one network, and an effect may then seem to come
before its cause.

Invariant: spans of one row do not overlap.
Source of the format: Chrome's "Trace Event Format", complete events ("X") and metadata ("M"); times
in microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from paradis.errors import ConfigError
from paradis.observe.spans import COMPUTE, STAGES, Span, SpanFile, read_spans, span_files

_TRACKS: Final = (
    "compute", "local reduction", "compression", "push gradient", "push sum", "aggregation",
    "update", "push update",
)  # fmt: skip
"""Order of the tracks of a node, from top to bottom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpans:
    """The spans of one node.

    Attributes:
        spans: in order of entering.
        shift_ns: what to add to their times for the run's axis, on which the first span enters
            at 0.
        dropped: spans that the node did not keep.
    """

    node: str
    spans: tuple[Span, ...]
    shift_ns: int
    dropped: int


def load_run(directory: Path) -> tuple[NodeSpans, ...]:
    """Read the spans of all nodes of a run, put on one axis.

    Raises:
        ConfigError: there is no such directory, or no span in it.
        StateError: a file is damaged.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"run directory {directory}: no such directory; give the one that `paradis run` named "
            "in its first line"
        )
    nodes = on_one_axis([read_spans(path) for path in span_files(directory)])
    if not any(node.spans for node in nodes):
        raise ConfigError(
            f"run directory {directory} holds no spans; turn them on with "
            "--set observe.trace=true (or observe.trace: true in the configuration) and run again"
        )
    return nodes


def on_one_axis(files: Sequence[SpanFile]) -> tuple[NodeSpans, ...]:
    """Return the spans of files with what shifts each file's clock to the common axis.

    All files of one clock are shifted alike, by the first one's wall time: so they keep their
    exact relations, whatever was done to the wall clock meanwhile.
    """
    to_wall: dict[str, int] = {}
    for header in (each.header for each in files):
        to_wall.setdefault(header.clock, header.time_ns - header.monotonic_ns)
    starts = [s.enter_ns + to_wall[f.header.clock] for f in files for s in f.spans]
    begin = min(starts, default=0)
    return tuple(
        NodeSpans(
            node=file.header.node,
            spans=tuple(sorted(file.spans, key=lambda s: (s.enter_ns, s.leave_ns))),
            shift_ns=to_wall[file.header.clock] - begin,
            dropped=file.header.dropped,
        )
        for file in files
    )


def rows(spans: Iterable[Span]) -> list[int]:
    """Return a row, from 0, for each span, so that no two of a row overlap.

    Args:
        spans: in order of entering.
    """
    found: list[int] = []
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    count = 0
    for span in spans:
        while busy and busy[0][0] <= span.enter_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, count = count, count + 1
        heapq.heappush(busy, (span.leave_ns, row))
        found.append(row)
    return found


# ------------------------------------------------------------------------------------ Chrome trace


def chrome_events(nodes: Sequence[NodeSpans]) -> Iterator[dict[str, Any]]:
    """Yield the events of a Chrome trace: a process per node, a thread per row."""
    for pid, node in enumerate(nodes, 1):
        yield _named("process_name", pid, 0, name=node.node)
        yield _named("process_sort_index", pid, 0, sort_index=pid)
        by_track: dict[str, list[Span]] = {track: [] for track in _TRACKS}
        for span in node.spans:
            by_track.setdefault(_track(span), []).append(span)
        first = 1
        for track, spans in by_track.items():
            of = rows(spans)
            count = max(of, default=-1) + 1
            for row in range(count):
                name = track if count == 1 else f"{track} {row + 1}"
                yield _named("thread_name", pid, first + row, name=name)
                yield _named("thread_sort_index", pid, first + row, sort_index=first + row)
            for span, row in zip(spans, of, strict=True):
                yield _complete(span, pid, first + row, node.shift_ns)
            first += count


def _track(span: Span) -> str:
    if span.stage in COMPUTE:
        return "compute"
    return f"{span.stage} {span.what}".rstrip()


def _named(what: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _complete(span: Span, pid: int, tid: int, shift_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.step, "group": span.group, "worker": span.worker}
    if span.shard >= 0:
        args |= {"shard": span.shard, "bytes": span.bytes}
    if span.peer:
        args["peer"] = span.peer
    return {
        "ph": "X",
        "name": f"{_track(span)} {span.shard}" if span.shard >= 0 else span.stage,
        "cat": "compute" if span.stage in COMPUTE else span.stage,
        "ts": (span.enter_ns + shift_ns) / 1000,
        "dur": (span.leave_ns - span.enter_ns) / 1000,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def write_chrome(nodes: Sequence[NodeSpans], path: Path) -> None:
    """Write a Chrome trace, event by event: a run's spans may be many.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = b"\n"
        for event in chrome_events(nodes):
            file.write(separator + msgspec.json.encode(event))
            separator = b",\n"
        file.write(b"\n]}\n")


# -------------------------------------------------------------------------------- walk of one shard


def walk(nodes: Sequence[NodeSpans], step: int, shard: int) -> list[str]:
    """Return the walk of one shard through one step: a line per span, in order of time.

    The workers' compute spans of the step are among them.

    Raises:
        ConfigError: the run has no such step or shard; says which it has.
    """
    of_shard = [s for n in nodes for s in n.spans if s.shard == shard]
    if not of_shard:
        known = sorted({s.shard for n in nodes for s in n.spans if s.shard >= 0})
        raise ConfigError(f"shard {shard} has no spans; the run has shards {ranges(known)}")
    group = of_shard[0].group
    if all(s.step != step for s in of_shard):
        known = sorted({s.step for s in of_shard})
        raise ConfigError(
            f"step {step} of shard {shard} has no spans; it has steps {ranges(known)}"
        )
    chosen = [
        (span.enter_ns + node.shift_ns, node.node, span)
        for node in nodes
        for span in node.spans
        if span.step == step and span.group == group and span.shard in (shard, -1)
    ]
    chosen.sort(key=lambda entry: (entry[0], entry[1]))
    begin = chosen[0][0]
    width = max(len(stage) for stage in (*STAGES, *COMPUTE))
    lines = [f"{'+ms':>10}  {'took ms':>9}  {'stage':<{width}}  where"]
    for at_ns, name, span in chosen:
        took = (span.leave_ns - span.enter_ns) / 1e6
        lines.append(
            f"{(at_ns - begin) / 1e6:10.3f}  {took:9.3f}  {span.stage:<{width}}  "
            f"{_where(name, span)}"
        )
    return lines


def _where(node: str, span: Span) -> str:
    if span.stage in COMPUTE:
        return node
    arrives = span.what == "update" and node.startswith("worker-")
    route = f" {'<-' if arrives else '->'} {span.peer}" if span.peer else ""
    what = f"  {span.what}" if span.what else ""
    return f"{node}{route}{what}  {span.bytes:,} bytes"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``0 to 4, 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join(" to ".join(map(str, part)) for part in parts)
