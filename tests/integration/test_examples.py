"""The shipped examples, run as a user runs them: alone, under `paradis run`, and resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paradis
from paradis.storage.export import export_state_dict

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "examples" / "digits.py")
TWO_GROUPS = str(ROOT / "examples" / "two_groups.py")
TRAIN_LM = str(ROOT / "examples" / "train_lm.py")
SOURCE = str(Path(paradis.__file__).parents[1])
WAIT_S = 100.0
AFTER = r"^held-out bits per byte after: +([\d.]+)$"
TINY = ("--layers", "1", "--width", "32", "--batch", "2")


def run(directory: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    """Run Python with arguments in a directory; return exit code, output, errors."""
    directory.mkdir(exist_ok=True)
    env = {key: value for key, value in os.environ.items() if "PARADIS" not in key}
    path = [environ.pop("PYTHONPATH", ""), SOURCE]
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in path if p)}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=directory, env=env | environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=WAIT_S)
    except BaseException:
        process.send_signal(signal.SIGINT)  # the launcher takes its nodes along
        try:
            process.communicate(timeout=15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise
    return process.returncode, out, err


def launch(directory: Path, *arguments: str) -> tuple[int, str, str]:
    """Run ``paradis run`` with arguments in a directory."""
    return run(directory, "-m", "paradis.cli.main", "run", *arguments)


def found(pattern: str, text: str) -> str:
    """Return the first group of the one line that matches."""
    match = re.search(pattern, text, re.MULTILINE)
    assert match, f"no {pattern!r} in:\n{text}"
    return match.group(1)


def accuracy(out: str) -> float:
    """Return the percentage that digits.py printed."""
    return float(found(r"^test accuracy: ([\d.]+) %$", out))


def values(checkpoint: str, file: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of a checkpoint, by way of an exported file."""
    export_state_dict(Path(checkpoint), file)
    loaded: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return loaded


def test_digits_alone(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, DIGITS)
    assert code == 0, err
    assert accuracy(out) >= 95.0


def test_digits_with_two_workers_and_two_servers(tmp_path: Path) -> None:
    code, out, err = launch(tmp_path, "--workers", "2", "--servers", "2", DIGITS)
    assert code == 0, err
    assert accuracy(out) >= 95.0


def test_two_groups_alone(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, TWO_GROUPS)
    assert code == 0, err
    assert accuracy(out) >= 95.0


def test_two_groups_train_a_backbone_and_a_head(tmp_path: Path) -> None:
    """Every worker reads digits, with a half that it has not trained."""
    code, _, err = launch(tmp_path, "--config", str(Path(TWO_GROUPS).with_suffix(".yaml")),
                          TWO_GROUPS)  # fmt: skip
    assert code == 0, err
    (run_directory,) = (tmp_path / "paradis-runs").iterdir()
    logs = [(run_directory / f"worker-{rank}.log").read_text() for rank in range(4)]
    assert all(accuracy(log) >= 94.0 for log in logs), logs
    saved = found(r"^paradis: checkpoint of step \d+: (.+)$", err)
    whole = values(saved, tmp_path / "whole.pt")
    assert whole.keys() == {
        *(f"backbone.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")),
        "head.weight", "head.bias",
    }  # fmt: skip


def test_digits_without_scikit_learn_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("raise ImportError('not here')\n")
    code, _, err = run(tmp_path, DIGITS, PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "paradis[examples]" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Six steps alone: the directory of checkpoints, of steps 3 and 6, and the output."""
    directory = tmp_path_factory.mktemp("whole")
    code, out, err = run(directory, TRAIN_LM, "--steps", "6", "--save-every", "3", *TINY)
    assert code == 0, err
    return directory / "checkpoints", out


def test_train_lm_alone_learns_and_saves(whole: tuple[Path, str]) -> None:
    checkpoints, out = whole
    before = float(found(r"^held-out bits per byte before: ([\d.]+)$", out))
    assert before == pytest.approx(8, abs=1)
    assert float(found(AFTER, out)) < before
    assert found(r"^checkpoint: (.+)$", out) == str(checkpoints / "step-00000006")


def test_train_lm_resumed_has_the_bits_of_an_uninterrupted_run(
    whole: tuple[Path, str], tmp_path: Path
) -> None:
    checkpoints, out = whole
    restore = {"PARADIS_CHECKPOINT_RESTORE": str(checkpoints / "step-00000003")}
    code, resumed, err = run(tmp_path, TRAIN_LM, "--steps", "6", *TINY, **restore)
    assert code == 0, err
    assert "resumed at step 3\n" in resumed
    assert found(AFTER, resumed) == found(AFTER, out)
    expected = values(str(checkpoints / "step-00000006"), tmp_path / "expected.pt")
    got = values(found(r"^checkpoint: (.+)$", resumed), tmp_path / "got.pt")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_train_lm_goes_on_with_two_workers_and_two_servers(
    whole: tuple[Path, str], tmp_path: Path
) -> None:
    resume = str(whole[0] / "step-00000006")
    code, out, err = launch(
        tmp_path, "--workers", "2", "--servers", "2", "--resume", resume,
        TRAIN_LM, "--steps", "8", *TINY,
    )  # fmt: skip
    assert code == 0, err
    assert "2 worker(s)" in out
    assert "resumed at step 6\n" in out
    assert re.search(r"^step 8/8  loss [\d.]+ ", out, re.MULTILINE)
    checkpoint = found(r"^checkpoint: (.+)$", out)
    assert Path(checkpoint).name == "step-00000008"
    assert f"--resume {checkpoint} {TRAIN_LM} --steps 8" in err
