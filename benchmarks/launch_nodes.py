"""Starts a leader and servers for a benchmark, as a user would by hand, and ends them with it."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_DEADLINE_S = 60.0
_PARADIS = ("-m", "paradis.cli.main")


def start_node(
    directory: Path, name: str, role: str, *arguments: str, program: tuple[str, ...] = _PARADIS
) -> subprocess.Popen[bytes]:
    """Start a server or dispatcher of the job in ``directory``; its log is named after it."""
    command = [
        sys.executable, *program, role, "--token-file", str(directory / "token"),
        "--run-dir", str(directory), *arguments,
    ]  # fmt: skip
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def in_racks(racks: Sequence[str], index: int) -> tuple[str, ...]:
    """Return the options of the dispatcher of one of the racks."""
    count = str(len(racks))
    return "--rack", racks[index], "--racks", ",".join(racks), "--dispatcher-count", count


def end_node(child: subprocess.Popen[bytes]) -> None:
    """Wait for a node to end by itself, then end it."""
    try:
        child.wait(10.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


class Nodes:
    """One dispatcher and some servers as processes of this host.

    Args:
        directory: where token, address, logs and metadata go; must exist.
        servers: dedicated servers of the job.
        settings: ``section.key=value`` texts for the leader.
        server: what runs a server: arguments of the interpreter.
        host: address of this host, where the nodes listen.
        elsewhere: somebody else starts the servers, with `start_node`.
        racks: of the job; the dispatcher serves the first one, somebody else starts the others'.
    """

    def __init__(
        self, directory: Path, *, workers: int, servers: int, settings: tuple[str, ...] = (),
        server: tuple[str, ...] = _PARADIS, host: str = "127.0.0.1", elsewhere: bool = False,
        racks: Sequence[str] = ("rack-0",),
    ) -> None:  # fmt: skip
        self.directory = directory
        self.token_file = directory / "token"
        self.token_file.write_text(secrets.token_hex(16), encoding="ascii")
        self.token_file.chmod(0o600)
        sets = [part for text in settings for part in ("--set", text)]
        address_file = directory / "leader.address"
        leader = start_node(
            directory, "dispatcher-0", "dispatcher", "--workers", str(workers),
            "--servers", str(servers), "--address-file", str(address_file),
            "--control-address", f"{host}:0", "--listen", host, *in_racks(racks, 0), *sets,
        )  # fmt: skip
        self._children = [leader]
        self.address = wait_for(address_file)
        self.servers = [
            start_node(
                directory, f"server-{i}", "server", "--index", str(i), "--listen", host,
                "--dispatchers", self.address, program=server,
            )
            for i in range(0 if elsewhere else servers)
        ]  # fmt: skip
        self._children += self.servers

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
            end_node(child)


def wait_for(path: Path) -> str:
    """Return the text of a file as soon as there is one."""
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        if path.exists():
            return path.read_text(encoding="ascii").strip()
        time.sleep(0.05)
    raise TimeoutError(f"nobody wrote {path} within {_DEADLINE_S:.0f} s; see the logs there")
