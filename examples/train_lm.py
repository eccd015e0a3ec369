"""A small language model of Python source, trained byte by byte on the standard library.

Alone:       python examples/train_lm.py --steps 20
A cluster:   paradis run --workers 4 --servers 2 examples/train_lm.py
Going on:    paradis run --workers 4 --servers 2 --resume DIR examples/train_lm.py --steps 400

The corpus is on every machine: the modules that come with the running interpreter. About one file
in twenty, chosen by the hash of its path, is held out to measure bits per byte. What makes this a
Paradis script is `paradis.wrap`; worker r draws its own batches by (seed, r, step).
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import paradis
import paradis.optim

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "_vendor"}
"""Folders of tests, of installed packages and of code that others wrote."""

CORPUS_BYTES_MAX = 8_000_000
HELD_OUT_ONE_IN = 20
HELD_OUT_WINDOWS = 64


# ----------------------------------------------------------------------------------------- corpus


@dataclass(frozen=True, slots=True)
class Corpus:
    """Source text as bytes.

    Attributes:
        files: number of files read.
        train: (T,) uint8.
        held_out: (H,) uint8, of files that are not in ``train``.
    """

    files: int
    train: torch.Tensor
    held_out: torch.Tensor


def load_corpus(root: Path) -> Corpus:
    """Read ``*.py`` below a directory in the order of their paths' hashes, up to 8 MB."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    files, total = 0, 0
    for digest, path in sorted((_digest(p.relative_to(root)), p) for p in _sources(root)):
        text = path.read_bytes()
        if total + len(text) > CORPUS_BYTES_MAX:
            break
        files, total = files + 1, total + len(text)
        parts[int(digest, 16) % HELD_OUT_ONE_IN == 0].append(text)
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(p)), dtype=torch.uint8) for p in parts)
    return Corpus(files, train, held_out)


def _sources(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.as_posix().encode()).hexdigest()


def draw_batch(text: torch.Tensor, batch: int, context: int, key: str) -> torch.Tensor:
    """Return (batch, context + 1) int64, windows at places that ``key`` alone decides."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(text.numel() - context, (batch,), generator=generator)
    return torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long()


# ------------------------------------------------------------------------------------------ model


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; about 3.7 million parameters as they stand."""

    layers: int = 6
    width: int = 224
    heads: int = 4
    context: int = 128


DEFAULT_SHAPE = Shape()


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, width) to (B, T, width)."""
        b, t, w = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return y


class ByteModel(nn.Module):
    """A GPT over bytes; input embedding and output layer are one tensor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, shape.width)
        self.place = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, 256, bias=False)
        self.head.weight = self.embed.weight
        self.apply(_start_small)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # they add to the residual stream
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats per byte of predicting (B, T + 1) int64 byte by byte."""
        given, wanted = window[:, :-1], window[:, 1:]
        x = self.embed(given) + self.place[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def _start_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def bits_per_byte(model: ByteModel, text: torch.Tensor, context: int) -> float:
    """Return the mean over the same evenly spaced windows every time."""
    starts = torch.linspace(0, text.numel() - context - 1, HELD_OUT_WINDOWS).long().tolist()
    windows = torch.stack([text[s : s + context + 1] for s in starts]).long()
    losses = [float(model(windows[i : i + 16])) for i in range(0, HELD_OUT_WINDOWS, 16)]
    return sum(losses) / len(losses) / math.log(2)


# --------------------------------------------------------------------------------------- training


def rate_factor(step: int, total: int) -> float:
    """Return the learning rate of a step as a part of the peak: warm-up, then half a cosine."""
    warm_up = min(20, max(1, total // 10))
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, total - warm_up))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(
    model: ByteModel, optimizer: paradis.WrappedOptimizer, corpus: Corpus, options: Options
) -> None:
    """Train up to ``options.steps`` in all, from wherever the optimizer stands."""
    for group in optimizer.param_groups:
        group["initial_lr"] = peak_rate(options)
    # A scheduler begins where training does: at 0, or at the step of the checkpoint.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: rate_factor(s, options.steps), last_epoch=optimizer.steps_done - 1
    )
    progress = paradis.Progress(optimizer, total=options.steps)
    curve = []
    for step in range(optimizer.steps_done, options.steps):
        key = f"{options.seed}/{paradis.rank()}/{step}"
        window = draw_batch(corpus.train, options.batch, options.shape.context, key)
        loss = model(window)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.update(float(loss.detach()), options.batch)
        curve.append(float(loss.detach()))
        done = step + 1
        if options.save_every and done % options.save_every == 0 and done < options.steps:
            optimizer.save_checkpoint(extra={"seed": options.seed})
    progress.close()
    optimizer.wait()  # with overlap double_buffer the last gradient is still on its way
    if options.curve and paradis.rank() == 0:
        Path(options.curve).write_text("\n".join(map(str, curve)))


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    steps: int
    batch: int
    seed: int
    save_every: int
    lr: float
    shape: Shape
    optimizer: str
    freeze: int
    curve: str


def peak_rate(options: Options) -> float:
    """Return the highest learning rate: Lion moves every element by all of it, so less."""
    return options.lr / 7 if options.optimizer == "lion" else options.lr


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Return AdamW, or an optimizer whose gradients and updates travel as one bit per element.

    With b2 = 0.99 the variance is that of the last hundred steps or so. With torch's 0.999 the
    first steps of so short a training would count to its end, and OneBitAdam freeze them in.
    """
    lr, betas = peak_rate(options), (0.9, 0.99)
    if options.optimizer == "onebit":
        return paradis.optim.OneBitAdam(
            model.parameters(), lr, betas, weight_decay=0.1, freeze_step=options.freeze
        )
    if options.optimizer == "lion":
        return paradis.optim.DistributedLion(model.parameters(), lr, betas, weight_decay=0.1)
    return torch.optim.AdamW(model.parameters(), lr, betas, weight_decay=0.1)


