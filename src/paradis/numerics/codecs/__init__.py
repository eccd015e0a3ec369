"""Gradient codecs: fewer bytes for the same numbers, or for nearly the same.

Kernels are compiled by Numba at their first use, so importing this package needs no Numba.

    >>> import torch
    >>> codec = Bfloat16()
    >>> code = torch.empty(codec.encoded_bytes(2), dtype=torch.uint8)
    >>> codec.encode(torch.tensor([1.0, -2.5]), code)
    >>> out = torch.empty(2)
    >>> codec.decode(code, out)
    >>> out.tolist()
    [1.0, -2.5]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paradis.numerics.codecs.codec import Codec
from paradis.numerics.codecs.freeze import (
    FreezeRule,
    FreezeWatch,
    bias_corrected,
    freeze_variance,
    uncorrected_freeze_step,
    variance_norm,
    variance_ratio,
)
from paradis.numerics.codecs.int8 import Int8
from paradis.numerics.codecs.lion import code_bytes, encode_lion, lion_step, majority_vote
from paradis.numerics.codecs.onebit import Blend, OneBit, pack_mask
from paradis.numerics.codecs.onebit_adam import encode_momentum, frozen_step, inverse_denominator
from paradis.numerics.codecs.plain import Bfloat16, Uncompressed

__all__ = [
    "CODECS",
    "Bfloat16",
    "Blend",
    "Codec",
    "FreezeRule",
    "FreezeWatch",
    "Int8",
    "OneBit",
    "Uncompressed",
    "bias_corrected",
    "code_bytes",
    "encode_lion",
    "encode_momentum",
    "freeze_variance",
    "frozen_step",
    "inverse_denominator",
    "lion_step",
    "majority_vote",
    "pack_mask",
    "uncorrected_freeze_step",
    "variance_norm",
    "variance_ratio",
]

CODECS: Final[Mapping[str, type[Codec]]] = {
    cls.name: cls for cls in (Uncompressed, Bfloat16, Int8, OneBit)
}
"""Codecs by name; made without arguments they have the defaults."""
