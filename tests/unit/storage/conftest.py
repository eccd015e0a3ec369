"""A small checkpoint of two servers to read, damage and export."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paradis.storage.checkpoint import Section, write_part
from paradis.storage.manifest import Manifest, group_directory, step_directory, write_manifest
from paradis.wire.messages import ParameterSpec

PARAMETERS = (
    ParameterSpec(name="conv.weight", shape=(4, 3, 2, 2), dtype="float32", options_group=0),
    ParameterSpec(name="half", shape=(70,), dtype="bfloat16", options_group=0),
    ParameterSpec(name="wide", shape=(5, 7), dtype="float64", options_group=1),
    ParameterSpec(name="nothing", shape=(0, 3), dtype="float32", options_group=1),
    ParameterSpec(name="count", shape=(), dtype="int64", options_group=-1),
)


def values_of(spec: ParameterSpec, key: str, seed: int) -> torch.Tensor:
    """Return the flat content of a parameter's key: the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    for byte in f"{spec.name}|{key}".encode():
        generator.manual_seed(generator.initial_seed() * 31 + byte & 0xFFFFFFFF)
    numbers = torch.randn(math.prod(spec.shape), generator=generator, dtype=torch.float64)
    return (numbers * 100).to(getattr(torch, spec.dtype))


@pytest.fixture
def parameters() -> tuple[ParameterSpec, ...]:
    return PARAMETERS


@pytest.fixture
def content() -> Callable[..., torch.Tensor]:
    return values_of


@pytest.fixture
def save() -> Callable[..., Path]:
    """Return a function that saves ``step`` under a root by two servers and returns its path."""

    def saved(root: Path, step: int, *, group: int = 0, **changes: Any) -> Path:
        directory = group_directory(step_directory(root, step), group)
        parts: dict[str, list[Section]] = {"server-0": [], "server-1": []}
        for spec in PARAMETERS:
            for key in ("value", "exp_avg") if spec.options_group >= 0 else ("value",):
                flat = values_of(spec, key, step)
                middle = flat.numel() // 3
                parts["server-0"].append(Section(spec.name, key, 0, flat[:middle]))
                parts["server-1"].append(Section(spec.name, key, middle, flat[middle:]))
        pieces = tuple(p for n, s in parts.items() for p in write_part(directory, n, s))
        fields: dict[str, Any] = {
            "paradis": "0.1",
            "step": step,
            "group": group,
            "groups": (group,),
            "parameters": PARAMETERS,
            "optimizer": "Adam",
            "options": [{"lr": 0.1, "betas": [0.9, 0.999]}, {"lr": 0.01, "betas": [0.9, 0.999]}],
            "scalars": {p.name: {"step": float(step)} for p in PARAMETERS if p.options_group >= 0},
            "extra": {"epoch": 3, "best": math.inf},
            "pieces": pieces,
        }
        write_manifest(directory, Manifest(**{**fields, **changes}))
        return directory.parent

    return saved
