"""Checkpoints as plain PyTorch loads them: models, tied weights, memory order, optimizers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from torch import nn

from paradis.errors import ConfigError, SnapshotCorrupt
from paradis.storage.checkpoint import Section, write_part
from paradis.storage.export import export_state_dict, optimizer_state_dict, read_state_dict
from paradis.storage.manifest import Manifest, read_manifest, write_manifest
from paradis.wire.messages import ParameterSpec

SOURCE = Path(__file__).parents[3] / "src"
Save = Callable[..., Path]
Content = Callable[[ParameterSpec, str, int], torch.Tensor]


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).clone()


def save_training(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save what torch holds as the pieces of one server, cut in two where there is enough."""
    names = {p: name for name, p in model.named_parameters()}
    specs, sections, scalars, layouts, options = [], [], {}, {}, []
    for number, group in enumerate(optimizer.param_groups):
        plain = {k: v for k, v in group.items() if k != "params"}
        options.append({k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()})
        for parameter in group["params"]:
            name = names[parameter]
            dtype = str(parameter.dtype).removeprefix("torch.")
            shape = tuple(parameter.shape)
            specs.append(ParameterSpec(name=name, shape=shape, dtype=dtype, options_group=number))
            if not parameter.is_contiguous():
                layouts[name] = parameter.stride()
            held: dict[str, Any] = {"value": parameter, **optimizer.state[parameter]}
            scalars[name] = {k: float(v) for k, v in held.items() if v.dim() == 0}
            for key, tensor in held.items():
                if tensor.dim():
                    flat = in_memory_order(tensor)
                    half = flat.numel() // 2
                    sections += [
                        Section(name, key, 0, flat[:half]),
                        Section(name, key, half, flat[half:]),
                    ]
    aliases = {
        alias: names[p]
        for alias, p in model.named_parameters(remove_duplicate=False)
        if alias != names[p]
    }
    write_manifest(
        directory,
        Manifest(
            paradis="0", step=3, group=0, groups=(0,), parameters=tuple(specs), layouts=layouts,
            optimizer=type(optimizer).__name__, options=options, scalars=scalars, extra={},
            aliases=aliases, pieces=write_part(directory, "server-0", sections),
        ),
    )  # fmt: skip


