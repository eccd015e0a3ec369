"""The least step time that a network allows a model: a list schedule, no processor time.

Layers become ready in backward order. A chunk goes up over the busiest link, is updated in no time
(with ``--early`` as soon as it is up, else when backward is over), and goes down over the busiest
link of that direction; forward of a layer waits for its own chunks. Each direction of a link sends
one chunk at a time, the layer needed first first. Steps follow one another; the period of the last
ones counts. Prints JSON: seconds a step, exposed beside compute.

Source of the busiest link's load: `paradis.core.colocation`, and for dedicated servers W / S.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass

from paradis.core.codes import code_bytes

Layer = tuple[float, int]
"""Relative compute, elements."""


def resnet50() -> list[Layer]:
    """Return the layers of ResNet-50 in forward order."""
    layers: list[Layer] = []

    def convolution(inputs: int, outputs: int, kernel: int, side: int) -> None:
        weights = inputs * outputs * kernel * kernel
        layers.append((float(weights * side * side), weights + 2 * outputs))

    convolution(3, 64, 7, 112)
    inputs = 64
    for width, blocks, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            convolution(inputs, width, 1, side)
            convolution(width, width, 3, side)
            convolution(width, 4 * width, 1, side)
            if not block:
                convolution(inputs, 4 * width, 1, side)
            inputs = 4 * width
    layers.append((2048.0 * 1000, 2048 * 1000 + 1000))
    return layers


def bert(width: int, blocks: int, words: int = 30522) -> list[Layer]:
    """Return the layers of BERT for pre-training in forward order."""

    def linear(inputs: int, outputs: int) -> Layer:
        return (float(inputs * outputs), inputs * outputs + outputs)

    norm: Layer = (0.0, 2 * width)
    layers: list[Layer] = [(0.0, (words + 512 + 2) * width), norm]
    for _ in range(blocks):
        layers += [linear(width, width)] * 4
        layers += [norm, linear(width, 4 * width), linear(4 * width, width), norm]
    return [*layers, *[linear(width, width)] * 2, norm, (float(words * width), words),
            linear(width, 2)]  # fmt: skip


SHAPES = {
    "resnet50": resnet50,
    "bert-base": lambda: bert(768, 12),
    "bert-large": lambda: bert(1024, 24),
}


@dataclass(slots=True)
class Chunk:
    """A piece of a layer's gradient and update: when it is ready, up, and down."""

    layer: int
    seconds: float
    ready: float = 0.0
    up: float = 0.0
    down: float = 0.0


def busiest(workers: int, servers: int, *, colocated: bool) -> float:
    """Return models that the busiest link carries in each direction of a step."""
    n, k = workers, servers
    if colocated:
        return 2 * n * (n - 1) / (n * n + k * n - 2 * k)
    return max(1.0, n / k)


def chunks_of(layers: list[Layer], options: argparse.Namespace) -> list[list[Chunk]]:
    """Return each layer's chunks; small tensors of BERT and ResNet alike travel in full."""
    factor = busiest(options.workers, options.servers, colocated=options.colocated)
    rate = options.mbytes * 1e6
    found = []
    for index, (_, elements) in enumerate(layers):
        count = max(1, math.ceil(elements * 4 / (4 << 20)))
        size = elements / count
        coded = options.codec and elements >= 4096
        nbytes = code_bytes(options.codec, round(size)) if coded else size * 4
        found.append([Chunk(index, factor * nbytes / rate) for _ in range(count)])
    return found


def serve(jobs: list[tuple[float, int, Chunk]], free: float) -> list[tuple[float, Chunk]]:
    """Send chunks over one direction, one at a time: of those ready the lowest layer first."""
    done, waiting = [], sorted(jobs, key=lambda j: (j[0], j[1]))
    now = free
    while waiting:
        ready = [job for job in waiting if job[0] <= now]
        if not ready:
            now = waiting[0][0]
            continue
        job = min(ready, key=lambda j: j[1])
        waiting.remove(job)
        now += job[2].seconds
        done.append((now, job[2]))
    return done


def period(layers: list[Layer], options: argparse.Namespace, steps: int = 6) -> float:
    """Return the seconds of a step in the long run."""
    total = sum(compute for compute, _ in layers)
    forward = [options.compute / 3 * compute / total for compute, _ in layers]
    chunks = chunks_of(layers, options)
    now, up_free, down_free, begun = 0.0, 0.0, 0.0, []
    for _ in range(steps):
        begun.append(now)
        for index, seconds in enumerate(forward):
            now = max([now, *(c.down for c in chunks[index])]) + seconds
        for index in reversed(range(len(layers))):
            now += 2 * forward[index]
            for chunk in chunks[index]:
                chunk.ready = now
        everything = [chunk for layer in chunks for chunk in layer]
        sent = serve([(c.ready, c.layer, c) for c in everything], up_free)
        for at, chunk in sent:
            chunk.up = at
        up_free = max(at for at, _ in sent)
        back = serve(
            [(c.up if options.early else max(c.up, now), c.layer, c) for c in everything], down_free
        )
        for at, chunk in back:
            chunk.down = at
        down_free = max(at for at, _ in back)
        if options.overlap == "none":
            now = max(now, down_free)
    half = steps // 2
    return (begun[-1] - begun[half]) / (steps - 1 - half)


def main() -> None:
    """Print the bound of one configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="resnet50")
    parser.add_argument("--compute", type=float, default=1.7, help="seconds a step")
    parser.add_argument("--mbytes", type=float, default=119.6, help="MB/s of each link direction")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2, help="dedicated ones")
    parser.add_argument("--colocated", action="store_true")
    parser.add_argument("--early", action="store_true", help="training.early_update")
    parser.add_argument("--overlap", choices=("none", "layerwise"), default="layerwise")
    parser.add_argument("--codec", default="", help="onebit, int8, bf16 or lion; empty: in full")
    options = parser.parse_args()
    layers = SHAPES[options.shape]()
    step = period(layers, options)
    print(json.dumps({
        "bench": "bound", **vars(options), "elements": sum(n for _, n in layers),
        "step_s": round(step, 3), "exposed_s": round(step - options.compute, 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
