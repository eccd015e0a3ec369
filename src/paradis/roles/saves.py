"""Checkpoints in the making, as the leader sees them: which servers have written their part.

Invariant: a manifest is written only when every server that owns a shard of the group has written
its part of the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paradis.roles import effects as fx
from paradis.wire import messages as msg


@dataclass(slots=True)
class Save:
    """One checkpoint; parts may come before its info, for they travel on other streams.

    Attributes:
        plans: those of its group when the info came. Who asked knew of no later one: it registers
            what it adds on the same stream, and waits for the plan.
    """

    info: msg.CheckpointInfo | None = None
    plans: tuple[msg.Plan, ...] = ()
    parts: dict[str, msg.Saved] = field(default_factory=dict)
    failed: str = ""


class Saves:
    """All checkpoints of the job. Bounded by the number of checkpoints asked for."""

    def __init__(self) -> None:
        self._open: dict[str, Save] = {}
        self._closed: dict[str, msg.CheckpointDone] = {}

    def __bool__(self) -> bool:
        """Whether a checkpoint is not complete."""
        return bool(self._open)

    def note(
        self, message: msg.CheckpointInfo | msg.Saved | msg.SaveFailed, plans: Sequence[msg.Plan]
    ) -> fx.WriteManifest | msg.CheckpointDone | None:
        """Take a message in.

        Args:
            message: from a worker or a server.
            plans: all plans of the job.

        Returns:
            The manifest to write if that was the last part, the bad news if a server failed.
        """
        name = message.checkpoint
        if name in self._closed:  # asked for again at the same step: it is there, or failed
            return self._closed[name] if isinstance(message, msg.CheckpointInfo) else None
        save = self._open.setdefault(name, Save())
        if isinstance(message, msg.CheckpointInfo):
            if save.info is None:
                save.info = message
                save.plans = tuple(p for p in plans if p.group == message.group)
        elif isinstance(message, msg.SaveFailed):
            save.failed = save.failed or f"{message.node}: {message.text}"
        else:
            save.parts[message.node] = message
        if save.info is None:
            return None
        if save.failed:
            return self.close(name, "", save.failed)
        owners = sorted({s.server for p in save.plans for s in p.shards})
        if not all(o in save.parts for o in owners):
            return None
        return fx.WriteManifest(save.info, save.plans, tuple(save.parts[o] for o in owners))

    def close(self, name: str, path: str, error: str) -> msg.CheckpointDone | None:
        """The manifest is written, or never will be; None if that was known."""
        save = self._open.pop(name, None)
        if save is None or save.info is None:
            return None
        done = msg.CheckpointDone(checkpoint=name, path=path, step=save.info.step, error=error)
        self._closed[name] = done
        return done
