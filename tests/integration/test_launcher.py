"""`paradis run` with real processes; servers and dispatchers are stand-ins with real streams."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paradis

WAIT_S = 40.0
SOURCE = str(Path(paradis.__file__).parents[1])

REDIRECT = """
import importlib.util, os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "paradis.runtime.process":
            return importlib.util.spec_from_file_location(name, os.environ["STAND_IN"])
sys.meta_path.insert(0, Finder())
"""

STAND_IN = """
import os, sys, threading
from paradis.control.client import ControlClient
from paradis.control.service import send_all
from paradis.runtime.rundir import read_token
from paradis.wire.messages import *

class Leader:
    def __init__(self, arguments):
        self.arguments, self.sessions, self.left = arguments, set(), set()
        self.over = threading.Event()
    def opened(self, session): self.sessions.add(session)
    def closed(self, session, reason): self.sessions.discard(session)
    def received(self, session, message):
        if isinstance(message, Join) and message.role == "agent":
            session.send(Announcement(level="INFO", text="hello " + message.node))
            if os.environ.get("CHECKPOINT"):
                session.send(CheckpointDone(checkpoint="c", path=os.environ["CHECKPOINT"], step=7))
        if isinstance(message, NodeExited):
            with open(self.arguments.run_directory / "exits", "a") as file:
                file.write(f"{message.node} {message.code}\\n")
            if message.code:
                send_all(self.sessions, Failed(error="JobFailed", text=f"{message.node} is gone"))
            if message.node.startswith("worker"):
                self.left.add(message.node)
            if len(self.left) == self.arguments.workers:
                send_all(self.sessions, Summary(nodes={}))
                send_all(self.sessions, Shutdown(reason="done"))
                self.over.set()

class Node:
    def __init__(self): self.over = threading.Event()
    def received(self, message):
        if isinstance(message, Shutdown): self.over.set()
    def lost(self, error): self.over.set()

def run_dispatcher(arguments, control):
    note(arguments, f"dispatcher-{arguments.index}")
    if arguments.index: return follow(arguments)
    if os.environ.get("LEADER_FAILS"): raise SystemExit("paradis: error: no leader today")
    leader = Leader(arguments)
    control.bind(leader)
    leader.over.wait(60)
    control.close()
    return 0

def run_server(arguments):
    note(arguments, f"server-{arguments.index}")
    if os.environ.get("SERVER_FAILS"): return int(os.environ["SERVER_FAILS"])
    return follow(arguments)

def follow(arguments):
    node = Node()
    client = ControlClient(arguments.dispatchers, read_token(arguments.token_file), node)
    client.connect(20)
    node.over.wait(60)
    client.close()
    return 0

def note(arguments, name):
    (arguments.run_directory / (name + ".pid")).write_text(str(os.getpid()))
"""


class Job:
    """A directory with a script, and launchers started in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.script = directory / "train.py"
        hooks = directory / "hooks"
        hooks.mkdir()
        (hooks / "sitecustomize.py").write_text(REDIRECT)
        (hooks / "process.py").write_text(STAND_IN)
        self.env = {key: value for key, value in os.environ.items() if "PARADIS" not in key}
        self.env.pop("OMP_NUM_THREADS", None)
        self.env["PYTHONPATH"] = f"{hooks}{os.pathsep}{SOURCE}"
        self.env["STAND_IN"] = str(hooks / "process.py")
        self.fifo = directory / "ready"
        os.mkfifo(self.fifo)
        self.env["READY"] = str(self.fifo)
        self.reader = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.keep = os.open(self.fifo, os.O_WRONLY)  # so that the pipe never ends
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, "-m", "paradis.cli.main", "run", *arguments]
        process = subprocess.Popen(
            command, cwd=self.directory, env=self.env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, str, str]:
        return self.end(self.start(*arguments, prefix=prefix))

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err

    def ready(self, count: int) -> list[int]:
        """Wait for as many lines in the pipe; return handles of the pids that they name."""
        data = b""
        poller = select.poll()
        poller.register(self.reader, select.POLLIN)
        while data.count(b"\n") < count:
            assert poller.poll(WAIT_S * 1000), f"only {data!r}"
            data += os.read(self.reader, 4096)
        return [os.pidfd_open(int(pid)) for pid in data.split()]

    @property
    def runs(self) -> list[Path]:
        return sorted((self.directory / "paradis-runs").iterdir())

    def services(self) -> list[int]:
        """Return handles of the servers and dispatchers that are alive."""
        pids = [int(path.read_text()) for path in self.runs[-1].glob("*.pid")]
        return [os.pidfd_open(pid) for pid in pids]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        os.close(self.reader)
        os.close(self.keep)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    directory = tmp_path / "my dir" / "zug é"
    directory.mkdir(parents=True)
    job = Job(directory)
    yield job
    job.close()


