"""Paradis as a plug-in of a training benchmark: ``wrap(cfg, rank, module)``.

Rank 0 starts a leader and two servers; the other ranks find them through a directory named after
the parent process. PARADIS_BENCH_SERVERS changes the number of servers.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import paradis

sys.path.insert(0, str(Path(__file__).parent))
from launch_nodes import Nodes  # a benchmark may load this file from anywhere


class Method:
    """One wrapped model in the benchmark's terms."""

    def __init__(self, optimizer: Any, nodes: Nodes | None) -> None:
        self._optimizer = optimizer
        self._nodes = nodes

    def zero_grad(self) -> None:
        """Clear gradients."""
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Exchange gradients and update."""
        self._optimizer.step()

    def drain(self) -> None:
        """Wait for the step that is on its way."""
        self._optimizer.wait()

    def close(self) -> None:
        """Leave the job; rank 0 ends the nodes."""
        paradis.close()
        if self._nodes is not None:
            self._nodes.close()


def wrap(cfg: dict[str, Any], rank: int, module: torch.nn.Module) -> Method:
    """Join (and on rank 0 start) the nodes, wrap the module with SGD."""
    workers = torch.distributed.get_world_size()
    servers = int(os.environ.get("PARADIS_BENCH_SERVERS", "2"))
    directory = Path(tempfile.gettempdir()) / f"paradis-bench-{os.getppid()}"
    nodes: Nodes | None = None
    ready = directory / "ready"
    if rank == 0:
        directory.mkdir()
        settings = tuple(os.environ.get("PARADIS_BENCH_SET", "").split())
        nodes = Nodes(directory, workers=workers, servers=servers, settings=settings)
        os.environ.update(nodes.environment(rank, workers))
        ready.touch()
    else:
        while not ready.exists():
            time.sleep(0.05)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(workers),
            PARADIS_DISPATCHERS=(directory / "leader.address").read_text().strip(),
            PARADIS_TOKEN_FILE=str(directory / "token"),
        )
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    return Method(paradis.wrap(module, optimizer), nodes)
