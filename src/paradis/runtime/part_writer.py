"""Writes a node's part of a checkpoint beside its work: copied at once, written on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from paradis.errors import ParadisError, StateError
from paradis.roles import effects as fx
from paradis.roles import events as ev
from paradis.storage.checkpoint import Section, write_part
from paradis.wire.messages import Saved

_TIMEOUT_S = 60.0

Scalars = dict[str, dict[str, float]]
Collect = Callable[[], tuple[list[Section], Scalars]]


class PartWriter:
    """The writing threads of one node.

    Args:
        node: its name.
        post: takes events.
    """

    def __init__(self, node: str, post: Callable[[ev.Event], None]) -> None:
        self._node = node
        self._post = post
        self._threads: list[threading.Thread] = []

    def copy(self, effect: fx.Copy, collect: Collect) -> ev.Event:
        """Copy what belongs in a checkpoint and begin to write it; reports `Written` later.

        Args:
            effect: which checkpoint.
            collect: returns copies, as sections, and single numbers per parameter; a `StateError`
                says that there is nothing left to copy, and only the checkpoint fails.
        """
        for earlier in self._threads:  # one copy at a time, or a slow disk fills the memory
            earlier.join(_TIMEOUT_S)
            if earlier.is_alive():
                text = (
                    f"the checkpoint before is not written after {_TIMEOUT_S:.0f} s: save less "
                    "often, or on a faster disk"
                )
                return self._failed(effect, text)
        try:
            sections, scalars = collect()
        except StateError as error:
            return self._failed(effect, error.message)
        writer = threading.Thread(
            target=self._write, args=(effect, sections, scalars), name="paradis-checkpoint"
        )
        self._threads = [t for t in self._threads if t.is_alive()] + [writer]
        writer.start()
        return ev.Copied(effect.group, effect.checkpoint)

    def _failed(self, effect: fx.Copy, text: str) -> ev.Event:
        """There will be no part; nobody waits for it."""
        self._post(ev.Written(effect.checkpoint, None, text))
        return ev.Copied(effect.group, effect.checkpoint)

    def _write(self, effect: fx.Copy, sections: list[Section], scalars: Scalars) -> None:
        try:
            pieces = write_part(Path(effect.checkpoint), self._node, sections)
        except ParadisError as error:
            self._post(ev.Written(effect.checkpoint, None, error.message))
            return
        self._post(ev.Written(effect.checkpoint, Saved(
            node=self._node, checkpoint=effect.checkpoint, group=effect.group, step=effect.step,
            pieces=pieces, scalars=scalars, options=effect.options,
        )))  # fmt: skip

    @property
    def writing(self) -> bool:
        """Whether a part is being written."""
        return any(t.is_alive() for t in self._threads)

    def finish(self) -> None:
        """Wait until everything is written, for a minute at most."""
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
