"""The section ``training`` of a job's configuration: what a step means and what is refused.

Invariant: a section that exists is legal in itself; relations to others are those of
`paradis.config_relations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paradis.config_keys import BOOL, COUNT, WORD, check_values, key


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """What a step means and what is refused."""

    SECTION: ClassVar[str] = "training"

    mode: str = key(
        "sync",
        WORD,
        "When an update may use a gradient. sync: all workers, same step; equal to plain PyTorch. "
        "ssp: each by itself, nobody more than staleness steps ahead. async: nobody waits.",
        choices="sync ssp async",
        shared="mode",
    )
    staleness: int = key(
        1,
        COUNT,
        "Of mode ssp: how many steps a worker may be ahead of the slowest. 1 hides one slow step; "
        "0 is sync.",
        shared="staleness",
    )
    staleness_scaling: bool = key(
        False,
        BOOL,
        "Of mode async: divide the learning rate of each update by its staleness, not by the "
        "number of workers. Off, as the same rate for all is easier to reason about.",
        shared="staleness_scaling",
    )
    backup_workers: int = key(
        0,
        COUNT,
        "Of mode sync: a step is the mean of the first workers that finish it; so many are not "
        "waited for, their gradients dropped. 0, for what is dropped was computed for nothing.",
        shared="backup_workers",
    )
    overlap: str = key(
        "layerwise",
        WORD,
        "What may run before an update is in. layerwise: step() returns at once, and whoever reads "
        "a parameter waits for that one: less waiting, the same bits. none: step() waits for all. "
        "double_buffer: each gradient is applied one step late, while the next one is computed.",
        choices="layerwise none double_buffer",
        shared="overlap",
    )
    watch_views: bool = key(
        True,
        BOOL,
        "With layerwise: where something else holds a parameter's or a gradient's memory, step() "
        "waits for that parameter, for it could be used unseen. false: the script does not use it.",
        shared="watch_views",
    )
    delay_warmup_steps: int = key(
        1000,
        COUNT,
        "Steps without delay before overlap double_buffer begins, over all runs: a usual warm-up "
        "of the learning rate, in which a late gradient does most harm.",
        shared="delay_warmup_steps",
    )
    compression: str = key(
        "none",
        WORD,
        "How gradients and updates travel. bf16: half the bytes. int8: a quarter, its errors are "
        "kept and sent later. Optimizers of paradis.optim bring their own code.",
        choices="none bf16 int8",
        shared="compression",
    )
    compression_benefit: str = key(
        "measured",
        WORD,
        "Whether compression must show that it helps. measured: after some steps of each kind the "
        "dispatcher turns it off where it makes steps slower, and says so. assumed: it stays as "
        "set, so that results do not depend on the speed of links.",
        choices="measured assumed",
        shared="compression_benefit",
    )
    compression_threshold: int = key(
        4096,
        COUNT,
        "Elements from which a tensor is compressed: below, headers outweigh what is saved.",
        least=1,
        shared="compression_elements_min",
    )
    local_reduction: str = key(
        "off",
        WORD,
        "Whether the workers of a host sum their gradients before anything leaves it. auto: where "
        "a job has several hosts. off: on one host it only adds a hop. The same bits.",
        choices="auto on off",
        shared="local_reduction",
    )
    on_early_finish: str = key(
        "continue",
        WORD,
        "When a worker runs out of batches. continue: the mean over those left, announced.",
        choices="continue fail",
        shared="on_early_finish",
    )
    early_update: bool = key(
        False,
        BOOL,
        "Update while backward runs. Hides the way down on a slow link; a script that changes "
        "gradients before step() ends the job, hence false.",
        shared="early_update",
    )
    free_gradients: bool = key(
        False,
        BOOL,
        "Let gradients go in backward once OneBitAdam has frozen: p.grad is None then, a worker "
        "holds 4 bytes an element less. Nothing can be undone, and save_checkpoint is for all "
        "workers to call, hence false.",
        shared="free_gradients",
    )
    detect_value_changes: bool = key(
        True,
        BOOL,
        "Notice parameters that the script changed between steps: lost silently otherwise.",
        shared="detect_value_changes",
    )
    debug_gradients: bool = key(
        False,
        BOOL,
        "Hash gradients to catch changes that nothing else shows: costs a pass over memory.",
        shared="debug_gradients",
    )
    check_finite: bool = key(
        True,
        BOOL,
        "Refuse a NaN or infinity in a gradient before it spoils the model.",
        shared="check_finite",
    )

    def __post_init__(self) -> None:
        """Check values.

        Raises:
            ConfigError: a value is illegal.
        """
        check_values(self)
