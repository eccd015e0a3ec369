"""A training script whose gradients travel as codes, compared with its coders on whole tensors.

    coded_worker.py OUT WAY STEPS [save STEP | from STEP [WAYS] | slower | faster | recompress]

WAY is bf16, int8, onebit, onebit-free, auto or lion. Every rank makes every rank's gradients and
does beside its training what servers and all workers should do: no messages, no shards, no threads.
After ``from`` it saves once more, one step before the end; WAYS has a 1 for each earlier step that
travelled as codes, else a 0. With ``slower`` the leader is told that steps take longer as codes,
and there is a checkpoint when it knows; with ``faster`` the opposite. With ``recompress`` ranks 0
and 1 are in one rack, rank 2 in another, whose agents each make one code of several.
Writes OUT/<rank>.json: failures, a digest of the values, bytes sent and received per step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash

import paradis
import paradis.optim
from paradis.core.codes import choose_codec, code_bytes
from paradis.numerics.coders import rack_coder, server_coder, worker_coder
from paradis.numerics.elementwise import options_of
from paradis.numerics.shard_optimizer import ShardOptimizer

SHAPES = ((50_001,), (130, 97), (5000,), (33,), (7,))
"""Cut into shards; alone; in a bucket with nobody; in full, in a bucket of two."""

FREEZE = 4
FREE = "onebit-free"
"""1-bit Adam with gradients that are let go: none is changed after backward, where none is left."""

THRESHOLD = 4096
RACKS = ((0, 1), (2,)) if sys.argv[4:5] == ["recompress"] else ()
NOISE = torch.randn(400_000, generator=torch.Generator().manual_seed(7))


class Parts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        values = (torch.randn(s, generator=generator) for s in SHAPES)
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(v) for v in values)


def factors(step: int, rank: int, index: int) -> torch.Tensor:
    at = (step * 7919 + rank * 104_729 + index * 15_485) % 300_000
    count = torch.Size(SHAPES[index]).numel()
    return NOISE[at : at + count].view(SHAPES[index])


def absent(step: int, rank: int, index: int) -> bool:
    return (step == 5 and index == 2) or (step == 6 and index == 1 and rank == 1)


def revised(step: int, rank: int) -> bool:
    """Whether the script changes a gradient after backward; early updates would forbid it."""
    return step == 7 and rank == 0 and sys.argv[4:5] != ["faster"] and sys.argv[2] != FREE


def gradient(step: int, rank: int, index: int) -> torch.Tensor | None:
    if absent(step, rank, index):
        return None
    found = factors(step, rank, index) * 1.0
    return found * 0.5 if revised(step, rank) and index == 0 else found


def backward(model: Parts, step: int, rank: int) -> None:
    total = torch.zeros(())
    for index, part in enumerate(model.parts):
        if not absent(step, rank, index):
            total = total + (part * factors(step, rank, index)).sum()
    total.backward()
    if revised(step, rank):
        first = model.parts[0].grad
        assert first is not None
        first.mul_(0.5)


def make_optimizer(way: str, model: Parts) -> torch.optim.Optimizer:
    parameters = model.parts
    if way == "lion":
        return paradis.optim.DistributedLion(parameters, lr=1e-3)
    if way in ("onebit", "auto"):
        fixed = FREEZE if way == "onebit" else None
        return paradis.optim.OneBitAdam(
            parameters, lr=1e-3, betas=(0.8, 0.9), freeze_step=fixed, weight_decay=0.1
        )
    return torch.optim.Adam(parameters, lr=1e-3)


def left_over(model: Parts, step: int, rank: int) -> list[str]:
    """Return what is wrong with the gradients that are left after backward, where some are not."""
    expected = [not absent(step, rank, index) for index in range(len(SHAPES))]
    if sys.argv[2] == FREE and step >= FREEZE:  # what travels as codes has gone
        expected[:3] = [False] * 3
    left = [part.grad is not None for part in model.parts]
    return [] if left == expected else [f"step {step}: gradients are left: {left}"]


class Stopwatch:
    """In place of a worker's meter: tells times that are given, after a few steps of each kind."""

    def __init__(self, coded_ms: int, full_ms: int) -> None:
        self.times = {True: coded_ms, False: full_ms}
        self.last: bool | None = None
        self.count = 0

    def closed(self, now_ns: int, *, coded: bool) -> tuple[int, ...]:
        self.count = self.count + 1 if coded == self.last else 1
        self.last = coded
        return (self.times[coded] * 1_000_000,) * 4 if self.count == 3 else ()


