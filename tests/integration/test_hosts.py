"""Nodes on several hosts, started by hand; each host is a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROLES = ("leader", "server", "worker", "other")


class Hosts:
    """Namespaces on one bridge: 10.77.0.1 is the leader's, then server, worker, other."""

    def __init__(self) -> None:
        self.names = {role: f"pd{os.getpid()}-{role}" for role in ("bridge", *ROLES)}
        self.addresses = {role: f"10.77.0.{i}" for i, role in enumerate(ROLES, 1)}
        bridge = self.names["bridge"]
        for name in self.names.values():
            ip("netns", "add", name)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for role, address in self.addresses.items():
            name = self.names[role]
            peer = ("peer", "name", role, "netns", bridge)
            ip("-n", name, "link", "add", "data", "type", "veth", *peer)
            ip("-n", bridge, "link", "set", role, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "data")
            for link in ("data", "lo"):
                ip("-n", name, "link", "set", link, "up")

    def on(self, role: str) -> list[str]:
        """Return the words before a command that is to run on this host."""
        return ["ip", "netns", "exec", self.names[role]]

    def close(self) -> None:
        """Remove everything."""
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    try:
        made = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are forbidden here: {error.stderr!r}")
    yield made
    made.close()


def start_services(cluster: Any, hosts: Hosts, *colocated: str) -> tuple[list[Any], dict[str, str]]:
    """Start leader and server on their hosts; return them and the environment of workers.

    ``colocated``: hosts of worker 0, 1, ..., where a server is to stand beside each.
    """
    token = cluster.directory / "token"
    token.write_text("c" * 64)
    control = f"{hosts.addresses['leader']}:7100"
    leader = cluster.start(
        *("dispatcher", "--token-file", str(token), "--workers", "2", "--servers", "1"),
        *("--control-address", control, "--listen", hosts.addresses["leader"]),
        *(["--colocated"] if colocated else []),
        prefix=tuple(hosts.on("leader")),
    )
    server = cluster.start(
        *("server", "--dispatchers", control, "--token-file", str(token)),
        *("--listen", hosts.addresses["server"]),
        prefix=tuple(hosts.on("server")),
    )
    beside = [
        cluster.start(
            *("server", "--dispatchers", control, "--token-file", str(token)),
            *("--listen", hosts.addresses[role], "--beside", str(rank)),
            prefix=tuple(hosts.on(role)),
        )
        for rank, role in enumerate(colocated)
    ]
    return [leader, server, *beside], {
        "PARADIS_DISPATCHERS": control,
        "PARADIS_TOKEN_FILE": str(token),
    }


def by_torchrun(cluster: Any, hosts: Hosts, env: dict[str, str]) -> list[Any]:
    torchrun = Path(sys.executable).with_name("torchrun")
    words = [str(torchrun), "--nproc-per-node", "2", "--master-port", "29411", "train.py"]
    return [cluster.spawn([*hosts.on("worker"), *words], env)]


def by_hand(cluster: Any, hosts: Hosts, env: dict[str, str]) -> list[Any]:
    return [
        cluster.spawn(
            [*hosts.on(role), sys.executable, "train.py"],
            {**env, "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank, role in enumerate(("worker", "other"))
    ]


def test_nodes_on_their_own_hosts_train_and_end_by_themselves(cluster: Any, hosts: Hosts) -> None:
    cluster.write()
    results = []
    for start in (by_torchrun, by_hand):
        services, env = start_services(cluster, hosts)
        for running in [*start(cluster, hosts, env), *services]:
            code, err = running.end()
            assert code == 0, err
            assert "Traceback" not in err
        results.append(cluster.digests(2))
        cluster.forget()
        cluster.assert_clean()
    assert len({*results[0], *results[1]}) == 1


LINKS = """
def before_step(step, *_):
    if step == 2:
        from paradis.frontend.session import current
        links = current().node.links._links.items()
        tell("links", rank, *sorted(f"{n}={l.connection._address[:4]}" for n, l in links))
"""


def test_a_colocated_server_is_reached_without_the_network(cluster: Any, hosts: Hosts) -> None:
    cluster.write()
    services, env = start_services(cluster, hosts)
    for running in [*by_hand(cluster, hosts, env), *services]:
        assert running.end()[0] == 0, running.err
    expected = cluster.digests(2)
    cluster.forget()
    cluster.write(LINKS)
    services, env = start_services(cluster, hosts, "worker", "other")
    for running in [*by_hand(cluster, hosts, env), *services]:
        assert running.end()[0] == 0, running.err
    assert cluster.digests(2) == expected
    links = {words[1]: [w for w in words[2:] if w.startswith("server")]
             for words in cluster.told("links", 2)}  # fmt: skip
    assert links == {
        "0": ["server-0=tcp:", "server-1=unix", "server-2=tcp:"],
        "1": ["server-0=tcp:", "server-1=tcp:", "server-2=unix"],
    }
    cluster.assert_clean()


def test_a_host_that_vanishes_is_named(cluster: Any, hosts: Hosts) -> None:
    cluster.write(
        "def before_step(step, *_):\n"
        "    if step == 2:\n        tell('at', rank)\n        pass_gate()\n"
    )
    with cluster.gate() as gate:
        services, env = start_services(cluster, hosts)
        workers = by_hand(cluster, hosts, {**env, "GATE": gate.path})
        cluster.told("at", 2)
        ip("-n", hosts.names["bridge"], "link", "set", "server", "down")
        gate.open()
        for running in [*workers, services[0]]:
            code, err = running.end()
            assert code == 1, err
            assert "server-0" in err and "Traceback" not in err, err
        code, err = services[1].end()
        assert code == 1, err
        assert "Traceback" not in err
    ip("-n", hosts.names["bridge"], "link", "set", "server", "up")
    cluster.assert_clean()
