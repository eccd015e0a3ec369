"""Which tensors travel as codes, and how many bytes a code has: closed forms, without the codecs.

Whoever plans and whoever bounds memory needs lengths, not arithmetic. A test compares them with
what the codecs of `paradis.numerics.codecs` really write.

    >>> code_bytes("onebit", 1_000_000)
    128908
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paradis.errors import ConfigError

SIGN_BLOCK: Final = 1024
"""Elements that share a scale in a sign code."""

INT8_BLOCK: Final = 256
"""Elements that share a scale in a byte code."""

BLOCK_ELEMENTS: Final = 1024
"""Tensors that travel as codes are cut at multiples of this: of the block of every codec."""

_SCALE_BYTES: Final = 4


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


_BYTES: Final[Mapping[str, Callable[[int], int]]] = {
    "bf16": lambda n: 2 * n,
    "int8": lambda n: _blocks(n, INT8_BLOCK) * _SCALE_BYTES + n,
    "onebit": lambda n: _blocks(n, SIGN_BLOCK) * _SCALE_BYTES + (n + 7) // 8,
    "onebit-tensor": lambda n: min(n, 1) * _SCALE_BYTES + (n + 7) // 8,
    "lion": lambda n: 1 + (n + 7) // 8,
}

NUMBERS: Final[Mapping[str, int]] = {
    "": 0, "bf16": 1, "int8": 2, "onebit": 3, "onebit-tensor": 4, "lion": 5,
}  # fmt: skip
"""Number on the wire of each codec; never given to another one. Empty: in full."""


def needs_all_codes(*, mode: str, backup_workers: int) -> bool:
    """Whether a committed step ends only with the gradients of all workers.

    Then a worker may commit before its codes are made: they are waited for, not left out.
    """
    return mode == "sync" and not backup_workers


def recompresses(codec: str) -> bool:
    """Whether a rack agent can make one code of several: those of 1-bit Adam.

    A sum of bytes (int8) has an error memory of each worker's gradient, which it would have to hand
    back when steps travel in full again; votes (Lion) would be counted twice.
    """
    return codec.startswith("onebit")


def pieces_of_whole(shards: Iterable[tuple[str, Sequence[int]]]) -> dict[int, int]:
    """Return parameter -> pieces, of those that must be whole and are cut: one scale per tensor.

    Args:
        shards: of each its codec, and the parameter of each of its segments.
    """
    pieces: dict[int, int] = {}
    for codec, parameters in shards:
        for parameter in parameters if codec == "onebit-tensor" else ():
            pieces[parameter] = pieces.get(parameter, 0) + 1
    return {parameter: count for parameter, count in pieces.items() if count > 1}


def code_bytes(codec: str, length: int) -> int:
    """Return the bytes of the code of ``length`` elements.

    Raises:
        ConfigError: unknown codec.
    """
    try:
        return _BYTES[codec](length)
    except KeyError:
        raise ConfigError(
            f"codec {codec!r} is unknown; expected one of {', '.join(sorted(_BYTES))}"
        ) from None


@dataclass(frozen=True, slots=True)
class CodedSteps:
    """Which steps of a group travel as codes: those of one period, the last one.

    A period that comes after another begins after the other's end. So both numbers only grow.

    Attributes:
        begin: first step of the period; -1: there is none.
        end: first step after it that travels in full; below ``begin``: none yet.
    """

    begin: int = -1
    end: int = -1

    def __contains__(self, step: int) -> bool:
        """Whether a step, of the period or just before or after it, travels as codes."""
        return 0 <= self.begin <= step and not self.begin < self.end <= step

    @property
    def open(self) -> bool:
        """Whether the period has begun, or will at a known step, and its end is not known."""
        return self.begin > self.end

    def later(self, other: CodedSteps) -> CodedSteps:
        """Return the later of two states of one group, whichever was heard of first."""
        return CodedSteps(max(self.begin, other.begin), max(self.end, other.end))

    def agreed(self, told: Iterable[CodedSteps], step: int) -> CodedSteps:
        """Return what holds after a step, as all members have said what the leader told them.

        The group changes when all have been told the same: with the step they were told, or if that
        is over, with the next one. A change that is still to come must come first, for these two
        numbers must go on telling how the present step travels. Who has been told what holds
        already, or nothing, changes nothing.

            >>> CodedSteps(0).agreed([CodedSteps(0, 7), CodedSteps(0, 7)], 9)
            CodedSteps(begin=0, end=10)

        Args:
            told: of each member of the step, from its commit.
            step: that all have committed.
        """
        said = set(told)
        if len(said) != 1 or max(self.begin, self.end) > step:
            return self
        (wish,) = said
        if wish == CodedSteps() or wish.open == self.open:
            return self
        if wish.open:
            return CodedSteps(max(wish.begin, step + 1), self.end)
        return CodedSteps(self.begin, max(wish.end, step + 1))


def first_coded_step(fixed: int | None, *, done: int, frozen: bool) -> int:
    """Return the first step of a run of 1-bit Adam that travels as codes; -1: not known yet.

    Args:
        fixed: steps before the freeze, over all runs, as the user gave it; None: to be decided.
        done: steps behind the checkpoint that the run begins with.
        frozen: the variance was frozen in it already.
    """
    if frozen:
        return 0
    return -1 if fixed is None else max(0, fixed - done)


def choose_codec(
    compression: str, optimizer: str, dtype: str, numel: int, *, threshold: int, scale: str = "l1"
) -> str:
    """Return how a parameter travels; empty: in full.

    Args:
        compression: what the configuration asks for, ``none`` or a codec's name.
        optimizer: class name; some bring their own code.
        dtype: name without ``torch.``; only float32 is coded.
        numel: elements.
        threshold: tensors with fewer elements travel in full: scales and headers would outweigh
            what is saved, and norms and biases are spiky. The signs of Lion are all that its
            servers understand, so they know no such bound.
        scale: of 1-bit Adam: ``l1`` per block, or ``l2`` per tensor.
    """
    if optimizer == "DistributedLion":
        return "lion" if numel else ""
    if dtype != "float32" or numel < max(1, threshold):
        return ""
    if optimizer == "OneBitAdam":
        return "onebit" if scale == "l1" else "onebit-tensor"
    return "" if compression == "none" else compression
