"""Step time of data-parallel training: Paradis, DDP on Gloo, a traditional server, compute only.

A 26 M-parameter MLP computes for real on every worker; the methods take turns of several
consecutive steps within one launch, drained inside the clock, so that their ratios come from the
same minutes. Loopback.
Prints JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from launch_nodes import Nodes
from plain_server import PlainWorker, run_server
from torch import distributed, nn

import paradis

WIDTHS = (1024, 4096, 4096, 1024)
LEARNING_RATE = 1e-3

Step = Callable[[], None]


def build() -> nn.Sequential:
    """Return the model; the same values on every worker."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for source, target in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [nn.Linear(source, target), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Methods:
    """The ways to train, each a function that makes one step."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self._x = torch.randn(job["batch"], WIDTHS[0])
        self.steps: dict[str, Step] = {}
        self.drains: dict[str, Step] = {}
        self.closers: list[Callable[[], None]] = []
        for name in job["methods"]:
            self.steps[name] = getattr(self, f"_{name}")(job, rank)

    def _train(self, model: nn.Module, zero: Step, finish: Step) -> Step:
        def step() -> None:
            zero()
            model(self._x).square().mean().backward()
            finish()

        return step

    def _local(self, job: dict[str, Any], rank: int) -> Step:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        return self._train(model, optimizer.zero_grad, lambda: None)

    def _ddp(self, job: dict[str, Any], rank: int) -> Step:
        model = nn.parallel.DistributedDataParallel(build(), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        return self._train(model, optimizer.zero_grad, lambda: optimizer.step() and None)

    def _paradis(self, job: dict[str, Any], rank: int) -> Step:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(job["workers"]),
            PARADIS_DISPATCHERS=job["address"],
            PARADIS_TOKEN_FILE=job["token_file"],
        )
        model = build()
        optimizer = paradis.wrap(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
        self.drains["paradis"] = optimizer.wait
        self.closers.append(paradis.close)
        return self._train(model, optimizer.zero_grad, lambda: optimizer.step() and None)

    def _plain(self, job: dict[str, Any], rank: int) -> Step:
        model = build()
        flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        nn.utils.vector_to_parameters(flat, model.parameters())
        parameters = list(model.parameters())
        worker = PlainWorker(job["ports"], flat.numpy())
        self.closers.append(worker.close)
        gradient = torch.empty_like(flat)

        def zero() -> None:
            for parameter in parameters:
                parameter.grad = None

        def finish() -> None:
            torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None], out=gradient)
            worker.sync(gradient.numpy())

        return self._train(model, zero, finish)


def work(job: dict[str, Any], rank: int) -> None:
    """One worker: take turns, write the times of each turn."""
    torch.set_num_threads(1)
    store = distributed.FileStore(job["store"], job["workers"])
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=job["workers"],
        timeout=datetime.timedelta(seconds=300),
    )  # fmt: skip
    methods = Methods(job, rank)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods.steps}
    for turn in range(-job["warmup"], job["rounds"]):
        for name, step in methods.steps.items():
            distributed.barrier()
            cpu = _cpu_s()
            start = time.perf_counter()
            for _ in range(job["steps"]):
                step()
            methods.drains.get(name, lambda: None)()
            distributed.barrier()
            if turn >= 0:
                seconds = time.perf_counter() - start
                times[name].append((seconds / job["steps"], (_cpu_s() - cpu) / job["steps"]))
    Path(job["directory"], f"times-{rank}.json").write_text(json.dumps(times))
    for close in methods.closers:
        close()
    distributed.destroy_process_group()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def launch(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Start servers and workers, wait, and put the figures together."""
    length = sum(p.numel() for p in build().parameters())
    length -= length % given.servers
    context = multiprocessing.get_context("spawn")
    ports, plain = [], []
    for _ in range(given.servers if "plain" in given.methods else 0):
        ours, theirs = context.Pipe()
        arguments = (theirs, given.workers, length // given.servers, LEARNING_RATE)
        plain.append(context.Process(target=run_server, args=arguments))
        plain[-1].start()
        ports.append(ours.recv())
    nodes = Nodes(directory, workers=given.workers, servers=given.servers, settings=given.set)
    job = {
        "workers": given.workers, "methods": given.methods, "batch": given.batch,
        "rounds": given.rounds, "warmup": given.warmup, "steps": given.steps, "ports": ports,
        "address": nodes.address, "token_file": str(nodes.token_file),
        "directory": str(directory), "store": str(directory / "gloo"),
    }  # fmt: skip
    (directory / "job.json").write_text(json.dumps(job))
    command = [sys.executable, __file__, "--work", str(directory / "job.json")]
    workers = [subprocess.Popen([*command, "--rank", str(r)]) for r in range(given.workers)]
    codes = [w.wait(given.limit) for w in workers]
    nodes.close()
    for process in plain:
        process.join(10)
    if any(codes):
        raise SystemExit(f"workers failed: {codes}")
    tables = [json.loads((directory / f"times-{r}.json").read_text()) for r in range(given.workers)]
    return _figures(tables, given)


def _figures(tables: list[dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"bench": "step", "workers": given.workers, "servers": given.servers,
                              "batch": given.batch, "methods": {}}  # fmt: skip
    step_s = {
        name: [max(t[name][r][0] for t in tables) for r in range(given.rounds)]
        for name in given.methods
    }
    for name, values in step_s.items():
        cpu = [sum(t[name][r][1] for t in tables) / len(tables) for r in range(given.rounds)]
        result["methods"][name] = {
            "step_s": [min(values), statistics.median(values), max(values)],
            "worker_cpu_s": statistics.median(cpu),
        }
        if "ddp" in step_s:
            ratios = [a / b for a, b in zip(values, step_s["ddp"], strict=True)]
            result["methods"][name]["over_ddp"] = statistics.median(ratios)
    return result


def main() -> None:
    """Run as launcher, or as one worker with ``--work``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="local,plain,ddp,paradis")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="consecutive steps of a turn")
    parser.add_argument("--set", action="append", default=[], help="a setting of the leader")
    parser.add_argument("--limit", type=float, default=600)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(json.loads(Path(given.work).read_text()), given.rank)
        return
    given.methods = given.methods.split(",")
    with tempfile.TemporaryDirectory(prefix="paradis-bench-") as directory:
        print(json.dumps(launch(given, Path(directory)), indent=1))


if __name__ == "__main__":
    main()
