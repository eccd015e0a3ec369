"""Pieces of a checkpoint: written whole or not at all, every damaged byte named, kept in order."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch

from paradis.errors import ConfigError, LocalProtocolError, SnapshotCorrupt, StateError
from paradis.storage.checkpoint import (
    PieceReader,
    Section,
    condition,
    prune,
    remove_incomplete,
    verify,
    write_part,
)
from paradis.storage.manifest import FILE_NAME, latest, read_manifest
from paradis.wire.messages import ParameterSpec

SOURCE = Path(__file__).parents[3] / "src"
Save = Callable[..., Path]
Content = Callable[[ParameterSpec, str, int], torch.Tensor]


def reader_of(checkpoint: Path, group: int = 0) -> PieceReader:
    directory = checkpoint / f"group-{group}"
    return PieceReader(directory, read_manifest(directory))


# ----------------------------------------------------------------------------- writing and reading


def test_what_was_saved_is_read_in_any_range(
    tmp_path: Path, save: Save, content: Content, parameters: tuple[ParameterSpec, ...]
) -> None:
    checkpoint = save(tmp_path, 4)
    assert verify(checkpoint) == [] and verify(checkpoint / "group-0") == []
    reader = reader_of(checkpoint)
    for spec in parameters:
        trained = spec.options_group >= 0
        assert reader.keys(spec.name) == (("exp_avg", "value") if trained else ("value",))
        assert reader.scalars(spec.name) == ({"step": 4.0} if trained else {})
        for key in reader.keys(spec.name):
            expected = content(spec, key, 4)
            assert reader.dtype(spec.name, key) == spec.dtype
            for offset in range(0, expected.numel() + 1, 5):
                length = min(11, expected.numel() - offset)
                got = reader.read(spec.name, key, offset, length, spec.dtype)
                assert got.dtype == expected.dtype
                assert torch.equal(got, expected[offset : offset + length])


def test_files_are_plain_safetensors(tmp_path: Path, save: Save) -> None:
    directory = save(tmp_path, 4) / "group-0"
    manifest = read_manifest(directory)
    loaded = {f.name: safetensors.torch.load_file(f) for f in directory.glob("*.safetensors")}
    assert len(loaded) == 2
    for piece in manifest.pieces:
        tensor = loaded[piece.file][piece.tensor]
        assert tensor.shape == (piece.length,) and str(tensor.dtype) == f"torch.{piece.dtype}"


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64,
     torch.uint16, torch.float8_e4m3fn],
)  # fmt: skip
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.arange(37) % 2).to(torch.float32).to(dtype)
    odd = torch.tensor([1, 2, 3], dtype=torch.uint8)
    pieces = write_part(
        tmp_path, "s", [Section("odd", "value", 0, odd), Section("p", "value", 0, tensor)]
    )
    loaded = safetensors.torch.load_file(tmp_path / pieces[0].file)
    assert torch.equal(loaded["p|value|0"].view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(loaded["odd|value|0"], odd)


def test_sections_may_share_storage_and_be_empty(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    sections = [Section("a", "value", 0, flat[:4]), Section("b", "value", 0, flat[2:9]),
                Section("c", "value", 0, flat[:0])]  # fmt: skip
    pieces = write_part(tmp_path / "new" / "deep", "s", sections)
    loaded = safetensors.torch.load_file(tmp_path / "new" / "deep" / pieces[0].file)
    assert [loaded[p.tensor].tolist() for p in pieces] == [s.tensor.tolist() for s in sections]
    assert write_part(tmp_path, "s", []) == ()


def test_saving_other_values_never_changes_an_older_file(tmp_path: Path) -> None:
    first = write_part(tmp_path, "s", [Section("p", "value", 0, torch.zeros(5))])
    again = write_part(tmp_path, "s", [Section("p", "value", 0, torch.zeros(5))])
    other = write_part(tmp_path, "s", [Section("p", "value", 0, torch.ones(5))])
    assert first == again and first[0].file != other[0].file
    assert (tmp_path / first[0].file).exists()


@pytest.mark.parametrize(
    ("name", "sections", "text"),
    [
        ("a/b", [], "plain file name"),
        ("s", [Section("p", "value", 0, torch.zeros(2, 2))], "contiguous vector"),
        ("s", [Section("p", "value", 0, torch.zeros(4)[::2])], "contiguous vector"),
        ("s", [Section("p", "value", 0, torch.zeros(4, dtype=torch.complex128))], "complex128"),
        ("s", [Section("p", "value", 0, torch.zeros(4))] * 2, "same name"),
    ],
)
def test_bad_sections_are_the_callers_bug(
    tmp_path: Path, name: str, sections: list[Section], text: str
) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        write_part(tmp_path, name, sections)
    assert not list(tmp_path.iterdir())


def test_what_is_not_there_is_named(tmp_path: Path, save: Save) -> None:
    reader = reader_of(save(tmp_path, 1))
    with pytest.raises(SnapshotCorrupt, match="parameter ghost has no value; it has \\[\\]"):
        reader.read("ghost", "value", 0, 1, "float32")
    with pytest.raises(SnapshotCorrupt, match="half has no max_exp; it has \\['exp_avg', 'value'"):
        reader.read("half", "max_exp", 0, 1, "bfloat16")
    with pytest.raises(SnapshotCorrupt, match=r"half \(value\): elements 70..71 are missing"):
        reader.read("half", "value", 60, 12, "bfloat16")
    with pytest.raises(SnapshotCorrupt, match="expected dtype float32, got bfloat16"):
        reader.read("half", "value", 0, 1, "float32")


def test_gap_between_pieces_is_missing(tmp_path: Path, save: Save) -> None:
    directory = save(tmp_path, 1) / "group-0"
    manifest = read_manifest(directory)
    first = tuple(p for p in manifest.pieces if p.offset == 0)
    second = tuple(p for p in manifest.pieces if p.offset > 0)
    for pieces in (first, second):
        reader = PieceReader(directory, msgspec.structs.replace(manifest, pieces=pieces))
        with pytest.raises(SnapshotCorrupt, match="are missing|another header"):
            reader.read("half", "value", 0, 70, "bfloat16")


# -------------------------------------------------------------------------------------- corruption


def test_flipped_bytes_are_named_by_file_and_parameter(tmp_path: Path, save: Save) -> None:
    checkpoint = save(tmp_path, 1)
    source = random.Random(11)
    for path in sorted((checkpoint / "group-0").iterdir()):
        data = path.read_bytes()
        for position in (0, 7, 8, len(data) - 1, *source.choices(range(len(data)), k=150)):
            flipped = bytearray(data)
            flipped[position] ^= source.randrange(1, 256)
            path.write_bytes(flipped)
            problems = verify(checkpoint)
            assert len(problems) == 1 and str(path) in problems[0], (path.name, position)
        path.write_bytes(data)
    assert verify(checkpoint) == []


def test_damaged_piece_is_refused_when_first_touched(tmp_path: Path, save: Save) -> None:
    checkpoint = save(tmp_path, 1)
    piece = next(
        p
        for p in read_manifest(checkpoint / "group-0").pieces
        if p.parameter == "wide" and p.offset
    )
    path = checkpoint / "group-0" / piece.file
    data = bytearray(path.read_bytes())
    whole = safetensors.torch.load_file(path)[piece.tensor]
    data[data.index(whole.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    reader = reader_of(checkpoint)
    for _ in range(2):
        with pytest.raises(SnapshotCorrupt) as raised:
            reader.read("wide", piece.key, 34, 1, "float64")
        for part in (str(path), piece.tensor, "wide", piece.checksum):
            assert part in str(raised.value)
    reader.read("half", "value", 0, 70, "bfloat16")


def test_shortened_lengthened_and_lost_files_are_named(tmp_path: Path, save: Save) -> None:
    checkpoint = save(tmp_path, 1)
    path = sorted((checkpoint / "group-0").glob("*.safetensors"))[0]
    data = path.read_bytes()
    for changed in (b"", data[:4], data[:-1], data + b"\0"):
        path.write_bytes(changed)
        (problem,) = verify(checkpoint)
        assert str(path) in problem and "damaged" in problem
    path.unlink()
    (problem,) = verify(checkpoint)
    assert problem.startswith(f"checkpoint file is missing: {path}")
    with pytest.raises(SnapshotCorrupt, match="missing"):
        reader_of(checkpoint).read("half", "value", 0, 70, "bfloat16")


def test_verify_reports_missing_groups_and_manifests(tmp_path: Path, save: Save) -> None:
    checkpoint = save(tmp_path, 1, groups=(0, 1))
    assert verify(checkpoint) == [f"checkpoint group is missing: {checkpoint / 'group-1'}"]
    (checkpoint / "group-1").mkdir()
    (problem,) = verify(checkpoint)
    assert "group-1 is not complete: no manifest" in problem
    assert "holds no groups" in verify(tmp_path / "empty")[0]


# --------------------------------------------------------------------------- crashes and full disks

SAVE_FOR_EVER = """
import sys
from pathlib import Path
import torch
from paradis.storage.checkpoint import Section, write_part
from paradis.storage.manifest import *
root = Path(sys.argv[1])
spec = ParameterSpec(name="w", shape=(200_000,), dtype="float32", options_group=0)
step = 0
while True:
    step += 1
    directory = group_directory(step_directory(root, step % 3), 0)
    tensor = torch.full((200_000,), float(step))
    halves = [("server-0", 0, tensor[:90_000]), ("server-1", 90_000, tensor[90_000:])]
    parts = [write_part(directory, n, [Section("w", "value", o, t)]) for n, o, t in halves]
    pieces = parts[0] + parts[1]
    write_manifest(directory, Manifest(paradis="0.1", step=step, group=0, groups=(0,),
        parameters=(spec,), optimizer="SGD", options=[{}], scalars={}, extra={}, pieces=pieces))
    print(step, flush=True)
