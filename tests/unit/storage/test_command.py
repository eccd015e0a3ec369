"""``paradis checkpoint``: what it prints and how it exits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paradis.cli.checkpoint import add_parser
from paradis.storage.manifest import FILE_NAME

Save = Callable[..., Path]


def run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser(prog="paradis")
    add_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["checkpoint", *map(str, words)])
    return int(arguments.run(arguments))


def test_ls_lists_all_with_their_condition(
    tmp_path: Path, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (7, 8, 9):
        save(tmp_path, step)
    (tmp_path / "step-00000008" / "group-0" / FILE_NAME).unlink()
    (tmp_path / "step-00000009" / "group-0" / FILE_NAME).write_bytes(b"?")
    assert run("ls", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "step-00000007  complete  group-0  step 7  5 parameters  0.0 MiB  Adam  best=inf, epoch=3",
        "step-00000008  incomplete",
        "step-00000009  damaged",
    ]
    for path in (tmp_path / "step-00000007", tmp_path / "step-00000007" / "group-0"):
        assert run("ls", path) == 0
        assert capsys.readouterr().out.splitlines() == lines[:1]


def test_verify_exits_1_and_names_what_is_damaged(
    tmp_path: Path, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save(tmp_path, 7)
    assert run("verify", tmp_path) == 0
    assert capsys.readouterr().out == f"{checkpoint}: whole\n"
    path = next((checkpoint / "group-0").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert run("verify", checkpoint) == 1
    out = capsys.readouterr().out
    assert str(path) in out and out.endswith(f"{checkpoint}: 1 problem\n")


def test_export_writes_a_plain_state_dict(
    tmp_path: Path, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save(tmp_path, 7)
    output = tmp_path / "model.pt"
    assert run("export", tmp_path, output) == 0
    assert capsys.readouterr().out == f"{checkpoint} -> {output}: 5 tensors\n"
    assert torch.load(output, weights_only=True)["conv.weight"].shape == (4, 3, 2, 2)


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["export"]])
def test_nothing_there_is_an_error_line(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = [tmp_path / "m.pt"] if words == ["export"] else []
    assert run(*words, tmp_path, *output) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: checkpoint not found: {tmp_path}")
