"""The other sections of a job's configuration, each a frozen dataclass that checks itself.

Stored durations are seconds (float), stored sizes are bytes (int). Every field tells its meaning
and why its default is what it is; `paradis.config` composes the sections and reads them.
Invariant: a section that exists is legal in itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from paradis.config_keys import (
    ADDRESS,
    BOOL,
    COUNT,
    DURATION,
    RATIO,
    SIZE,
    TEXT,
    WORD,
    check_values,
    key,
    keys_of,
)
from paradis.errors import ConfigError

_MOMENT: Final = 0.001
"""Shortest duration, seconds: below a millisecond a timer says nothing."""


def _ordered(section: Any, less: str, more: str, *, strictly: bool) -> None:
    low, high = getattr(section, less), getattr(section, more)
    if low < high or (low == high and not strictly):
        return
    keys = keys_of(type(section))
    relation = "less than" if strictly else "at most"
    raise ConfigError(
        f"config refused: {keys[less].path} = {keys[less].kind.show(low)}; expected {relation} "
        f"{keys[more].path} = {keys[more].kind.show(high)}; change one of them",
        keys=(keys[less].path, keys[more].path),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationConfig:
    """Deadlines, sizes and addresses of everything that travels."""

    SECTION: ClassVar[str] = "communication"

    heartbeat_interval: float = key(
        2.0,
        DURATION,
        "How often a node is reported alive. Two are missed before failure_timeout ends.",
        least=_MOMENT,
        shared="heartbeat_interval_s",
    )
    failure_timeout: float = key(
        5.0,
        DURATION,
        "Silence after which a node is dead. Host agents report for their nodes, so a busy worker "
        "is never silent; an agent that is silent for so long is gone.",
        least=_MOMENT,
        shared="failure_timeout_s",
    )
    rpc_timeout: float = key(
        10.0,
        DURATION,
        "Deadline of one question on the control plane: far above a healthy answer.",
        least=_MOMENT,
        shared="rpc_timeout_s",
    )
    control_interface: str = key(
        "", TEXT, "Network interface of the control plane, such as eth0. Empty: the system chooses."
    )
    data_interface: str = key(
        "", TEXT, "Network interface of the data plane, such as eth1. Empty: the system chooses."
    )
    control_address: str = key(
        "", ADDRESS, "Where the leader listens. Empty: this host, with a port from the system."
    )
    shard_size: int = key(
        4 << 20,
        SIZE,
        "Largest shard, the unit of ownership and transfer: it costs more to send than to handle.",
        least=64 << 10,  # below, messages cost more than the bytes in them
        shared="shard_bytes",
    )
    bucket_size: int = key(
        1 << 20,
        SIZE,
        "Size up to which small tensors are packed together: sent early, yet not one by one.",
        least=4,
        shared="bucket_bytes",
    )
    small_tensor: int = key(
        256 << 10,
        SIZE,
        "Tensors below this size are packed: alone they would cost more in headers than in bytes.",
        shared="small_tensor_bytes",
    )
    contribution_store: int = key(
        256 << 20,
        SIZE,
        "Memory for gradients that wait for their sum, per receiver, shared out among its workers: "
        "16 default shards for each of 4 workers.",
        least=4,
        shared="contribution_store_bytes",
    )
    straggler_warning: float = key(
        10.0,
        DURATION,
        "Wait for a worker after which it is named, not failed: longer than a usual hiccup.",
        least=_MOMENT,
        shared="straggler_warning_s",
    )
    sync_timeout: float = key(
        1800.0,
        DURATION,
        "Longest wait for the other workers of a step: long, since evaluation or compilation on "
        "one rank is legal.",
        least=_MOMENT,
        shared="sync_timeout_s",
    )
    join_timeout: float = key(
        120.0,
        DURATION,
        "Longest wait for all nodes to join: importing torch from a cold disk takes a minute.",
        least=_MOMENT,
        shared="join_timeout_s",
    )
    retry_interval: float = key(
        3.0,
        DURATION,
        "Time without any answer after which unanswered messages are sent again; all idempotent.",
        least=_MOMENT,
        shared="retry_interval_s",
    )
    payload_checksum: str = key(
        "auto",
        WORD,
        "Checksum over each payload. auto: for tcp to another host, where hardware can corrupt.",
        choices="auto on off",
        shared="payload_checksum",
    )
    user_timeout: float = key(
        5.0,
        DURATION,
        "Unacknowledged data on a tcp link for so long ends it: as long as failure_timeout.",
        least=_MOMENT,
        shared="user_timeout_s",
    )
    socket_buffer: int = key(
        4 << 20,
        SIZE,
        "Buffers of a data connection: the next shard arrives while one is handled.",
        least=4096,
        shared="socket_buffer_bytes",
    )
    congestion_control: str = key(
        "auto",
        WORD,
        "Of data connections over tcp. auto: reno where the system says bbr, which leaves links "
        "idle between the bursts of many connections; otherwise, as with system, the system's.",
        choices="auto system cubic reno bbr dctcp",
        shared="congestion_control",
    )
    same_host: str = key(
        "unix",
        WORD,
        "Transport between nodes of one host. unix: skips the whole network stack.",
        choices="unix tcp",
        shared="same_host",
    )
    rack_aggregation: str = key(
        "auto",
        WORD,
        "Whether a rack's dispatcher sums its workers' gradients. auto: when that saves traffic.",
        choices="auto on off",
        shared="rack_aggregation",
    )
    rack_codes: str = key(
        "forward",
        WORD,
        "What a rack's dispatcher does with its workers' codes. forward: sends them on together; "
        "same bits as without it. recompress: makes one code of them, with an error memory of its "
        "own (2.5 models in each rack, in no checkpoint); of 1-bit Adam only, and other bits.",
        choices="forward recompress",
        shared="rack_codes",
    )

    def __post_init__(self) -> None:
        """Check values and relations.

        Raises:
            ConfigError: a value or a relation is illegal.
        """
        check_values(self)
        _ordered(self, "heartbeat_interval", "failure_timeout", strictly=True)
        _ordered(self, "retry_interval", "sync_timeout", strictly=True)
        _ordered(self, "straggler_warning", "sync_timeout", strictly=True)
        _ordered(self, "small_tensor", "bucket_size", strictly=False)
        _ordered(self, "bucket_size", "shard_size", strictly=False)
        _ordered(self, "shard_size", "contribution_store", strictly=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When and where the job's state is saved."""

    SECTION: ClassVar[str] = "checkpoint"

    directory: str = key(
        "", TEXT, "Where checkpoints go. Empty: inside the run directory.",
        shared="checkpoint_directory",
    )  # fmt: skip
    every_steps: int = key(
        0,
        COUNT,
        "Steps between checkpoints. 0: only when the script asks, which knows a good moment.",
        shared="checkpoint_every_steps",
    )
    keep: int = key(
        3, COUNT, "Newest checkpoints to keep: one may be damaged, one be too new.", least=1,
        shared="checkpoint_keep",
    )  # fmt: skip
    restore: str = key(
        "", TEXT, "Checkpoint to start from. Empty: start from the script's values.",
        shared="restore",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check values.

        Raises:
            ConfigError: a value is illegal.
        """
        check_values(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """How processes are started and ended."""

    SECTION: ClassVar[str] = "launch"

    grace_period: float = key(
        30.0,
        DURATION,
        "From SIGTERM to SIGKILL: enough for a script to write its last files.",
        least=_MOMENT,
    )
    drain_timeout: float = key(
        5.0,
        DURATION,
        "Longest wait for servers and dispatchers to end after the last worker.",
        least=_MOMENT,
    )
    run_directory: str = key(
        "paradis-runs", TEXT, "Where each run gets a directory for logs, sockets and checkpoints."
    )
    omp_threads: int = key(
        0, COUNT, "OMP_NUM_THREADS of a worker. 0: its fair share of the cores, unless it is set."
    )

    def __post_init__(self) -> None:
        """Check values.

        Raises:
            ConfigError: a value is illegal, or the run directory is empty.
        """
        check_values(self)
        if not self.run_directory:
            raise ConfigError(
                "config refused: launch.run_directory is empty; expected a directory; name one",
                keys=("launch.run_directory",),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How shards are spread over servers."""

    SECTION: ClassVar[str] = "scheduler"

    virtual_nodes: int = key(
        160,
        COUNT,
        "Points of each server on the hash ring. 160: shares vary by about 8 %.",
        least=1,
        shared="virtual_nodes",
    )
    load_epsilon: float = key(
        0.1,
        RATIO,
        "How far above the mean a server's bytes may be before shards go to the next one.",
        least=0.001,
        shared="load_epsilon",
    )

    def __post_init__(self) -> None:
        """Check values.

        Raises:
            ConfigError: a value is illegal.
        """
        check_values(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveConfig:
    """What a run leaves behind for those who want to know."""

    SECTION: ClassVar[str] = "observe"

    trace: bool = key(
        False,
        BOOL,
        "Record when each shard passes each stage, for `paradis trace`. Off: each stage of each "
        "shard costs some microseconds, and a node keeps up to 200000 spans.",
        shared="trace",
    )

    def __post_init__(self) -> None:
        """Check values.

        Raises:
            ConfigError: a value is illegal.
        """
        check_values(self)
