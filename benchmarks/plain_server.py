"""The traditional parameter server that speed-ups are taken over, in as few lines as it needs.

Synchronous, no overlap, no compression, static placement: the flat model is cut into equal runs,
one per server; after backward every worker sends its run of the gradient to each server, which
adds them up as they arrive, takes an SGD step, and sends the new values back.
"""

from __future__ import annotations

import socket
import sys
import threading
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill a view from a socket.

    Raises:
        EOFError: the peer closed.
    """
    while len(view):
        count = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError
        view = view[count:]


def serve(listener: socket.socket, workers: int, length: int, learning_rate: float) -> None:
    """Serve one run of the model until all workers have closed."""
    value = np.zeros(length, np.float32)
    total = np.zeros(length, np.float32)
    lock = threading.Lock()
    barrier = threading.Barrier(workers)

    def handle(sock: socket.socket) -> None:
        nonlocal value
        gradient = np.empty(length, np.float32)
        first = True
        while True:
            try:
                receive_exactly(sock, memoryview(gradient).cast("B"))
            except EOFError:
                return
            if first:  # the first message of a worker carries the initial values
                value[:] = gradient
                first = False
                continue
            with lock:
                np.add(total, gradient, out=total)
            if barrier.wait() == 0:
                np.multiply(total, learning_rate / workers, out=total)
                np.subtract(value, total, out=value)
                total.fill(0)
            barrier.wait()
            sock.sendall(memoryview(value).cast("B"))

    threads = []
    for _ in range(workers):
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threads.append(threading.Thread(target=handle, args=(sock,)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def run_server(pipe: Connection, workers: int, length: int, learning_rate: float) -> None:
    """Listen, tell the port through ``pipe``, serve."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    serve(listener, workers, length, learning_rate)


class PlainWorker:
    """The worker's side.

    Args:
        ports: one per server.
        values: (N,) float32 initial values, N divisible by the number of servers.
    """

    def __init__(self, ports: list[int], values: Vector) -> None:
        self.values = values
        self._length = len(values) // len(ports)
        self._socks = [socket.create_connection(("127.0.0.1", p)) for p in ports]
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._each(lambda i, sock: sock.sendall(self._run(self.values, i)))

    def _run(self, vector: Vector, index: int) -> memoryview:
        run = vector[index * self._length : (index + 1) * self._length]
        return memoryview(run).cast("B")

    def _each(self, job: object) -> None:
        threads = [
            threading.Thread(target=job, args=(i, sock))  # type: ignore[arg-type]
            for i, sock in enumerate(self._socks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def sync(self, gradient: Vector) -> None:
        """Send the gradient, receive the new values into ``values``."""

        def exchange(index: int, sock: socket.socket) -> None:
            sock.sendall(self._run(gradient, index))
            receive_exactly(sock, self._run(self.values, index))

        self._each(exchange)

    def close(self) -> None:
        """Close the connections; the servers end."""
        for sock in self._socks:
            sock.close()


if __name__ == "__main__":
    sys.exit("a library of benchmarks/bench_step.py")
