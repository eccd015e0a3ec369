"""Wrong input of every kind: one clear message, a non-zero exit, and nothing left behind."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("communication.failure_timeot=5s", "failure_timeout"),
        ("communication.failure_timeout=5parsecs", "5parsecs"),
        ("training.mode=bsp", "sync or ssp or async"),
        ("communication.heartbeat_interval=9s", "failure_timeout"),
    ],
)
def test_a_wrong_setting_is_one_line_before_anything_starts(
    cluster: Any, setting: str, expected: str
) -> None:
    cluster.write()
    code, err = cluster.run("--set", setting, "train.py")
    assert code == 2
    assert err.startswith("paradis: error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert not (cluster.directory / "paradis-runs").exists()


def test_an_unknown_key_in_the_file_names_file_and_nearest_key(cluster: Any) -> None:
    cluster.write()
    (cluster.directory / "job.yaml").write_text("topology:\n  serves: 2\n")
    code, err = cluster.run("--config", "job.yaml", "train.py")
    assert code == 2
    assert "job.yaml" in err and "serves" in err and "servers" in err
    assert err.count("\n") == 1


def test_a_busy_control_port_is_named(cluster: Any) -> None:
    cluster.write()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        setting = f"communication.control_address={address}"
        code, err = cluster.run("--set", setting, "train.py")
    assert code == 2, err
    assert err.count("error:") == 1, err
    assert f"cannot listen on {address}" in err
    assert "Traceback" not in err


def test_an_address_that_nobody_answers_and_a_wrong_token(cluster: Any) -> None:
    """One leader by hand, and nodes that cannot join it; then its own deadline ends it."""
    cluster.write()
    for name, text in (("token", "a" * 64), ("wrong", "b" * 64)):
        (cluster.directory / name).write_text(text)
    address_file = cluster.directory / "address"
    leader = cluster.start(
        *("dispatcher", "--token-file", "token", "--workers", "1", "--servers", "1"),
        *("--address-file", str(address_file), "--set", "communication.join_timeout=20s"),
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        limit = {"PARADIS_COMMUNICATION_JOIN_TIMEOUT": "1s"}
        worker = {**limit, "PARADIS_DISPATCHERS": nobody, "PARADIS_TOKEN_FILE": "token"}
        lost = [cluster.spawn([sys.executable, "train.py"], worker)]
        ends = [running.end() for running in lost]
    for code, err in ends:
        assert code != 0
        assert err.count("error:") == 1, err
        assert nobody in err and "Traceback" not in err
    address = cluster.content(address_file).strip()
    worker = {"PARADIS_DISPATCHERS": address, "PARADIS_TOKEN_FILE": "wrong"}
    refused = [
        cluster.start("server", "--dispatchers", address, "--token-file", "wrong"),
        cluster.spawn([sys.executable, "train.py"], worker),
    ]
    for running in refused:
        code, err = running.end()
        assert code == 1, err
        assert err.count("error:") == 1 and "wrong job token" in err, err
        assert "Traceback" not in err
    code, err = leader.end()
    assert code == 1
    assert "the job did not start" in err and "worker-0" in err and "server-0" in err, err
    assert "Traceback" not in err


def test_an_optimizer_that_is_not_elementwise_is_refused_by_name(cluster: Any) -> None:
    cluster.write(
        "def build():\n"
        "    model = torch.nn.Linear(8, 4)\n"
        "    return model, torch.optim.LBFGS(model.parameters())\n"
    )
    code, err = cluster.run("--workers", "2", "train.py")
    assert code == 1
    assert err.count("error:") <= 2 and "LBFGS" in err, err
    assert "Traceback" not in err


def test_a_worker_that_ends_without_wrap_is_named(cluster: Any) -> None:
    cluster.write("if rank == 1: sys.exit(0)\n")
    code, err = cluster.run("--workers", "2", "train.py")
    assert code == 1
    assert "worker 1 ended before it called paradis.wrap" in err, err
    assert "Traceback" not in err


SAVING = """
def build():
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 3000), torch.nn.Linear(3000, 4))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

def before_step(step, model, optimizer):
    if step == 1:
        optimizer.save_checkpoint({"note": "é"}, wait=True)
        if rank == 0: spoil()
    if step == 2:
        optimizer.save_checkpoint()
    if step == 4 and rank == 0:
        try:
            optimizer.save_checkpoint(wait=True)
        except paradis.errors.StateError as error:
            tell("refused", error)
"""
FULL = """
def spoil():
    filler = open(os.path.join(os.environ["DISK"], "filler"), "wb")
    try:
        while True:
            filler.write(bytes(4096))
            filler.flush()
    except OSError as error:
        tell("full", error.errno)
"""
RESUMES = """
def before_step(step, model, optimizer):
    if step == 0: tell("restored", rank, optimizer.steps_done, optimizer.restored["note"])
"""
OTHER = (
    "def build():\n    m = torch.nn.Linear(8, 5)\n    return m, torch.optim.SGD(m.parameters())\n"
)


def test_a_full_disk_costs_the_new_checkpoint_only(cluster: Any) -> None:
    """Training goes on, the old checkpoint stays whole, and it resumes by the printed command."""
    disk = cluster.small_disk()
    directory = cluster.directory / "my dir" / "zug é"
    directory.mkdir(parents=True)
    script = "my dir/zug é/train me.py"
    cluster.write(SAVING + FULL, name=script)
    words = ["a b", "--", "it's", '"q"', "--workers", "9"]
    options = ("--workers", "2", "--set", f"checkpoint.directory={disk / 'check points'}")
    code, err = cluster.run(*options, script, *words, env={"DISK": str(disk)})
    assert code == 0, err
    assert err.count("warning: checkpoint") >= 2, err
    assert "no space left" in err, err
    digests = cluster.digests(2)
    assert digests[0] == digests[1]
    refused = " ".join(cluster.told("refused")[0])
    assert "no space left" in refused
    (disk / "filler").unlink()

    cluster.forget()
    cluster.write(SAVING.partition("def before")[0] + RESUMES, name=script)
    command = next(line for line in err.splitlines() if "to resume: " in line).partition(": ")[2]
    command = command.partition("to resume: ")[2] or command
    resumed = cluster.spawn(["bash", "-c", command])
    code, err = resumed.end()
    assert code == 0, err
    assert cluster.told("restored", 2)[0][2:] == ["1", "é"]

    cluster.write(OTHER)
    checkpoint = shlex.split(command)[shlex.split(command).index("--resume") + 1]
    code, err = cluster.run("--workers", "1", "--resume", checkpoint, "train.py")
    assert code == 1
    assert err.count("error:") == 1, err
    assert "0.weight" in err and "Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_no_traceback(cluster: Any) -> None:
    cluster.write()
    shell = 'exec "$@" config example > /dev/full'
    running = cluster.spawn(["bash", "-c", shell, "bash", sys.executable, "-m", "paradis.cli.main"])
    code, err = running.end()
    assert code != 0
    assert "Traceback" not in err, err
    assert os.listdir(cluster.temporary) == []
