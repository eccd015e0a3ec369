"""Addresses of the socket transports: parse, print, listen, connect, set options.

tcp://host:port     port 0 when listening: the system chooses
tcp://[::1]:port    IPv6
unix://path         a file, removed when the listener closes
unix://@name        abstract: no file, gone with its last descriptor (Linux)
unix://             when listening: an abstract name of random bytes
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import time
from typing import Final

from paradis.errors import ConfigError, PeerUnreachable
from paradis.transport.base import LinkConfig
from paradis.transport.fork import watch_socket

SCHEMES: Final = ("tcp", "unix")
BACKLOG: Final = 1024
"""Connections the kernel holds until we accept them: all nodes of a job may arrive at once."""

_KEEPALIVE_PROBES: Final = 3
_PORTS: Final = range(1 << 16)

_Address = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int] | str]


def listen_socket(address: str, scheme: str, config: LinkConfig) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: the address is malformed, unknown here, or in use.
    """
    family, target = _resolve(address or f"{scheme}://", scheme, listening=True)[0]
    sock = watch_socket(socket.socket(family, socket.SOCK_STREAM))
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Set before listening, so that TCP offers a window as large as the buffer.
        set_options(sock, config)
        sock.bind(target)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_listen(address, error) from error
    return sock


def _cannot_listen(address: str, error: OSError) -> ConfigError:
    advice = "check the host name, the port and the path"
    if error.errno == errno.EADDRINUSE:
        advice = "stop the process that uses it, or choose another"
        advice += " path" if address.startswith("unix://") else " port (0 lets the system choose)"
    elif error.errno == errno.EACCES:
        advice = "choose a port above 1023 or a path you may write to"
    return ConfigError(f"cannot listen on {address}: {error.strerror or error}; {advice}")


def connect_socket(address: str, scheme: str, config: LinkConfig) -> socket.socket:
    """Return a socket connected within ``config.connect_timeout_s``.

    Raises:
        ConfigError: the address is malformed.
        PeerUnreachable: nothing answers.
    """
    deadline = time.monotonic() + config.connect_timeout_s
    failure: OSError | None = None
    try:
        candidates = _resolve(address, scheme, listening=False)
    except socket.gaierror as error:
        candidates, failure = [], error
    for family, target in candidates:
        sock = watch_socket(socket.socket(family, socket.SOCK_STREAM))
        try:
            set_options(sock, config)
            left_s = max(deadline - time.monotonic(), 1e-3)
            if family == socket.AF_UNIX:
                # A non-blocking connect fails at once when the backlog is full; this one waits.
                set_send_timeout(sock, left_s)
            else:
                sock.settimeout(left_s)
            sock.connect(target)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise PeerUnreachable(
        f"no connection to {address} within {config.connect_timeout_s} s: "
        f"{failure}; check that the peer runs and that no firewall is in between"
    ) from failure


def set_options(sock: socket.socket, config: LinkConfig) -> None:
    """Set buffer sizes and, for TCP, no delay, keepalive and the user timeout."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.socket_buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, config.socket_buffer_bytes)
    if sock.family == socket.AF_UNIX:
        return
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, config.keepalive_s)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, config.keepalive_s)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, config.user_timeout_ms)
    if config.congestion_control:
        sock.setsockopt(tcp, socket.TCP_CONGESTION, config.congestion_control.encode())


def set_send_timeout(sock: socket.socket, seconds: float) -> None:
    """Make a blocked send (or a Unix connect) give up after this long; 0 means never."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def local_address(sock: socket.socket) -> str:
    """Return the address a listening socket really has."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        text = name.decode() if isinstance(name, bytes) else name
        return f"unix://@{text[1:]}" if text.startswith("\0") else f"unix://{text}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"tcp://{host}:{name[1]}"


def remove_file(address: str) -> None:
    """Remove the file of a ``unix://path`` address, if it has one and it is still there."""
    path = address.removeprefix("unix://")
    if path != address and not path.startswith("@"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _resolve(address: str, scheme: str, *, listening: bool) -> list[_Address]:
    prefix, found, rest = address.partition("://")
    if not found or prefix != scheme or scheme not in SCHEMES:
        raise ConfigError(
            f"address {address!r} refused: expected {scheme}://..., got {prefix!r}; correct it"
        )
    if scheme == "unix":
        return [(socket.AF_UNIX, _unix_target(address, rest, listening=listening))]
    host, port = _host_and_port(address, rest, listening=listening)
    try:
        found_all = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if listening:
            raise _cannot_listen(address, error) from error
        raise
    return [(family, target) for family, _, _, _, target in found_all]  # type: ignore[misc]


def _unix_target(address: str, rest: str, *, listening: bool) -> str:
    if not rest and listening:
        return f"\0paradis-{secrets.token_hex(12)}"
    if rest in ("", "@"):
        raise ConfigError(
            f"address {address!r} refused: expected unix://path or unix://@name, got no name; "
            "use the address that the listener shows"
        )
    return "\0" + rest[1:] if rest.startswith("@") else rest


def _host_and_port(address: str, rest: str, *, listening: bool) -> tuple[str, int]:
    host, _, port = rest.rpartition(":")
    ports = _PORTS if listening else _PORTS[1:]
    if not host or not port.isascii() or not port.isdigit() or int(port) not in ports:
        raise ConfigError(
            f"address {address!r} refused: expected tcp://host:port with a port of "
            f"{ports.start} to {ports.stop - 1}, got {rest!r}; correct it"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
