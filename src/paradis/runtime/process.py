"""Builds one process of a role from its arguments, runs it, drains it."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import FrameType

import torch

from paradis.core.tree import validate_tree
from paradis.errors import InternalError, ParadisError
from paradis.ids import NodeId, dispatcher_id
from paradis.roles.leader import LeaderConfig
from paradis.roles.rack_agent import RackAgentRole
from paradis.roles.server import ServerRole
from paradis.runtime.agent_node import AgentNode
from paradis.runtime.arguments import DispatcherArguments, ServerArguments
from paradis.runtime.interpreter import settle_process
from paradis.runtime.joining import (
    LeaderStream,
    Pulse,
    is_remote,
    make_join,
    make_transports,
    shared_settings,
)
from paradis.runtime.leader_control import LeaderControl
from paradis.runtime.leader_node import LeaderNode, LocalChannel
from paradis.runtime.node import ControlChannel, Node
from paradis.runtime.rundir import read_token
from paradis.runtime.server_node import ServerNode
from paradis.settings import SharedSettings
from paradis.storage.metastore import SqliteStore
from paradis.transport.base import Identity
from paradis.wire.messages import Failed, Listening, Scalar

_CONNECT_TIMEOUT_S = 30.0
_LOOK_S = 0.2
"""How often a serving process looks for a signal."""


def require_assertions() -> None:
    """Refuse ``python -O``: invariants are assertions.

    Raises:
        InternalError: assertions are off.
    """
    if not __debug__:
        raise InternalError(
            "Paradis does not run under python -O: its invariants are assertions; start Python "
            "without -O and without PYTHONOPTIMIZE"
        )


def start_logging(node: str) -> None:
    """Log to stderr, which the host agent keeps per node."""
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("PARADIS_LOG", "INFO").upper(),
        format=f"%(asctime)s {node} %(levelname)s %(message)s",
    )


class _Signals:
    """SIGTERM and SIGINT ask for a drain. The handler only sets an event."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked.set()


