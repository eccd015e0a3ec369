"""One ``wrap`` call: the model's tensors, their plan, and the way to ask the system for things."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from paradis.errors import ConfigError, ParadisError, StateError
from paradis.frontend import restoring, saving
from paradis.frontend.codes import Codes
from paradis.frontend.collector import Collector
from paradis.frontend.compression import Compressor
from paradis.frontend.early import EarlyUpdates
from paradis.frontend.flight import Flight
from paradis.frontend.freeing import frees_gradients
from paradis.frontend.naming import Named, name_parameters
from paradis.frontend.other_groups import OtherGroups
from paradis.frontend.overlap import After, Explain
from paradis.frontend.session import Session
from paradis.frontend.step_clock import record
from paradis.frontend.watch import ModelWatch, check_tensors
from paradis.numerics.elementwise import check_supported, options_of
from paradis.roles import events as ev
from paradis.roles.effects import Complete
from paradis.roles.worker_state import Assignment, push_bytes
from paradis.runtime.bound_tensor import BoundTensor
from paradis.runtime.worker_memory import GroupMemory
from paradis.storage.manifest import Manifest
from paradis.wire import messages as msg

if TYPE_CHECKING:
    from paradis.frontend.optimizer import WrappedOptimizer

_MARGIN_S = 30.0


class Binding:
    """The worker's side of one ``wrap`` call.

    Attributes:
        group: number of the call in this process.
        steps_done: finished steps.
        steps_before: those before the restore that this run began with.
        restored: ``extra`` of the checkpoint started from, or None.
        optimizer: the wrapped one, once it exists.
        named: its tensors, as registered.
        codes: what travels as codes, and from when.
        compression: chosen for this call; empty: as the configuration says.
        early: what is said ahead of ``step()``, where updates may go ahead of it; else None.
        mode: of the group, as its plan says.
        watch: notices parameters that are replaced.
        first_group: number on the wire of the first worker group's part.
        others: what other worker groups train of the model; None where nobody does.
    """

    def __init__(
        self, session: Session, model: torch.nn.Module, optimizer_name: str, compression: str = ""
    ) -> None:
        self.session = session
        self.model = model
        self.optimizer_name = optimizer_name
        self.compression = compression
        self.first_group = session.groups
        session.groups += max(1, len(session.membership.groups))
        self.group = self.first_group + session.membership.index
        self.others: OtherGroups | None = None
        self.restored: dict[str, msg.Scalar] | None = None
        self.mode = "sync"
        self.steps_before = 0
        self._manifest: Manifest | None = None
        self._parts = 0
        self._order_told = False
        self._begun = 0
        self.named: list[Named] = []
        session.bindings.append(self)
        self._trained: dict[int, None] = {}
        self.watch = ModelWatch(model)
        self.memory = GroupMemory(
            detect_changes=session.settings.detect_value_changes,
            frees=frees_gradients(session, optimizer_name),
        )
        session.node.memory[self.group] = self.memory
        self._timeout_s = session.settings.sync_timeout_s + _MARGIN_S
        self.early = EarlyUpdates.where_on(session, self)
        self.optimizer: torch.optim.Optimizer | None = None
        self.compressor = Compressor(
            self.memory, self._hand_over, self.present_options, lambda: self._step,
            fail=partial(session.node.failed, "compressing a gradient"), timeout_s=self._timeout_s,
        )  # fmt: skip
        self.codes = Codes(self)
        self.flight = Flight(
            session.node, session.settings, self.group, self.memory, timeout_s=self._timeout_s
        )
        self.collector = Collector(
            self.memory, self._ready, self._begin_step, late=self._delays,
            debug=session.settings.debug_gradients,
        )  # fmt: skip
        self.compressor.on_let_go = self.collector.encoded
        record(self, lambda: self._step)

    @property
    def steps_done(self) -> int:
        """Finished steps of this group, those before a restore included, and one on its way."""
        return self.steps_before + max(self._step, self._begun)

    @property
    def _step(self) -> int:
        """The group's step in this run, which starts at 0 after a restore, too."""
        group = self.session.node.worker_role.groups.get(self.group)
        return group.step if group is not None else 0

    @property
    def clocked(self) -> bool:
        """Whether each worker's gradient is an update by itself (modes ``ssp`` and ``async``)."""
        return self.mode != "sync"

    def members(self) -> tuple[int, ...]:
        """Return the ranks that train what this worker trains."""
        view = self.session.node.worker_role.view
        if view is None:
            return (self.session.rank,)
        return tuple(r for r in view.members if r in self.session.membership.ranks)

    @property
    def first(self) -> bool:
        """Whether this worker's values and optimizer state are the ones that count."""
        return min(self.members()) == self.session.rank

    def _begin_step(self, wait: bool) -> bool:
        """Whether a gradient may be handed over; with ``wait`` it may, after the step before."""
        early = self.early if self.session.alive else None
        if early is not None:
            early.note()
        if not wait and self.flight.airborne:
            return False
        self.settle()
        if early is not None:
            early.begin()
        return True

    def confirm(self, commit: msg.StepCommit) -> None:
        """Refuse a commit that is not what was said ahead of it, with early updates; it goes next.

        Raises:
            StateError: it differs.
        """
        if self.early is not None:
            where = f"step {self._step} of worker {self.session.rank}"
            self.early.confirm(commit, self.collector.altered, where=where)
            self.early.end()

    def changed(self) -> dict[int, list[int]]:
        """Return shard -> digests of the shards whose value the script changed."""
        return self.memory.changed() if self.early is None else self.early.changed()

    def _ready(self, shards: tuple[int, ...]) -> None:
        if not self.session.alive:
            return
        coded = [s for s in shards if self.memory.codes(s)]
        whole = tuple(s for s in shards if not self.memory.codes(s))
        if coded:
            self.compressor.submit(coded)
        if whole:
            self._hand_over(whole)

    def _hand_over(self, shards: tuple[int, ...], step: int = -1) -> None:
        if self.session.alive:
            self.session.node.post(ev.ShardsReady(self.group, shards, step))

    def present_options(self) -> list[msg.Options]:
        """Return the hyper-parameters of each parameter group as they are now."""
        assert self.optimizer is not None
        return [options_of(group) for group in self.optimizer.param_groups]

    # ---------------------------------------------------------------- asking

    def ask(
        self,
        what: str,
        event: ev.Event,
        *,
        explain: Callable[[ParadisError], ParadisError] | None = None,
        timeout_s: float | None = None,
        beginning: bool = False,
    ) -> Complete:
        """Post an event and wait for its completion, once the servers have finished the step.

        With ``beginning`` the step that has its first gradient needs it before it begins.

        Raises:
            ParadisError: it failed, was refused, or did not come in time.
        """
        self.flight.arrive()
        if self.early is not None and what != "step" and not beginning:
            if self.early.noted:  # refused or not, it must not depend on how fast others are
                self._begin_step(True)
            self.early.refuse_within(what)
        self._post(what, event)
        try:
            limit = timeout_s or self._timeout_s
            return self.session.node.wait(self.group, what, timeout_s=limit)
        except ParadisError as error:
            better = explain(error) if explain is not None else error
            raise better from None

    def _post(self, what: str, event: ev.Event) -> None:
        if not self.session.alive:
            raise StateError(
                "this process has left the job (or is a forked child of a worker); call step() "
                "only in the process that called paradis.wrap"
            )
        self.session.node.forget(self.group, what)
        self.session.node.post(event)

    def send_off(self, event: ev.StepClosed, *, explain: Explain, after: After) -> bool:
        """Commit a step and leave it on its way, where overlap is on and possible.

        Args:
            explain: may say more about an error of the step.
            after: called when the step is finished, with the seconds waited for it.

        Returns:
            Whether it is on its way; False: nothing has been done.
        """

        def post() -> None:
            self._begun = self._step + 1
            self.session.node.post(event)

        if not self.session.alive or self.clocked:
            return False
        self.session.node.forget(self.group, "step")
        step = self.steps_done
        return self.flight.send_off(post, self.collector, step, explain=explain, after=after)

    def _delays(self) -> bool:
        """Whether the gradient of the step in progress is handed over late."""
        return self.flight.delays(self.steps_done)

    def finish(self) -> None:
        """Wait for the step that is on its way, and bring a late one into the parameters.

        Raises:
            ParadisError: it failed.
        """
        self.flight.finish()
        self.codes.follow()

    def end(self) -> None:
        """Wait for the step that is on its way: the session ends.

        Raises:
            ParadisError: it failed.
        """
        self.flight.end()

    def settle(self) -> None:
        """Wait for a step that writes into the parameters while the script runs.

        Raises:
            ParadisError: it failed.
        """
        self.flight.settle()
        self.codes.follow()

    # ------------------------------------------------------------ registering

    def register(
        self, named: Sequence[Named], options: list[msg.Options], *, step: int = 0
    ) -> msg.Plan:
        """Register tensors as the next part, and bind them to the plan's shards.

        Raises:
            JoinRefused: workers registered different things; the message compares them.
        """
        self.named.extend(named)
        self.memory.tensors.extend(BoundTensor(n.spec.name, n.tensor) for n in named)
        trained = [n.tensor for n in named if n.spec.options_group >= 0]
        self._trained.update(dict.fromkeys(map(id, trained)))
        self.watch.add(trained)
        request = msg.Register(
            rank=self.session.rank,
            group=self.group,
            part=self._parts,
            parameters=tuple(n.spec for n in named),
            optimizer=self.optimizer_name,
            options=options,
            step=step,
        )
        request = self.codes.describe(request)
        self._parts += 1
        timeout_s = self.session.settings.join_timeout_s + _MARGIN_S
        asked = self.ask("plan", ev.RegisterAsked(request), timeout_s=timeout_s)
        plan = self.codes.checked(asked.plan)
        self.mode = plan.mode
        self.memory.add(plan.shards)
        # Codes of updates are received beside the parameters.
        self.session.node.arena.widen(sum(s.code_bytes for s in plan.shards))
        if self.early is not None:  # at most the whole plan waits for step() at one time
            self.session.node.arena.widen(sum(push_bytes(s, coded=False) for s in plan.shards))
        self.collector.extend()
        return plan

    def initialize(self, plan: msg.Plan, *, give: Callable[[Sequence[int]], None]) -> None:
        """Bring the plan's shards to worker 0's values (or the checkpoint's) on every worker.

        Args:
            give: sends this worker's values of the shards to the servers.
        """
        shards = tuple(s.shard for s in plan.shards if s.length)
        if self.first and not plan.restore:
            give(shards)
            for shard in shards:
                self.memory.installed(shard)
        else:
            self.ask("pull", ev.PullAsked(self.group, shards))
        self.codes.ready = True
        self.codes.follow()

    def extend(self, optimizer: WrappedOptimizer) -> None:
        """Register parameters that ``add_param_group`` added."""
        self.finish()  # they begin with the step after the one on its way
        index = len(optimizer.param_groups) - 1
        added = name_parameters(self.model, optimizer.param_groups[index:], first_group=index)
        added = [n for n in added if id(n.tensor) not in self._trained]
        options = [options_of(g) for g in optimizer.param_groups]
        for named in added:
            check_supported(self.optimizer_name, options[index], named.tensor.dtype)
        plan = self.register(added, options, step=self._step)
        if plan.restore and self._manifest is not None:
            restoring.check_added(self._manifest, [n.spec for n in added])
            restoring.take_options(self._manifest, optimizer)
        self.initialize(plan, give=self.give_values)

    def give_values(self, shards: Sequence[int]) -> None:
        """Send the present values of shards to the servers and wait until they have them."""
        entries: dict[int, Assignment] = {
            s: (("value",), (self.memory.shards[s].plan.dtype,), {}) for s in shards
        }
        self.ask("assign", ev.AssignAsked(self.group, entries))

    def order_to_tell(self) -> tuple[int, ...]:
        """Return the admission order that the first backward taught, once, on the lowest rank."""
        if self._order_told or not self.collector.yielded or self.members()[0] != self.session.rank:
            return ()
        self._order_told = True
        return self.collector.learnt_order()

    # ---------------------------------------------------------------- checks

    def check(self) -> None:
        """Refuse what would train the wrong thing.

        Raises:
            ConfigError: a parameter was replaced, moved to another dtype or reshaped after wrap.
        """
        error = self.session.node.error
        if error is not None:
            raise error
        name = self.watch.replaced()
        if name:
            raise ConfigError(
                f"step refused: {name} was replaced after paradis.wrap, so the new tensor would "
                "never train; change it in place (p.data.copy_), or build the model first and "
                "wrap it then"
            )
        check_tensors(self.named, self.memory.tensors)

    # ----------------------------------------------------------- checkpoints

    def take_restored(self, plan: msg.Plan, optimizer: torch.optim.Optimizer) -> None:
        """Take over options and extra values of the checkpoint that the servers load.

        Raises:
            SnapshotCorrupt: it is of another model, damaged or incomplete.
        """
        manifest = restoring.open_manifest(plan.restore, self.group, [n.spec for n in self.named])
        self._manifest = manifest
        self.restored = dict(manifest.extra)
        self.steps_before = manifest.step
        restoring.take_options(manifest, optimizer)

    def detach(self) -> None:
        """Let go of the tensors and remove the hooks: the session is over, or this is a fork."""
        self.flight.drop()
        self.collector.detach()
        if self.others is not None:
            self.others.detach()
        self.compressor.stop()

    def save(
        self, options: list[msg.Options], extra: dict[str, msg.Scalar], *, wait: bool
    ) -> str | None:
        """Ask for a checkpoint at the present step (see `WrappedOptimizer.save_checkpoint`)."""
        return saving.save(self, options, extra, wait=wait)
