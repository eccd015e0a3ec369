"""Calls that take tensors without a torch function, made to wait while a step is on its way.

``torch.tensor(p)``, the transforms of ``torch.func``, DLPack and collectives hand a parameter to
C++ and ask no ``__torch_function__``. While a step is on its way each of these names means a
function that first waits for the held tensors among its arguments; afterwards it means what it did.
Compilers look at names, hooks and memory alike: before them the whole step is finished.

What is left is code that holds such a function from before, and extensions of the script's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from paradis.frontend.reading import await_all

_READERS = {
    "torch": "tensor as_tensor asarray",
    "torch.utils": "swap_tensors",
    "torch.utils.dlpack": "to_dlpack",
    "torch._functorch.eager_transforms": "_wrap_for_grad _wrap_functional_tensor",
    "torch._functorch.vmap": "_add_batch_dim",
    "torch.distributed": "all_gather all_gather_into_tensor all_reduce all_to_all "
    "all_to_all_single broadcast gather irecv isend recv reduce reduce_scatter "
    "reduce_scatter_tensor scatter send",
}
_COMPILERS = {"torch": "compile", "torch.jit": "script trace trace_module"}


class UnseenCalls:
    """Stand-ins that are in place while any step of this process is on its way.

    Args:
        finish: finishes every step that is on its way.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._users = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def watch(self) -> None:
        """Put them in place, for one step more."""
        self._users += 1
        if self._users == 1:
            for names, make in ((_READERS, _waiting), (_COMPILERS, self._finishing)):
                for module, words in names.items():
                    self._replace(sys.modules.get(module), words.split(), make)

    def _replace(
        self, module: Any, names: list[str], make: Callable[[Any], Callable[..., Any]]
    ) -> None:
        for name in names:
            call = getattr(module, name, None)
            if call is not None:
                stand_in = make(call)
                setattr(module, name, stand_in)
                self._replaced.append((module, name, call, stand_in))

    def _finishing(self, call: Any) -> Callable[..., Any]:
        @functools.wraps(call)
        def finish_first(*args: Any, **kwargs: Any) -> Any:
            self._finish()
            return call(*args, **kwargs)

        return finish_first

    def unwatch(self) -> None:
        """Take them away, for one step; the last one puts back what was there."""
        self._users -= 1
        if not self._users:
            for module, name, call, stand_in in self._replaced:
                if getattr(module, name, None) is stand_in:  # else somebody came after us
                    setattr(module, name, call)
            self._replaced = []


def _waiting(call: Any) -> Callable[..., Any]:
    @functools.wraps(call)
    def wait_first(*args: Any, **kwargs: Any) -> Any:
        await_all((args, kwargs))
        return call(*args, **kwargs)

    return wait_first
