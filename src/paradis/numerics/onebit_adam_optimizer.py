"""1-bit Adam as an optimizer: what users construct, and the algorithm in one process, in words.

Invariant: for one worker, a step here has the very bits of a worker and a server that exchange
codes (`paradis.numerics.onebit_coding`); a test compares them. It is written without them.

Source: Tang et al., 1-bit Adam, ICML 2021, algorithm 1. Differences: scales are L1 per block of
1024 elements by default; the frozen variance is bias-corrected, floored and masked
(`freeze_variance`); when to freeze is decided as `FreezeRule` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, Literal, TypedDict, Unpack

import torch

from paradis.core.freezing import FreezeRule, FreezeWatch
from paradis.errors import ConfigError
from paradis.numerics.codecs.codec import NUMPY_OF
from paradis.numerics.codecs.freeze import freeze_variance, variance_norm
from paradis.numerics.codecs.onebit import OneBit, pack_mask
from paradis.numerics.codecs.onebit_adam import encode_momentum, frozen_step, inverse_denominator

_ADAMW_STEP: Final[Callable[[torch.optim.Optimizer], object]] = inspect.unwrap(
    torch.optim.AdamW.step
)
"""Without torch's decorators: hooks of this optimizer's own step would run twice."""


class Freezing(TypedDict, total=False):
    """What `OneBitAdam` takes besides AdamW's hyper-parameters."""

    freeze_step: int | None
    warm_up_steps: int
    scale: Literal["l1", "l2"]


_DEFAULTS: Final[Freezing] = {"freeze_step": None, "warm_up_steps": 0, "scale": "l1"}