def read_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Trains a byte-level language model.")
    parser.add_argument("--steps", type=int, default=200, help="steps in all (default: 200)")
    parser.add_argument("--batch", type=int, default=4, help="windows per worker (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of values and batches (default: 0)")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument(
        "--layers", type=int, default=DEFAULT_SHAPE.layers, help="depth of the model"
    )
    parser.add_argument("--width", type=int, default=DEFAULT_SHAPE.width, help="a multiple of 4")
    parser.add_argument("--optimizer", choices=("adamw", "onebit", "lion"), default="adamw")
    parser.add_argument(
        "--freeze", type=int, default=100, help="step at which onebit freezes the variance"
    )
    parser.add_argument("--curve", default="", help="file for one loss per step, of worker 0")
    given = parser.parse_args()
    if min(given.steps, given.batch, given.layers) < 1 or given.width < 4 or given.width % 4:
        parser.error("--steps, --batch and --layers are at least 1, --width a multiple of 4")
    shape = Shape(layers=given.layers, width=given.width)
    return Options(
        given.steps, given.batch, given.seed, given.save_every, given.lr, shape,
        given.optimizer, given.freeze, given.curve,
    )  # fmt: skip


def say(line: str) -> None:
    """Print a line, on worker 0 only."""
    if paradis.rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Train, measure, save."""
    options = read_options()
    torch.manual_seed(options.seed)
    corpus = load_corpus(Path(sysconfig.get_paths()["stdlib"]))
    model = ByteModel(options.shape)
    optimizer = paradis.wrap(model, make_optimizer(model, options))

    context, leads = options.shape.context, paradis.rank() == 0
    size = sum(p.numel() for p in model.parameters())
    say(f"model: {size:,} parameters; {paradis.world_size()} worker(s)")
    say(
        f"corpus: {corpus.files} files, {corpus.train.numel() / 1e6:.2f} MB to train on, "
        f"{corpus.held_out.numel() / 1e6:.2f} MB held out"
    )
    if optimizer.steps_done:
        say(f"resumed at step {optimizer.steps_done}")
    if leads:
        say(f"held-out bits per byte before: {bits_per_byte(model, corpus.held_out, context):.3f}")
    train(model, optimizer, corpus, options)
    if leads:
        measured = bits_per_byte(model, corpus.held_out, context)
        say(f"held-out bits per byte after:  {measured:.3f}")
        extra: dict[str, bool | int | float | str | None] = {
            "seed": options.seed,
            "bits_per_byte": round(measured, 4),
        }
        say(f"checkpoint: {optimizer.save_checkpoint(extra=extra, wait=True)}")


if __name__ == "__main__":
    main()
