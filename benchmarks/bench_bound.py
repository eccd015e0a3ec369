"""The least step time that a network allows a model: a list schedule, no processor time.

Layers become ready in backward order. A chunk goes up over the busiest link, is updated in no time
(with ``--early`` as soon as it is up, else when backward is over), and goes down over the busiest
link of that direction; forward of a layer waits for its own chunks. Each direction of a link sends
one chunk at a time, the layer needed first first. Steps follow one another; the period of the last
ones counts. Prints JSON: seconds a step, exposed beside compute.

With ``--racks`` an agent on a worker's host sums for each rack. The busiest direction then carries
both gradients and updates, so both take turns on it: it is that of an agent's host, into which come
the gradients of its rack's other workers, and the updates; or that of an uplink, with the sums for
the other racks and the updates from there.

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
    """A piece of a layer's gradient and update: when it is ready, up, and down.

    Attributes:
        seconds: on the busiest link, of the gradient; ``back``: of the update.
    """

    layer: int
    seconds: float
    back: float
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
    up = down = busiest(options.workers, options.servers, colocated=options.colocated)
    if options.racks > 1:
        up, down = rack_loads(options)
    rate = options.mbytes * 1e6
    found = []
    for index, (_, elements) in enumerate(layers):
        count = max(1, math.ceil(elements * 4 / (4 << 20)))
        size = elements / count
        coded = options.codec and elements >= 4096
        nbytes = code_bytes(options.codec, round(size)) if coded else size * 4
        seconds = nbytes / rate
        found.append([Chunk(index, up * seconds, down * seconds) for _ in range(count)])
    return found


def rack_loads(options: argparse.Namespace) -> tuple[float, float]:
    """Return models, of gradients and of updates, on the busiest direction, of a host's link."""
    mates = options.workers // options.racks - 1
    across = (options.racks - 1) / options.racks * options.mbytes / options.uplink
    if options.codec:  # codes are forwarded, not summed
        return max((float(mates), 1.0), (across * (mates + 1), across), key=sum)
    return max((float(mates), 1.0), (across, across), key=sum)


class Direction:
    """One direction of a link, which sends one thing at a time.

    Attributes:
        free: when it has sent what it has begun.
        jobs: of each (ready at, layer, seconds, chunk, kind); of those ready the lowest layer goes
            first.
    """

    def __init__(self) -> None:
        self.free = 0.0
        self.jobs: list[tuple[float, int, float, Chunk, str]] = []

    def add(self, ready: float, chunk: Chunk, kind: str) -> None:
        """Queue a chunk's gradient (``up``) or update (``down``)."""
        seconds = chunk.seconds if kind == "up" else chunk.back
        self.jobs.append((ready, chunk.layer, seconds, chunk, kind))

    def begins(self) -> float:
        """Return when the next thing is sent."""
        return max(self.free, min(job[0] for job in self.jobs))

    def send(self) -> tuple[Chunk, str]:
        """Send the next thing."""
        now = self.begins()
        job = min((j for j in self.jobs if j[0] <= now), key=lambda j: j[1])
        self.jobs.remove(job)
        self.free = now + job[2]
        setattr(job[3], job[4], self.free)
        return job[3], job[4]


def exchange(chunks: list[Chunk], up: Direction, down: Direction, at: float | None) -> None:
    """Send all gradients and updates of a step; both directions may be the same one.

    Args:
        at: time before which there are no updates; None: each when its gradient is up.
    """
    for chunk in chunks:
        up.add(chunk.ready, chunk, "up")
    while up.jobs or down.jobs:
        chunk, kind = min((d for d in (up, down) if d.jobs), key=Direction.begins).send()
        if kind == "up":
            down.add(chunk.up if at is None else max(chunk.up, at), chunk, "down")


def period(layers: list[Layer], options: argparse.Namespace, steps: int = 6) -> float:
    """Return the seconds of a step in the long run."""
    total = sum(compute for compute, _ in layers)
    forward = [options.compute / 3 * compute / total for compute, _ in layers]
    chunks = chunks_of(layers, options)
    up = Direction()
    down = up if options.racks > 1 else Direction()
    now, begun = 0.0, []
    for _ in range(steps):
        begun.append(now)
        for index, seconds in enumerate(forward):
            now = max([now, *(c.down for c in chunks[index])]) + seconds
        for index in reversed(range(len(layers))):
            now += 2 * forward[index]
            for chunk in chunks[index]:
                chunk.ready = now
        exchange([c for layer in chunks for c in layer], up, down, None if options.early else now)
        if options.overlap == "none":
            now = max(now, down.free)
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
    parser.add_argument("--racks", type=int, default=1)
    parser.add_argument("--uplink", type=float, default=59.8, help="MB/s of a rack's, with racks")
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
