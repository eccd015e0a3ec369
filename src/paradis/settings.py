"""The settings that every node of a job must agree on, as they travel in `Welcome`.

The leader sends them once, on joining; a node uses these and never its own configuration file, so
that two hosts with different files cannot run the same job differently.
Invariant: ``settings_from(dataclasses.asdict(settings)) == settings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paradis.errors import RemoteProtocolError, VersionMismatch

Setting = int | float | str | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSettings:
    """Job-wide settings in SI units: ``_s`` is seconds, ``_bytes`` is bytes.

    The defaults are those of `paradis.config`, where each key's meaning and reason are written;
    a test keeps the two equal.

    Attributes:
        payload_checksum: ``auto`` (on for tcp to another host), ``on`` or ``off``.
        congestion_control: of TCP: ``auto``, ``system`` or a name of the kernel's.
        same_host: ``unix`` or ``tcp``, the transport between nodes of one host.
        rack_aggregation: ``auto``, ``on`` or ``off``.
        rack_codes: ``forward`` or ``recompress``, what a rack agent does with codes.
        mode: ``sync``, ``ssp`` or ``async``.
        staleness: of ``ssp``: steps that a worker may be ahead of the slowest.
        staleness_scaling: of ``async``: divide a rate by the staleness of its update.
        backup_workers: of ``sync``: workers that a step does without.
        compression: ``none``, ``bf16`` or ``int8``, of gradients and updates.
        compression_benefit: ``measured`` or ``assumed``, that codes make steps faster.
        compression_elements_min: tensors with fewer elements travel in full.
        overlap: ``layerwise``, ``none`` or ``double_buffer``.
        watch_views: wait in ``step()`` where something else holds a parameter's memory.
        delay_warmup_steps: steps before ``double_buffer`` begins.
        local_reduction: ``auto``, ``on`` or ``off``, the workers of a host reduce first.
        on_early_finish: ``continue`` or ``fail``, when a worker runs out of batches.
        early_update: servers update a shard before the workers have committed.
        free_gradients: gradients of 1-bit Adam are let go in backward, in steps as codes.
        checkpoint_directory: empty: inside the run directory.
        checkpoint_every_steps: 0: only when the script asks.
        restore: checkpoint to start from; empty: none.
        trace: record spans of the gradient path.
        worker_groups: groups that train disjoint parameters, as `paradis.core.worker_groups`
            writes them; empty: all workers train everything.
    """

    heartbeat_interval_s: float = 2.0
    failure_timeout_s: float = 5.0
    rpc_timeout_s: float = 10.0
    shard_bytes: int = 4 << 20
    bucket_bytes: int = 1 << 20
    small_tensor_bytes: int = 256 << 10
    contribution_store_bytes: int = 256 << 20
    straggler_warning_s: float = 10.0
    sync_timeout_s: float = 1800.0
    join_timeout_s: float = 120.0
    retry_interval_s: float = 3.0
    payload_checksum: str = "auto"
    user_timeout_s: float = 5.0
    socket_buffer_bytes: int = 4 << 20
    congestion_control: str = "auto"
    same_host: str = "unix"
    rack_aggregation: str = "auto"
    rack_codes: str = "forward"
    mode: str = "sync"
    staleness: int = 1
    staleness_scaling: bool = False
    backup_workers: int = 0
    overlap: str = "layerwise"
    watch_views: bool = True
    delay_warmup_steps: int = 1000
    compression: str = "none"
    compression_benefit: str = "measured"
    compression_elements_min: int = 4096
    local_reduction: str = "off"
    on_early_finish: str = "continue"
    early_update: bool = False
    free_gradients: bool = False
    detect_value_changes: bool = True
    debug_gradients: bool = False
    check_finite: bool = True
    checkpoint_directory: str = ""
    checkpoint_every_steps: int = 0
    checkpoint_keep: int = 3
    restore: str = ""
    virtual_nodes: int = 160
    load_epsilon: float = 0.1
    trace: bool = False
    worker_groups: str = ""


def settings_from(received: Mapping[str, object]) -> SharedSettings:
    """Rebuild the settings that the leader sent; whole numbers are taken for seconds too.

    Raises:
        VersionMismatch: a setting is missing or unknown here.
        RemoteProtocolError: a setting has another type.
    """
    types = {field.name: type(field.default) for field in fields(SharedSettings)}
    if received.keys() != types.keys():
        missing = sorted(types.keys() - received.keys())
        unknown = sorted(received.keys() - types.keys())
        raise VersionMismatch(
            f"settings of the leader refused: missing {missing}, unknown {unknown}; "
            "install the same Paradis version on all hosts"
        )
    values: dict[str, Any] = {
        name: _typed(name, received[name], kind) for name, kind in types.items()
    }
    return SharedSettings(**values)


def _typed(name: str, value: object, kind: type) -> Setting:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind and isinstance(value, int | float | str | bool):
        return value
    raise RemoteProtocolError(
        f"settings of the leader refused: {name}: expected {kind.__name__}, got {value!r}; "
        "install the same Paradis version on all hosts"
    )