class Tied(nn.Module):
    """A convolution in channels-last order and two linear layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.inner(self.conv(x).mean((2, 3))))
        return out


def trained(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Tied()
    optimizer = make(
        [
            {"params": list(model.conv.parameters()), "lr": 0.02},
            {"params": [p for n, p in model.named_parameters() if not n.startswith("conv")]},
        ]
    )
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4, 4, generator=generator)).square().sum().backward()
        optimizer.step()


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda groups: torch.optim.Adam(groups, lr=0.01),
    lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    lambda groups: torch.optim.SGD(groups, lr=0.01),
    lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    lambda groups: torch.optim.NAdam(groups, lr=0.01),
    lambda groups: torch.optim.Rprop(groups, lr=0.01),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_goes_on_in_plain_torch_bit_for_bit(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model, optimizer = trained(make)
    directory = tmp_path / "step-00000003" / "group-0"
    save_training(directory, model, optimizer)
    export_state_dict(directory.parent, tmp_path / "model.pt")
    other, other_optimizer = trained(make)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    other_optimizer.load_state_dict(optimizer_state_dict(directory.parent))
    train(model, optimizer)
    train(other, other_optimizer)
    for name, expected in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], expected), name


def test_optimizer_state_has_torchs_own_form(tmp_path: Path) -> None:
    model, optimizer = trained(OPTIMIZERS[0])
    save_training(tmp_path / "group-0", model, optimizer)
    got, expected = optimizer_state_dict(tmp_path / "group-0"), optimizer.state_dict()
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        assert got["state"][index].keys() == entry.keys()
        for key, tensor in entry.items():
            assert got["state"][index][key].dtype == tensor.dtype
            assert torch.equal(got["state"][index][key], tensor)


def test_tied_names_share_memory_in_pt_and_stand_twice_in_safetensors(tmp_path: Path) -> None:
    model, optimizer = trained(OPTIMIZERS[2])
    save_training(tmp_path / "group-0", model, optimizer)
    names = export_state_dict(tmp_path, tmp_path / "m.safetensors")
    export_state_dict(tmp_path, tmp_path / "m.pt")
    flat = safetensors.torch.load_file(tmp_path / "m.safetensors")
    shared = torch.load(tmp_path / "m.pt", weights_only=True)
    assert set(names) == set(flat) == set(shared) == set(model.state_dict())
    assert shared["outer.weight"].data_ptr() == shared["inner.weight"].data_ptr()
    for name, expected in model.state_dict().items():
        assert shared[name].is_contiguous()
        assert torch.equal(flat[name], expected) and torch.equal(shared[name], expected)


def test_every_shape_is_exported_buffers_too(
    tmp_path: Path, save: Save, content: Content, parameters: tuple[ParameterSpec, ...]
) -> None:
    checkpoint = save(tmp_path, 5)
    export_state_dict(checkpoint, tmp_path / "m.safetensors")
    got = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert list(read_state_dict(checkpoint)) == [p.name for p in parameters]
    for spec in parameters:
        assert torch.equal(got[spec.name], content(spec, "value", 5).view(spec.shape))


def test_groups_are_joined_when_their_names_differ(tmp_path: Path, save: Save) -> None:
    checkpoint = save(tmp_path, 5, groups=(0, 1))
    with pytest.raises(SnapshotCorrupt, match=r"no manifest.json of groups \[1\]"):
        export_state_dict(checkpoint, tmp_path / "m.pt")
    save(tmp_path, 5, group=1, groups=(0, 1))
    with pytest.raises(ConfigError, match="several groups have a parameter"):
        export_state_dict(checkpoint, tmp_path / "m.pt")
    with pytest.raises(ConfigError, match="expected one group, got 2"):
        optimizer_state_dict(checkpoint)
    assert export_state_dict(checkpoint / "group-1", tmp_path / "m.pt")
    other = nn.Linear(2, 3)
    save_training(checkpoint / "group-1", other, torch.optim.SGD(other.parameters(), lr=0.1))
    names = export_state_dict(checkpoint, tmp_path / "m.pt")
    assert {"half", "weight", "bias"} <= set(names)


def test_bad_output_and_path_are_refused(tmp_path: Path, save: Save) -> None:
    checkpoint = save(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"ending in .safetensors or .pt or .pth, got .onnx"):
        export_state_dict(checkpoint, tmp_path / "m.onnx")
    with pytest.raises(ConfigError, match="no directory"):
        export_state_dict(checkpoint, tmp_path / "absent" / "m.pt")
    with pytest.raises(ConfigError, match="holds no groups"):
        export_state_dict(tmp_path / "absent", tmp_path / "m.pt")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layouts": {"wide": (1, 500)}}, "wide: strides"),
        ({"aliases": {"head": "ghost"}}, "head is tied to ghost"),
    ],
)
def test_manifest_that_contradicts_itself_is_corrupt(
    tmp_path: Path, save: Save, changes: dict[str, Any], text: str
) -> None:
    directory = save(tmp_path, 5) / "group-0"
    write_manifest(directory, msgspec.structs.replace(read_manifest(directory), **changes))
    with pytest.raises(SnapshotCorrupt, match=text):
        read_state_dict(directory)


LIMITED = """
import resource, sys
from pathlib import Path
from paradis.errors import StateError
from paradis.storage.export import export_state_dict
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
try:
    export_state_dict(Path(sys.argv[1]), Path(sys.argv[2]))
except StateError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_failed_export_leaves_the_old_output(tmp_path: Path, save: Save, name: str) -> None:
    checkpoint = save(tmp_path / "root", 5)
    (tmp_path / name).write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(checkpoint), str(tmp_path / name)],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.stdout.startswith(f"export could not be written: {tmp_path / name}"), done.stderr
    assert (tmp_path / name).read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "root"]
