"""Which settings go together: one table of combinations, and what is refused beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from paradis.config_keys import keys_of
from paradis.config_sections import CommunicationConfig
from paradis.config_topology import TopologyConfig
from paradis.config_training import TrainingConfig
from paradis.core.worker_groups import WorkerGroup
from paradis.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A legal combination of mode, compression and overlap, and what it promises.

    Attributes:
        backup: steps may do without some workers (``training.backup_workers``).
    """

    mode: str
    compression: str
    overlap: str
    promise: str
    backup: bool = False


COMBINATIONS: Final = (
    Combination(
        mode="sync",
        compression="none",
        overlap="none",
        promise="one worker equals plain PyTorch bit for bit, N the mean of their gradients",
        backup=True,
    ),
    Combination(
        mode="sync",
        compression="none",
        overlap="layerwise",
        promise="the same bits; updates come in while the script goes on",
        backup=True,
    ),
    Combination(
        mode="sync",
        compression="none",
        overlap="double_buffer",
        promise="after a warm-up each gradient is one step late; all workers have the same bits",
    ),
    *(
        Combination(mode="sync", compression=codec, overlap=overlap, promise=promise, backup=True)
        for codec, promise in (
            ("bf16", "half the bytes; all workers have the same bits"),
            ("int8", "a quarter of the bytes, errors sent later; all workers have the same bits"),
            ("onebit", "of a worker group: its optimizer is paradis.optim.OneBitAdam"),
        )
        for overlap in ("none", "layerwise")
    ),
    *(
        Combination(mode=mode, compression="none", overlap=overlap, promise=promise)
        for mode, promise in (
            ("ssp", "one worker as in sync; N by themselves, staleness steps apart at most"),
            ("async", "one worker as in sync; N by themselves, and nobody waits for another"),
        )
        for overlap in ("none", "layerwise")  # step() waits for its own answer in any case
    ),
)
"""Whatever is not in this table is refused."""


def check_store(topology: TopologyConfig, communication: CommunicationConfig) -> None:
    """Check that a receiver has room for one shard of each worker.

    Raises:
        ConfigError: it has not.
    """
    need = communication.shard_size * topology.workers
    if need > communication.contribution_store:
        show = keys_of(CommunicationConfig)["contribution_store"].kind.show
        raise ConfigError(
            f"config refused: communication.contribution_store = "
            f"{show(communication.contribution_store)}; expected at least {show(need)}, one "
            f"communication.shard_size for each of topology.workers = "
            f"{topology.workers}; raise it or make shards smaller",
            keys=("communication.contribution_store", "topology.workers"),
        )


def as_in_training(group: WorkerGroup, training: TrainingConfig) -> WorkerGroup:
    """Return a worker group with what it does not say taken from ``training``."""
    return replace(
        group,
        mode=group.mode or training.mode,
        staleness=training.staleness if group.staleness < 0 else group.staleness,
        compression=group.compression or training.compression,
    )


def check_combination(training: TrainingConfig, group: WorkerGroup | None = None) -> None:
    """Check mode, compression and overlap, of the job or of one worker group.

    Raises:
        ConfigError: they are not in `COMBINATIONS`.
    """
    wanted = (training.mode, training.compression, training.overlap)
    if group is not None:
        wanted = (group.mode, group.compression, training.overlap)
    backed = {(each.mode, each.compression, each.overlap) for each in COMBINATIONS if each.backup}
    if training.backup_workers and wanted not in backed:
        raise ConfigError(
            f"config refused: training.backup_workers = {training.backup_workers} with mode "
            f"{wanted[0]}, compression {wanted[1]} and overlap {wanted[2]}; expected mode sync and "
            "overlap none or layerwise: a step that does without somebody is a step of all, and a "
            "late gradient would be of a version that is gone",
            keys=("training.backup_workers", "training.mode", "training.overlap"),
        )
    if wanted not in {(each.mode, each.compression, each.overlap) for each in COMBINATIONS}:
        whose = f" of the worker group {group.name}" if group is not None else ""
        where = ("topology.worker_groups",) if group is not None else ()
        raise ConfigError(
            f"config refused: mode {wanted[0]} with compression {wanted[1]} and overlap "
            f"{wanted[2]}{whose}; expected one of the table that `paradis config show` prints",
            keys=(*where, "training.mode", "training.overlap"),
        )


