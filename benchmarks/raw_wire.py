"""What the sockets of this machine can do, without Paradis: the yardstick of its transport.

Two processes move bytes over a Unix socket or TCP loopback with nothing but ``sendall`` and
``recv_into`` (which waits for whole chunks, as the transport does). Fair means: the same buffer
is reused for every chunk at both ends, and the socket options are those of `LinkConfig`. The
receiving process is this file, started as a script; it needs the standard library only.

    python benchmarks/raw_wire.py --repeats 5 > raw.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

FAMILIES = ("unix", "tcp")
DEADLINE_S = 60.0
_OUTSTANDING_ROUNDS = 5


def socket_options(family: str) -> list[tuple[int, int, int]]:
    """Return (level, option, value) of every option that `LinkConfig` sets."""
    from paradis.transport.base import LinkConfig

    config = LinkConfig()
    options = [
        (socket.SOL_SOCKET, socket.SO_SNDBUF, config.socket_buffer_bytes),
        (socket.SOL_SOCKET, socket.SO_RCVBUF, config.socket_buffer_bytes),
    ]
    if family == "tcp":
        options += [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, config.keepalive_s),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, config.keepalive_s),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, config.user_timeout_ms),
        ]
    return options


def measure_raw(
    family: str, total_bytes: int, chunk_bytes: int, repeats: int, *, hot: bool = False
) -> list[float]:
    """Move ``total_bytes`` in chunks, then wait for one byte, ``repeats`` times.

    Args:
        family: ``unix`` or ``tcp``.
        total_bytes: bytes of one repetition; the last chunk may be shorter.
        chunk_bytes: bytes of one ``sendall`` and of one receive.
        repeats: measured repetitions; one more runs first and is not counted.
        hot: use one chunk of memory over and over, which stays in the cache, at both ends; a
            gradient lies in ``total_bytes`` of memory, and so do the bytes here by default.

    Returns:
        Seconds of each repetition, from the first byte sent to the acknowledgement received.

    Raises:
        ValueError: a size or count is not positive, or the family is unknown.
        OSError: a socket failed or the receiving process did not answer in time.
    """
    _require_positive(total_bytes, chunk_bytes, repeats)
    size = chunk_bytes if hot else total_bytes
    buffer = memoryview(bytearray(b"\xa5" * size))
    job = {"unit": total_bytes, "chunk": chunk_bytes, "count": repeats + 1, "size": size}
    seconds = []
    with _receiver(family, job) as sock:
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for first in range(0, total_bytes, chunk_bytes):
                at = first % size
                sock.sendall(buffer[at : at + min(chunk_bytes, total_bytes - first)])
            _receive_acks(sock, 1)
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


def measure_raw_outstanding(
    family: str, message_bytes: int, outstanding: int, count: int
) -> list[float]:
    """Send messages that are acknowledged by a byte each, with a bound on unacknowledged ones.

    Args:
        family: ``unix`` or ``tcp``.
        message_bytes: bytes of one message.
        outstanding: most messages without acknowledgement.
        count: messages of one round.

    Returns:
        Bytes per second of each of five rounds; one more runs first and is not counted.

    Raises:
        ValueError: a size or count is not positive, or the family is unknown.
        OSError: a socket failed or the receiving process did not answer in time.
    """
    _require_positive(message_bytes, outstanding, count)
    message = memoryview(bytearray(b"\xa5" * message_bytes))
    rounds = _OUTSTANDING_ROUNDS + 1
    job = {"unit": message_bytes, "chunk": message_bytes, "count": count * rounds}
    rates = []
    with _receiver(family, job) as sock:
        for _ in range(rounds):
            start = time.perf_counter()
            waiting = 0
            for _ in range(count):
                if waiting == outstanding:
                    waiting -= len(sock.recv(outstanding))
                sock.sendall(message)
                waiting += 1
            _receive_acks(sock, waiting)
            rates.append(count * message_bytes / (time.perf_counter() - start))
    return rates[1:]


def _require_positive(*numbers: int) -> None:
    if min(numbers) < 1:
        raise ValueError(f"sizes and counts must be at least 1, got {numbers}; correct them")


def _receive_acks(sock: socket.socket, count: int) -> None:
    while count:
        got = len(sock.recv(count))
        if not got:
            raise ConnectionResetError("the receiving process ended early; see its output")
        count -= got


@contextlib.contextmanager
def _receiver(family: str, job: dict[str, int]) -> Iterator[socket.socket]:
    """Start the receiving process; yield a socket connected to it; stop the process."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown: expected one of {FAMILIES}")
    options = socket_options(family)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_open(family, options))
        server.bind(("127.0.0.1", 0) if family == "tcp" else f"\0raw-{secrets.token_hex(8)}")
        server.listen(1)
        server.settimeout(DEADLINE_S)
        name = server.getsockname()
        address = list(name) if family == "tcp" else name.decode()
        text = json.dumps({"family": family, "address": address, "options": options, **job})
        process = subprocess.Popen([sys.executable, __file__, "--receive", text])
        stack.callback(_stop, process)
        sock = stack.enter_context(server.accept()[0])
        sock.settimeout(None)
        _set(sock, options)
        yield sock


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _open(family: str, options: list[tuple[int, int, int]]) -> socket.socket:
    sock = socket.socket(socket.AF_INET if family == "tcp" else socket.AF_UNIX)
    _set(sock, options)
    return sock


def _set(sock: socket.socket, options: list[tuple[int, int, int]]) -> None:
    for level, option, value in options:
        sock.setsockopt(level, option, value)


def _receive(job: dict[str, Any]) -> None:
    """Be the receiving process: fill the buffer chunk by chunk, acknowledge each unit."""
    with _open(job["family"], [tuple(o) for o in job["options"]]) as sock:
        address = job["address"]
        sock.connect(tuple(address) if isinstance(address, list) else address)
        size = job.get("size", job["chunk"])
        buffer = memoryview(bytearray(size))
        for _ in range(job["count"]):
            left = job["unit"]
            while left:
                at = (job["unit"] - left) % size
                view = buffer[at : at + min(left, job["chunk"])]
                left -= len(view)
                while view:
                    got = sock.recv_into(view, 0, socket.MSG_WAITALL)
                    if not got:
                        return
                    view = view[got:]
            sock.sendall(b"!")


def _report(repeats: int, total_bytes: int) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    for family in FAMILIES:
        for chunk in (1 << 20, 4 << 20):
            seconds = measure_raw(family, total_bytes, chunk, repeats)
            rates = [total_bytes / s for s in seconds]
            results.append({"family": family, "chunk_bytes": chunk, **_summary(rates)})
        for message, outstanding in ((64 << 10, 1), (64 << 10, 16), (1 << 20, 4)):
            rates = measure_raw_outstanding(
                family, message, outstanding, max(1, total_bytes // message)
            )
            results.append(
                {
                    "family": family,
                    "message_bytes": message,
                    "outstanding": outstanding,
                    **_summary(rates),
                }
            )
    return {
        "host": {"cores": os.cpu_count(), "kernel": platform.release()},
        "total_bytes": total_bytes,
        "results": results,
    }


def _summary(rates: list[float]) -> dict[str, Any]:
    return {
        "median_bytes_per_s": statistics.median(rates),
        "min_bytes_per_s": min(rates),
        "max_bytes_per_s": max(rates),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="measured repetitions")
    parser.add_argument("--total-mib", type=int, default=64, help="MiB moved in each")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.receive:
        _receive(json.loads(chosen.receive))
        return
    json.dump(_report(chosen.repeats, chosen.total_mib << 20), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
