"""A gradient as it was handed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import xxhash

from paradis.errors import StateError
from paradis.numerics.memory_order import as_bytes


@dataclass(slots=True)
class Handed:
    """A gradient as it was handed over: the tensor, its version, its flat form, its hash.

    Attributes:
        taken: the parameter has it no more (``training.free_gradients``).
    """

    grad: torch.Tensor
    version: int
    flat: torch.Tensor
    digest: int = 0
    taken: bool = False

    def check_digest(self, name: str) -> None:
        """Compare the gradient with its hash.

        Raises:
            StateError: it is another; ``name`` is its parameter's.
        """
        if xxhash.xxh3_64_intdigest(as_bytes(self.flat)) != self.digest:
            raise StateError(
                f"gradient of {name} was changed after backward through .data or NumPy, "
                "which no version counter sees; change it through torch operations "
                "(p.grad.mul_(...)), so that the change counts"
            )


GONE: Final = Handed(torch.empty(0), -1, torch.empty(0), taken=True)
"""In place of a gradient that was taken and whose codes are made."""
