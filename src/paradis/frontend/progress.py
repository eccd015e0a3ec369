"""One progress line for worker 0: step, loss, rate, bytes, and where a step's time goes."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from paradis.frontend.optimizer import WrappedOptimizer
from paradis.frontend.session import rank, world_size


class Progress:
    """Prints one line, rewritten in place on a terminal, repeated at intervals elsewhere.

    Args:
        optimizer: the wrapped optimizer, for its counters.
        total: number of steps to come, for display; 0 if unknown.
        interval_s: least seconds between two lines.
        stream: where to print.
    """

    def __init__(
        self,
        optimizer: WrappedOptimizer,
        *,
        total: int = 0,
        interval_s: float = 1.0,
        stream: TextIO = sys.stdout,
    ) -> None:
        self._optimizer = optimizer
        self._total = total
        self._stream = stream
        self._terminal = os.environ.get("PARADIS_TTY") == "1" or stream.isatty()
        self._interval_s = interval_s if self._terminal else max(interval_s, 5.0)
        self._last_s = time.perf_counter()
        self._last = optimizer.metrics()
        self._samples = 0
        self._width = 0

    def update(self, loss: float, samples: int) -> None:
        """Count a finished step; print if it is time.

        Args:
            loss: this worker's loss.
            samples: samples of this worker in the step.
        """
        self._samples += samples
        now_s = time.perf_counter()
        done = self._optimizer.steps_done
        if rank() != 0 or (now_s - self._last_s < self._interval_s and done != self._total):
            return
        self._print(self._line(loss, now_s))

    def _line(self, loss: float, now_s: float) -> str:
        counters = self._optimizer.metrics()
        since = {k: counters.get(k, 0.0) - self._last.get(k, 0.0) for k in counters}
        seconds = max(now_s - self._last_s, 1e-9)
        steps = max(since.get("steps", 0.0), 1.0)
        wait_ms = since.get("wait_s", 0.0) / steps * 1e3
        step_ms = seconds / steps * 1e3
        total = f"/{self._total}" if self._total else ""
        rate = self._samples * world_size() / seconds
        self._last, self._last_s, self._samples = counters, now_s, 0
        return (
            f"step {self._optimizer.steps_done}{total}  loss {loss:.4f}  {rate:,.0f} samples/s  "
            f"pushed {_size(counters.get('push_bytes', 0.0))}  "
            f"pulled {_size(counters.get('pull_bytes', 0.0))}  "
            f"step {step_ms:.0f} ms = {max(step_ms - wait_ms, 0.0):.0f} compute + "
            f"{wait_ms:.0f} wait"
        )

    def _print(self, line: str) -> None:
        if self._terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line."""
        if self._terminal and rank() == 0 and self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.1f} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1000
    return ""
