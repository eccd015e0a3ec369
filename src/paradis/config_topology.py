"""The topology section: how many nodes of each role, where, and how their sums are grouped.

Invariant: lists and counts agree: `derived_counts` fills counts in from lists, and a section whose
counts contradict its lists cannot be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paradis.config_keys import (
    ADDRESSES,
    BOOL,
    COUNT,
    Kind,
    check_values,
    key,
    listed,
    parse_address,
    parse_fields,
    quote,
)
from paradis.core.worker_groups import WorkerGroup, encode
from paradis.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherNode:
    """Where one dispatcher listens and which rack it serves."""

    address: str
    rack: str


MODES = ("", "sync", "ssp", "async")
COMPRESSIONS = ("", "none", "bf16", "int8", "onebit")
"""Of a worker group; ``onebit`` says that its optimizer is `paradis.optim.OneBitAdam`."""


def _parse_dispatchers(value: object) -> tuple[DispatcherNode, ...]:
    def one(item: object) -> DispatcherNode:
        found = parse_fields(item, ("address", "rack"), ())
        if not isinstance(found["rack"], str) or not found["rack"]:
            raise ValueError("a rack name that is text")
        return DispatcherNode(address=parse_address(found["address"]), rack=found["rack"])

    return listed(value, one, "mappings {address: host:port, rack: name}")


def _show_dispatchers(value: tuple[DispatcherNode, ...]) -> str:
    shown = (f"{{address: {quote(n.address)}, rack: {quote(n.rack)}}}" for n in value)
    return f"[{', '.join(shown)}]"


def _parse_groups(value: object) -> tuple[WorkerGroup, ...]:
    if not isinstance(value, Mapping):
        raise ValueError(f"a mapping of group names to {{{', '.join(_GROUP_FIELDS)}}}")
    return tuple(_parse_group(str(name), item) for name, item in value.items())


_GROUP_FIELDS = ("workers", "parameters", "mode", "staleness", "compression")


def _parse_group(name: str, item: object) -> WorkerGroup:
    try:
        found = dict(parse_fields(item, (), _GROUP_FIELDS))
    except ValueError as error:
        raise ValueError(f"for the group {name} {error}") from error
    patterns = found.pop("parameters", "*")
    patterns = patterns if isinstance(patterns, list) else [patterns]
    if not patterns or not all(isinstance(each, str) and each for each in patterns):
        raise ValueError(f"a pattern or a list of them for the group {name}, got {patterns!r}")
    for field, value in found.items():
        number = field in ("workers", "staleness")
        if number and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            what = "a number of workers" if field == "workers" else "a number of updates"
            raise ValueError(f"{what} for the group {name}, got {value!r}")
        if not number and not isinstance(value, str):
            raise ValueError(f"text for {field} of the group {name}, got {value!r}")
    return WorkerGroup(name=name, parameters=tuple(patterns), **found)


def _show_groups(value: tuple[WorkerGroup, ...]) -> str:
    return f"{{{', '.join(f'{quote(g.name)}: {{{_show_group(g)}}}' for g in value)}}}"


def _show_group(group: WorkerGroup) -> str:
    """What is left out means what ``training`` says."""
    said = [f"workers: {group.workers}"]
    said += [f"parameters: [{', '.join(map(quote, group.parameters))}]"]
    said += [f"mode: {quote(group.mode)}"] if group.mode else []
    said += [f"staleness: {group.staleness}"] if group.staleness >= 0 else []
    said += [f"compression: {quote(group.compression)}"] if group.compression else []
    return ", ".join(said)


def _parse_reduction(value: object) -> str | tuple[tuple[int, ...], ...]:
    if value == "auto":
        return "auto"
    try:
        return listed(value, lambda item: listed(item, _parse_rank, "ranks"), "lists of ranks")
    except ValueError as error:
        raise ValueError('"auto" or lists of ranks such as [[0, 1], [2, 3]]') from error


def _parse_rank(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("a rank")
    return value


def _show_reduction(value: str | tuple[tuple[int, ...], ...]) -> str:
    return quote(value) if isinstance(value, str) else str([list(group) for group in value])


_DISPATCHERS = Kind(unit="list", parse=_parse_dispatchers, show=_show_dispatchers, structured=True)
_GROUPS = Kind(
    unit="mapping", parse=_parse_groups, show=_show_groups, structured=True, share=encode
)
_REDUCTION = Kind(
    unit="auto or lists", parse=_parse_reduction, show=_show_reduction, structured=True
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyConfig:
    """How many nodes of each role, and where they are."""

    SECTION: ClassVar[str] = "topology"

    workers: int = key(
        1, COUNT, "Worker processes. 1 behaves as plain PyTorch does, bit for bit.", least=1
    )
    servers: int = key(
        1,
        COUNT,
        "Server processes, among which parameters are spread. 1 is enough for one host, 0 where "
        "topology.colocated starts others.",
    )
    colocated: bool = key(
        False,
        BOOL,
        "One more server beside each worker, on its host; topology.servers are dedicated ones. "
        "Each kind's share is such that the busiest link is lightest, and load_epsilon is at most "
        "0.02. Off, as such servers take cores and memory from the workers.",
    )
    dispatchers: int = key(
        1, COUNT, "Dispatcher processes. The first one leads, so there is at least one.", least=1
    )
    racks: int = key(
        1,
        COUNT,
        "Racks the workers are dealt to. 1, as hosts beside each other need none.",
        least=1,
    )
    ps_nodes: tuple[str, ...] = key(
        (),
        ADDRESSES,
        "Where servers listen, co-located ones left out, such as [host-a:7000, host-b:7000]. "
        "Empty: on this host, with ports from the system.",
    )
    disp_nodes: tuple[DispatcherNode, ...] = key(
        (),
        _DISPATCHERS,
        "Where dispatchers listen and which rack each serves, such as "
        "[{address: host-c:7100, rack: r0}]. Empty: on this host.",
    )
    worker_groups: tuple[WorkerGroup, ...] = key(
        (),
        _GROUPS,
        "Groups of workers that train disjoint parameters and read the others', such as {backbone: "
        '{workers: 6, parameters: "backbone.*"}, head: {workers: 2, parameters: "head.*", mode: '
        "ssp, staleness: 2}}. What a group does not say is as in training. Empty: all workers "
        "train everything.",
        shared="worker_groups",
    )
    reduction_groups: str | tuple[tuple[int, ...], ...] = key(
        "auto",
        _REDUCTION,
        "Ranks whose gradients are summed first, such as [[0, 1], [2, 3]]; this fixes the "
        "rounding. auto: one group per rack.",
    )

    def __post_init__(self) -> None:
        """Check values and relations.

        Raises:
            ConfigError: a value or a relation is illegal.
        """
        check_values(self)
        self._check_servers()
        self._check_counts()
        self._check_groups()
        self._check_reduction()

    @property
    def all_servers(self) -> int:
        """Dedicated and co-located servers."""
        return self.servers + (self.workers if self.colocated else 0)

    def _check_servers(self) -> None:
        expected = ""
        if self.all_servers == 0:
            expected = "at least 1 without topology.colocated"
        elif self.colocated and self.workers == 1 and self.servers:
            expected = (
                "0 with topology.colocated and one worker: the server beside it owns everything "
                "and nothing has to travel"
            )
        elif self.colocated and self.servers >= self.workers:
            expected = (
                f"fewer than topology.workers = {self.workers} with topology.colocated: from there "
                "on dedicated servers alone are already optimal and co-located ones would own "
                "nothing"
            )
        if expected:
            _refuse("servers", self.servers, expected, "colocated")

    def _check_counts(self) -> None:
        racks = {node.rack for node in self.disp_nodes}
        addresses = [*self.ps_nodes, *(node.address for node in self.disp_nodes)]
        if self.racks > self.workers:
            _refuse("racks", self.racks, f"at most topology.workers = {self.workers}")
        if self.ps_nodes and len(self.ps_nodes) != self.servers:
            _refuse("servers", self.servers, f"{len(self.ps_nodes)}, as many as topology.ps_nodes")
        if self.disp_nodes and len(self.disp_nodes) != self.dispatchers:
            expected = f"{len(self.disp_nodes)}, as many as topology.disp_nodes"
            _refuse("dispatchers", self.dispatchers, expected)
        if len(racks) > self.racks:
            _refuse("racks", self.racks, f"at least {len(racks)}, as topology.disp_nodes names")
        twice = sorted({each for each in addresses if addresses.count(each) > 1})
        if twice:
            _refuse("ps_nodes", twice[0], "each address once in ps_nodes and disp_nodes")

    def _check_groups(self) -> None:
        groups = self.worker_groups
        for group in groups:
            where = f"worker_groups.{group.name}"
            if group.mode not in MODES:
                _refuse(f"{where}.mode", group.mode, " or ".join(MODES[1:]))
            if group.compression not in COMPRESSIONS:
                _refuse(f"{where}.compression", group.compression, " or ".join(COMPRESSIONS[1:]))
            if not group.workers and len(groups) > 1:
                _refuse(f"{where}.workers", 0, "at least 1, as there are several groups")
        if len(groups) == 1 and groups[0].workers not in (0, self.workers):
            where = f"worker_groups.{groups[0].name}.workers"
            _refuse(where, groups[0].workers, f"topology.workers = {self.workers}")
        if len(groups) > 1 and (total := sum(g.workers for g in groups)) != self.workers:
            _refuse("workers", self.workers, f"{total}, the sum of the groups", "worker_groups")

    def _check_reduction(self) -> None:
        groups = self.reduction_groups
        if isinstance(groups, str):
            if groups != "auto":
                _refuse("reduction_groups", groups, '"auto" or lists of ranks')
            return
        ranks = sorted(rank for group in groups for rank in group)
        if ranks != list(range(self.workers)) or not all(groups):
            expected = f"each rank from 0 to {self.workers - 1} in exactly one group"
            _refuse("reduction_groups", _show_reduction(groups), expected)


def _refuse(name: str, got: object, expected: str, *also: str) -> None:
    keys = (name.partition(".")[0], *also)
    raise ConfigError(
        f"config refused: topology.{name} = {got}; expected {expected}; correct one of them",
        keys=tuple(f"topology.{each}" for each in keys),
    )


def derived_counts(values: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Return the counts that lists imply: key -> (count, name of the list).

    Args:
        values: the keys of the section that were set, parsed; counts set there are left alone.
    """
    racks = {node.rack for node in values.get("disp_nodes", ())}
    workers = sum(group.workers for group in values.get("worker_groups", ()))
    implied = {
        "workers": (workers, "worker_groups"),
        "servers": (len(values.get("ps_nodes", ())), "ps_nodes"),
        "dispatchers": (len(values.get("disp_nodes", ())), "disp_nodes"),
        "racks": (len(racks), "disp_nodes"),
    }
    return {name: pair for name, pair in implied.items() if pair[0] and name not in values}
