"""A server that applies every update and sends no values: for measuring the way up alone.

It is ``paradis server`` with one change: the updates of a step go out when its last shard is
applied, as messages without a payload, as for shards that did not change. Workers' values stay as
they were.
"""

from __future__ import annotations

from paradis.cli.main import main
from paradis.ids import NodeId
from paradis.roles.held import HeldGroup, HeldShard
from paradis.roles.server import ServerRole

_finished: list[tuple[NodeId, HeldGroup, HeldShard]] = []
_send_update = ServerRole._send_update


def _send_together(
    self: ServerRole, target: NodeId, group: HeldGroup, shard: HeldShard, *, unchanged: bool
) -> None:
    _finished.append((target, group, shard))
    if group.unfinished == 1:
        for waiting in _finished:
            _send_update(self, *waiting, unchanged=True)
        _finished.clear()


ServerRole._send_update = _send_together  # type: ignore[method-assign]

if __name__ == "__main__":
    raise SystemExit(main())