def quota_bytes(settings: SharedSettings, contributors: int) -> int:
    """Return what one pusher may have unreturned at one receiver: its share of the store.

    Withheld and early returned credit together hold 1.5 quotas, the lane two largest shards.
    """
    share = settings.contribution_store_bytes // max(contributors, 1) - 2 * settings.shard_bytes
    return max(2 * settings.shard_bytes, share * 2 // 3)


def store_bytes(settings: SharedSettings, contributors: int) -> int:
    """Return the bound of a store: as configured, or what the smallest quotas need."""
    quota = quota_bytes(settings, contributors)
    needed = contributors * (quota * 3 // 2 + 2 * settings.shard_bytes)
    return max(settings.contribution_store_bytes, needed)


def numeric_threads() -> int:
    """Return the number of numeric threads: shards are many, cores few."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def make_server(
    identity: Identity,
    control: ControlChannel,
    settings: SharedSettings,
    *,
    world_size: int,
    transports: Mapping[str, object] | None = None,
    remote: bool = False,
) -> ServerNode:
    """Return a server node, not yet bound to its control channel."""
    role = ServerRole(
        identity.node,
        quota_bytes=quota_bytes(settings, world_size),
        warning_ns=int(settings.straggler_warning_s * 1e9),
        timeout_ns=int(settings.sync_timeout_s * 1e9),
        check_finite=settings.check_finite,
        early_finish_fails=settings.on_early_finish == "fail",
        early_update=settings.early_update,
    )
    return ServerNode(
        role,
        identity,
        control,
        transports or make_transports(settings, remote=remote),
        store_bytes_max=store_bytes(settings, world_size),
        threads=numeric_threads(),
    )


def _server_name(arguments: ServerArguments) -> str:
    """Return what a server is called until the leader has named it."""
    if arguments.beside >= 0:
        return f"server-beside-worker-{arguments.beside}"
    return f"server-{'?' if arguments.index is None else arguments.index}"


def run_server(arguments: ServerArguments) -> int:
    """Run one server until the job ends; return the exit status.

    Raises:
        ParadisError: the server cannot join.
    """
    require_assertions()
    signals = _Signals()
    start_logging(_server_name(arguments))
    token = read_token(arguments.token_file)
    stream = LeaderStream(arguments.dispatchers, token, watched="PARADIS_AGENT" in os.environ)
    welcome = stream.join(
        make_join("server", arguments.index, rack=arguments.rack, beside=arguments.beside),
        connect_timeout_s=_CONNECT_TIMEOUT_S,
        welcome_timeout_s=_CONNECT_TIMEOUT_S,
    )
    settings = shared_settings(welcome)
    identity = Identity(node=NodeId(welcome.node), incarnation=welcome.incarnation, token=token)
    node = make_server(
        identity,
        stream,
        settings,
        world_size=welcome.world_size,
        remote=is_remote(arguments.listen),
    )
    if settings.trace:
        node.trace_into(arguments.run_directory.absolute())
    _warm_up()
    return _serve(node, stream, settings, arguments.listen, signals)


def _serve(
    node: Node, stream: LeaderStream, settings: SharedSettings, listen: str, signals: _Signals
) -> int:
    """Listen, follow the leader, drain when told to."""
    pulse: Pulse | None = None
    try:
        addresses = node.links.listen(data_addresses(settings, listen))
        stream.bind(node.post)
        node.tell_leader(Listening(node=node.identity.node, addresses=addresses))
        pulse = _pulse(node, settings, beat="PARADIS_AGENT" not in os.environ)
        while not node.ended.wait(_LOOK_S):
            if signals.asked.is_set():
                node.end("asked to stop by a signal")
    finally:
        if pulse is not None:
            pulse.stop()
        node.close()
    return _status(node.identity.node, node.error, node.reason)


def _pulse(node: Node, settings: SharedSettings, *, beat: bool) -> Pulse:
    return Pulse(
        node.identity.node,
        node.counters,
        node.control.send,
        interval_s=settings.heartbeat_interval_s,
        beat=beat,
    )


def _status(name: str, error: ParadisError | None, reason: str) -> int:
    """Say how a node ended; return its exit status."""
    if error is None:
        logging.getLogger("paradis").info("%s: done: %s", name, reason)
        return 0
    # A host agent reads the class; a person who started the node by hand has no use for it.
    agent = "PARADIS_AGENT" in os.environ
    lead = f"paradis.errors.{type(error).__name__}" if agent else f"paradis: error: {name}"
    sys.stderr.write(f"{lead}: {error.message}\n")
    sys.stderr.flush()
    return 1


def data_addresses(settings: SharedSettings, listen: str) -> list[str]:
    """Return what a data plane listens on: TCP, and an unnamed Unix socket for its own host."""
    host, _, port = listen.rpartition(":") if _has_port(listen) else (listen, ":", "0")
    addresses = [f"tcp://{host}:{port or 0}"]
    if settings.same_host == "unix":
        addresses.insert(0, "unix://")
    return addresses


def _has_port(listen: str) -> bool:
    return listen.rpartition(":")[2].isdecimal() and listen.count(":") in (1,)


def _warm_up() -> None:
    """Pay once, before the first step, what torch and the allocator charge for first use."""
    torch.set_num_threads(1)
    _without_compiler()
    parameter = torch.nn.Parameter(torch.zeros(64))
    torch.optim.SGD([parameter], lr=0.0)  # imports what optimizers need
    # After one large block was freed, glibc keeps memory of updates instead of trimming it.
    del parameter
    _ = torch.empty(31 << 20, dtype=torch.uint8)
    settle_process()


def _without_compiler() -> None:
    """Keep optimizers in this process from importing torch's compiler: 2 s and 100 MB.

    torch wraps these methods to hide them from its compiler, which it imports for that on the
    first call unless the method carries its uncompiled form already. No server compiles anything.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        method.__dict__.setdefault("__dynamo_disable", method)


def run_dispatcher(arguments: DispatcherArguments, control: LeaderControl | None = None) -> int:
    """Run one dispatcher until the job ends. Return the exit status.

    Args:
        arguments: what it is to do.
        control: the open control plane, for the dispatcher that leads only.

    Raises:
        ParadisError: it cannot listen or join.
    """
    require_assertions()
    signals = _Signals()
    start_logging(dispatcher_id(arguments.index))
    torch.set_num_threads(1)
    settle_process()
    token = read_token(arguments.token_file)
    if control is not None:
        return _lead(arguments, control, token, signals)
    stream = LeaderStream(arguments.dispatchers, token, watched="PARADIS_AGENT" in os.environ)
    welcome = stream.join(
        make_join("dispatcher", arguments.index, rack=arguments.rack),
        connect_timeout_s=_CONNECT_TIMEOUT_S,
        welcome_timeout_s=_CONNECT_TIMEOUT_S,
    )
    settings = shared_settings(welcome)
    identity = Identity(node=NodeId(welcome.node), incarnation=welcome.incarnation, token=token)
    node = make_agent(identity, stream, settings, welcome.world_size, arguments.listen)
    if settings.trace:
        node.trace_into(arguments.run_directory.absolute())
    return _serve(node, stream, settings, arguments.listen, signals)


def make_agent(
    identity: Identity, control: ControlChannel, settings: SharedSettings, workers: int, listen: str
) -> AgentNode:
    """Return a rack agent's node."""
    role = RackAgentRole(
        identity.node,
        quota_bytes=quota_bytes(settings, workers),
        retry_ns=int(settings.retry_interval_s * 1e9),
    )
    return AgentNode(
        role,
        identity,
        control,
        make_transports(settings, remote=is_remote(listen)),
        store_bytes_max=store_bytes(settings, workers + 4),
        threads=numeric_threads(),
    )


def leader_config(
    settings: SharedSettings,
    shared: dict[str, Scalar],
    *,
    counts: tuple[int, int, int],
    colocated: bool = False,
    tree: tuple[tuple[int, ...], ...] = (),
    job: str = "",
    earlier: tuple[int, int] = (0, 0),
) -> LeaderConfig:
    """Return the leader's configuration.

    Args:
        counts: workers, servers, dispatchers.
        colocated: the last of the servers stand beside the workers.
        earlier: last generation and incarnation of an earlier life.
    """
    if tree:
        validate_tree(tree, counts[0])
    return LeaderConfig(
        job=job,
        workers=counts[0],
        servers=counts[1],
        dispatchers=counts[2],
        settings=settings,
        shared=shared,
        colocated=colocated,
        tree=tree,
        first_generation=earlier[0],
        first_incarnation=earlier[1],
    )


def _lead(
    arguments: DispatcherArguments, control: LeaderControl, token: bytes, signals: _Signals
) -> int:
    run_directory = arguments.run_directory.absolute()
    settings = arguments.settings
    if not settings.checkpoint_directory:
        settings = replace(settings, checkpoint_directory=str(run_directory / "checkpoints"))
    store = SqliteStore(run_directory / "metadata.sqlite")
    earlier = tuple(
        int(held.value) if (held := store.get(key)) is not None else 0
        for key in ("generation", "incarnation")
    )
    shared: dict[str, Scalar] = asdict(settings)
    leader = LeaderNode(
        leader_config(
            settings, shared,
            counts=(arguments.workers, arguments.servers, arguments.dispatchers_count),
            colocated=arguments.colocated, tree=arguments.tree, job=arguments.job,
            earlier=(earlier[0], earlier[1]),
        ),
        store,
    )  # fmt: skip
    agent: AgentNode | None = None
    pulse: Pulse | None = None
    try:
        channel = LocalChannel(leader, dispatcher_id(0))
        identity = Identity(node=dispatcher_id(0), incarnation=0, token=token)
        agent = make_agent(identity, channel, settings, arguments.workers, arguments.listen)
        if settings.trace:
            agent.trace_into(run_directory)
        addresses = agent.links.listen(data_addresses(settings, arguments.listen))
        channel.bind(agent.post)
        join = make_join("dispatcher", 0, rack=arguments.rack)
        channel.send(join)
        agent.tell_leader(Listening(node=dispatcher_id(0), addresses=addresses))
        leader.serve(control)
        pulse = _pulse(agent, settings, beat=False)
        reported = False
        while not leader.ended.wait(_LOOK_S):
            if agent.ended.is_set() and not reported:
                if agent.error is not None:
                    text = agent.error.message
                    agent.tell_leader(Failed(error=type(agent.error).__name__, text=text))
                # Told to shut down: the last counters must be there before the summary is made.
                reported = True
                agent.report()
            if signals.asked.is_set():
                leader.ended.set()
    finally:
        if pulse is not None:
            pulse.stop()
        if agent is not None:
            agent.close()
        leader.close()
    return _status(dispatcher_id(0), leader.error, leader.reason)
