"""Paradis as a plug-in of a training benchmark: ``wrap(cfg, rank, module)`` and ``serve(cfg, i)``.

Rank 0 starts a leader; everybody else finds it through a directory named after the parent process.
A benchmark that calls ``serve`` has its ``cfg["servers"]``, (host, port) each, as dedicated
servers, each on the host where it is called; where there are none, rank 0 starts
PARADIS_BENCH_SERVERS (2) servers of its own. With PARADIS_BENCH_COLOCATED=1 every worker also
starts the co-located server beside it, on its host: ``cfg["servers"]`` may be empty then.
PARADIS_BENCH_RACKS=R puts the workers into R racks, in blocks of ranks, and servers round the
racks; the first worker of each rack starts its dispatcher, which sums the rack's gradients.
PARADIS_BENCH_SET holds further settings, ``section.key=value``, separated by blanks.
PARADIS_BENCH_OPTIMIZER is ``sgd`` (default), ``lion``, or ``onebit:N``, frozen after N steps.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

import paradis
import paradis.optim
from paradis.cli.main import main

sys.path.insert(0, str(Path(__file__).parent))
# This file is loaded from anywhere.
from launch_nodes import Nodes, end_node, in_racks, start_node, wait_for


class Method:
    """One wrapped model in the benchmark's terms."""

    def __init__(
        self, optimizer: Any, nodes: Nodes | None, beside: list[subprocess.Popen[bytes]]
    ) -> None:
        self._optimizer = optimizer
        self._nodes = nodes
        self._beside = beside

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
        """Leave the job; what was started here ends with it."""
        paradis.close()
        for node in self._beside:
            end_node(node)
        if self._nodes is not None:
            self._nodes.close()


def wrap(cfg: dict[str, Any], rank: int, module: torch.nn.Module) -> Method:
    """Join (and on rank 0 start) the job, wrap the module."""
    workers = torch.distributed.get_world_size()
    colocated = os.environ.get("PARADIS_BENCH_COLOCATED") == "1"
    directory, host = _directory(), _own_address()
    nodes = _lead(cfg, workers, host, colocated=colocated) if rank == 0 else None
    address = wait_for(directory / "ready")
    racks = _racks()
    rack = rank * len(racks) // workers
    beside = []
    if rank and rack != (rank - 1) * len(racks) // workers:
        beside.append(start_node(
            directory, f"dispatcher-{rack}", "dispatcher", "--index", str(rack),
            "--listen", host, "--dispatchers", address, *in_racks(racks, rack),
        ))  # fmt: skip
    if colocated:
        beside.append(start_node(
            directory, f"server-beside-{rank}", "server", "--beside", str(rank),
            "--listen", host, "--dispatchers", address, "--rack", racks[rack],
        ))  # fmt: skip
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(workers),
        PARADIS_DISPATCHERS=address,
        PARADIS_TOKEN_FILE=str(directory / "token"),
        PARADIS_RUN_DIR=str(directory),  # where spans go, with observe.trace
        PARADIS_RACK=racks[rack],
    )
    return Method(paradis.wrap(module, make_optimizer(module)), nodes, beside)


def make_optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that PARADIS_BENCH_OPTIMIZER names."""
    name, _, steps = os.environ.get("PARADIS_BENCH_OPTIMIZER", "sgd").partition(":")
    if name == "lion":
        return paradis.optim.DistributedLion(module.parameters(), lr=1e-4)
    if name == "onebit":
        return paradis.optim.OneBitAdam(module.parameters(), lr=1e-4, freeze_step=int(steps))
    return torch.optim.SGD(module.parameters(), lr=1e-3)


def serve(cfg: dict[str, Any], index: int) -> dict[str, Any]:
    """Run a dedicated server in this process until the job ends."""
    directory = _directory()
    address, racks = wait_for(directory / "ready"), _racks()
    code = main([
        "server", "--index", str(index), "--listen", cfg["servers"][index][0],
        "--rack", racks[index % len(racks)],
        "--dispatchers", address, "--token-file", str(directory / "token"),
        "--run-dir", str(directory),
    ])  # fmt: skip
    if code:
        raise SystemExit(code)
    return {}


def _lead(cfg: dict[str, Any], workers: int, host: str, *, colocated: bool) -> Nodes:
    directory = _directory()
    directory.mkdir()
    settings = tuple(os.environ.get("PARADIS_BENCH_SET", "").split())
    served = len(cfg.get("servers", ()))
    elsewhere = served > 0 or colocated
    own = int(os.environ.get("PARADIS_BENCH_SERVERS", "2"))
    if colocated:
        settings = (*settings, "topology.colocated=true")
    nodes = Nodes(
        directory, workers=workers, servers=served if elsewhere else own,
        settings=settings, host=host, elsewhere=elsewhere, racks=_racks(),
    )  # fmt: skip
    ready = directory / "ready.part"
    ready.write_text(nodes.address, encoding="ascii")
    ready.rename(directory / "ready")
    return nodes


def _racks() -> list[str]:
    return [f"rack-{i}" for i in range(int(os.environ.get("PARADIS_BENCH_RACKS", "1")))]


def _directory() -> Path:
    """Return where the job's files are, the same for all processes of one benchmark."""
    return Path(tempfile.gettempdir()) / f"paradis-bench-{os.getppid()}"


def _own_address() -> str:
    """Return this host's address on the network that the benchmark uses."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    families = {each.family: each.address for each in psutil.net_if_addrs()[device]}
    return families[socket.AF_INET]
