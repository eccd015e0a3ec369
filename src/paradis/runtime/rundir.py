"""The directory of one run: logs of its nodes, its secret, the leader's address.

Invariant: no two runs share a directory, only the owner may read the token, and what is not a log
or a checkpoint is gone when the run is over.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from pathlib import Path
from typing import Final

from paradis.errors import ConfigError

_ATTEMPTS: Final = 100
_ADDRESS_BYTES_MAX: Final = 1024


class RunDirectory:
    """``<parent>/<timestamp>-<pid>/``, made by `create`.

    Attributes:
        path: absolute path.
        job: the directory's name, which also names the job.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.job = self.path.name

    @classmethod
    def create(cls, parent: Path) -> RunDirectory:
        """Make a new directory under ``parent``.

        Raises:
            ConfigError: it cannot be made.
        """
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        for attempt in range(_ATTEMPTS):
            path = parent / (name if attempt == 0 else f"{name}-{attempt}")
            try:
                path.mkdir(parents=True, exist_ok=False, mode=0o700)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"run directory {path} cannot be made: {error.strerror}; "
                    "set launch.run_directory to a place you may write to"
                ) from error
            return cls(path)
        raise ConfigError(f"run directory {parent / name} cannot be made: too many of that name")

    def log(self, node: str) -> Path:
        """Return the path of a node's log."""
        return self.path / f"{node}.log"

    @property
    def token_file(self) -> Path:
        """Path of the token, readable by its owner only."""
        return self.path / "token"

    @property
    def address_file(self) -> Path:
        """Path where the leader writes its control address."""
        return self.path / "leader.address"

    def make_token(self) -> bytes:
        """Write a fresh token and return it."""
        token = secrets.token_hex(32).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(self.token_file, flags, 0o600), "wb") as file:
            file.write(token)
        return token

    def clean(self) -> None:
        """Remove all but logs and checkpoints: token, address, metadata, sockets. Idempotent."""
        for path in (self.token_file, self.address_file, *self.path.glob("metadata.sqlite*")):
            path.unlink(missing_ok=True)
        for path in self.path.iterdir():
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink(missing_ok=True)


def read_token(path: Path) -> bytes:
    """Return the token of a file.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"token file {path} cannot be read: {error.strerror}; copy the file that `paradis run` "
            "or your scheduler made for this job to this host and name it by --token-file or "
            "PARADIS_TOKEN_FILE"
        ) from error
    if not token:
        raise ConfigError(f"token file {path} is empty; expected the job's token")
    return token


def write_address(path: Path, address: str) -> None:
    """Write the leader's address so that a reader sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(address + "\n", encoding="ascii")
    os.replace(temporary, path)


def read_address(path: Path) -> str | None:
    """Return the leader's address, or None while it is not there."""
    try:
        with path.open("rb") as file:
            return file.read(_ADDRESS_BYTES_MAX).decode("ascii").strip()
    except FileNotFoundError:
        return None
