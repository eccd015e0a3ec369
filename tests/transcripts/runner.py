"""Transcripts of one role: events in, effects out, to be read and reviewed as documents.

A ``*.txt`` file: ``#`` lines explain, ``role`` names the role and its numbers, ``>`` is an event,
the lines below it are its effects. ``python tests/transcripts/runner.py`` rewrites the effects.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from paradis.ids import NodeId
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.roles.rack_agent import RackAgentRole
from paradis.roles.server import ServerRole
from paradis.roles.worker import WorkerRole
from paradis.roles.worker_state import WorkerConfig
from paradis.wire import messages as msg

HERE = Path(__file__).parent
OPTIONS: list[msg.Options] = [{"lr": 0.1}]


def view(
    generation: int = 1, members: tuple[int, ...] = (0, 1), rack: bool = False,
    left: dict[int, dict[int, int]] | None = None, host: bool = False,
) -> msg.View:  # fmt: skip
    """Return a view of two workers and one server; with ``rack`` dispatcher-0 sums for both.

    With ``host`` the workers are on one host and reduce first.
    """
    return msg.View(
        generation=generation, members=members, left=left or {}, tree=((0, 1),),
        addresses={"server-0": ("x",), "dispatcher-0": ("y",)},
        racks={"r": ("dispatcher-0" if rack else "", (0, 1))},
        host_groups={"h/1": (0, 1)} if host else {},
    )  # fmt: skip


def plan(
    shards: int = 2, mode: str = "sync", staleness: int = 0, backup: int = 0, coded: int = -1,
    recompressed: bool = False,
) -> msg.Plan:  # fmt: skip
    """Return a plan of shards of one parameter each, 16 bytes, all on server-0.

    From the step ``coded`` on they travel as codes of 5 bytes.
    """
    return msg.Plan(
        generation=1, group=0, part=0, first_parameter=0, optimizer="SGD", options=OPTIONS, step=0,
        mode=mode, staleness=staleness, backup=backup, coded_from=coded,
        parameters=tuple(
            msg.ParameterSpec(name=f"w{i}", shape=(4,), dtype="float32", options_group=0)
            for i in range(shards)
        ),
        shards=tuple(
            msg.ShardPlan(
                shard=i, server="server-0", dtype="float32", length=4, options_group=0, priority=i,
                segments=(msg.Segment(i, 0, 4, 0),), codec="onebit" if coded >= 0 else "",
                code_bytes=5 if coded >= 0 else 0, recompressed=recompressed,
            )
            for i in range(shards)
        ),
    )  # fmt: skip


def commit(present: int = 0b11, **fields: Any) -> msg.StepCommit:
    """Return what ``step()`` decided; ``present`` has a bit per parameter."""
    plain = {"revisions": {}, "present": bytes([present]), "options": OPTIONS}
    return msg.StepCommit(**{**plain, **fields})


def got(source: str, message: Any, lease: int = 0) -> ev.Received:
    """Return the event of a message."""
    return ev.Received(NodeId(source), message, lease)


NAMES: dict[str, Any] = {
    "view": view, "plan": plan, "commit": commit, "got": got, "msg": msg, "ev": ev,
    "worker": lambda rank, early=False: WorkerRole(
        WorkerConfig(rank=rank, quota_bytes=64, retry_ns=1000, early_update=early)
    ),
    "server": lambda early=False: ServerRole(
        NodeId("server-0"), quota_bytes=64, warning_ns=10**12, timeout_ns=10**13,
        early_update=early,
    ),
    "agent": lambda: RackAgentRole(NodeId("dispatcher-0"), quota_bytes=64, retry_ns=1000),
}  # fmt: skip


def show(value: Any) -> str:
    """Return a struct by its name and the fields that are not at their default."""
    if isinstance(value, msg.Plan):
        return f"Plan(group={value.group}, part={value.part})"
    if isinstance(value, msg.ShardPlan):
        return f"shard {value.shard}"
    if isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        return f"({', '.join(show(v) for v in value)})"
    if isinstance(value, msgspec.Struct):
        info = zip(value.__struct_fields__, _defaults(type(value)), strict=True)
        fields = [f"{n}={show(v)}" for n, d in info if (v := getattr(value, n)) != d]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {show(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _defaults(kind: type[msgspec.Struct]) -> list[Any]:
    found = []
    for field in msgspec.structs.fields(kind):
        empty = field.default_factory
        found.append(field.default if empty is msgspec.NODEFAULT else empty())
    return found


def describe(effect: fx.Effect) -> str:
    """Return an effect as a line."""
    if isinstance(effect, fx.Send):
        payload = f" with {show(effect.payload)}" if effect.payload is not None else ""
        return f"send {effect.target} {show(effect.message)}{payload}"
    return show(effect)


def replay(text: str) -> str:
    """Return the transcript with the effects that the role gives now."""
    role: Any = None
    lines, now_ns = [], 0
    for line in text.splitlines():
        if line.startswith("role "):
            role = eval(line[5:], dict(NAMES))
            lines.append(line)
        elif line.startswith("> "):
            lines.append(line)
            now_ns += 1
            lines += [f"  {describe(e)}" for e in role.handle(eval(line[2:], dict(NAMES)), now_ns)]
            role.check()
        elif not line.startswith("  "):
            lines.append(line)
    return "\n".join(lines) + "\n"


def transcripts() -> list[Path]:
    """Return all transcript files."""
    return sorted(HERE.glob("*.txt"))


if __name__ == "__main__":
    for path in transcripts():
        path.write_text(replay(path.read_text()))
        sys.stdout.write(f"wrote {path.name}\n")
