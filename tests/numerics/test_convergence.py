"""A small network learns as well with one bit as with Adam, and only because errors are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paradis.numerics.elementwise import Options
from paradis.numerics.lion_coding import LionServer, LionWorker
from paradis.numerics.onebit_coding import OneBitAdamServer, OneBitAdamWorker

WORKERS, BATCH, STEPS, WARM_UP = 4, 8, 240, 40
RATE = 2e-3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def task() -> tuple[torch.Tensor, torch.Tensor]:
    """2048 noisy answers of a linear teacher, 64 inputs and 10 classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048, 64, generator=generator)
    teacher = torch.randn(64, 10, generator=generator)
    noise = torch.randn(2048, 10, generator=generator)
    return inputs, (inputs @ teacher + noise).argmax(1)


INPUTS, TARGETS = task()


class Run:
    """One training: AdamW on the mean gradient, then codes or not."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10)
        )
        self.parameters = list(self.net.parameters())
        self.adam = torch.optim.AdamW(self.parameters, lr=RATE, weight_decay=0.0)
        self.lengths = [p.numel() for p in self.parameters]
        self.spans = [(sum(self.lengths[:i]), n) for i, n in enumerate(self.lengths)]
        self.values = [p.detach().view(-1) for p in self.parameters]

    def loss(self) -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(self.net(INPUTS), TARGETS))

    def gradients(self, step: int) -> list[list[torch.Tensor]]:
        found = []
        for rank in range(WORKERS):
            generator = torch.Generator().manual_seed(step * WORKERS + rank)
            picks = torch.randint(0, len(INPUTS), (BATCH,), generator=generator)
            loss = torch.nn.functional.cross_entropy(self.net(INPUTS[picks]), TARGETS[picks])
            grads = torch.autograd.grad(loss, self.parameters)
            found.append([grad.reshape(-1) for grad in grads])
        return found

    def in_full(self, steps: range) -> Run:
        for step in steps:
            for parameter, *grads in zip(self.parameters, *self.gradients(step), strict=True):
                parameter.grad = torch.stack(grads).mean(0).view(parameter.shape)
            self.adam.step()
        return self

    def in_codes(self, steps: range, workers: list[Any], server: Any, options: Options,
                 *, forgetful: bool = False) -> Run:  # fmt: skip
        total, present = torch.empty(sum(self.lengths)), [True] * len(self.lengths)
        code = torch.empty(workers[0].code_bytes, dtype=torch.uint8)
        for step in steps:
            for rank, gradients in enumerate(self.gradients(step)):
                workers[rank].encode(gradients, code, options)
                workers[rank].keep()
                server.add(code, total, first=rank == 0)
            server.update(total.div_(WORKERS), None, present, options)
            for worker in workers:
                worker.install(server.code, [v.clone() for v in self.values], present, options)
            for coder in [*workers, server] if forgetful else []:
                for name, memory in coder.memories().items():
                    for error in memory if name.endswith("error") else []:
                        error.zero_()
        return self

    def one_bit(self, *, forgetful: bool = False) -> Run:
        options: Options = {"lr": RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
        self.in_full(range(WARM_UP))
        states = [
            (
                {k: self.adam.state[p][k].view(-1) for k in ("exp_avg", "exp_avg_sq")},
                {"step": float(WARM_UP)},
            )
            for p in self.parameters
        ]
        workers = [OneBitAdamWorker(self.lengths) for _ in range(WORKERS)]
        server = OneBitAdamServer(self.spans, self.values)
        for coder in (*workers, server):
            coder.begin(states, options)
        return self.in_codes(range(WARM_UP, STEPS), workers, server, options, forgetful=forgetful)

    def lion(self) -> Run:
        options: Options = {"lr": RATE / 2, "betas": [0.9, 0.99], "weight_decay": 0.0}
        workers = [LionWorker(self.lengths) for _ in range(WORKERS)]
        server = LionServer(self.spans, self.values, [0] * len(self.lengths))
        return self.in_codes(range(STEPS), workers, server, options)


def test_one_bit_learns_as_adam_does_and_not_without_error_memory() -> None:
    start, adam = Run().loss(), Run().in_full(range(STEPS)).loss()
    assert adam < 0.4 * start
    assert Run().one_bit().loss() < 1.06 * adam
    assert Run().one_bit(forgetful=True).loss() > 1.4 * adam


def test_votes_learn() -> None:
    assert Run().lion().loss() < 0.5 * Run().loss()
