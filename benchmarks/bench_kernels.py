"""Codecs' kernels on one core, beside a copy of the same bytes and torch's fused Adam.

A gradient is handled shard by shard, as in training; all shards together do not fit any cache. The
kernels take turns, so that their ratios come from the same minutes. ``gbytes_s`` counts bytes of
the float32 gradient whatever the kernel reads and writes; times are of the thread's CPU, so that a
neighbour on the core does not count (one on the memory does). Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from paradis.numerics.codecs import (
    Bfloat16,
    Blend,
    Codec,
    Int8,
    OneBit,
    code_bytes,
    encode_lion,
    encode_momentum,
    frozen_step,
    lion_step,
    majority_vote,
)

Kernel = Callable[[int], object]
WORKERS = 4

GOALS = {
    "onebit encode momentum": ("copy", 0.6),
    "onebit encode momentum one pass": ("copy", 0.6),
    "onebit decode add": ("copy", 0.8),
    "onebit step": ("adam fused torch", 0.8),
}
"""Speed of one kernel over that of another that is wanted."""


class Shards:
    """Tensors of every kind, one per shard, and the kernels that work on them."""

    def __init__(self, count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.count, self.length = count, length

        def draw() -> list[torch.Tensor]:
            return [torch.randn(length, generator=generator) for _ in range(count)]

        self.gradient, self.momentum, self.value, self.total = draw(), draw(), draw(), draw()
        self.error = [torch.zeros(length) for _ in range(count)]
        self.inverse = [tensor.abs() for tensor in draw()]

    def codes(self, codec: Codec) -> list[torch.Tensor]:
        """Return a code of every shard."""
        found = []
        for tensor in self.gradient:
            memory = torch.zeros(self.length) if codec.remembers else None
            found.append(torch.empty(codec.encoded_bytes(self.length), dtype=torch.uint8))
            codec.encode(tensor, found[-1], memory)
        return found

    def plain(self) -> dict[str, Kernel]:
        """Return what torch does."""
        copies = [torch.zeros(self.length) for _ in range(self.count)]
        optimizers = []
        for value, gradient in zip(self.value, self.gradient, strict=True):
            parameter = torch.nn.Parameter(value.clone())
            parameter.grad = gradient
            optimizers.append(torch.optim.Adam([parameter], fused=True))
        return {
            "copy": lambda i: copies[i].copy_(self.gradient[i]),
            "add torch": lambda i: copies[i].add_(self.gradient[i]),
            "adam fused torch": lambda i: optimizers[i].step(),
        }

    def one_bit(self) -> dict[str, Kernel]:
        """Return the kernels of 1-bit Adam."""
        codec, last = OneBit(), self.codes(OneBit())
        out = [code.clone() for code in last]
        momentum = [last, self.momentum]

        def encode(i: int, packed: bool) -> None:
            m = momentum[0 if packed else 1][i]
            encode_momentum(codec, self.gradient[i], m, self.error[i], out[i], beta=0.9)

        def at_once(i: int) -> None:
            blend = Blend(self.gradient[i], self.error[i], last[i], 0.9)
            codec.signs_and_leave(blend, out[i], self.error[i])

        def step(i: int) -> None:
            frozen_step(codec, last[i], self.value[i], self.inverse[i], lr=1e-6, weight_decay=0.01)

        many = [[last[(i + k) % self.count] for k in range(WORKERS)] for i in range(self.count)]
        return {
            "onebit encode momentum": lambda i: encode(i, True),
            "onebit encode momentum one pass": at_once,
            "onebit encode momentum float32": lambda i: encode(i, False),
            "onebit encode": lambda i: codec.encode(self.gradient[i], out[i], self.error[i]),
            "onebit decode add": lambda i: codec.decode_add(last[i], self.total[i]),
            f"onebit mean of {WORKERS}": lambda i: codec.mean(many[i], self.total[i]),
            "onebit step": step,
        }

    def others(self) -> dict[str, Kernel]:
        """Return int8, bf16 and Lion."""
        found: dict[str, Kernel] = {}
        for codec in (Int8(), Bfloat16()):
            found |= self._pair(codec)
        size = code_bytes(self.length)
        signs = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(WORKERS)]
        out = torch.empty(size, dtype=torch.uint8)
        return found | {
            "lion encode": lambda i: encode_lion(self.gradient[i], self.momentum[i], out),
            f"lion vote of {WORKERS}": lambda i: majority_vote(signs, out, version=i),
            "lion step": lambda i: lion_step(signs[0], self.value[i], lr=1e-6, weight_decay=0.01),
        }

    def _pair(self, codec: Codec) -> dict[str, Kernel]:
        codes = self.codes(codec)
        memory = [error if codec.remembers else None for error in self.error]
        return {
            f"{codec.name} encode": lambda i: codec.encode(self.gradient[i], codes[i], memory[i]),
            f"{codec.name} decode add": lambda i: codec.decode_add(codes[i], self.total[i]),
        }


def first_encodes() -> dict[str, float]:
    """Return how long the first encoding of each codec takes, importing Numba and compiling."""
    found = {}
    for codec in (OneBit(), Int8()):
        start = time.perf_counter()
        codec.encode(
            torch.ones(8), torch.empty(codec.encoded_bytes(8), dtype=torch.uint8), torch.zeros(8)
        )
        found[f"{codec.name} encode"] = round(time.perf_counter() - start, 3)
    return found


def measure(given: argparse.Namespace) -> dict[str, object]:
    """Time every kernel over all shards, in turns; the first turn compiles and is not counted."""
    torch.set_num_threads(1)
    compile_s = first_encodes()
    shards = Shards(given.shards, given.elements)
    kernels = shards.plain() | shards.one_bit() | shards.others()
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for name, kernel in kernels.items():
        start = time.perf_counter()
        kernel(0)
        compile_s.setdefault(name, round(time.perf_counter() - start, 3))
    for turn in range(-1, given.rounds):
        for name, kernel in kernels.items():
            start = time.thread_time()
            for i in range(given.shards):
                kernel(i)
            if turn >= 0:
                times[name].append(time.thread_time() - start)
    return {"bench": "kernels", "shards": given.shards, "elements": given.elements,
            "rounds": given.rounds, "load": os.getloadavg()[0], "first_call_s": compile_s,
            **figures(times, given.shards * given.elements)}  # fmt: skip


def figures(times: dict[str, list[float]], elements: int) -> dict[str, object]:
    """Return least, median and greatest speed of each kernel, and the goals."""
    table = {}
    for name, values in times.items():
        speeds = sorted(elements / seconds for seconds in values)
        three = (speeds[0], statistics.median(speeds), speeds[-1])
        ratios = [a / b for a, b in zip(times["copy"], values, strict=True)]
        table[name] = {
            "gbytes_s": [round(4e-9 * speed, 2) for speed in three],
            "mparam_s": [round(1e-6 * speed) for speed in three],
            "over_copy": round(statistics.median(ratios), 2),
        }
    goals = {}
    for name, (other, wanted) in GOALS.items():
        ratios = [a / b for a, b in zip(times[other], times[name], strict=True)]
        goals[name] = {"over": other, "wanted": wanted, "got": round(statistics.median(ratios), 2),
                       "least": round(min(ratios), 2), "most": round(max(ratios), 2)}  # fmt: skip
    return {"kernels": table, "goals": goals}


def main() -> None:
    """Measure and print; ``--fresh`` measures compiling too, with an empty cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--elements", type=int, default=1 << 20, help="of a shard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fresh", action="store_true", help="compile anew")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paradis-bench-") as directory:
        if given.fresh:
            os.environ["NUMBA_CACHE_DIR"] = directory
        print(json.dumps(measure(given), indent=1))


if __name__ == "__main__":
    main()
