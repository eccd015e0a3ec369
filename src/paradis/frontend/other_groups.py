"""What a worker reads: the parameters of its model that other worker groups train.

They lie on the same servers and come in before each step, within the bound of the group that trains
them. Gradients flow through them and are not computed for them: ``requires_grad`` is off until the
session ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paradis.core.worker_groups import WorkerGroup, assign
from paradis.errors import ConfigError
from paradis.frontend.naming import Named
from paradis.roles import events as ev
from paradis.roles.effects import Complete
from paradis.roles.worker_state import push_bytes
from paradis.runtime.bound_tensor import BoundTensor
from paradis.runtime.worker_memory import GroupMemory
from paradis.storage.manifest import group_directory
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.frontend.binding import Binding

_MARGIN_S = 30.0


def split(trained: Sequence[Named], groups: Sequence[WorkerGroup]) -> list[list[Named]]:
    """Return what each worker group trains, in the model's order.

    Raises:
        ConfigError: a parameter matches no group, or several; names it.
    """
    try:
        place = assign({n.spec.name: n.spec.aliases for n in trained}, groups)
    except ConfigError as error:
        raise ConfigError(f"paradis.wrap refused: {error.message}") from None
    return [[n for n in trained if place[n.spec.name] == i] for i in range(len(groups))]


def register_parts(
    binding: Binding, parts: Sequence[Sequence[Named]], options: list[msg.Options]
) -> msg.Plan:
    """Register what each worker group trains, all in one order; return the plan of the own part.

    Args:
        binding: the ``wrap`` call.
        parts: tensors of each worker group, in order; of one if the job has none.
        options: hyper-parameters per parameter group.

    Raises:
        JoinRefused: workers registered different things; the message compares them.
    """
    own: msg.Plan | None = None
    if len(parts) > 1:
        binding.others = OtherGroups(binding)
    for index, named in enumerate(parts):
        if index == binding.session.membership.index:
            own = binding.register(named, options)
        elif binding.others is not None:
            binding.others.register(binding.first_group + index, named, options)
    assert own is not None
    return own


class OtherGroups:
    """Everything of one ``wrap`` call that this worker reads.

    Args:
        binding: the call.
    """

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._session = binding.session
        self._timeout_s = binding.session.settings.sync_timeout_s + _MARGIN_S
        self._memory: dict[int, GroupMemory] = {}
        self._frozen: list[Named] = []

    def register(self, group: int, named: Sequence[Named], options: list[msg.Options]) -> None:
        """Register what another worker group trains, and bind it to its plan's shards.

        Args:
            group: number on the wire.
            named: its tensors, as this worker's model has them.
            options: of this worker's own optimizer; those of the others count.

        Raises:
            JoinRefused: workers registered different things; the message compares them.
        """
        node = self._session.node
        memory = self._memory[group] = GroupMemory(detect_changes=False)
        memory.tensors.extend(BoundTensor(n.spec.name, n.tensor) for n in named)
        node.memory[group] = memory
        request = msg.Register(
            rank=self._session.rank, group=group, part=0, parameters=tuple(n.spec for n in named),
            optimizer=self._binding.optimizer_name, options=options,
        )  # fmt: skip
        timeout_s = self._session.settings.join_timeout_s + _MARGIN_S
        plan = self._ask("plan", ev.RegisterAsked(request), group, timeout_s).plan
        assert plan is not None
        memory.add(plan.shards)
        # At most all of it is kept beside the parameters until the next step begins, and comes anew
        # while what was kept is being installed.
        node.arena.widen(2 * sum(push_bytes(s, coded=False) for s in plan.shards))
        trained = [n for n in named if n.spec.options_group >= 0]
        self._binding.watch.add([n.tensor for n in trained])
        for each in trained:
            if each.tensor.requires_grad:
                each.tensor.requires_grad_(False)
                self._frozen.append(each)

    def _ask(self, what: str, event: ev.Event, group: int, timeout_s: float) -> Complete:
        node = self._session.node
        node.forget(group, what)
        node.post(event)
        return node.wait(group, what, timeout_s=timeout_s)

    def refresh(self) -> None:
        """Bring in what the others have trained, as a step begins: within the bound afterwards.

        Raises:
            ParadisError: the job failed, or a server did not answer in time.
        """
        node = self._session.node
        for group, memory in self._memory.items():
            memory.changed()  # a tensor may have got other memory
            node.forget(group, "read")
            node.post(ev.ReadAsked(group))
        for group in self._memory:
            node.wait(group, "read", timeout_s=self._timeout_s)

    def save(self, path: Path, info: msg.CheckpointInfo, *, wait: bool) -> None:
        """Ask for a copy of what others train beside the own part of a checkpoint; on worker 0.

        Args:
            path: the checkpoint's directory.
            info: of the own part.
            wait: return when everything is written.

        Raises:
            ParadisError: it could not be copied, or written.
        """
        names: list[str] = []
        for group in self._memory:
            name = str(group_directory(path, group))
            names.append(f"checkpoint {name}")
            self._session.node.forget(-1, names[-1])
            other = msgspec.structs.replace(
                info, checkpoint=name, group=group, options=[], workers=(), as_is=True
            )
            self._ask("snapshot", ev.SnapshotAsked(group, other), group, self._timeout_s)
        for name in names if wait else ():
            self._session.node.wait(-1, name, timeout_s=600.0)

    def refuse_adding(self) -> None:
        """Refuse parameters that come later.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "add_param_group refused: in a job with several worker groups all workers would have "
            "to come to it at one step; give all parameters to the optimizer before paradis.wrap"
        )

    def detach(self) -> None:
        """Let the script train everything again: the session is over."""
        for each in self._frozen:
            each.tensor.requires_grad_(True)
        self._frozen = []
