"""Real jobs: `paradis run` with a training script, watched from outside."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import paradis

WAIT_S = 100.0
SOURCE = str(Path(paradis.__file__).parents[1])
TRAIN = """
import fcntl, hashlib, inspect, os, signal, sys
import torch, paradis

for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
    method.__dict__["__dynamo_disable"] = method  # or torch's compiler is imported: 2 s
torch.set_num_threads(1)
rank = paradis.rank()

def tell(*words):
    open(os.environ["READY"], "w").write(" ".join(str(word) for word in words) + "\\n")

def pass_gate():
    with open(os.environ["GATE"]) as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)

def build():
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

def before_step(step, model, optimizer):
    pass
"""

LOOP = """
model, optimizer = build()
optimizer = paradis.wrap(model, optimizer)
for step in range(int(os.environ.get("STEPS", "6"))):
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(8, 8, generator=generator)).square().mean().backward()
    before_step(step, model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.md5(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
tell("digest", rank, digest.hexdigest())
"""


class Running:
    """A started command whose output is collected line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((process.stdout, self.out), (process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Iterator[str], lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line)
                self._changed.notify_all()

    def until(self, text: str) -> None:
        """Wait until the text stands in standard error."""
        with self._changed:
            found = self._changed.wait_for(lambda: text in "".join(self.err), WAIT_S)
        assert found, f"no {text!r} in:\n{''.join(self.err)}"

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the command, or to its process group as a terminal does."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def end(self, timeout_s: float = WAIT_S) -> tuple[int, str]:
        """Wait for the end; return exit code and standard error."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s:g} s:\n{''.join(self.err)}")
        for thread in self._threads:
            thread.join(5.0)
        return code, "".join(self.err)


class Gate:
    """A locked file: workers that `pass_gate` wait until it is opened, and never after that."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def open(self) -> None:
        """Let everybody pass; idempotent."""
        self._file.close()


class Cluster:
    """A directory with a training script, and jobs started in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self.temporary = directory / "tmp"
        self.temporary.mkdir(parents=True)
        self.env = {k: v for k, v in os.environ.items() if "PARADIS" not in k}
        self.env.pop("OMP_NUM_THREADS", None)
        self.env |= {
            "PYTHONPATH": SOURCE,
            "PARADIS_TEST_MARK": self.mark,
            "TMPDIR": str(self.temporary),
            "READY": str(directory / "ready"),
        }
        os.mkfifo(directory / "ready")
        self._reader = os.open(directory / "ready", os.O_RDONLY | os.O_NONBLOCK)
        self._keep = os.open(directory / "ready", os.O_WRONLY)  # so that the pipe never ends
        self._told = ""
        self._shared = set(os.listdir("/dev/shm"))
        self._started: list[Running] = []
        self._disks: list[Path] = []

    def write(self, extra: str = "", *, loop: str = LOOP, name: str = "train.py") -> Path:
        """Write the training script; ``extra`` may redefine `build` and `before_step`."""
        path = self.directory / name
        path.write_text(TRAIN + extra + loop, encoding="utf-8")
        return path

    def start(
        self, *words: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> Running:
        """Start ``paradis`` with these words."""
        command = [*prefix, sys.executable, "-m", "paradis.cli.main", *words]
        return self.spawn(command, env or {})

    def spawn(self, command: list[str], env: dict[str, str] | None = None) -> Running:
        """Start any command in the job's directory and environment."""
        process = subprocess.Popen(
            command, cwd=self.directory, env={**self.env, **(env or {})}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, errors="replace",
        )  # fmt: skip
        running = Running(process)
        self._started.append(running)
        return running

    def run(self, *words: str, **options: object) -> tuple[int, str]:
        """Run to the end, check that nothing is left; return exit code and standard error."""
        code, err = self.start("run", *words, **options).end()  # type: ignore[arg-type]
        self.assert_clean()
        return code, err

    def content(self, path: Path) -> str:
        """Wait until there is such a file; return its text."""
        until = time.monotonic() + WAIT_S
        while not path.exists():
            assert time.monotonic() < until, f"no {path}"
            os.sched_yield()
        return path.read_text()

    def small_disk(self) -> Path:
        """Return an empty file system of 4 MB; skips the test where mounting is forbidden."""
        disk = self.directory / "disk"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system needs root")
        self._disks.append(disk)
        return disk

    def gate(self) -> Gate:
        """Return a gate for workers to wait at."""
        return Gate(self.directory / f"gate-{len(os.listdir(self.directory))}")

    def told(self, start: str, count: int = 1) -> list[list[str]]:
        """Wait until the script has told so many lines that start so; return their words."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        while len(found := self._lines(start)) < count:
            errors = "".join("".join(r.err) for r in self._started)
            assert poller.poll(WAIT_S * 1000), f"told only {self._told!r}:\n{errors}"
            self._told += os.read(self._reader, 65536).decode()
        return found

    def _lines(self, start: str) -> list[list[str]]:
        lines = self._told[: self._told.rfind("\n") + 1].splitlines()
        return [line.split() for line in lines if line.startswith(start)]

    def digests(self, count: int) -> list[str]:
        """Return the digest of each rank's final parameters, in order of rank."""
        lines = self.told("digest", count)
        return [words[2] for words in sorted(lines, key=lambda words: int(words[1]))][-count:]

    def forget(self) -> None:
        """Drop what was told."""
        self._told = ""

    @property
    def run_directory(self) -> Path:
        """Directory of the newest run."""
        return max((self.directory / "paradis-runs").iterdir(), key=lambda p: p.stat().st_ctime_ns)

    def node(self, name: str) -> psutil.Process:
        """Return the process of a node, such as ``server-1``."""
        role, _, index = name.partition("-")
        launchers = {running.process.pid for running in self._started}
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                rank = process.environ().get("RANK") if process.ppid() in launchers else None
                if role == "worker" and rank == index and "exec_child" not in " ".join(words):
                    return process
                if role in words and words[words.index(role) + 2] == index:
                    return process
        pytest.fail(f"no process of {name}")

    def wait_stopped(self, process: psutil.Process) -> None:
        """Wait until a process has stopped itself."""
        until = time.monotonic() + WAIT_S
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < until, f"{process} does not stop"
            os.sched_yield()

    def alive(self) -> list[psutil.Process]:
        """Return all living processes that this cluster's commands started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get("PARADIS_TEST_MARK") == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_clean(self) -> None:
        """Assert that no process, shared memory, socket, token or temporary file is left."""
        gone, alive = psutil.wait_procs(self.alive(), timeout=2.0)
        assert not alive, [p.cmdline() for p in alive if p.is_running()]
        new = {name for name in set(os.listdir("/dev/shm")) - self._shared if "paradis" in name}
        assert not new
        # torch's compiler and torchrun, and loader processes that are killed, leave directories.
        left = [n for n in os.listdir(self.temporary) if not n.startswith(("torch", "pymp-"))]
        assert left == []
        for run in (self.directory / "paradis-runs").glob("*"):
            left = [p.name for p in run.iterdir() if p.suffix != ".log"]
            assert set(left) <= {"checkpoints", "nodes.json"}, left

    def close(self) -> None:
        """Kill what is left."""
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for running in self._started:
            running.process.wait(10.0)
        for disk in self._disks:
            subprocess.run(["umount", str(disk)], check=True)
        os.close(self._reader)
        os.close(self._keep)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A place to start real jobs in; kills what a failed test leaves."""
    made = Cluster(tmp_path / "job")
    yield made
    made.close()
