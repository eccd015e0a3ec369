"""The command line and environment of every node that ``paradis run`` starts.

Invariant: workers stand in racks in contiguous blocks of ranks, so that summing over racks in order
keeps worker order; dispatcher i serves rack i; the token travels in a file only.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from paradis.config import JobConfig
from paradis.core.worker_groups import decode, encode, group_of
from paradis.errors import ConfigError
from paradis.ids import dispatcher_id, server_id, worker_id
from paradis.runtime.child import NodeCommand
from paradis.runtime.rundir import RunDirectory

_HERE: Final = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """What all commands of one job are made of.

    Attributes:
        environ: environment to inherit.
        terminal: whether standard output is a terminal.
        script: path and arguments of the training script.
        master_port: free TCP port for the script's own `torch.distributed`.
    """

    config: JobConfig
    run: RunDirectory
    config_file: Path | None
    overrides: Mapping[str, str]
    environ: Mapping[str, str]
    terminal: bool
    script: tuple[str, ...]
    master_port: int = 0

    @property
    def racks(self) -> tuple[str, ...]:
        """Names of the job's racks, in order; those that the configuration names come first."""
        topology = self.config.topology
        named = dict.fromkeys(node.rack for node in topology.disp_nodes)
        names = [*named, *(f"rack-{i}" for i in range(topology.racks) if f"rack-{i}" not in named)]
        return tuple(names[: topology.racks])

    def rack_of_worker(self, rank: int) -> str:
        """Return the rack of a rank: blocks whose sizes differ by one at most."""
        count = len(self.racks)
        return self.racks[rank * count // self.config.topology.workers]

    def rack_of_dispatcher(self, index: int) -> str:
        """Return the rack that a dispatcher serves; empty for one more than there are racks."""
        if self.config.topology.disp_nodes:
            return self.config.topology.disp_nodes[index].rack
        return self.racks[index] if index < len(self.racks) else ""


def dispatcher_command(plan: JobPlan, index: int, leader: str) -> NodeCommand:
    """Return the command of a dispatcher.

    Number 0 leads: it is given no ``leader``, but the configuration, which all others take from it.
    """
    topology = plan.config.topology
    listen = _HERE
    if topology.disp_nodes:
        listen = _local(topology.disp_nodes[index].address, f"dispatcher {index}")
    argv = [
        *_node_argv(plan, "dispatcher", index, listen),
        *("--rack", plan.rack_of_dispatcher(index), "--racks", ",".join(plan.racks)),
        *("--workers", str(topology.workers), "--servers", str(topology.servers)),
        *("--dispatcher-count", str(topology.dispatchers), "--job", plan.run.job),
    ]
    if topology.colocated:
        argv += ["--colocated"]
    if index == 0:
        control = plan.config.communication.control_address or f"{_HERE}:0"
        argv += ["--control-address", control, "--address-file", str(plan.run.address_file)]
        if plan.config_file is not None:
            argv += ["--config", str(plan.config_file)]
        for name, value in plan.overrides.items():
            argv += ["--set", f"{name}={value}"]
    else:
        argv += ["--dispatchers", leader]
    return _command(plan, dispatcher_id(index), argv, {})


def server_command(plan: JobPlan, index: int, leader: str) -> NodeCommand:
    """Return the command of a server.

    Dedicated servers go round the racks; those that follow stand beside worker 0, 1, ...
    """
    topology = plan.config.topology
    rank = index - topology.servers
    listed = bool(topology.ps_nodes) and rank < 0
    listen = _local(topology.ps_nodes[index], f"server {index}") if listed else _HERE
    rack = plan.racks[index % len(plan.racks)] if rank < 0 else plan.rack_of_worker(rank)
    argv = [
        *_node_argv(plan, "server", index, listen),
        *("--dispatchers", leader, "--rack", rack),
    ]
    return _command(plan, server_id(index), argv, {})


def worker_command(plan: JobPlan, rank: int, leader: str) -> NodeCommand:
    """Return the command of a worker: the user's script, arguments unchanged."""
    workers = str(plan.config.topology.workers)
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers,
        "GROUP_RANK": "0",
        "MASTER_ADDR": _HERE,
        "MASTER_PORT": str(plan.master_port),
        "PARADIS_DISPATCHERS": leader,
        "PARADIS_TOKEN_FILE": str(plan.run.token_file),
        "PARADIS_RACK": plan.rack_of_worker(rank),
        "PARADIS_JOB": plan.run.job,
    }
    groups = decode(encode(plan.config.topology.worker_groups), int(workers))
    if groups:
        env["PARADIS_WORKER_GROUP"] = groups[group_of(groups, rank)].name
    if "OMP_NUM_THREADS" not in plan.environ or plan.config.launch.omp_threads:
        env["OMP_NUM_THREADS"] = str(_threads(plan))
    if plan.config.checkpoint.restore:
        env["PARADIS_RESUME"] = plan.config.checkpoint.restore
    if plan.terminal:
        env["PARADIS_TTY"] = "1"
    argv = (sys.executable, *plan.script)
    return _command(plan, worker_id(rank), argv, env, forward=rank == 0)


def _threads(plan: JobPlan) -> int:
    cores = len(os.sched_getaffinity(0))
    return plan.config.launch.omp_threads or max(1, cores // plan.config.topology.workers)


def _node_argv(plan: JobPlan, role: str, index: int, listen: str) -> list[str]:
    # -P: or a file of the user's named like a module of ours or torch's would be imported here.
    argv = [sys.executable, "-P", "-m", "paradis.cli.main", role, "--index", str(index)]
    argv += ["--token-file", str(plan.run.token_file), "--run-dir", str(plan.run.path)]
    argv += ["--listen", listen]
    return argv


def _command(
    plan: JobPlan,
    name: str,
    argv: list[str] | tuple[str, ...],
    env: Mapping[str, str],
    *,
    forward: bool = False,
) -> NodeCommand:
    for_all = {
        "PARADIS_AGENT": "1",
        "PARADIS_RUN_DIR": str(plan.run.path),
        "PYTHONUNBUFFERED": "1",
    }
    # Of a run that this one is started from.
    stale = ("PARADIS_RESUME", "PARADIS_TTY", "PARADIS_WORKER_GROUP")
    kept = {key: value for key, value in plan.environ.items() if key not in stale}
    return NodeCommand(
        name=name,
        argv=tuple(argv),
        env={**kept, **for_all, **env},
        cwd=os.getcwd(),
        forward=forward,
    )


def _local(address: str, who: str) -> str:
    """Return an address of this host.

    Raises:
        ConfigError: it belongs to another host.
    """
    host = address.rpartition(":")[0].strip("[]")
    own = {addr.address for each in psutil.net_if_addrs().values() for addr in each}
    names = {"localhost", "0.0.0.0", "::", socket.gethostname(), socket.getfqdn()}
    if host in own | names or host.startswith("127."):
        return address
    raise ConfigError(
        f"topology names {address} for {who}, which is not an address of this host "
        f"({socket.gethostname()}); paradis run starts nodes on this host only: start that one "
        "there with `paradis server` or `paradis dispatcher`"
    )
