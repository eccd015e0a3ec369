"""Which optimizers may be split into shards, and their hyper-parameters as plain values.

Invariant: an optimizer is listed only if its update of an element depends on that element's
value, gradient and state, and on numbers that are the same for the whole parameter (``step`` and
the like). Then any cut of a parameter gives the same bits; a test tries it for every class.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Final

import torch
from torch import optim

from paradis.errors import ConfigError
from paradis.numerics.codecs.codec import NUMPY_OF
from paradis.numerics.codecs.kernels import require_kernels
from paradis.numerics.lion_optimizer import DistributedLion
from paradis.numerics.onebit_adam_optimizer import OneBitAdam

Scalar = bool | int | float | str | None
Options = dict[str, Scalar | list[float]]
"""Same shape as `paradis.wire.messages.Options`; this layer does not import messages."""


@dataclasses.dataclass(frozen=True, slots=True)
class Elementwise:
    """An optimizer class and the names of what it keeps per parameter.

    Attributes:
        kind: the class, one of torch's or of `paradis.optim`.
        tensors: state with one entry per element, there after the first step.
        scalars: state with one number per parameter, there after the first step.
        optional: further state with one entry per element, there under some options.
        eager: whether the state is there before the first step.
        rebuilt: the class that servers construct while gradients travel in full; None for
            ``kind`` itself.
        coded: whether steps may travel as codes that this class alone defines.
    """

    kind: type[optim.Optimizer]
    tensors: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ("step",)
    optional: tuple[str, ...] = ()
    eager: bool = False
    rebuilt: type[optim.Optimizer] | None = None
    coded: bool = False

    @property
    def home(self) -> str:
        """The public module of the class."""
        return "paradis.optim" if self.coded else "torch.optim"


_ADAM: Final = ("exp_avg", "exp_avg_sq")

ELEMENTWISE: Final[Mapping[str, Elementwise]] = {
    entry.kind.__name__: entry
    for entry in (
        Elementwise(optim.SGD, scalars=(), optional=("momentum_buffer",)),
        Elementwise(optim.Adam, _ADAM, optional=("max_exp_avg_sq",)),
        Elementwise(optim.AdamW, _ADAM, optional=("max_exp_avg_sq",)),
        Elementwise(optim.Adagrad, ("sum",), eager=True),
        Elementwise(optim.RMSprop, ("square_avg",), optional=("momentum_buffer", "grad_avg")),
        Elementwise(optim.Adadelta, ("square_avg", "acc_delta")),
        Elementwise(optim.Adamax, ("exp_avg", "exp_inf")),
        Elementwise(optim.NAdam, _ADAM, scalars=("step", "mu_product")),
        Elementwise(optim.RAdam, _ADAM),
        Elementwise(optim.Rprop, ("prev", "step_size")),
        Elementwise(optim.ASGD, ("ax",), scalars=("step", "eta", "mu")),
        Elementwise(OneBitAdam, _ADAM, rebuilt=optim.AdamW, coded=True),
        # While votes travel, servers never step it and hold no state.
        Elementwise(DistributedLion, ("exp_avg",), scalars=(), coded=True),
    )
}

_UNSPLITTABLE: Final = {
    "LBFGS": "its step takes dot products over all parameters",
    "Adafactor": "its state is factored by rows and columns of a matrix",
    "Muon": "its step orthogonalises whole matrices",
    "SparseAdam": "its gradients are sparse",
}

_HYPER_PARAMETERS: Final = frozenset(
    name for entry in ELEMENTWISE.values() for name in inspect.signature(entry.kind).parameters
) - {"params"}

_INT64: Final = range(-(2**63), 2**63)


def elementwise(name: str) -> Elementwise:
    """Return the entry of a supported optimizer class.

    Raises:
        ConfigError: no such class is supported.
    """
    try:
        return ELEMENTWISE[name]
    except KeyError:
        raise ConfigError(_refusal(name, "it is not a class that servers can rebuild")) from None


def optimizer_name(optimizer: optim.Optimizer) -> str:
    """Return the name under which servers rebuild an optimizer.

    The class must be exactly one of torch's or of `paradis.optim`: a subclass may override any
    part of the step.

    Raises:
        ConfigError: user code, a subclass, or a class whose update is not elementwise.
    """
    kind = type(optimizer)
    entry = ELEMENTWISE.get(kind.__name__)
    if entry is not None and entry.kind is kind:
        return kind.__name__
    if kind.__name__ in _UNSPLITTABLE and kind is getattr(optim, kind.__name__, None):
        raise ConfigError(_refusal(kind.__name__, _UNSPLITTABLE[kind.__name__]))
    known = [base.__name__ for base in kind.__mro__[1:] if base.__name__ in ELEMENTWISE]
    reason = (
        f"it is a subclass of {known[0]} that may step differently"
        if known
        else ("it is not one of torch's own classes, and servers run no user code")
    )
    raise ConfigError(_refusal(f"{kind.__module__}.{kind.__qualname__}", reason))


def check_supported(name: str, options: Mapping[str, object], dtype: torch.dtype) -> None:
    """Refuse parameters and options that the servers' CPUs cannot update correctly.

    torch's fused SGD kernel for CPUs leaves most elements of bfloat16 and float16 parameters as
    they were and reads momentum beyond its end (PyTorch issue 191763, seen in 2.12 and 2.13).

    Args:
        name: name of a supported class.
        options: hyper-parameters of the parameter's group.
        dtype: dtype of the parameter.

    Raises:
        ConfigError: unknown class, a dtype that is not real floating, fused SGD in half
            precision; or a class of `paradis.optim` in half precision, with ``amsgrad``, or
            without Numba.
    """
    entry = elementwise(name)
    if not dtype.is_floating_point:
        raise ConfigError(
            f"parameter refused: dtype {dtype}; expected float32, float64, bfloat16 or float16; "
            "leave it out of wrap()"
        )
    if entry.coded:
        _check_coded(name, options, dtype)
    if name == "SGD" and options.get("fused") and dtype.itemsize < 4:
        raise ConfigError(
            f"optimizer option refused: fused=True of SGD with {dtype}; expected fused=False, "
            "because torch's fused CPU kernel skips elements of half-precision parameters "
            "(PyTorch issue 191763); construct SGD without fused"
        )


def _check_coded(name: str, options: Mapping[str, object], dtype: torch.dtype) -> None:
    if dtype not in NUMPY_OF:
        raise ConfigError(
            f"parameter refused: dtype {dtype} with {name}; expected float32 or float64, which "
            "its codes are computed in; keep parameters in float32 and use autocast"
        )
    if options.get("amsgrad"):
        raise ConfigError(
            f"optimizer option refused: amsgrad=True of {name}; expected False, because the "
            "variance is frozen; construct it without amsgrad"
        )
    require_kernels(f"optimizer {name}")


def _refusal(name: str, reason: str) -> str:
    return (
        f"optimizer refused: {name}, because {reason}; "
        f"expected one of {' or '.join(_choices())}; "
        "wrap one of these, or leave the parameters that need another optimizer out of wrap()"
    )


def _choices() -> list[str]:
    homes = dict.fromkeys(entry.home for entry in ELEMENTWISE.values())
    return [
        f"{home}.{{{', '.join(n for n, entry in ELEMENTWISE.items() if entry.home == home)}}}"
        for home in homes
    ]


def options_of(group: Mapping[str, Any]) -> Options:
    """Return the hyper-parameters of a parameter group as plain values.

    A tensor or NumPy number, such as a tensor ``lr``, becomes a float: the servers then compute
    with it as with any float, where plain torch would round intermediate results to its dtype.
    Values that torch does not know are kept if they are scalars (``initial_lr`` of a scheduler)
    and dropped otherwise.

    Args:
        group: one of ``optimizer.param_groups``. Not modified.

    Returns:
        Every key but ``params``: bool, int, float, str, None or a list of floats (``betas``).

    Raises:
        ConfigError: a hyper-parameter of torch has another type, or asks for ``differentiable``
            or ``capturable``, which are for autograd and for CUDA graphs.
    """
    options: Options = {}
    for key, value in group.items():
        if key == "params":
            continue
        known = key in _HYPER_PARAMETERS
        if key in ("differentiable", "capturable") and value:
            raise ConfigError(
                f"optimizer option refused: {key}; expected False, got {value!r}; "
                "the update runs on the servers' CPUs: construct the optimizer without it"
            )
        try:
            options[key] = (
                _numbers(value) if isinstance(value, list | tuple) and known else (_scalar(value))
            )
        except TypeError:
            if known:
                raise ConfigError(
                    f"optimizer option refused: {key}; expected a number, a flag or a tuple of "
                    f"numbers, got {type(value).__name__}: {value!r:.80}; set a plain value"
                ) from None
    return options


def _numbers(values: list[Any] | tuple[Any, ...]) -> list[float]:
    numbers = [_scalar(value) for value in values]
    if any(isinstance(number, str | None) for number in numbers):
        raise TypeError
    return [float(number) for number in numbers if number is not None]


def _scalar(value: object) -> Scalar:
    """Return a plain value for a scalar.

    Raises:
        TypeError: it is none.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError
        return float(value.item())
    if isinstance(value, Integral):
        if int(value) not in _INT64:
            raise TypeError
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError
