"""How ``paradis run`` reads its arguments and lays out nodes; no process is started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from paradis.cli.main import main
from paradis.cli.nodes import JobPlan, dispatcher_command, server_command, worker_command
from paradis.cli.run import parse, resume_command
from paradis.config import load_config
from paradis.errors import ConfigError
from paradis.runtime.rundir import RunDirectory


def plan(overrides: dict[str, str], environ: dict[str, str] | None = None) -> JobPlan:
    return JobPlan(
        config=load_config(None, {}, overrides).config,
        run=RunDirectory(Path("/runs/one")),
        config_file=None,
        overrides=overrides,
        environ=environ or {"HOME": "/h"},
        terminal=True,
        script=("train.py", "--lr", "1"),
    )


def option(argv: Sequence[str], name: str) -> str:
    return argv[list(argv).index(name) + 1]


def test_what_follows_the_script_is_the_script_s() -> None:
    rest = ["--workers", "4", "--", "--help", "train.py", ""]
    request = parse(["--workers", "2", "--set", "launch.grace_period=1s", "t.py", *rest])
    assert (request.script, list(request.arguments)) == ("t.py", rest)
    expected = {"topology.workers": "2", "launch.grace_period": "1s"}
    assert request.overrides == expected
    assert parse(["--", "-odd.py", "--", "x"]).arguments == ("--", "x")


@pytest.mark.parametrize("words", [["--resume", "."], ["--resume=."]])
def test_the_resume_command_replaces_the_checkpoint(words: list[str]) -> None:
    request = parse([*words, "--workers=2", "my train.py", "--resume", "x"])
    assert request.overrides["checkpoint.restore"] == str(Path.cwd())
    command = resume_command(request, "/c p")
    at = command.index("run")
    pasted = shlex.split(shlex.join(command))[at + 1 :]
    expected = ["--workers=2", "--resume", "/c p", "my train.py", "--resume", "x"]
    assert pasted == expected
    again = parse([word if word != "/c p" else "." for word in pasted])
    assert again.arguments == request.arguments


@pytest.mark.parametrize("words", [[], ["--workers"], ["--nope", "t.py"], ["--workers", "x", "t"]])
def test_bad_options_are_config_errors(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse(words)


def test_workers_stand_in_racks_in_blocks_of_ranks() -> None:
    made = plan({"topology.workers": "5", "topology.racks": "2", "topology.dispatchers": "3"})
    commands = [worker_command(made, rank, "h:1") for rank in range(5)]
    racks = [command.env["PARADIS_RACK"] for command in commands]
    assert racks == ["rack-0"] * 3 + ["rack-1"] * 2
    assert [command.forward for command in commands] == [True, False, False, False, False]
    assert commands[3].argv[1:] == ("train.py", "--lr", "1")
    assert commands[3].env["RANK"] == "3" and commands[3].env["WORLD_SIZE"] == "5"
    assert commands[0].env["PARADIS_TTY"] == "1"
    served = [option(dispatcher_command(made, i, "h:1").argv, "--rack") for i in range(3)]
    assert served == ["rack-0", "rack-1", ""]


def test_threads_are_shared_out_unless_set() -> None:
    assert worker_command(plan({"topology.workers": "64"}), 0, "h:1").env["OMP_NUM_THREADS"] == "1"
    given = {"OMP_NUM_THREADS": "9"}
    assert worker_command(plan({}, given), 0, "h:1").env["OMP_NUM_THREADS"] == "9"
    wanted = {"launch.omp_threads": "5"}
    assert worker_command(plan(wanted, given), 0, "h:1").env["OMP_NUM_THREADS"] == "5"


def test_the_leader_gets_no_leader_and_others_do() -> None:
    made = plan({"topology.dispatchers": "2", "topology.workers": "2", "topology.racks": "2"})
    leader, other = (dispatcher_command(made, i, "h:1").argv for i in range(2))
    assert "--dispatchers" not in leader
    assert option(leader, "--control-address") == "127.0.0.1:0"
    assert option(leader, "--address-file") == "/runs/one/leader.address"
    assert option(leader, "--dispatcher-count") == "2"
    assert option(other, "--dispatchers") == "h:1"
    server = server_command(made, 0, "h:1").argv
    assert option(server, "--dispatchers") == "h:1"
    assert option(leader, "--set") == "topology.dispatchers=2"
    assert "--set" not in server and "--set" not in other


def test_colocated_servers_follow_the_dedicated_ones_in_the_racks_of_their_workers() -> None:
    request = parse(["--servers", "2", "--colocated", "--workers", "4", "t.py"])
    assert request.overrides["topology.colocated"] == "true"
    assert "--colocated" in resume_command(request, "c")
    made = plan(
        {
            **request.overrides,
            "topology.racks": "2",
            "topology.ps_nodes": "[127.0.0.1:1, 127.0.0.1:2]",
        }
    )
    assert made.config.topology.all_servers == 6
    servers = [server_command(made, i, "h:1") for i in range(6)]
    assert [command.name for command in servers] == [f"server-{i}" for i in range(6)]
    racks = [option(command.argv, "--rack") for command in servers]
    assert racks == ["rack-0", "rack-1", "rack-0", "rack-0", "rack-1", "rack-1"]
    listen = [option(command.argv, "--listen") for command in servers]
    assert listen == ["127.0.0.1:1", "127.0.0.1:2", *["127.0.0.1"] * 4]
    leader = dispatcher_command(made, 0, "").argv
    assert "--colocated" in leader and option(leader, "--servers") == "2"
    assert "--colocated" not in dispatcher_command(plan({}), 0, "").argv


@pytest.mark.parametrize(
    ("workers", "servers", "text"), [(2, 2, "alone are already optimal"), (1, 1, "has to travel")]
)
def test_colocated_servers_that_would_own_nothing_are_refused(
    workers: int, servers: int, text: str
) -> None:
    counts = ["--workers", str(workers), "--servers", str(servers)]
    request = parse([*counts, "--colocated", "t.py"])
    with pytest.raises(ConfigError, match=f"topology.servers = {servers}.*{text}"):
        load_config(None, {}, request.overrides)


def test_a_server_is_named_by_index_or_by_its_worker(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["server", "--token-file", "x", "--dispatchers", "h:1", "--index", "1", "--beside", "0"]
    assert main(words) == 2
    assert "--index N or --beside RANK, not both" in capsys.readouterr().err


def test_nodes_of_other_hosts_are_refused_by_address() -> None:
    here = plan({"topology.ps_nodes": "[127.0.0.1:7000]"})
    assert option(server_command(here, 0, "h:1").argv, "--listen") == "127.0.0.1:7000"
    away = plan({"topology.ps_nodes": "[far.example:7000]"})
    with pytest.raises(ConfigError, match="far.example:7000.*server 0"):
        server_command(away, 0, "h:1")
    racks = plan({"topology.disp_nodes": "[{address: localhost:7100, rack: r7}]"})
    assert option(dispatcher_command(racks, 0, "").argv, "--rack") == "r7"
    assert worker_command(racks, 0, "h:1").env["PARADIS_RACK"] == "r7"
