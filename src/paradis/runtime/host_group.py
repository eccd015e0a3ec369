"""The workers of one host as a group of ``torch.distributed``, beside any of the script's own.

It is built directly, not by ``init_process_group``: the script's default group is not touched and
needs no place in it. The members find each other by a file whose name follows from the job's token,
and talk over the loopback interface. Every wait has a deadline.

Gloo matches what is sent and received by (peer, tag), in order; so no two members need agree on
what comes next. The tensors are on the CPU: that is where Paradis keeps what travels.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as distributed

from paradis.errors import PeerUnreachable
from paradis.transport.fork import watch_link

OPEN_TIMEOUT_S: Final = 30.0
"""How long the members of a group look for each other: all have joined the job already."""

_NOBODY: Final = 1 << 30
"""A tag that nobody sends."""


class Pending(Protocol):
    """A send or receive that is under way; dropping it takes it back."""

    def wait(self, timeout: timedelta) -> bool:
        """Wait until it is done."""
        ...


def meeting_point(name: str, ranks: Sequence[int], secret: bytes) -> Path:
    """Return the file by which a group's members meet: a name that only they can know."""
    words = f"{name} {list(ranks)}".encode()
    digest = hashlib.blake2b(words, key=hashlib.sha256(secret).digest(), digest_size=16)
    return Path(tempfile.gettempdir()) / f"paradis-host-{digest.hexdigest()}"


class HostGroup:
    """One member of a host group, connected to all others when the constructor returns.

    Args:
        path: where the members meet; the first removes it when all are there.
        ranks: of all members, ascending.
        rank: of this one.
        timeout_s: deadline of finding each other.

    Raises:
        PeerUnreachable: somebody does not come.
    """

    def __init__(
        self, path: Path, ranks: Sequence[int], rank: int, *, timeout_s: float = OPEN_TIMEOUT_S
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self._place = {r: place for place, r in enumerate(self.ranks)}
        limit = timedelta(seconds=timeout_s)
        before = _loopback_sockets()
        try:
            if not distributed.is_available() or not distributed.is_gloo_available():
                raise RuntimeError("this build of torch has no Gloo")
            package: Any = distributed
            store = package.FileStore(str(path), len(self.ranks))
            store.set_timeout(limit)
            kind: Any = distributed.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname="127.0.0.1")]
            options._timeout = limit
            options._threads = 1
            self._group: Any = kind(store, self._place[rank], len(self.ranks), options)
            self._group.barrier().wait(limit)
            now = _loopback_sockets().items()
            self._sockets = [(number, inode) for inode, number in now if inode not in before]
            watch_link(self)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerUnreachable(
                f"workers {list(self.ranks)} do not find each other within {timeout_s:g} s: "
                f"{reason}; are they on one host?"
            ) from error
        finally:
            if self._place[rank] == 0:
                with contextlib.suppress(OSError):
                    path.unlink()

    def send(self, rank: int, tag: int, tensor: torch.Tensor) -> Pending:
        """Begin to send a tensor, which must stay as it is until the send is done."""
        pending: Pending = self._group.send([tensor], self._place[rank], tag)
        return pending

    def receive(self, rank: int, tag: int, tensor: torch.Tensor) -> Pending:
        """Begin to receive into a tensor."""
        pending: Pending = self._group.recv([tensor], self._place[rank], tag)
        return pending

    def forget(self) -> None:
        """Close this forked child's copies of the connections: the parent's end must be seen."""
        for number, inode in self._sockets:
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    os.close(number)

    def sever(self) -> None:
        """End every wait of this process, and by the end of the connections those of the others.

        Gloo offers no call for it; but a receive that times out breaks all connections.
        """
        peer = next(r for r in self.ranks if r != self.rank)
        with contextlib.suppress(RuntimeError):
            self.receive(peer, _NOBODY, torch.empty(1)).wait(timedelta(milliseconds=1))


def _loopback_sockets() -> dict[int, int]:
    """Return inode -> descriptor of this process's TCP sockets on the loopback interface.

    Gloo does not tell which are its own; what appears while a group is made is taken for it.
    """
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if not stat.S_ISSOCK(status.st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
            try:
                inet = copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM
                if inet and copy.getsockname()[0] == "127.0.0.1":
                    found[status.st_ino] = int(name)
            finally:
                copy.close()
    return found
