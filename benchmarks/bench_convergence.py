"""Losses of the language model with compressed and delayed training, beside plain AdamW.

Each method trains ``examples/train_lm.py`` with the same seeds, steps, batches and learning rates,
by ``paradis run``. Prints JSON: held-out bits per byte of each seed, their mean as a ratio to
AdamW's; and draws the training losses, smoothed over 20 steps, mean of the seeds. What ``--runs``
has from an earlier call with the same options is not trained again.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "train_lm.py"

METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "AdamW": ((), ()),
    "AdamW, int8": (("training.compression=int8", "training.compression_benefit=assumed"), ()),
    "1-bit Adam": (("training.compression_threshold=16384",), ("--optimizer", "onebit")),
    "Lion, majority vote": ((), ("--optimizer", "lion")),
    "AdamW, double_buffer": (("training.overlap=double_buffer",), ()),
}
"""Method -> settings of the job, arguments of the script.

1-bit Adam leaves the table of positions and attention's output layers in full, whose variances
are still far from steady at the freeze; by the default threshold they would travel as codes.
"""

COLOURS = ("#1b1b1b", "#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def train(method: str, seed: int, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Return held-out bits per byte at the end, and the loss of each step."""
    settings, arguments = METHODS[method]
    warm_up = f"training.delay_warmup_steps={options.freeze}"
    with tempfile.TemporaryDirectory() as directory:
        curve = Path(directory) / "curve"
        words = [sys.executable, "-m", "paradis.cli.main", "run", "--workers", str(options.workers),
                 "--servers", "1"]  # fmt: skip
        for setting in (*settings, warm_up):
            words += ["--set", setting]
        words += [str(SCRIPT), "--steps", str(options.steps), "--seed", str(seed), "--curve",
                  str(curve), "--freeze", str(options.freeze), "--batch", str(options.batch),
                  "--layers", str(options.layers), "--width", str(options.width),
                  *arguments]  # fmt: skip
        done = subprocess.run(
            words, cwd=directory, capture_output=True, text=True, timeout=options.limit, check=False
        )
        found = re.search(r"bits per byte after:\s+([0-9.]+)", done.stdout)
        if done.returncode or found is None:
            raise SystemExit(f"{method}, seed {seed} failed:\n{done.stdout}\n{done.stderr}")
        return float(found[1]), [float(line) for line in curve.read_text().split()]


class Runs:
    """Results by method and seed, kept in a file of JSON lines."""

    def __init__(self, path: Path | None, options: argparse.Namespace) -> None:
        self._path = path
        self._what = [options.steps, options.freeze, options.workers, options.batch,
                      options.layers, options.width]  # fmt: skip
        self._known: dict[tuple[str, int], tuple[float, list[float]]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                run = json.loads(line)
                if run["what"] == self._what:
                    self._known[run["method"], run["seed"]] = run["bits"], run["curve"]

    def of(self, method: str, seed: int, options: argparse.Namespace) -> tuple[float, list[float]]:
        """Return a result, training first where there is none."""
        if (method, seed) not in self._known:
            bits, curve = train(method, seed, options)
            self._known[method, seed] = bits, curve
            if self._path is not None:
                run = {"what": self._what, "method": method, "seed": seed, "bits": bits}
                run["curve"] = curve
                with self._path.open("a") as file:
                    file.write(json.dumps(run) + "\n")
        return self._known[method, seed]


def smoothed(curves: list[list[float]], over: int = 20) -> list[float]:
    """Return the mean of the curves, each point over the last ``over`` steps."""
    mean = [statistics.fmean(each) for each in zip(*curves, strict=True)]
    return [statistics.fmean(mean[max(0, i + 1 - over) : i + 1]) for i in range(len(mean))]


def draw(curves: dict[str, list[float]]) -> str:
    """Return the curves as an SVG picture."""
    width, height, margin = 720, 420, 50
    points = [value for curve in curves.values() for value in curve[20:]]
    low, high = min(points), max(points)
    count = max(len(curve) for curve in curves.values())

    def place(step: int, loss: float) -> str:
        x = margin + step / count * (width - 2 * margin)
        y = height - margin - (loss - low) / (high - low) * (height - 2 * margin)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{margin},{margin} V{height - margin} H{width - margin}" fill="none" '
        'stroke="black"/>',
        f'<text x="{width / 2}" y="{height - 12}">step, of {count}</text>',
        f'<text x="8" y="{margin - 14}">training loss, nats per byte</text>',
        f'<text x="8" y="{margin + 4}">{high:.2f}</text>',
        f'<text x="8" y="{height - margin}">{low:.2f}</text>',
    ]
    for index, (name, curve) in enumerate(curves.items()):
        line = " ".join(place(step, loss) for step, loss in enumerate(curve) if step >= 20)
        colour = COLOURS[index % len(COLOURS)]
        y = margin + 16 * index
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{width - 230}" y="{y}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Train all methods with all seeds, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--freeze", type=int, default=250, help="and steps without delay")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3, help="an odd number has no ties of votes")
    parser.add_argument("--batch", type=int, default=3, help="windows per worker")
    parser.add_argument("--layers", type=int, default=2, help="depth of the model")
    parser.add_argument("--width", type=int, default=96, help="of the model, a multiple of 4")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one run")
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    parser.add_argument("--runs", type=Path, help="JSON lines: read and added to")
    parser.add_argument("--picture", type=Path, help="where the SVG goes")
    options = parser.parse_args()
    names = [name.strip() for name in options.methods.split(";")]
    held_out: dict[str, list[float]] = {name: [] for name in names}
    curves: dict[str, list[list[float]]] = {name: [] for name in names}
    runs = Runs(options.runs, options)
    for seed in range(options.seeds):
        for name in names:
            bits, curve = runs.of(name, seed, options)
            held_out[name].append(bits)
            curves[name].append(curve)
            print(f"seed {seed}, {name}: {bits} bits per byte", file=sys.stderr, flush=True)
    base = statistics.fmean(held_out[names[0]])
    if options.picture is not None:
        options.picture.write_text(draw({name: smoothed(each) for name, each in curves.items()}))
    print(json.dumps({
        "bench": "convergence", "steps": options.steps, "freeze": options.freeze,
        "workers": options.workers, "batch": options.batch, "layers": options.layers,
        "width": options.width, "held_out_bits_per_byte": held_out,
        "ratio_to_first": {n: round(statistics.fmean(b) / base, 4) for n, b in held_out.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
