"""What ``paradis run`` leaves behind: a table of the nodes, and their counters as a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table


def node_table(nodes: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of every node's traffic and load.

    Args:
        nodes: node -> counters (names in `paradis.observe.metrics`).
    """
    table = Table(title=None, box=None, pad_edge=False)
    table.add_column("node")
    for name in ("sent", "received", "busy", "memory", "steps or updates"):
        table.add_column(name, justify="right")
    for node in sorted(nodes, key=_order):
        counters = nodes[node]
        wall_s = max(counters.get("wall_s", 0.0), 1e-9)
        work = counters.get("steps", 0.0) or counters.get("updates", 0.0)
        table.add_row(
            node,
            _megabytes(counters.get("data_bytes_out", 0.0)),
            _megabytes(counters.get("data_bytes_in", 0.0)),
            f"{100 * counters.get('cpu_s', 0.0) / wall_s:.0f} %",
            _megabytes(counters.get("rss_bytes", 0.0)),
            f"{work:,.0f}" if work else "-",
        )
    return table


def print_nodes(nodes: Mapping[str, Mapping[str, float]]) -> None:
    """Print the table on standard error, beside the launcher's other lines."""
    if nodes:
        Console(stderr=True, highlight=False).print(node_table(nodes))


def write_nodes(path: Path, nodes: Mapping[str, Mapping[str, float]]) -> None:
    """Write every node's counters as JSON, node -> name -> number, if the disk has room."""
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(nodes, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _order(node: str) -> tuple[int, int]:
    role, _, index = node.partition("-")
    roles = ("dispatcher", "server", "worker")
    place = roles.index(role) if role in roles else len(roles)
    return place, int(index) if index.isdecimal() else 0


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
