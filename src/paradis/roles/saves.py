"""Checkpoints in the making, as the leader sees them: which nodes have written their part.

Invariant: a manifest is written only when every server that owns a shard of the group has written
its part of the same checkpoint, and every worker that has one and has not left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paradis.ids import NodeId, index_of, role_of, worker_id
from paradis.roles import effects as fx
from paradis.wire import messages as msg


@dataclass(slots=True)
class Save:
    """One checkpoint; parts may come before its info, for they travel on other streams.

    Attributes:
        uncopied: ranks whose part is not copied yet; worker 0 waits for it.
        writing: its manifest is being written; once, for two would be in each other's way.
        plans: those of its group when the info came. Who asked knew of no later one: it registers
            what it adds on the same stream, and waits for the plan.
    """

    info: msg.CheckpointInfo | None = None
    plans: tuple[msg.Plan, ...] = ()
    parts: dict[str, msg.Saved] = field(default_factory=dict)
    uncopied: dict[int, None] = field(default_factory=dict)
    failed: str = ""
    writing: bool = False


class Saves:
    """All checkpoints of the job. Bounded by the number of checkpoints asked for."""

    def __init__(self) -> None:
        self._open: dict[str, Save] = {}
        self._closed: dict[str, msg.CheckpointDone] = {}
        self._left: dict[str, None] = {}
        self._written: dict[str, dict[str, None]] = {}

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
        return self._complete(save)

    def _complete(self, save: Save) -> fx.WriteManifest | None:
        assert save.info is not None
        owners = sorted({s.server for p in save.plans for s in p.shards})
        workers = [worker_id(r) for r in save.info.workers]
        awaited = [*owners, *(w for w in workers if w not in self._left)]
        if save.writing or not all(o in save.parts for o in awaited):
            return None
        save.writing = True
        parts = tuple(save.parts[o] for o in (*owners, *workers) if o in save.parts)
        return fx.WriteManifest(save.info, save.plans, parts)

    def ask_workers(self, info: msg.CheckpointInfo) -> list[tuple[NodeId, msg.ControlMessage]]:
        """Return what to tell whom so that workers copy their parts; after `note`."""
        save = self._open.get(info.checkpoint)
        ask = msg.CopyMemories(checkpoint=info.checkpoint, group=info.group, step=info.version)
        told: list[tuple[NodeId, msg.ControlMessage]] = []
        for rank in info.workers:
            if worker_id(rank) in self._left:
                told.append((worker_id(0), _copied(rank, info)))
            else:
                told.append((worker_id(rank), ask))
                if save is not None:
                    save.uncopied[rank] = None
        return told

    def copied(self, message: msg.MemoriesCopied) -> None:
        """A worker's part is copied."""
        if message.checkpoint in self._open:
            self._open[message.checkpoint].uncopied.pop(message.rank, None)

    def implied(self, saved: msg.Saved) -> msg.MemoriesCopied | None:
        """Return what worker 0 must hear: a worker's part that is written has been copied.

        The worker may have ended before it could say so.
        """
        save = self._open.get(saved.checkpoint)
        node = NodeId(saved.node)
        if save is None or save.info is None or role_of(node) != "worker":
            return None
        rank = index_of(node)
        if rank not in save.uncopied:
            return None
        del save.uncopied[rank]
        return _copied(rank, save.info)

    def left(self, rank: int) -> tuple[list[msg.ControlMessage], list[fx.WriteManifest]]:
        """A worker has left: do without its parts.

        Returns:
            What worker 0 must hear, and the manifests that waited for this worker alone.
        """
        self._left[worker_id(rank)] = None
        told: list[msg.ControlMessage] = []
        ready: list[fx.WriteManifest] = []
        for save in self._open.values():
            if save.info is None or rank not in save.info.workers:
                continue
            if rank in save.uncopied:
                del save.uncopied[rank]
                told.append(_copied(rank, save.info))
            done = None if save.failed else self._complete(save)
            if done is not None:
                ready.append(done)
        return told, ready

    def close(self, name: str, path: str, error: str) -> msg.CheckpointDone | None:
        """The manifest is written, or never will be; None if that was known."""
        save = self._open.pop(name, None)
        if save is None or save.info is None:
            return None
        done = msg.CheckpointDone(checkpoint=name, path=path, step=save.info.step, error=error)
        self._closed[name] = done
        return done

    def whole(self, done: msg.CheckpointDone, parts: int) -> bool:
        """Return whether a user should hear of a checkpoint: it failed, or all of it is written.

        Args:
            done: of one part.
            parts: how many worker groups one call saves.
        """
        if done.error:
            return True
        written = self._written.setdefault(done.path, {})
        written[done.checkpoint] = None
        return len(written) % parts == 0


def _copied(rank: int, info: msg.CheckpointInfo) -> msg.MemoriesCopied:
    return msg.MemoriesCopied(rank=rank, checkpoint=info.checkpoint, group=info.group)