class OneBitAdam(torch.optim.AdamW):
    """AdamW whose variance is frozen after a while, so that momentum can travel as one bit.

    Until the freeze it is ``torch.optim.AdamW``, bit for bit. From then on a step is, with m
    and x the same everywhere and C(c) one sign per element and one scale per block::

        c = b1 * m + (1 - b1) * g + e;  q = C(c);  e = c - q           # on each worker
        a = mean of q + E;              m = C(a);  E = a - m           # on the server
        x -= lr * (m / (sqrt(v) + eps) + weight_decay * x)

    v is the bias-corrected second moment at the freeze. An element that never had a gradient until
    then moves by weight decay alone from then on.

    v is a mean over some ``1 / (1 - b2)`` steps: frozen before twice as many, which an automatic
    freeze waits for, it still holds the large gradients of the start, and steps are too small for
    some tensors and too large for others until the end. In a training too short for that, take a
    smaller b2 (0.99). m is not bias-corrected, which does not matter by then.

    Given to ``paradis.wrap`` servers and workers share this out. On its own it computes the same
    for one worker, and so shows on one machine what the code does to training.

    Args:
        params: parameters or groups, as in torch; float32 or float64. All groups freeze together.
        lr: learning rate; may change at any step, as may weight decay and betas.
        betas: shares of the first and second moment that are kept.
        eps: added to the root of v; counts as it is at the freeze.
        weight_decay: decoupled, never compressed.
        freeze_step: steps before the freeze; None: when v is steady (`FreezeRule`).
        warm_up_steps: steps of learning-rate warm-up, which v must not be frozen in; they count
            only where ``freeze_step`` is None.
        scale: ``l1``, a mean of magnitudes per block of 1024 elements; ``l2``, a root mean square
            per tensor, as in the published code, for comparison.

    Raises:
        ConfigError: a hyper-parameter or a parameter's dtype does not fit.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **freezing: Unpack[Freezing],
    ) -> None:
        self._own: dict[str, Any] = {**_DEFAULTS, **freezing}
        _check_freezing(self._own)
        super().__init__(params, lr, betas, eps, weight_decay)
        self.defaults.update(self._own)
        self._watches: list[FreezeWatch] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, of this class or of AdamW; norms of v seen so far are forgotten."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        first = self.param_groups[0] if self.param_groups else {}
        self._own = {key: first.get(key, self.defaults[key]) for key in _DEFAULTS}
        for group in self.param_groups:
            group.update({key: group.get(key, value) for key, value in self._own.items()})
        self._watches = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; after the freeze, those of a new group move by weight decay alone.

        Raises:
            ConfigError: a parameter is not float32 or float64, or the group freezes otherwise.
        """
        for key, value in self._own.items():
            if param_group.setdefault(key, value) != value:
                raise ConfigError(
                    f"parameter group refused: {key} of OneBitAdam; expected {value!r} as in the "
                    f"others, got {param_group[key]!r}; all groups freeze together: give it to "
                    "the constructor"
                )
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in NUMPY_OF:
                self.param_groups.pop()
                raise ConfigError(
                    f"parameter refused: dtype {parameter.dtype} of OneBitAdam; expected float32 "
                    "or float64; keep parameters in float32 and use autocast"
                )

    @property
    def frozen(self) -> bool:
        """Whether the variance is frozen, as far as this process stepped itself."""
        return any("inverse" in state for state in self.state.values())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step.

        Args:
            closure: reevaluates the model, as in torch.

        Raises:
            NonFiniteGradient: after the freeze a gradient holds NaN or infinity; nothing changed.
            ConfigError: the freeze is due, and Numba is not installed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if not self.frozen and self._freeze_is_due():
                self._freeze()
            if self.frozen:
                self._frozen_step()
            else:
                _ADAMW_STEP(self)
        return loss

    # ------------------------------------------------------------- the decision

    def _freeze_is_due(self) -> bool:
        """Return whether the steps so far were the last in full."""
        done = max((int(state["step"]) for state in self.state.values() if state), default=0)
        freeze_step = self.param_groups[0]["freeze_step"]
        if freeze_step is not None:
            return bool(done >= freeze_step)
        if self._watches is None or len(self._watches) != len(self.param_groups):
            warm_up = self.param_groups[0]["warm_up_steps"]
            rules = [FreezeRule(beta2=float(group["betas"][1])) for group in self.param_groups]
            self._watches = [FreezeWatch(rule, warm_up) for rule in rules]
        # Groups watch on their own, as one of them may have another b2; all must be steady, and
        # each must see every step.
        watched = zip(self._watches, self.param_groups, strict=True)
        steady = [self._observe(watch, group, done) for watch, group in watched]
        return all(steady)

    def _observe(self, watch: FreezeWatch, group: dict[str, Any], done: int) -> bool:
        if not watch.rule.recorded(done):
            return False
        norms, counts = {}, {}
        for index, parameter in enumerate(group["params"]):
            state = self.state.get(parameter)
            if state:
                norms[index] = variance_norm(
                    state["exp_avg_sq"], int(state["step"]), float(group["betas"][1])
                )
                counts[index] = parameter.numel()
        return not counts or watch.observe(done, norms, counts)

    # --------------------------------------------------------- after the freeze

    def _freeze(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self._freeze_one(parameter, group)

    def _freeze_one(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:  # no gradient so far
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        done, variance = int(state["step"]), _flat(state["exp_avg_sq"])
        inverse = torch.zeros_like(variance)
        if done:
            frozen, real = freeze_variance(variance, done, float(group["betas"][1]))
            inverse = inverse_denominator(frozen, float(group["eps"]), real)
        state["inverse"] = inverse.view(parameter.shape).to(parameter.device)
        state["exp_avg"].masked_fill_(state["inverse"] == 0.0, 0.0)
        state["error"] = torch.zeros_like(parameter)
        state["server_error"] = torch.zeros_like(parameter)

    def _frozen_step(self) -> None:
        after: list[_Exchange] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if "inverse" not in self.state[parameter]:
                    self._freeze_one(parameter, group)
                if parameter.grad is not None:
                    after.append(_Exchange(parameter, self.state[parameter], group))
        for exchange in after:  # all gradients are finite
            exchange.count()


class _Exchange:
    """One parameter's way to the server and back: computed first, and then it counts."""

    def __init__(
        self, parameter: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ConfigError(
                "step refused: a sparse gradient of OneBitAdam; expected a dense one; construct "
                "the embedding with sparse=False"
            )
        blocks: dict[str, Any] = {}
        if group["scale"] == "l2":
            blocks = {"block_elements": None, "norm": "l2"}
        self.codec = OneBit(dtype=parameter.dtype, **blocks)
        self.parameter, self.state, self.group = parameter, state, group
        real = _flat(state["inverse"]) != 0.0
        self.mask = None if bool(real.all()) else pack_mask(real)
        code = torch.empty(self.codec.encoded_bytes(parameter.numel()), dtype=torch.uint8)
        self.error = _flat(state["error"]).clone()
        encode_momentum(
            self.codec, _flat(parameter.grad), _flat(state["exp_avg"]), self.error, code,
            beta=float(group["betas"][0]), mask=self.mask,
        )  # fmt: skip
        mean = torch.empty_like(self.error)
        self.codec.decode(code, mean, self.mask)
        self.server_error = _flat(state["server_error"]).clone()
        self.codec.encode(mean, code, self.server_error, self.mask)
        self.answer = code

    def count(self) -> None:
        """Keep error memories and momentum, move the parameter."""
        momentum = torch.empty_like(self.error)
        self.codec.decode(self.answer, momentum, self.mask)
        value = _flat(self.parameter)
        frozen_step(
            self.codec, self.answer, value, _flat(self.state["inverse"]),
            lr=float(self.group["lr"]), weight_decay=float(self.group["weight_decay"]),
        )  # fmt: skip
        if value.data_ptr() != self.parameter.data_ptr():
            self.parameter.copy_(value.view(self.parameter.shape))
        shape = self.parameter.shape
        self.state["exp_avg"].copy_(momentum.view(shape))
        self.state["error"].copy_(self.error.view(shape))
        self.state["server_error"].copy_(self.server_error.view(shape))
        self.state["step"] += 1


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return (N,) of a tensor on the CPU in logical order; a view where that is its memory."""
    return tensor.detach().reshape(-1).cpu()


def _check_freezing(own: dict[str, Any]) -> None:
    unknown = sorted(set(own) - set(_DEFAULTS))
    if unknown:
        raise TypeError(f"OneBitAdam got unexpected keyword arguments: {unknown}")
    step, warm_up = own["freeze_step"], own["warm_up_steps"]
    if step is not None and step < 1:
        raise ConfigError(
            f"optimizer refused: freeze_step of OneBitAdam; expected 1 or more, or None, got {step}"
            "; there is no variance to freeze before the first step"
        )
    if warm_up < 0 or own["scale"] not in ("l1", "l2"):
        raise ConfigError(
            "optimizer refused: OneBitAdam; expected warm_up_steps of 0 or more and scale 'l1' or "
            f"'l2', got {warm_up} and {own['scale']!r}; leave the defaults"
        )
