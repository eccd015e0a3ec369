"""Nodes that die, stall or are stopped in the middle of training: one clear end, nothing left."""

from __future__ import annotations

import signal
from typing import Any

import pytest

SMALL = ("run", "--workers", "2", "--servers", "1")
WAITS = """
def before_step(step, model, optimizer):
    if step == 2:
        tell("at", rank)
        signal.pause()
"""


@pytest.mark.parametrize("node", ["worker-1", "server-0", "dispatcher-0"])
def test_a_killed_node_is_named_and_the_others_end(cluster: Any, node: str) -> None:
    cluster.write(WAITS)
    job = cluster.start(*SMALL, "train.py")
    cluster.told("at", 2)
    cluster.node(node).kill()
    code, err = job.end()
    assert code == 128 + signal.SIGKILL
    assert f"error: {node.replace('-', ' ')} was killed by signal 9 (SIGKILL); its log:" in err
    assert err.count("error:") == 1, err
    assert "Traceback" not in err
    cluster.assert_clean()


RACKS = ("--dispatchers", "2", "--racks", "2", "--set", "communication.rack_aggregation=on")
ASKS = """
def before_step(step, model, optimizer):
    if step == 2 and "GATE" in os.environ:
        tell("at", rank)
        pass_gate()
"""


def test_losing_a_rack_agent_changes_nothing_but_a_warning(cluster: Any) -> None:
    cluster.write(ASKS)
    code, err = cluster.run(*SMALL[1:], *RACKS, "train.py")
    assert code == 0, err
    digests = cluster.digests(2)
    assert digests[0] == digests[1]
    for node in ("dispatcher-0", "dispatcher-1", "server-0", "worker-0", "worker-1"):
        assert f"\n{node} " in err  # in the table
    cluster.forget()
    with cluster.gate() as gate:
        job = cluster.start(*SMALL, *RACKS, "train.py", env={"GATE": gate.path})
        cluster.told("at", 2)
        cluster.node("dispatcher-1").kill()
        job.until("warning: dispatcher 1 was killed by signal 9 (SIGKILL)")
        gate.open()
        code, err = job.end()
    assert code == 0, err
    assert "push directly to the servers" in err
    assert cluster.digests(2) == digests
    cluster.assert_clean()


def test_a_gradient_that_is_not_finite_names_worker_parameter_and_step(cluster: Any) -> None:
    cluster.write(
        "def before_step(step, model, optimizer):\n"
        "    if step == 2 and rank == 1: model[2].weight.grad[1, 2] = float('nan')\n"
    )
    code, err = cluster.run(*SMALL[1:], "train.py")
    assert code == 1
    assert err.count("error:") == 1, err
    for part in ("2.weight", "worker 1", "step 2"):
        assert part in err
    assert "Traceback" not in err


STALLS = ("--set", "communication.straggler_warning=500ms")


def test_a_worker_that_never_steps_is_warned_about_then_fails_the_job(cluster: Any) -> None:
    cluster.write("def before_step(step, *_):\n    if step == 2 and rank == 1: signal.pause()\n")
    limits = ("--set", "communication.sync_timeout=3s", "--set", "communication.retry_interval=1s")
    code, err = cluster.run(*SMALL[1:], *STALLS, *limits, "train.py")
    assert code == 1
    warning = next(line for line in err.splitlines() if "warning:" in line)
    error = next(line for line in err.splitlines() if "error:" in line)
    for line in (warning, error):
        assert "Gradient sync timeout" in line
        assert "step 2" in line and "worker 1" in line and "shard" in line
    assert "Traceback" not in err


def test_a_slow_rank_is_warned_about_and_never_failed(cluster: Any) -> None:
    cluster.write(WAITS.replace("signal.pause()", "os.kill(os.getpid(), signal.SIGSTOP)"))
    beats = ("--set", "communication.heartbeat_interval=100ms")
    limit = ("--set", "communication.failure_timeout=400ms")
    job = cluster.start(*SMALL, *STALLS, *beats, *limit, "train.py")
    cluster.told("at", 2)
    for node in ("worker-0", "worker-1"):
        cluster.wait_stopped(cluster.node(node))  # a signal before that would be lost
    cluster.node("worker-1").send_signal(signal.SIGCONT)
    job.until("Gradient sync timeout")
    cluster.node("worker-0").send_signal(signal.SIGCONT)
    code, err = job.end()
    assert code == 0, err
    assert "worker 0" in err
    digests = cluster.digests(2)
    assert digests[0] == digests[1]


def test_ctrl_c_ends_training(cluster: Any) -> None:
    cluster.write("def before_step(step, *_):\n    if step == 3: tell('at', rank)\n")
    job = cluster.start(*SMALL, "train.py", env={"STEPS": "1000000"})
    cluster.told("at", 2)
    job.signal(signal.SIGINT, group=True)
    code, err = job.end(20.0)
    assert code == 128 + signal.SIGINT
    assert "interrupted: stopping within 5 s" in err
    assert "Traceback" not in err and "error:" not in err, err
    cluster.assert_clean()


SAVES = """
import subprocess, threading
child = subprocess.Popen([sys.executable, "-c", '''
import os, signal
signal.signal(signal.SIGTERM, lambda *_: open("child-signalled", "w").close())
print(flush=True)
while True: signal.pause()
'''], stdout=subprocess.PIPE)
child.stdout.readline()

asked = []

def save(*_):
    torch.save(model.state_dict(), f"rank-{rank}.pt")
    threading.Event().wait(1.0)
    tell("saved", rank)
    asked.append(True)

def before_step(step, model, optimizer):
    if step == 3:
        tell("at", rank)
    if asked:
        optimizer.save_checkpoint({"why": "preempted"}, wait=True)
        child.kill()
        child.wait()
        sys.exit(0)

signal.signal(signal.SIGTERM, save)
"""


def test_sigterm_runs_the_handler_of_every_worker(cluster: Any) -> None:
    cluster.write(SAVES)
    job = cluster.start(*SMALL, "train.py", env={"STEPS": "1000000"})
    cluster.told("at", 2)
    job.signal(signal.SIGTERM)
    code, err = job.end()
    assert code == 128 + signal.SIGTERM, err
    assert "checkpoint of step" in err and "killed" not in err and "error:" not in err, err
    cluster.told("saved", 2)
    assert not (cluster.directory / "child-signalled").exists()
    cluster.assert_clean()
