"""Which worker belongs to which worker group, and which group trains which parameter.

Groups take consecutive ranks in the order in which the configuration names them. Invariant: every
rank is in exactly one group, and every parameter is trained by exactly one, or is refused by name.

Source: none. Patterns are those of the shell, as `fnmatch.fnmatchcase` reads them.

    >>> groups = (WorkerGroup(name="backbone", workers=2, parameters=("backbone.*",)),
    ...           WorkerGroup(name="head", workers=1, parameters=("head.*",)))
    >>> ranks_of(groups, 0), ranks_of(groups, 1)
    ((0, 1), (2,))
    >>> assign({"backbone.weight": (), "head.bias": ()}, groups)
    {'backbone.weight': 0, 'head.bias': 1}
    >>> decode(encode(groups), 3) == groups
    True
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase

from paradis.errors import ConfigError

_SHOWN_MAX = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """Workers that train the same parameters in the same way.

    Attributes:
        workers: how many; 0: all of the job, where there is one group.
        parameters: patterns over parameter names.
        mode: ``sync``, ``ssp`` or ``async``; empty: that of ``training.mode``.
        staleness: of ``ssp``: steps that a worker may be ahead of the slowest one. For readers in
            other groups: updates that they may miss. -1: that of ``training.staleness``.
        compression: how gradients and updates travel; empty: as ``training.compression`` says.
    """

    name: str
    workers: int = 0
    parameters: tuple[str, ...] = ("*",)
    mode: str = ""
    staleness: int = -1
    compression: str = ""

    def matches(self, name: str) -> bool:
        """Whether the group trains a parameter of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)


def encode(groups: Sequence[WorkerGroup]) -> str:
    """Return the groups as one line of JSON, as settings travel; empty for none."""
    return json.dumps([asdict(g) for g in groups], separators=(",", ":")) if groups else ""


def decode(text: str, world_size: int) -> tuple[WorkerGroup, ...]:
    """Return the groups that a line of JSON names, with their numbers of workers.

    Raises:
        ConfigError: the workers of the groups are not those of the job.
    """
    groups = [
        WorkerGroup(**{**each, "parameters": tuple(each["parameters"])})
        for each in (json.loads(text) if text else ())
    ]
    if len(groups) == 1 and not groups[0].workers:
        groups = [replace(groups[0], workers=world_size)]
    total = sum(g.workers for g in groups)
    if groups and total != world_size:
        raise ConfigError(
            f"worker groups refused: expected {total} workers, the sum over "
            f"{', '.join(f'{g.name} ({g.workers})' for g in groups)}, got {world_size}; start as "
            "many, or correct topology.worker_groups"
        )
    return tuple(groups)


def ranks_of(groups: Sequence[WorkerGroup], index: int) -> tuple[int, ...]:
    """Return the ranks of a group, ascending."""
    first = sum(g.workers for g in groups[:index])
    return tuple(range(first, first + groups[index].workers))


def group_of(groups: Sequence[WorkerGroup], rank: int) -> int:
    """Return the index of a rank's group."""
    return next(i for i in range(len(groups)) if rank in ranks_of(groups, i))


@dataclass(frozen=True, slots=True)
class Membership:
    """Where one worker belongs.

    Attributes:
        groups: all worker groups of the job, if it has any.
        index: of this worker's group among them; 0 without groups.
        own: this worker's group; one without a name if the job has none.
        ranks: of this worker's group, ascending.
    """

    groups: tuple[WorkerGroup, ...]
    index: int
    own: WorkerGroup
    ranks: tuple[int, ...]


def membership(text: str, rank: int, world_size: int, *, wanted: str = "") -> Membership:
    """Return where a worker belongs.

    Args:
        text: the groups, as `encode` writes them.
        rank: of the worker.
        world_size: workers of the job.
        wanted: name of the group that the worker was started for; empty: any.

    Raises:
        ConfigError: the rank is in another group than the wanted one, or the groups do not fit.
    """
    groups = decode(text, world_size)
    if groups:
        index = group_of(groups, rank)
        found = Membership(groups, index, groups[index], ranks_of(groups, index))
    else:
        everybody = WorkerGroup(name="", workers=world_size)
        found = Membership((), 0, everybody, tuple(range(world_size)))
    if wanted not in ("", found.own.name):
        spans = ", ".join(f"{g.name} {list(ranks_of(groups, i))}" for i, g in enumerate(groups))
        raise ConfigError(
            f"PARADIS_WORKER_GROUP = {wanted!r} refused on worker {rank}: expected "
            f"{found.own.name!r}, as groups take consecutive ranks ({spans or 'there are none'}); "
            "give the worker another RANK, or unset it"
        )
    return found


def assign(
    parameters: Mapping[str, Sequence[str]], groups: Sequence[WorkerGroup]
) -> dict[str, int]:
    """Return for each parameter the index of the group that trains it.

    Args:
        parameters: name -> further names of a tied parameter.
        groups: all groups of the job.

    Raises:
        ConfigError: a parameter matches no group, or several; or a group has none.
    """
    found: dict[str, int] = {}
    wrong: list[str] = []
    for name, aliases in parameters.items():
        matching = [i for i, g in enumerate(groups) if any(map(g.matches, (name, *aliases)))]
        if len(matching) == 1:
            found[name] = matching[0]
        else:
            told = f" (tied to {', '.join(aliases)})" if aliases else ""
            which = " and ".join(groups[i].name for i in matching) or "no group"
            wrong.append(f"{name}{told} matches {which}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN_MAX} more" if len(wrong) > _SHOWN_MAX else ""
        raise ConfigError(
            f"worker groups refused: {'; '.join(wrong[:_SHOWN_MAX])}{more}; expected exactly one "
            "group for each parameter; correct the patterns in topology.worker_groups"
        )
    idle = [g.name for i, g in enumerate(groups) if i not in found.values()]
    if idle:
        raise ConfigError(
            f"worker groups refused: no parameter matches {', '.join(idle)}; names begin as in "
            f"{next(iter(parameters), '')}; correct the patterns in topology.worker_groups"
        )
    return found
