"""What messages are made of: settings of a step, parameters, shards, pieces of checkpoints."""

from __future__ import annotations

import msgspec

Scalar = bool | int | float | str | None
Options = dict[str, Scalar | list[float]]
"""Hyper-parameters of one parameter group: every key of the torch group except ``params``."""


class ParameterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One named tensor of a model, as registered.

    Attributes:
        options_group: index of its parameter group; -1 for a buffer.
        trainable: ``requires_grad`` when registered.
        strides: of a parameter that is not contiguous, in elements; its pieces follow memory order.
        aliases: further names of a tied parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    options_group: int
    trainable: bool = True
    strides: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()


class Segment(msgspec.Struct, frozen=True):
    """A piece of one parameter inside a shard; all numbers in elements.

    Attributes:
        parameter: index within the group, over all parts in order.
        offset: first element, in the parameter's memory order.
        start: first element inside the shard.
    """

    parameter: int
    offset: int
    length: int
    start: int


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One shard: who owns it, what it is made of; ``priority`` is its place in admission order.

    Attributes:
        codec: how gradients and updates travel once its group is coded; empty: always in full.
        code_bytes: bytes of such a gradient or update, without header.
        recompressed: rack agents make one code of their workers' codes, else forward them.
    """

    shard: int
    server: str
    dtype: str
    length: int
    segments: tuple[Segment, ...]
    options_group: int
    priority: int
    codec: str = ""
    code_bytes: int = 0
    recompressed: bool = False

    @property
    def is_buffer(self) -> bool:
        """Whether the shard holds module buffers, which no optimizer updates."""
        return self.options_group < 0


class StepCommit(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's ``step()`` decided.

    Attributes:
        revisions: shard -> revision that counts, where it is not 0.
        present: bit i (little-endian) tells whether parameter i of the group has a gradient.
        options: hyper-parameters per parameter group, the one source of truth for this step.
        found_inf: this worker's GradScaler saw an overflow: nobody applies the step.
        clip: factor for the mean gradient; 1.0 when not clipped.
        coded_from: what the leader has told this worker of the first coded step, -1: nothing.
        coded_until: likewise of the first one after it in full.
        changed: shard -> digest per segment, where the script changed values since the last update.
        order: shards in the order in which backward yielded them, from the lowest rank, when it has
            learnt it; otherwise empty.
        delay: updates that the parameters lacked when this gradient was computed, 0 or 1.
    """

    revisions: dict[int, int]
    present: bytes
    options: list[Options]
    found_inf: bool = False
    clip: float = 1.0
    changed: dict[int, list[int]] = {}
    order: tuple[int, ...] = ()
    coded_from: int = -1
    coded_until: int = -1
    delay: int = 0


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in a checkpoint file: a run of elements of one parameter.

    Attributes:
        key: ``value`` or the name of an optimizer state.
        tensor: name inside the file.
        checksum: xxh3_64 of the raw bytes, as 16 hex digits.
    """

    parameter: str
    key: str
    offset: int
    length: int
    dtype: str
    file: str
    tensor: str
    checksum: str
