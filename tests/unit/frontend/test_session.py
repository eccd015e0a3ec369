"""Rank and number of workers as the environment names them."""

from __future__ import annotations

import pytest

from paradis.errors import ConfigError
from paradis.frontend.session import rank, world_size

JOB = {"PARADIS_DISPATCHERS": "node0:7000"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({**SLURM, **JOB}, (2, 4)),
        ({**SLURM, **JOB, "RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),  # a launcher inside Slurm
        ({**SLURM, **JOB, "RANK": "1"}, (1, 4)),
        (SLURM, (0, 1)),  # a script run alone inside an allocation
        (JOB, (0, 1)),
    ],
)
def test_place(environ: dict[str, str], place: tuple[int, int]) -> None:
    assert (rank(environ), world_size(environ)) == place


def test_without_an_argument_the_environment_of_the_process_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert (rank(), world_size()) == (5, 6)


@pytest.mark.parametrize("text", ["x", "", "-1", "1.0", " 1"])
def test_what_is_no_number_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"RANK refused: expected a number .* got {text!r}"):
        rank({"RANK": text})
    with pytest.raises(ConfigError, match="WORLD_SIZE refused"):
        world_size({"WORLD_SIZE": text})
    with pytest.raises(ConfigError, match="SLURM_PROCID refused"):
        rank({**JOB, "SLURM_PROCID": text})
    with pytest.raises(ConfigError, match="SLURM_NTASKS refused"):
        world_size({**JOB, "SLURM_NTASKS": text})