def check_groups(
    topology: TopologyConfig, training: TrainingConfig, communication: CommunicationConfig
) -> None:
    """Check what several worker groups do not go with.

    Raises:
        ConfigError: a setting means nothing there; the message says why.
    """
    groups = topology.worker_groups
    if len(groups) < 2:
        return
    for setting, wrong, why in (
        ("communication.rack_aggregation = on", communication.rack_aggregation == "on",
         "a rack's workers may train different parameters, so all push directly"),
        ("training.local_reduction = on", training.local_reduction == "on",
         "a host's workers may train different parameters, so all push directly"),
        ("training.early_update = true", training.early_update,
         "what others read would be an update that no commit has confirmed"),
        ("training.free_gradients = true", training.free_gradients,
         "worker 0 asks for a checkpoint at any step of the other groups"),
        (f"training.backup_workers = {training.backup_workers}", training.backup_workers > 0,
         "a group may have too few workers to do without one"),
        ("training.overlap = double_buffer", training.overlap == "double_buffer",
         "a late gradient is of values that were read for the step before"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(
                f"config refused: {setting} with several topology.worker_groups: {why}; leave it "
                "at its default",
                keys=("topology.worker_groups", setting.partition(" ")[0]),
            )


def check_relations(training: TrainingConfig, communication: CommunicationConfig) -> None:
    """Check what stands beside the table.

    Raises:
        ConfigError: two settings contradict each other; the message says why.
    """
    stale = training.mode != "sync"
    mode = f"training.mode = {training.mode}"
    early, local = "training.early_update = true", "training.local_reduction = on"
    racks, late = "communication.rack_aggregation = on", "training.overlap = double_buffer"
    own = "there each worker's gradient is an update by itself"
    free = "training.free_gradients = true"
    for first, second, wrong, why in (
        ("training.staleness_scaling = true", mode, training.staleness_scaling
         and training.mode != "async", "only async knows it"),
        ("training.on_early_finish = fail", mode, training.on_early_finish == "fail" and stale,
         own),
        (racks, mode, communication.rack_aggregation == "on" and stale, own),
        (early, mode, training.early_update and stale, own),
        (local, mode, training.local_reduction == "on" and stale, own),
        (racks, early, communication.rack_aggregation == "on" and training.early_update,
         "with early updates workers push directly to the servers"),
        (early, late, training.early_update and training.overlap == "double_buffer",
         "a late gradient is no hurry"),
        (local, early, training.local_reduction == "on" and training.early_update,
         "an owner sends updates on after step() only"),
        (local, late, training.local_reduction == "on" and training.overlap == "double_buffer",
         "an owner sends updates on from the parameters"),
        (free, mode, training.free_gradients and stale, own),
        (free, late, training.free_gradients and training.overlap == "double_buffer",
         "a late gradient is kept for a step"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(
                f"config refused: {first} with {second}: {why}; leave one of them at its default",
                keys=(first.partition(" ")[0], second.partition(" ")[0]),
            )


def check_backup(
    topology: TopologyConfig, training: TrainingConfig, communication: CommunicationConfig
) -> None:
    """Check what goes with steps that do without some workers.

    Raises:
        ConfigError: nobody would be left, or sums are made where nobody knows who counts.
    """
    backup, workers = training.backup_workers, topology.workers
    for other, wrong, why in (
        (f"topology.workers = {workers}", backup >= workers, "somebody must make a step"),
        ("communication.rack_aggregation = on", communication.rack_aggregation == "on",
         "a rack's sum may hold somebody who is too late"),
        ("training.local_reduction = on", training.local_reduction == "on",
         "a host's sum may hold somebody who is too late"),
        ("training.early_update = true", training.early_update,
         "servers would update before it is known who makes the step"),
        ("training.free_gradients = true", training.free_gradients,
         "a gradient that is dropped is given back, and it would be gone"),
    ):  # fmt: skip
        if backup and wrong:
            raise ConfigError(
                f"config refused: training.backup_workers = {backup} with {other}: {why}; leave "
                "one of them at its default",
                keys=("training.backup_workers", other.partition(" ")[0]),
            )
