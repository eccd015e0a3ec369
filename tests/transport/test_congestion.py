"""Which TCP congestion control data connections ask the kernel for, on real sockets."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paradis.errors import ConfigError
from paradis.transport.addresses import set_options
from paradis.transport.base import LinkConfig
from paradis.transport.congestion import choose_congestion_control

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()


def in_use(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_system_asks_for_nothing() -> None:
    assert choose_congestion_control("system", system="bbr") == ""


@pytest.mark.parametrize("system", ["cubic", "reno", "dctcp"])
def test_auto_leaves_what_loses_nothing(system: str) -> None:
    assert choose_congestion_control("auto", system=system) == ""


@pytest.mark.parametrize("system", ["bbr", "bbr2"])
def test_auto_replaces_bbr(system: str) -> None:
    """Every Linux allows cubic or reno, or both."""
    assert choose_congestion_control("auto", system=system) in {"cubic", "reno"}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_named_one_is_what_sockets_use(name: str) -> None:
    chosen = choose_congestion_control(name)
    with socket.socket() as sock:
        set_options(sock, LinkConfig(congestion_control=chosen))
        assert in_use(sock) == name


def test_one_that_the_kernel_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match="no_such refused by the kernel.*it has .*reno"):
        choose_congestion_control("no_such")


def test_unix_sockets_have_none() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        set_options(sock, LinkConfig(congestion_control="reno"))
