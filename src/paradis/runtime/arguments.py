"""What the commands hand to the runtime: one frozen dataclass for each kind of process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paradis.settings import SharedSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArguments:
    """One server process.

    Attributes:
        dispatchers: control address of the leader, ``host:port``.
        token_file: file that holds the job's token.
        index: wanted index; None asks the leader for the next free one.
        beside: rank of the worker whose co-located server this is, in place of an index; -1: none.
        listen: ``host`` or ``host:port`` of the data plane; a bare host takes a free port.
        rack: rack this server stands in; empty when unknown.
        run_directory: where logs, sockets and checkpoints of this run go, absolute.
    """

    dispatchers: str
    token_file: Path
    index: int | None = None
    beside: int = -1
    listen: str = "127.0.0.1"
    rack: str = ""
    run_directory: Path = Path()


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherArguments:
    """One dispatcher process; index 0 is the leader.

    Attributes:
        token_file: file that holds the job's token.
        index: 0 for the leader.
        workers: workers of the job.
        servers: servers of the job, co-located ones included.
        colocated: one of the servers stands beside each worker.
        dispatchers_count: dispatchers of the job.
        racks: names of the job's racks, in order.
        rack: rack whose agent this dispatcher is.
        control_address: where the leader listens; port 0 takes a free port.
        dispatchers: control address of the leader; empty for the leader itself.
        address_file: where the leader writes its control address, by rename; None: nowhere.
        listen: ``host`` or ``host:port`` of the data plane; a bare host takes a free port.
        run_directory: where logs, sockets and checkpoints of this run go, absolute.
        settings: what the leader tells every node; others take the leader's.
        tree: logical groups of ranks, in order; empty: one group per rack.
        job: name of the job, for messages.
    """

    token_file: Path
    index: int = 0
    workers: int = 1
    servers: int = 1
    colocated: bool = False
    dispatchers_count: int = 1
    racks: tuple[str, ...] = ("rack-0",)
    rack: str = "rack-0"
    control_address: str = "127.0.0.1:0"
    dispatchers: str = ""
    address_file: Path | None = None
    listen: str = "127.0.0.1"
    run_directory: Path = Path()
    settings: SharedSettings = SharedSettings()
    tree: tuple[tuple[int, ...], ...] = ()
    job: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Deadlines of a host agent, seconds.

    Attributes:
        heartbeat_interval_s: between two beats to the leader.
        grace_period_s: from SIGTERM until workers that have not ended are killed.
        drain_timeout_s: from the order to stop until what has not ended is killed.
        finish_timeout_s: from the end of the last worker until the leader must have ended the job;
            long, since a checkpoint may still be written.
        settle_s: wait for the cause when only its consequences are known yet.
        connect_timeout_s: deadline of joining the leader.
    """

    heartbeat_interval_s: float = 2.0
    grace_period_s: float = 30.0
    drain_timeout_s: float = 5.0
    finish_timeout_s: float = 120.0
    settle_s: float = 2.0
    connect_timeout_s: float = 10.0
