"""Starts a leader and servers for a benchmark, as a user would by hand, and ends them with it."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from pathlib import Path

_DEADLINE_S = 60.0
_PARADIS = ("-m", "paradis.cli.main")


class Nodes:
    """One dispatcher and some servers as processes of this host.

    Args:
        directory: where token, address, logs and metadata go; must exist.
        settings: ``section.key=value`` texts for the leader.
        server: what runs a server: arguments of the interpreter.
    """

    def __init__(
        self, directory: Path, *, workers: int, servers: int, settings: tuple[str, ...] = (),
        server: tuple[str, ...] = _PARADIS,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.token_file = directory / "token"
        self.token_file.write_text(secrets.token_hex(16), encoding="ascii")
        self.token_file.chmod(0o600)
        self._children: list[subprocess.Popen[bytes]] = []
        sets = [part for text in settings for part in ("--set", text)]
        address_file = directory / "leader.address"
        self._start(
            _PARADIS, "dispatcher", "--workers", str(workers), "--servers", str(servers),
            "--address-file", str(address_file), *sets,
        )  # fmt: skip
        self.address = _wait_for(address_file)
        self.servers = [
            self._start(server, "server", "--index", str(i), "--dispatchers", self.address)
            for i in range(servers)
        ]

    def _start(
        self, program: tuple[str, ...], role: str, *arguments: str
    ) -> subprocess.Popen[bytes]:
        log = (self.directory / f"{role}-{len(self._children)}.log").open("wb")
        command = [
            sys.executable, *program, role, "--token-file", str(self.token_file),
            "--run-dir", str(self.directory), *arguments,
        ]  # fmt: skip
        child = subprocess.Popen(command, stdout=log, stderr=log)
        log.close()
        self._children.append(child)
        return child

    def environment(self, rank: int, workers: int) -> dict[str, str]:
        """Return what a worker needs in its environment to join."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "PARADIS_DISPATCHERS": self.address,
            "PARADIS_TOKEN_FILE": str(self.token_file),
        }

    def close(self) -> None:
        """Wait for the nodes to end by themselves, then end them."""
        for child in self._children:
            try:
                child.wait(10.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _wait_for(path: Path) -> str:
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        if path.exists():
            return path.read_text(encoding="ascii").strip()
        time.sleep(0.05)
    raise TimeoutError(f"no leader wrote {path} within {_DEADLINE_S:.0f} s; see its log there")
