"""One tensor of the script, as flat memory of the CPU: a view where possible, else a copy."""

from __future__ import annotations

import torch

from paradis.numerics.memory_order import as_bytes, copy_in_order, flat_view, same_order


class BoundTensor:
    """One parameter or buffer of the model.

    Args:
        name: as registered.
        tensor: the live tensor.

    Attributes:
        flat: (numel,) on the CPU in memory order: a view of the tensor, or a staging copy.
        staged: whether ``flat`` is a staging copy.
        stride: of the tensor when bound first.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.stride = tensor.stride()
        self._aside: torch.Tensor | None = None
        self.bind()

    def bind(self) -> None:
        """Look at the tensor's memory (again: ``p.data = other`` moves it)."""
        view = flat_view(self.tensor) if self.tensor.device.type == "cpu" else None
        self.staged = view is None
        self._row_major = not self.staged and self.tensor.is_contiguous()
        self.flat = torch.empty(self.tensor.numel(), dtype=self.dtype) if view is None else view
        self.pointer = self.tensor.data_ptr()
        self.bytes = as_bytes(self.flat)
        self.stage()

    def moved(self) -> bool:
        """Whether the tensor lies elsewhere than when it was bound."""
        with torch._C.DisableTorchFunctionSubclass():  # another call may wait for its value
            return self.tensor.data_ptr() != self.pointer

    def stage(self) -> None:
        """Copy the tensor's present value into the staging copy, if it has one."""
        if self.staged:
            _copy_out(self.tensor.detach(), self.flat)

    def unstage(self) -> None:
        """Copy the staging copy into the tensor, if it has one."""
        if self.staged:
            # The tensor may be held until this is done (`frontend.reading`).
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                value = self.flat.view(self.shape) if self.flat.numel() else self.flat
                self.tensor.copy_(value.reshape(self.shape))

    def set_aside(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a gradient in memory that backward does not write, until the next call.

        Args:
            flat: as `gradient` returned it; if it is a copy already, it is returned itself.
        """
        grad = self.tensor.grad
        assert grad is not None
        if flat.untyped_storage()._cdata != grad.untyped_storage()._cdata:
            return flat
        if self._aside is None or self._aside.shape != flat.shape:
            self._aside = torch.empty_like(flat)
        return self._aside.copy_(flat)

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient, (numel,) in the value's memory order; a view where possible.

        Raises:
            ValueError: the gradient is sparse; the caller names the parameter.
        """
        grad = self.tensor.grad
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            raise ValueError("sparse")
        if self.staged:
            flat = torch.empty(self.tensor.numel(), dtype=self.dtype)
            _copy_out(grad.detach(), flat)
            return flat
        here = grad.dtype == self.dtype and grad.device.type == "cpu"
        if here and self._row_major and grad.is_contiguous():
            return grad.detach().view(-1)
        if here and same_order(grad, self.tensor):
            view = flat_view(grad)
            if view is not None:
                return view
        flat = torch.empty(self.tensor.numel(), dtype=self.dtype)
        copy_in_order(grad.to(self.dtype), self.tensor, flat)
        return flat


def _copy_out(source: torch.Tensor, flat: torch.Tensor) -> None:
    """Write a tensor into a flat CPU tensor in row-major order."""
    flat.copy_(source.reshape(-1))
