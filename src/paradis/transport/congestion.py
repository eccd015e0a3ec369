"""Which TCP congestion control data connections use.

BBR learns a bandwidth for each flow and paces it to that. A worker's flows to several servers pause
and resume all the time as shards get ready, and while the others pause a flow stays at the share
that it has learnt: BERT-Base at 1 Gbit/s exposed 2.68 s of each step, 2.31 with cubic, 2.17 with
reno. So ``auto`` means reno, else cubic, where the system says BBR, and otherwise what the system
says: cubic on most, dctcp where somebody has set up switches for it. Reno before cubic, for between
machines that stand together (round trips below a millisecond) it has what it lost back sooner.

Source: Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016 (it
probes over eight round trips); measurements in docs/benchmarks.md.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from paradis.errors import ConfigError

_AVAILABLE: Final = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_LONGEST: Final = 16
"""TCP_CA_NAME_MAX of Linux, bytes."""


def choose_congestion_control(setting: str, system: str = "") -> str:
    """Return the algorithm that data connections of this process ask for; empty: the system's own.

    Args:
        setting: ``auto``, ``system`` or the name of an algorithm.
        system: the system's own; empty: ask the kernel.

    Raises:
        ConfigError: the kernel lacks that algorithm, or does not allow this user to take it.
    """
    if setting == "system":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        if setting != "auto":
            if reason := _refusal(sock, setting):
                raise ConfigError(
                    f"communication.congestion_control = {setting} refused by the kernel "
                    f"({reason}): it has {_read(_AVAILABLE)}, and users may take "
                    f"{_read(_ALLOWED)}; load or allow it on every host "
                    "(net.ipv4.tcp_allowed_congestion_control), or leave it at auto"
                )
            return setting
        if not (system or _of(sock)).startswith("bbr"):
            return ""
        return next((name for name in ("reno", "cubic") if not _refusal(sock, name)), "")


def _of(sock: socket.socket) -> str:
    found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LONGEST)
    return found.rstrip(b"\0").decode("ascii")


def _refusal(sock: socket.socket, name: str) -> str:
    """Make a socket use an algorithm; return why it cannot, or nothing."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return "an unknown set"
