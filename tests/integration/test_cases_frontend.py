"""What the frontend decides by itself: names, compiled models, replaced modules, copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from paradis import ParadisError
from paradis.frontend.naming import clean, name_buffers, name_parameters
from paradis.frontend.optimizer import WrappedOptimizer
from paradis.frontend.watch import ModelWatch
from paradis.frontend.wrap import is_compiled


class OptimizedModule(torch.nn.Module):
    """Named and built as what ``torch.compile`` returns for a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def two_layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def test_a_compiled_model_is_noticed() -> None:
    model = two_layers()
    assert not is_compiled(model)
    assert is_compiled(OptimizedModule(model))
    model.compile(backend="eager")
    assert is_compiled(model)


def test_names_are_those_of_the_plain_model() -> None:
    model = two_layers()
    wrapped = OptimizedModule(model)
    wrapped._orig_mod[1] = OptimizedModule(model[1])
    groups = [{"params": list(model.parameters())}]
    names = [n.spec.name for n in name_parameters(wrapped, groups)]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert clean("module.a.module.b") == "a.module.b"


def test_parameters_outside_the_model_are_named_by_place() -> None:
    loose = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    named = name_parameters(two_layers(), [{"params": []}, {"params": loose}], first_group=3)
    assert [n.spec.name for n in named] == ["param_groups.4.0", "param_groups.4.1"]
    assert [n.spec.options_group for n in named] == [4, 4]


def test_buffers_that_servers_cannot_hold_are_left_out_by_name() -> None:
    model = two_layers()
    model.register_buffer("phases", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("kept", torch.ones(2, dtype=torch.bool))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    trained = name_parameters(model, [{"params": list(model.parameters())}])
    stored, left_out = name_buffers(model, trained)
    assert [n.spec.name for n in stored] == ["kept"]
    assert left_out == ["phases", "sparse"]


def test_only_another_tensor_under_the_same_name_is_a_replacement() -> None:
    model = two_layers()
    watch = ModelWatch(model)
    watch.add(model.parameters())
    assert watch.replaced() == ""
    model[1] = OptimizedModule(model[1])  # the same parameters below
    assert watch.replaced() == ""
    model.append(torch.nn.Linear(1, 1))  # others, not trained
    assert watch.replaced() == ""
    del model[2]
    kept = model[0]
    model[0] = torch.nn.Identity()  # gone: unused from now on
    assert watch.replaced() == ""
    model[0] = torch.nn.Linear(3, 2)
    assert watch.replaced() == "0.weight"
    model[0] = kept
    assert watch.replaced() == ""


def test_a_tie_that_is_undone_is_a_replacement() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    watch = ModelWatch(model)
    watch.add(model.parameters())
    model[1].weight = torch.nn.Parameter(torch.ones(2, 2))
    assert watch.replaced() == "1.weight"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_of_the_optimizer_do_not_train(duplicate: Any) -> None:
    # The class alone: a copy has what torch's own __getstate__ keeps, and no binding.
    optimizer = WrappedOptimizer(torch.optim.SGD(two_layers().parameters(), lr=0.1), None)  # type: ignore[arg-type]
    copied = duplicate(optimizer)
    with pytest.raises(ParadisError, match=r"copy its state_dict\(\) instead"):
        copied.step()