def assert_ended(handles: list[int], timeout_s: float = 0.0) -> None:
    poller = select.poll()
    for handle in handles:
        poller.register(handle, select.POLLIN)
        assert poller.poll(timeout_s * 1000), "a process is still alive"
        poller.unregister(handle)
        os.close(handle)


TELL = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PARADIS_RACK", "PARADIS_AGENT",
         "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"]
print(json.dumps([sys.argv, os.getcwd(), {n: os.environ[n] for n in names}]))
assert os.stat(os.environ["PARADIS_TOKEN_FILE"]).st_mode & 0o777 == 0o600
assert os.path.isabs(os.environ["PARADIS_RUN_DIR"]) and os.environ["PARADIS_DISPATCHERS"]
assert "PARADIS_RESUME" not in os.environ and "PARADIS_TTY" not in os.environ
"""


def test_arguments_arrive_unchanged_and_output_goes_where_it_should(job: Job) -> None:
    script = job.directory / "train me é.py"
    script.write_text(TELL)
    odd = ["a b", "--", "--workers", "9", "it's", '"q"', "", "é", "--config=x", "-h"]
    counts = ("--workers", "3", "--servers=2", "--dispatchers", "2", "--racks", "2")
    code, out, err = job.run(*counts, script.name, *odd)
    assert code == 0, err
    argv, cwd, env = json.loads(out)
    assert argv == [script.name, *odd]
    assert cwd == str(job.directory)
    assert env["RANK"] == env["LOCAL_RANK"] == "0"
    assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "3"
    assert int(env["OMP_NUM_THREADS"]) >= 1
    assert env["MASTER_ADDR"] == "127.0.0.1" and int(env["MASTER_PORT"]) > 0
    (run,) = job.runs
    assert f"run directory: {shlex.quote(str(run))}" in err
    assert f"paradis: hello agent-{socket.gethostname()}" in err
    logs = {path.name for path in run.glob("*.log")}
    assert len(logs) == 7
    racks = [json.loads((run / f"worker-{i}.log").read_text())[2] for i in range(3)]
    assert len({each["MASTER_PORT"] for each in racks}) == 1
    assert [env["PARADIS_RACK"] for env in racks] == ["rack-0", "rack-0", "rack-1"]
    assert not (run / "token").exists()
    assert not (run / "leader.address").exists()


def test_a_traceback_is_shown_once_with_its_rank(job: Job) -> None:
    job.env["CHECKPOINT"] = "/some where/step-7"
    job.script.write_text(
        "import os, signal\n"
        "if os.environ['RANK'] == '1':\n"
        "    try:\n        1 / 0\n"
        "    except ZeroDivisionError as error:\n"
        "        raise ValueError('bad é') from error\n"
        "signal.pause()\n"
    )
    code, out, err = job.run("--workers", "2", "--resume", ".", "train.py", "a b")
    assert code == 1
    assert out == ""
    assert err.count("[worker 1] ValueError: bad é") == 1
    assert err.count("[worker 1] ZeroDivisionError: division by zero") == 1
    assert err.count("Traceback") == 2  # the error and its cause
    assert f"worker 1 exited with code 1; its log: {job.runs[0]}/worker-1.log" in err
    (line,) = [line for line in err.splitlines() if "to resume: " in line]
    command = shlex.split(line.partition("to resume: ")[2])
    at = command.index("run")
    expected = ["run", "--workers", "2", "--resume", "/some where/step-7", "train.py", "a b"]
    assert command[at:] == expected
    assert "worker-1 1\n" in (job.runs[0] / "exits").read_text()


def test_exit_codes_and_last_lines_are_passed_on(job: Job) -> None:
    job.script.write_text("import sys\nprint('the last words', file=sys.stderr)\nsys.exit(7)\n")
    code, _, err = job.run("train.py")
    assert code == 7
    assert "worker 0 exited with code 7" in err
    assert err.count("the last words") == 1


def test_the_cause_is_shown_and_not_its_consequence(job: Job) -> None:
    job.script.write_text(
        "import os, select, signal\n"
        "from paradis.errors import JobFailed\n"
        "if os.environ['RANK'] == '1':\n"
        "    with open('first', 'w') as file: file.write(str(os.getpid()))\n"
        "    open(os.environ['READY'], 'w').write(f'{os.getpid()}\\n')\n"
        "    raise JobFailed('worker 0 is gone')\n"
        "with open(os.environ['READY']) as ready: pid = int(ready.readline())\n"
        "try:\n"
        "    handle = os.pidfd_open(pid)\n"
        "    select.select([handle], [], [], 20)\n"
        "except ProcessLookupError:\n    pass\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, _, err = job.run("--workers", "2", "train.py")
    assert code == 128 + 9, err
    assert "worker 0 was killed by signal 9 (SIGKILL); its log: " in err
    assert "JobFailed" not in err


def test_a_server_that_ends_early_fails_the_job(job: Job) -> None:
    job.env["SERVER_FAILS"] = "5"
    job.script.write_text("import signal\nsignal.pause()\n")
    code, _, err = job.run("train.py")
    assert code == 5
    assert "server 0 exited with code 5" in err


def test_a_leader_that_cannot_start_is_reported_at_once(job: Job) -> None:
    job.env["LEADER_FAILS"] = "1"
    job.script.write_text("")
    code, _, err = job.run("train.py")
    assert code == 1
    assert "error: dispatcher 0: no leader today; its log: " in err


GRACE = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, signal
signal.signal(signal.SIGTERM, lambda *_: open("child-signalled", "w").close())
open(os.environ["READY"], "w").write(f"{os.getpid()}\\\\n")
while True: signal.pause()
'''])
def save(*_):
    run = os.environ["PARADIS_RUN_DIR"]
    for name in os.listdir(run):
        if name.endswith(".pid"):
            os.kill(int(open(os.path.join(run, name)).read()), 0)
    open("saved-" + os.environ["RANK"], "w").close()
    child.kill()
    child.wait()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(os.environ["READY"], "w").write(f"{os.getpid()}\\n")
while True: signal.pause()
"""


