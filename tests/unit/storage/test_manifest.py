"""The manifest: read back as written, refused when damaged, completing a checkpoint."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from paradis.errors import ConfigError, SnapshotCorrupt, StateError
from paradis.storage.checkpoint import condition
from paradis.storage.manifest import (
    FILE_NAME,
    Manifest,
    check_parameters,
    coverage_problems,
    latest,
    read_manifest,
    resolve,
    write_manifest,
)
from paradis.wire.messages import ParameterSpec, Piece

Save = Callable[..., Path]


def small(**changes: object) -> Manifest:
    piece = Piece(
        parameter="w", key="value", offset=0, length=6, dtype="float32", file="f.safetensors",
        tensor="w|value|0", checksum="0" * 16,
    )  # fmt: skip
    manifest = Manifest(
        paradis="0.1", step=12, group=0, groups=(0,), optimizer="SGD", options=[{"lr": 0.1}],
        parameters=(ParameterSpec(name="w", shape=(2, 3), dtype="float32", options_group=0),),
        scalars={}, extra={}, pieces=(piece,),
    )  # fmt: skip
    return msgspec.structs.replace(manifest, **changes)


def test_manifest_is_read_back_as_written(tmp_path: Path) -> None:
    options = [{"lr": 1e-3, "betas": [0.9, 0.999], "fused": None, "nesterov": True, "n": 2}]
    extra = {
        "nan": math.nan, "inf": -math.inf, "zero": -0.0, "tiny": 5e-324, "big": 2**63 - 1,
        "text": "float:inf", "more": "text:float:x", "é\n": "\x00ü", "none": None,
    }  # fmt: skip
    written = small(
        options=options, extra=extra, scalars={"w": {"step": 3, "mu": math.inf}},
        layouts={"w": (1, 2)}, aliases={"head": "w"},
    )  # fmt: skip
    write_manifest(tmp_path, written)
    got = read_manifest(tmp_path)
    assert math.isnan(got.extra.pop("nan"))  # type: ignore[arg-type]
    extra.pop("nan")
    assert got == written
    assert [type(got.extra[k]) for k in extra] == [type(v) for v in extra.values()]
    assert math.copysign(1, got.extra["zero"]) == -1  # type: ignore[arg-type]


def test_value_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        write_manifest(tmp_path, small(extra={"name": "\ud800"}))
    assert not list(tmp_path.iterdir())


def test_missing_manifest_says_that_the_checkpoint_is_incomplete(tmp_path: Path) -> None:
    with pytest.raises(SnapshotCorrupt, match=f"{tmp_path} is not complete: no manifest"):
        read_manifest(tmp_path)


def test_every_changed_or_lost_byte_is_noticed(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, small(extra={"a b": " x  y ", "f": 0.5}))
    data = path.read_bytes()
    source = random.Random(7)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= source.randrange(1, 256)
        path.write_bytes(flipped)
        with pytest.raises(SnapshotCorrupt, match=str(path)):
            read_manifest(tmp_path)
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(SnapshotCorrupt, match=str(path)):
            read_manifest(tmp_path)


def test_other_format_and_unknown_fields_are_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, small(format=2, paradis="9.9"))
    with pytest.raises(SnapshotCorrupt, match=r"expected format 1, got 2 of Paradis 9\.9"):
        read_manifest(tmp_path)


def test_file_names_may_not_leave_the_directory(tmp_path: Path) -> None:
    manifest = small()
    piece = msgspec.structs.replace(manifest.pieces[0], file="../f.safetensors")
    write_manifest(tmp_path, msgspec.structs.replace(manifest, pieces=(piece,)))
    with pytest.raises(SnapshotCorrupt, match="expected plain file names"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([(0, 6)], None),
        ([(4, 2), (0, 4), (4, 0)], None),
        ([(0, 4)], "elements 4..5 are missing"),
        ([(1, 5)], "elements 0..0 are missing"),
        ([(0, 4), (3, 3)], "elements from 3 are there twice"),
        ([(0, 7)], "7 elements, expected 6"),
        ([], "elements 0..5 are missing"),
    ],
)
def test_coverage_must_be_exactly_once(
    tmp_path: Path, runs: list[tuple[int, int]], problem: str | None
) -> None:
    one = small().pieces[0]
    pieces = tuple(msgspec.structs.replace(one, offset=o, length=n) for o, n in runs)
    manifest = small(pieces=pieces)
    found = coverage_problems(manifest)
    if problem is None:
        assert found == []
        return
    assert len(found) == 1 and problem in found[0] and "w (value)" in found[0]
    with pytest.raises(StateError, match="was not completed"):
        write_manifest(tmp_path, manifest)
    assert not list(tmp_path.iterdir())


def test_optimizer_state_needs_full_coverage_too_and_unknown_parameters_are_named() -> None:
    one = small().pieces[0]
    state = msgspec.structs.replace(one, key="exp_avg", length=5)
    stranger = msgspec.structs.replace(one, parameter="other")
    found = coverage_problems(small(pieces=(one, state, stranger)))
    assert found == [
        "parameter other of file f.safetensors is unknown",
        "parameter w (exp_avg): elements 5..5 are missing",
    ]


def test_check_parameters_names_each_difference(parameters: tuple[ParameterSpec, ...]) -> None:
    manifest = small(parameters=parameters)
    check_parameters(manifest, parameters)
    frozen = msgspec.structs.replace(parameters[0], trainable=False, dtype="torch.float32")
    check_parameters(manifest, (*parameters[1:], frozen))
    other = (
        msgspec.structs.replace(parameters[0], shape=(4, 3, 3, 3)),
        msgspec.structs.replace(parameters[1], name="whole"),
        *parameters[2:],
    )
    with pytest.raises(SnapshotCorrupt) as raised:
        check_parameters(manifest, other)
    text = str(raised.value)
    assert "conv.weight: expected float32 (4, 3, 3, 3)" in text
    assert "got float32 (4, 3, 2, 2)" in text
    assert "whole: not in the checkpoint" in text and "half: only in the checkpoint" in text
    assert "wide" not in text


def test_check_parameters_compares_memory_order(parameters: tuple[ParameterSpec, ...]) -> None:
    layouts = {"conv.weight": (12, 1, 6, 3)}
    manifest = small(parameters=parameters, layouts=layouts)
    check_parameters(manifest, parameters, layouts)
    with pytest.raises(SnapshotCorrupt, match=r"with strides \(12, 1, 6, 3\)"):
        check_parameters(manifest, parameters)


def test_long_differences_are_shortened() -> None:
    many = [
        ParameterSpec(name=f"p{i}", shape=(), dtype="float32", options_group=0) for i in range(30)
    ]
    with pytest.raises(SnapshotCorrupt, match="and 21 more"):
        check_parameters(small(), many)


# ------------------------------------------------------------------------------------- directories


def test_latest_is_the_newest_complete_one(tmp_path: Path, save: Save) -> None:
    assert latest(tmp_path / "none") is None
    assert latest(tmp_path) is None
    for step in (9, 100_000_000, 10):
        save(tmp_path, step)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-00000999.bak").mkdir()
    newest = tmp_path / "step-100000000"
    assert latest(tmp_path) == newest
    (newest / "group-0" / FILE_NAME).unlink()
    assert latest(tmp_path) == tmp_path / "step-00000010"


def test_checkpoint_needs_all_its_groups(tmp_path: Path, save: Save) -> None:
    save(tmp_path, 1)
    checkpoint = save(tmp_path, 2, groups=(0, 3))
    assert condition(checkpoint) == "incomplete"
    assert latest(tmp_path) == tmp_path / "step-00000001"
    save(tmp_path, 2, group=3, groups=(0, 3))
    assert condition(checkpoint) == "complete"
    assert latest(tmp_path) == checkpoint


def test_damaged_newest_is_reported_not_skipped(tmp_path: Path, save: Save) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (newest / "group-0" / FILE_NAME).write_bytes(b"{}")
    assert condition(newest) == "damaged"
    with pytest.raises(SnapshotCorrupt, match="damaged"):
        latest(tmp_path)


def test_resolve_takes_roots_checkpoints_and_groups(tmp_path: Path, save: Save) -> None:
    checkpoint = save(tmp_path, 1)
    assert resolve(tmp_path) == checkpoint
    assert resolve(checkpoint) == checkpoint
    assert resolve(checkpoint / "group-0") == checkpoint / "group-0"
    for absent in (tmp_path / "none", tmp_path / "step-00000005", tmp_path / "group-4"):
        with pytest.raises(ConfigError, match=f"not found: {absent}"):
            resolve(absent)
