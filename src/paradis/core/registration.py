"""Whether workers registered the same thing: parameters, optimizer and hyper-parameters.

Invariant: None means that all agree exactly; otherwise the text names ranks, parameters and both
values, in at most a screenful, and ends with what to do. Order counts: the same names in another
order are refused, for parameters are addressed by index on the data plane.

Source: none. PyTorch DDP has a like check of shapes when it wraps a model; we differ: dtype,
group, order, optimizer and options are compared too, by name and for all workers at once.

    >>> a = Registration(0, (RegisteredParameter("w", (3, 4), "float32", 0),), "SGD", [{"lr": 0.1}])
    >>> b = Registration(1, (RegisteredParameter("w", (4, 4), "float32", 0),), "SGD", [{"lr": 0.1}])
    >>> print(compare([a, b]))
    workers registered different models:
      parameter 'w' shape: worker 0 (3, 4), worker 1 (4, 4)
    build the same model and optimizer on every worker
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

LINES_MAX: Final = 10
"""Differences that are shown; the rest is counted."""

_ASPECTS: Final = ("shape", "dtype", "options_group", "trainable")
_READ: Final = ("shape", "dtype")


@dataclass(frozen=True, slots=True)
class RegisteredParameter:
    """One named tensor as a worker registered it; ``options_group`` is -1 for a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    options_group: int
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class Registration:
    """What one worker registered.

    Attributes:
        optimizer: class name.
        options: hyper-parameters per parameter group; ``params`` is ignored.
    """

    rank: int
    parameters: tuple[RegisteredParameter, ...]
    optimizer: str
    options: list[dict[str, Any]] = field(hash=False)
    compression: str = ""


def compare(
    registrations: Sequence[Registration], readers: Sequence[Registration] = ()
) -> str | None:
    """Return None if all workers registered the same, else a readable difference.

    Args:
        registrations: of the workers that train the parameters.
        readers: of those that only read them: their optimizers may be others.
    """
    ordered = sorted(registrations, key=lambda r: r.rank)
    if len(ordered) + len(readers) < 2:
        return None
    lines = _parameter_lines(ordered)
    if readers and not lines:
        lines = _parameter_lines([ordered[0], *sorted(readers, key=lambda r: r.rank)], _READ)
    lines += _line("optimizer", {r.rank: r.optimizer for r in ordered})
    lines += _line("compression", {r.rank: r.compression for r in ordered})
    lines += _option_lines({r.rank: r.options for r in ordered})
    if not lines:
        return None
    shown = [f"  {line}" for line in lines[:LINES_MAX]]
    if len(lines) > LINES_MAX:
        shown.append(f"  ... and {len(lines) - LINES_MAX} more")
    head = "workers registered different models:"
    return "\n".join([head, *shown, "build the same model and optimizer on every worker"])


def compare_options(by_rank: Mapping[int, Sequence[Mapping[str, Any]]]) -> str | None:
    """Compare the hyper-parameters that workers committed for one step.

    Args:
        by_rank: rank -> hyper-parameters per parameter group; ``params`` is ignored.

    Returns:
        None if all agree, floats to the last bit; else one line that names groups, keys, ranks.
    """
    # Equal text means equal values; only a difference is worth looking at value by value.
    if len({repr(options) for options in by_rank.values()}) < 2:
        return None
    lines = _option_lines(by_rank)
    if not lines:
        return None
    only_rates = all(line.split(": ")[0].endswith(" lr") for line in lines)
    text = "; ".join(lines[:LINES_MAX])
    if len(lines) > LINES_MAX:
        text += f"; ... and {len(lines) - LINES_MAX} more"
    what = "learning rates" if only_rates else "hyper-parameters"
    return f"{what} differ: {text}; set the same values on every worker before step()"


def _parameter_lines(
    ordered: Sequence[Registration], aspects: Sequence[str] = _ASPECTS
) -> list[str]:
    lines: list[str] = []
    by_name = [{p.name: p for p in r.parameters} for r in ordered]
    for r, own in zip(ordered, by_name, strict=True):
        if len(own) != len(r.parameters):
            lines.append(f"worker {r.rank} registers a name twice: {_first_repeated(r)!r}")
    names = list(dict.fromkeys(name for own in by_name for name in own))
    for name in names:
        holders = {
            r.rank: own[name] for r, own in zip(ordered, by_name, strict=True) if name in own
        }
        if len(holders) < len(ordered):
            missing = [r.rank for r in ordered if r.rank not in holders]
            lines.append(
                f"parameter {name!r}: registered by {_workers(list(holders))}, "
                f"not by {_workers(missing)}"
            )
        for aspect in aspects:
            values = {rank: getattr(p, aspect) for rank, p in holders.items()}
            lines += _line(f"parameter {name!r} {aspect}", values)
    return lines or _order_lines(ordered)


def _first_repeated(registration: Registration) -> str:
    seen: set[str] = set()
    for p in registration.parameters:
        if p.name in seen:
            return p.name
        seen.add(p.name)
    return ""


def _order_lines(ordered: Sequence[Registration]) -> list[str]:
    """Show, for each worker with the same names in another order, the first difference."""
    first = [p.name for p in ordered[0].parameters]
    lines = []
    for r in ordered[1:]:
        names = [p.name for p in r.parameters]
        at = next((i for i, (a, b) in enumerate(zip(first, names, strict=True)) if a != b), None)
        if at is not None:
            lines.append(
                f"order of parameters, first difference at position {at}: "
                f"worker {ordered[0].rank} {first[at]!r}, worker {r.rank} {names[at]!r}"
            )
    return lines


def _option_lines(by_rank: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[str]:
    counts = _line("number of parameter groups", {k: len(v) for k, v in by_rank.items()})
    if counts:
        return counts
    lines: list[str] = []
    for group in range(max((len(options) for options in by_rank.values()), default=0)):
        keys = dict.fromkeys(key for options in by_rank.values() for key in options[group])
        for key in keys:
            if key != "params":
                values = {rank: o[group].get(key, _ABSENT) for rank, o in by_rank.items()}
                lines += _line(f"group {group} {key}", values)
    return lines


class _Absent:
    """Stands for a key that a worker did not give."""

    def __repr__(self) -> str:
        return "not given"


_ABSENT: Final = _Absent()


def _line(what: str, values: Mapping[int, object]) -> list[str]:
    """Return no line if all ranks have the same value, else one that names them by value."""
    ranks: dict[Hashable, list[int]] = {}
    shown: dict[Hashable, str] = {}
    for rank in sorted(values):
        exact = _exact(values[rank])
        ranks.setdefault(exact, []).append(rank)
        value = values[rank]
        shown.setdefault(exact, value if isinstance(value, str) else repr(value))
    if len(ranks) < 2:
        return []
    return [f"{what}: " + ", ".join(f"{_workers(r)} {shown[exact]}" for exact, r in ranks.items())]


def _exact(value: object) -> Hashable:
    """Return a key that is equal for two values exactly when torch would compute the same."""
    if isinstance(value, bool) or value is None:
        return ("constant", value)
    if isinstance(value, int | float):
        if value != value:
            return ("number", "nan")
        if value == 0:
            return ("number", math.copysign(1.0, value), 0)
        return ("number", value)
    if isinstance(value, list | tuple):
        return ("sequence", *(_exact(v) for v in value))
    return (type(value).__name__, repr(value))


def _workers(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order, runs shortened: ``workers 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'worker' if len(ranks) == 1 else 'workers'} {text}"