def test_sigterm_lets_every_worker_save_while_servers_stay(job: Job) -> None:
    job.script.write_text(GRACE)
    process = job.start("--workers", "2", "train.py")
    handles = job.ready(4) + job.services()
    process.send_signal(signal.SIGTERM)
    code, _, err = job.end(process)
    assert code == 128 + signal.SIGTERM
    assert "SIGTERM: workers have 30 s to end" in err
    for rank in range(2):
        assert (job.directory / f"saved-{rank}").exists(), err
    assert not (job.directory / "child-signalled").exists()
    assert_ended(handles)
    exits = (job.runs[0] / "exits").read_text().split("\n")
    assert {"worker-0 0", "worker-1 0"} <= set(exits)


STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import os, signal; signal.signal(15, signal.SIG_IGN);"
code += "open(os.environ['READY'], 'w').write(f'{os.getpid()}\\\\n');"
code += "[signal.pause() for _ in range(9)]"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open(os.environ["READY"], "w").write(f"{os.getpid()}\\n")
while True: signal.pause()
"""


def test_after_the_grace_period_workers_are_killed(job: Job) -> None:
    job.script.write_text(STUBBORN)
    limits = ("--set", "launch.grace_period=200ms", "--set", "launch.drain_timeout=200ms")
    process = job.start(*limits, "train.py")
    handles = job.ready(2) + job.services()
    process.send_signal(signal.SIGTERM)
    code, _, err = job.end(process)
    assert code == 128 + signal.SIGTERM
    assert "worker-0 did not end in time" in err
    assert_ended(handles)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_leaves_nothing_behind(job: Job, interrupts: int) -> None:
    job.script.write_text(STUBBORN)
    drain = "300ms" if interrupts == 1 else "1h"
    process = job.start("--workers", "2", "--set", f"launch.drain_timeout={drain}", "train.py")
    handles = job.ready(4) + job.services()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    if interrupts == 2:
        assert process.stderr is not None
        while "interrupted" not in process.stderr.readline():
            pass
        os.killpg(process.pid, signal.SIGINT)
    code, _, err = job.end(process)
    assert code == 130, err
    assert "Traceback" not in err
    assert_ended(handles)
    left = {path.name for path in job.runs[0].iterdir() if path.suffix not in (".log", ".pid")}
    assert left <= {"exits", "nodes.json"}


def test_a_killed_launcher_takes_its_nodes_with_it(job: Job) -> None:
    job.script.write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(os.environ['READY'], 'w').write(f'{os.getpid()}\\n')\n"
        "while True: signal.pause()\n"
    )
    process = job.start("--workers", "2", "train.py")
    handles = job.ready(2) + job.services()
    process.kill()
    job.end(process)
    assert_ended(handles, WAIT_S)


def test_output_without_a_reader_does_no_harm(job: Job) -> None:
    job.script.write_text("for i in range(20000): print('x' * 50)\n")
    process = job.start("train.py")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, _, err = job.end(process)
    assert code == 0, err
    assert (job.runs[0] / "worker-0.log").stat().st_size == 20000 * 51


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("missing.py",), "missing.py"),
        ((), "no script given"),
        (("--worker", "2", "train.py"), "--worker"),
        (("--workers", "0", "train.py"), "topology.workers"),
        (("--set", "nonsense", "train.py"), "SECTION.KEY=VALUE"),
        (("--resume", "nowhere", "train.py"), "nowhere"),
        (("--config", "nowhere.yaml", "train.py"), "nowhere.yaml"),
    ],
)
def test_bad_arguments_are_one_line(job: Job, arguments: tuple[str, ...], expected: str) -> None:
    job.script.write_text("")
    code, out, err = job.run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("paradis: error: ")
    assert expected in err
    assert "Traceback" not in err


def test_too_few_descriptors_are_one_error_with_the_numbers(job: Job) -> None:
    job.script.write_text("import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n")
    hard = ("bash", "-c", 'ulimit -n 105; exec "$@"', "bash")
    code, _, err = job.run("train.py", prefix=hard)
    assert code == 2
    assert "needs 109, 105 are allowed" in err
    assert "ulimit -n 109" in err
    soft = ("bash", "-c", 'ulimit -Sn 60; exec "$@"', "bash")
    code, out, err = job.run("train.py", prefix=soft)
    assert code == 0, err
    assert out == "109\n"


def test_the_version_and_the_node_commands_are_there() -> None:
    env = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, "-m", "paradis.cli.main"]
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                subprocess.Popen([*command, *words], env=env, text=True, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE)
            )
            for words in (["--version"], ["server", "--token-file", "x"], ["checkpoint", "--help"])
        ]  # fmt: skip
        results = [(run.communicate(timeout=WAIT_S), run.returncode) for run in runs]
    assert results[0][0][0].startswith("paradis ") and results[0][1] == 0
    assert "needs --dispatchers" in results[1][0][1] and results[1][1] == 2
    assert results[2][1] == 0