"""


@pytest.mark.parametrize("after", [1, 4])
def test_kill_9_in_the_middle_of_a_save_leaves_the_previous_ones(
    tmp_path: Path, after: int
) -> None:
    saved = 0
    with subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    ) as child:
        assert child.stdout is not None
        try:
            while saved < after:
                saved = int(child.stdout.readline())
            # The next save is begun: its files appear before its manifest.
            while saved == after and not in_the_making(tmp_path, after + 1):
                if child.poll() is not None:
                    break
        finally:
            child.kill()
        saved = max([saved, *(int(line) for line in child.stdout if line.endswith("\n"))])
    steps = {}
    for checkpoint in tmp_path.iterdir():
        if condition(checkpoint) == "complete":
            assert verify(checkpoint) == []
            step = read_manifest(checkpoint / "group-0").step
            values = reader_of(checkpoint).read("w", "value", 0, 200_000, "float32")
            assert torch.equal(values, torch.full((200_000,), float(step)))
            steps[step] = checkpoint
    # All that were acknowledged and not replaced by a later complete one are there.
    newest = max(steps)
    assert newest in (saved, saved + 1)
    assert set(range(max(1, newest - 1), newest + 1)) <= set(steps)


def in_the_making(root: Path, step: int) -> bool:
    directory = root / f"step-{step % 3:08d}" / "group-0"
    return any(p.name.endswith(".tmp") for p in directory.glob(".*"))


def test_next_save_sweeps_what_a_crash_left(tmp_path: Path, save: Save) -> None:
    directory = tmp_path / "step-00000002" / "group-0"
    directory.mkdir(parents=True)
    (directory / ".server-0-00.safetensors.99.tmp").write_bytes(b"half")
    (directory / "server-9-00.safetensors").write_bytes(b"old")
    save(tmp_path, 2)
    manifest = read_manifest(directory)
    assert {p.name for p in directory.iterdir()} == {FILE_NAME, *(p.file for p in manifest.pieces)}


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from paradis.errors import StateError
from paradis.storage.checkpoint import Section, write_part
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_part(Path(sys.argv[1]), "server-0", [Section("w", "value", 0, torch.zeros(100_000))])
except StateError as error:
    print(error)
"""


