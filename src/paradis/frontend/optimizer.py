"""The wrapped optimizer: a ``torch.optim.Optimizer`` whose update happens on the servers."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from paradis.errors import ConfigError, NonFiniteGradient, ParadisError, StateError
from paradis.frontend import state_transfer
from paradis.frontend.binding import Binding
from paradis.frontend.freeing import refuse_clipping
from paradis.frontend.quorum import own_norm_reason, refuse_adding, refuse_loading, save_is_due
from paradis.frontend.scaling import unscale
from paradis.numerics.elementwise import options_of
from paradis.roles import events as ev
from paradis.roles.effects import Complete
from paradis.wire.messages import Options, Scalar, StepCommit

warnings.filterwarnings(
    "ignore", message="GradScaler is going to stop passing itself", category=FutureWarning
)


class WrappedOptimizer(torch.optim.Optimizer):
    """What `paradis.wrap` returns. Use it like the optimizer that was wrapped.

    Learning-rate schedulers, parameter groups, ``state_dict``, accumulation (`no_sync`) and
    GradScaler work as usual; hyper-parameters travel with the step they belong to.
    """

    _step_supports_amp_scaling = True
    """Tells a GradScaler to leave skipping to us: one worker's overflow skips the step on all."""

    def __init__(self, inner: torch.optim.Optimizer, binding: Binding) -> None:
        self._binding: Binding | None = None
        super().__init__(inner.param_groups, inner.defaults)
        self._binding = binding
        self._inner_name = type(inner).__name__
        self._clip = 1.0
        self._announced_clip = False
        self._loaded_at = -1
        self._saved_at = 0

    # -------------------------------------------------------------------- step

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Commit this step's gradients; whoever reads a parameter then gets its next value.

        An error of the step is raised where the script waits next: in a read, or the next step.
        With overlap ``double_buffer`` the update comes in with the next ``step()``; its
        hyper-parameters are those of this call.

        Args:
            closure: reevaluates the model, as in torch.
            grad_scaler: a ``torch.amp.GradScaler`` passes itself here.

        Raises:
            WorkersDisagree: hyper-parameters or changed values differ among workers.
            NonFiniteGradient: a gradient holds NaN or infinity; names worker and parameter.
            DeadlineExceeded: ``Gradient sync timeout``; names step, shard and missing workers.
            JobFailed: another node failed; names it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        binding = self._bound
        late = binding.flight.late
        if grad_scaler is not None:
            binding.flight.check_scaler()
        binding.finish()
        binding.check()
        binding.collector.flush()
        clock = binding.collector.clock
        if clock is not None:
            clock.called()
        overflow, scaler_state = unscale(self, grad_scaler)
        # A checkpoint is of this moment: what follows may change rates and buffers.
        here = grad_scaler is not None or self._save_is_due(self.steps_done + 1)
        commit, present, revised = self._close(
            overflow, scaled=grad_scaler is not None, unchanged=late
        )
        compressor = binding.compressor
        leaves = not here and binding.flight.leaves(binding.mode)
        if not leaves:
            compressor.settle(present, revised, commit.options, empty=overflow)
        order = binding.order_to_tell()
        if order:
            commit = msgspec.structs.replace(commit, order=order)
        binding.confirm(commit)
        if late:
            commit = msgspec.structs.replace(commit, delay=1)
        coming = compressor.leave(present, revised, commit.options) if leaves else ()
        closed = ev.StepClosed(binding.group, commit, present, revised, coming)
        if here or not binding.send_off(closed, explain=self._explain, after=self._count):
            done, wait_s = self._ask_and_wait(closed)
            if done.found_inf and scaler_state is not None:
                for found in scaler_state["found_inf_per_device"].values():
                    found.fill_(1.0)
            self._count(wait_s)
            if self._save_is_due(self.steps_done):
                self._saved_at = self.steps_done
                binding.save(self._options(), {}, wait=False)
        if clock is not None:
            clock.returned()
        self._clip = 1.0
        binding.collector.end_step(scaled=grad_scaler is not None)
        compressor.end_step()
        if binding.others is not None:
            binding.others.refresh()  # the next step begins
        return loss

    def _ask_and_wait(self, closed: ev.StepClosed) -> tuple[Complete, float]:
        clock = self._bound.collector.clock
        start_ns = time.monotonic_ns()
        try:
            done = self._bound.ask("step", closed, explain=self._explain)
        finally:
            if clock is not None:
                clock.waited(start_ns)
        return done, (time.monotonic_ns() - start_ns) / 1e9

    def wait(self) -> None:
        """Return when the parameters have the values of the last ``step()``.

        With overlap ``layerwise`` it is only needed before something reads a parameter's memory
        behind torch's back, as an extension does that got a pointer earlier: everything else waits
        by itself. With ``double_buffer`` it brings the late step in: call it on every worker, at
        the end, or before the script changes parameters.

        Raises:
            ParadisError: that step failed.
        """
        self._bound.finish()

    @property
    def _bound(self) -> Binding:
        binding: Binding | None = getattr(self, "_binding", None)
        if binding is None:
            raise StateError(
                "this optimizer is a copy of one that paradis.wrap returned (deepcopy, pickle); "
                "only the original is part of the job: copy its state_dict() instead"
            )
        return binding

    @property
    def _backup(self) -> int:
        """How many workers a step does without."""
        return self._bound.session.settings.backup_workers

    def _close(
        self, overflow: bool, *, scaled: bool, unchanged: bool = False
    ) -> tuple[StepCommit, tuple[int, ...], tuple[int, ...]]:
        """Return what the step decided, and which shards have gradients, and which changed.

        Args:
            overflow: the GradScaler found one.
            scaled: there is a GradScaler.
            unchanged: the values are known to be as installed.
        """
        collector = self._bound.collector
        # A GradScaler unscales in place without a version bump: what was pushed before is void.
        bits, present, revised = collector.close(all_changed=scaled and not collector.deferred)
        if collector.rewritten and not scaled:
            self._announce_clipping()
        commit = StepCommit(
            revisions={},
            present=bits,
            options=self._options(),
            found_inf=overflow,
            clip=self._clip,
            changed={} if unchanged else self._bound.changed(),
        )
        return commit, present, revised

    def _options(self) -> list[Options]:
        return [options_of(group) for group in self.param_groups]

    def _explain(self, error: ParadisError) -> ParadisError:
        """Say more about an error where this worker knows more."""
        if isinstance(error, NonFiniteGradient):
            name = self._bound.collector.non_finite()
            if name:
                return NonFiniteGradient(
                    f"{error.message}; worker {self._bound.session.rank}'s own gradient of {name} "
                    "holds NaN or infinity: look at its last batch, or lower the learning rate "
                    "(training.check_finite: false applies such gradients as torch does)"
                )
        return error

    def _announce_clipping(self) -> None:
        bound = self._bound
        if self._announced_clip or len(bound.members()) == 1 or bound.clocked:
            return
        if bound.early is not None:  # the step is refused, and says why
            return
        self._announced_clip = True
        self._bound.session.node.announce(
            "warning",
            "gradients were changed after backward; each worker's own gradient was. If that was "
            "torch.nn.utils.clip_grad_norm_, use optimizer.clip_grad_norm_(max_norm): it clips the "
            "mean gradient over all workers",
            once=True,
        )

    def _announce_own_norm(self) -> None:
        if not self._announced_clip and len(self._bound.members()) > 1:
            self._announced_clip = True
            bound = self._bound
            why = own_norm_reason(self._backup, bound.mode, self._inner_name)
            self._bound.session.node.announce(
                "warning",
                f"clip_grad_norm_ clips each worker's own gradient {why}",
                once=True,
            )

    def _count(self, wait_s: float) -> None:
        counters = self._bound.session.node.counters
        counters.add(steps=1, wait_s=wait_s)

    # ---------------------------------------------------------- what torch has

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block without handing them over."""
        collector = self._bound.collector
        before, collector.pushing = collector.pushing, False
        try:
            yield
        finally:
            collector.pushing = before

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the 2-norm of the *mean* gradient over all parameters and workers.

        Call it on every worker between ``backward`` and ``step``. With one worker it is
        ``torch.nn.utils.clip_grad_norm_``. The factor is applied on the servers; ``.grad`` stays.
        In ssp and async, and with backup workers, it clips this worker's own gradient, in place.

        Args:
            max_norm: bound of the norm.

        Returns:
            The norm before clipping, a 0-dim float64 tensor (float32 with one worker).

        Raises:
            ConfigError: with ``training.early_update`` servers do not wait for the norm, with
                ``training.free_gradients`` the gradients are gone.
        """
        binding = self._bound
        refuse_clipping(binding)
        binding.flight.arrive()
        binding.codes.follow()  # gradients may travel as codes from this step on
        own = binding.clocked or binding.codes.no_gradients or self._backup > 0
        if len(binding.members()) == 1 or own:
            if own:
                self._announce_own_norm()
            parameters = [p for g in self.param_groups for p in g["params"]]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        binding.check()
        commit, present, revised = self._close(False, scaled=False)
        finite = binding.compressor.settle(present, revised, commit.options, lenient=True)
        done = binding.ask("norm", ev.NormAsked(binding.group, commit, present, revised))
        squares = sum(done.squares[s] for s in sorted(done.squares))
        total = torch.tensor(squares, dtype=torch.float64).sqrt()
        if not finite:  # a code of it is zeros: the norm is not what the servers found
            return torch.tensor(torch.inf, dtype=torch.float64)
        self._clip = min(1.0, float(max_norm) / (float(total) + 1e-6))
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch does; a factor that `clip_grad_norm_` found for them goes, too.

        ``model.zero_grad()`` clears gradients as well, but a clipped step that is dropped must be
        dropped by this method, or its factor counts for the next step.
        """
        self._bound.collector.refuse_taken("zero_grad")
        if not set_to_none:
            self._bound.settle()  # the gradients' memory may still be on its way out
        super().zero_grad(set_to_none)
        self._clip = 1.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; every worker must add the same. They start from worker 0's values."""
        binding: Binding | None = getattr(self, "_binding", None)
        if binding is not None:
            refuse_adding(self._backup)
            if binding.others is not None:
                binding.others.refuse_adding()
        super().add_param_group(param_group)
        if binding is not None:
            binding.extend(self)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's ``state_dict``, with the optimizer state fetched from the servers.

        With overlap ``double_buffer`` it brings the late step into the parameters: call it on every
        worker.
        """
        self._bound.finish()
        if self._bound.codes.no_gradients:
            self._bound.session.node.announce(
                "warning",
                f"state_dict() of {self._inner_name} lacks what travels as codes since its freeze "
                "(or from the first step on, with Lion); save_checkpoint() has all of it",
                once=True,
            )
        if self._loaded_at != self.steps_done:  # else the servers may not have worker 0's yet
            state_transfer.fetch(self._bound, self)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and state, and give worker 0's to the servers; call it on every worker.

        Raises:
            ConfigError: the state travels as codes, and no ``state_dict`` has it; or steps have
                been done with backup workers.
        """
        self._bound.finish()
        if self._bound.codes.no_gradients:
            raise ConfigError(
                f"load_state_dict refused: the state of {self._inner_name} is in its codes now; "
                "resume from a checkpoint of the job (checkpoint.restore, paradis run --resume)"
            )
        refuse_loading(self._backup, self.steps_done - self._bound.steps_before)
        super().load_state_dict(state_dict)
        if self._bound.first:
            state_transfer.give(self._bound, self)
        self._loaded_at = self.steps_done

    # ------------------------------------------------------------ checkpoints

    @property
    def steps_done(self) -> int:
        """Finished steps, those before a restore included."""
        return self._bound.steps_done

    @property
    def restored(self) -> dict[str, Scalar] | None:
        """The ``extra`` values of the checkpoint this run started from; None if it started anew."""
        return self._bound.restored

    def save_checkpoint(
        self, extra: dict[str, Scalar] | None = None, *, wait: bool = False
    ) -> str | None:
        """Save values, optimizer state and step. Only worker 0 acts; others return at once.

        Training goes on while the servers write; the manifest comes last. What counts is the state
        at this moment: a scheduler made with ``last_epoch=optimizer.steps_done - 1`` after a resume
        goes on rightly if the save comes before ``scheduler.step()``, as scheduled saves do.

        With ``training.free_gradients`` call it on every worker, after the same step and before the
        next backward: each waits until its part is copied. After the last step worker 0 is enough.

        Args:
            extra: numbers and strings of yours to get back from `restored`.
            wait: return when the checkpoint is complete, and raise if it failed.

        Returns:
            The checkpoint's directory on worker 0, None elsewhere.

        Raises:
            StateError: with ``wait``, it could not be written; the last complete one is untouched.
            DeadlineExceeded: with ``training.free_gradients``, worker 0 has not called it.
        """
        self._bound.collector.refuse_taken("save_checkpoint")
        return self._bound.save(self._options(), extra or {}, wait=wait)

    def _save_is_due(self, step: int) -> bool:
        every = self._bound.session.settings.checkpoint_every_steps
        if every > 0 and self._backup:
            return save_is_due(step, every, max(self._saved_at, self._bound.steps_before))
        return every > 0 and step % every == 0

    # --------------------------------------------------------------- counters

    def metrics(self) -> dict[str, float]:
        """Return this worker's counters since the start (bytes, seconds, steps)."""
        counters = self._bound.session.node.counters.snapshot()
        if self._bound.flight.pending:
            counters["steps"] = counters.get("steps", 0.0) + 1.0
        return counters

    def __repr__(self) -> str:
        return f"paradis.WrappedOptimizer({self._inner_name}, groups={len(self.param_groups)})"