class Twin:
    """One parameter, whole: the server's value, what workers hold, all coders."""

    def __init__(self, index: int, value: torch.Tensor, way: str, name: str, options: Any) -> None:
        self.index = index
        self.value = value.detach().reshape(-1).clone()
        self.held = self.value.clone()
        self.optimizer = ShardOptimizer(name, options, [self.value])
        compression = way if way in ("bf16", "int8") else "none"
        length = self.value.numel()
        self.codec = choose_codec(compression, name, "float32", length, threshold=THRESHOLD)
        if self.codec:
            spans = [(0, length)]
            self.server = server_coder(self.codec, length, spans, [self.value], [0])
            self.server.replaced()
            ranks = range(paradis.world_size())
            self.workers = [worker_coder(self.codec, [length]) for _ in ranks]
            self.racks = [rack_coder(self.codec, spans, length) for _ in RACKS]
        self.begun = self.codec not in ("onebit",)

    def step(self, step: int, options: Any, *, coded: bool) -> None:
        ranks = range(paradis.world_size())
        gradients = [gradient(step, r, self.index) for r in ranks]
        if all(g is None for g in gradients):
            return
        flats = [None if g is None else g.reshape(-1) for g in gradients]
        if not (coded and self.codec):
            self.step_in_full(flats, options)
            return
        if not self.begun:
            self.begun = True
            self.server.begin([self.optimizer.state(0)], options)
            for worker in self.workers:
                worker.load_memories(self.server.start())
            for rack in self.racks:
                rack.begin(self.server.start())
        total = torch.zeros_like(self.value)
        codes = []
        for worker, flat in zip(self.workers, flats, strict=True):
            codes.append(torch.empty(worker.code_bytes, dtype=torch.uint8))
            worker.encode([flat], codes[-1], options)
        for place, code in enumerate(self.through_racks(codes)):
            self.server.add(code, total, first=not place)
        self.server.update(total.div_(len(flats)), self.optimizer, [True], options)
        for worker in self.workers:
            copy = self.held.clone()
            worker.keep()
            worker.install(self.server.code, [copy], [True], options)
        self.held = copy

    def through_racks(self, codes: list[torch.Tensor]) -> list[torch.Tensor]:
        made = []
        for rack, ranks in zip(self.racks, RACKS, strict=True):
            made.append(torch.empty_like(codes[0]))
            rack.combine([codes[rank] for rank in ranks], made[-1])
            rack.counts()
        return made or codes

    def step_in_full(self, flats: list[torch.Tensor | None], options: Any) -> None:
        total = torch.zeros_like(self.value)
        for rank, flat in enumerate(flats):
            pushed = torch.zeros_like(self.value) if flat is None else flat
            if self.codec and self.workers[rank].carries:
                pushed = torch.empty_like(self.value)
                self.workers[rank].encode_in_full([flat], [pushed])
                self.workers[rank].keep()
            total += pushed
        self.optimizer.apply([total.div_(len(flats))], options)
        if self.codec:
            self.server.replaced()
        self.held.copy_(self.value)


def main() -> None:
    out, way, steps = Path(sys.argv[1]), sys.argv[2].removesuffix("-free"), int(sys.argv[3])
    what, at = (*sys.argv[4:5], "")[0], int((*sys.argv[5:6], "-1")[0])
    ways = [each == "1" for each in (*sys.argv[6:7], "")[0]]
    rank = paradis.rank()
    model = Parts()
    initial = [p.detach().clone() for p in model.parts]
    optimizer = paradis.wrap(model, make_optimizer(way, model))
    options = options_of(optimizer.param_groups[0])
    twins = [Twin(i, v, way, optimizer._inner_name, options) for i, v in enumerate(initial)]
    failures: list[str] = []
    sizes: list[tuple[float, float]] = []
    first_coded = {"onebit": FREEZE, "auto": -1}.get(way, 0)
    role = optimizer._binding.session.node.worker_role.groups[0]
    watch = Stopwatch(41, 33) if what == "slower" else Stopwatch(33, 41)
    if what in ("slower", "faster"):
        role.meter = watch
    for step in range(steps):
        if what == "from" and step < at:
            for twin in twins:
                twin.step(step, options, coded=ways[step] if ways else 0 <= first_coded <= step)
            continue
        before = optimizer.metrics()
        model.zero_grad()
        backward(model, step, rank)
        failures += left_over(model, step, rank)
        optimizer.step()
        optimizer.wait()
        if optimizer._binding.memory.gradients():
            failures.append(f"step {step}: a gradient is held after its update")
        after = optimizer.metrics()
        keys = ("push_bytes", "pull_bytes")
        sent, received = (after.get(k, 0.0) - before.get(k, 0.0) for k in keys)
        sizes.append((sent, received))
        if way == "auto" and first_coded < 0 and optimizer._binding.memory.coded:
            first_coded = step + 1
        coded = step - max(0, at if what == "from" else 0) in role.coded_steps
        if way not in ("onebit", "auto"):  # the step was one of this run
            ways.append(coded)
        else:
            coded = 0 <= first_coded <= step
        for twin, part in zip(twins, model.parts, strict=True):
            twin.step(step, options, coded=coded)
            if not torch.equal(part.detach().reshape(-1), twin.held):
                failures.append(f"step {step}: parameter {twin.index}")
        if (what == "save" and step + 1 == at) or (what == "from" and step + 1 == steps - 1):
            optimizer.save_checkpoint(wait=True)
        if what == "slower" and at < 0 and watch.count == 4 and not coded:
            at = step + 1
            optimizer.save_checkpoint(wait=True)
    total = xxhash.xxh3_64()
    for part in model.parts:
        total.update(part.detach().reshape(-1).view(torch.uint8).numpy())
    codes = sum(
        sum(code_bytes(t.codec, n) for n in cuts(t.value.numel())) if t.codec else 0 for t in twins
    )
    result = {"failures": failures, "digest": total.hexdigest(), "sizes": sizes,
              "codes": codes, "first_coded": first_coded, "saved": at,
              "ways": "".join("01"[each] for each in ways)}  # fmt: skip
    (out / f"{rank}.json").write_text(json.dumps(result))


def cuts(length: int) -> list[int]:
    """Return the lengths of the pieces that a parameter is cut into, 64 KiB each at most."""
    units = -(-length // 1024)
    count = -(-units // 16) if length * 4 > 64 << 10 else 1
    edges = [min(units * i // count * 1024, length) for i in range(count)] + [length]
    return [b - a for a, b in zip(edges, edges[1:], strict=False)]


main()