def test_failed_write_is_a_state_error_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.stdout.startswith(f"checkpoint part could not be written: {tmp_path}/server-0-")
    assert "file too large; the previous checkpoint is untouched; free space" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


def test_full_disk_leaves_the_previous_checkpoint(tiny_disk: Path, save: Save) -> None:
    checkpoint = save(tiny_disk, 1)
    directory = tiny_disk / "step-00000002" / "group-0"
    big = Section("w", "value", 0, torch.ones(1 << 19))
    with pytest.raises(StateError, match="no space left.*previous checkpoint is untouched.*free"):
        write_part(directory, "server-0", [big])
    assert list(directory.iterdir()) == []
    assert latest(tiny_disk) == checkpoint and verify(checkpoint) == []
    filler = tiny_disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(b"x" * (1 << 20))
    with pytest.raises(StateError, match="checkpoint manifest could not be written|part could not"):
        save(tiny_disk, 3)
    filler.unlink()
    assert latest(tiny_disk) == checkpoint and verify(checkpoint) == []
    assert latest(tiny_disk) != save(tiny_disk, 3) == latest(tiny_disk)


# ---------------------------------------------------------------------------------------- removing


def test_prune_keeps_the_newest_complete_ones(tmp_path: Path, save: Save) -> None:
    kept = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    (kept[3] / "group-0" / FILE_NAME).unlink()
    damaged = save(tmp_path, 0)
    (damaged / "group-0" / FILE_NAME).write_bytes(b"?")
    assert prune(tmp_path, 2) == (kept[0],)
    assert sorted(tmp_path.iterdir()) == [damaged, *kept[1:]]
    assert prune(tmp_path, 2) == ()
    with pytest.raises(ConfigError, match="expected 1 or more, got 0"):
        prune(tmp_path, 0)


def test_remove_incomplete_spares_what_may_be_in_the_making(tmp_path: Path, save: Save) -> None:
    (tmp_path / "step-00000001" / "group-0").mkdir(parents=True)
    assert remove_incomplete(tmp_path) == ()
    save(tmp_path, 2)
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-other").mkdir()
    assert remove_incomplete(tmp_path) == (tmp_path / "step-00000001",)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["step-00000002", "step-00000003", "step-other"]
