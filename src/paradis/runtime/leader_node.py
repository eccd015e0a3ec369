"""The leading dispatcher's control duty, for real: streams, metadata store, manifests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from paradis import version
from paradis.control.service import Session
from paradis.errors import (
    JoinRefused,
    ParadisError,
    RemoteProtocolError,
    from_name,
)
from paradis.ids import LEADER, NodeId
from paradis.roles import effects as fx
from paradis.roles.events import Event, ManifestWritten, PeerLost, Received
from paradis.roles.leader import LeaderConfig, LeaderRole
from paradis.runtime.driver import Driver
from paradis.runtime.leader_control import LeaderControl
from paradis.storage.checkpoint import prune, remove_incomplete
from paradis.storage.manifest import Manifest, write_manifest
from paradis.storage.metastore import MetaStore
from paradis.wire.messages import ControlMessage, Failed, Join, Refused

_log = logging.getLogger("paradis.leader")


class Target(Protocol):
    """Where messages for one node go."""

    def send(self, message: ControlMessage) -> None:
        """Queue a message; never blocks."""
        ...


class LocalChannel:
    """The control channel of a node that lives in the leader's own process.

    Args:
        leader: the leader in this process.
        post: takes the node's events; set by `bind`.
    """

    def __init__(self, leader: LeaderNode, node: NodeId) -> None:
        self._leader = leader
        self._node = node
        self._post: Callable[[Event], None] | None = None

    def bind(self, post: Callable[[Event], None]) -> None:
        """Deliver the leader's messages to this node."""
        self._post = post
        self._leader.attach(self._node, _LocalTarget(post))

    def send(self, message: ControlMessage) -> None:
        """Hand a message to the leader."""
        self._leader.driver.post(Received(self._node, message))

    def close(self) -> None:
        """Say nothing: the leader ends with the process."""


class _LocalTarget:
    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post

    def send(self, message: ControlMessage) -> None:
        self._post(Received(LEADER, message))


class LeaderNode:
    """Runs `LeaderRole` over gRPC sessions and local channels.

    Args:
        config: what the job consists of.
        store: where generations and incarnations survive a restart.
    """

    def __init__(self, config: LeaderConfig, store: MetaStore) -> None:
        self.role = LeaderRole(config)
        self._store = store
        self._keep = config.settings.checkpoint_keep
        self.ended = threading.Event()
        self.reason = ""
        self.error: ParadisError | None = None
        self._lock = threading.Lock()
        self._targets: dict[NodeId, Target] = {}
        self._control: LeaderControl | None = None
        self._writers: list[threading.Thread] = []
        self.driver = Driver(LEADER, self.role, self._carry, self._broken)

    def serve(self, control: LeaderControl) -> None:
        """Take the streams of an open control plane, and own it from now on."""
        self._control = control
        control.bind(self)

    # ------------------------------------------------------------- sessions

    def opened(self, session: Session) -> None:
        """A stream whose token was right; it must join next."""

    def received(self, session: Session, message: ControlMessage) -> None:
        """Take a message of a stream; the first one names the node."""
        if not session.name:
            if not isinstance(message, Join):
                raise RemoteProtocolError(
                    f"{session.peer} refused: expected Join first, got {type(message).__name__}"
                )
            node = self.role.name_of(message)
            refusal = self.role.refusal(_named(message, node))
            if refusal:
                session.send(Refused(error=JoinRefused.__name__, text=refusal))
                return
            session.name = node
            self.attach(node, session)
            message = _named(message, node)
        self.driver.post(Received(NodeId(session.name), message))

    def closed(self, session: Session, reason: ParadisError | None) -> None:
        """A stream is over."""
        node = NodeId(session.name)
        with self._lock:
            known = bool(node) and self._targets.get(node) is session
            if known:
                del self._targets[node]
        if known:
            self.driver.post(PeerLost(node, reason.message if reason else "closed"))

    def attach(self, node: NodeId, target: Target) -> None:
        """Messages for this node go there."""
        with self._lock:
            self._targets[node] = target

    # -------------------------------------------------------------- effects

    def _carry(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Send(target=node, message=ControlMessage() as message):
                if isinstance(message, Failed) and self.error is None:
                    self.error = from_name(message.error, message.text)
                target = self._targets.get(node)
                if target is not None:
                    target.send(message)
            case fx.SetTimer():
                self.driver.set_timer(effect.name, effect.at_ns)
            case fx.Persist():
                self._store.txn({}, {k: v.encode() for k, v in effect.puts.items()})
            case fx.WriteManifest():
                writer = threading.Thread(target=self._write, args=(effect,), daemon=True)
                self._writers.append(writer)
                writer.start()
            case fx.Announce():
                _log.warning("%s", effect.text)
            case fx.End():
                self.reason = effect.reason
                self.ended.set()
            case _:
                raise AssertionError(f"the leader cannot carry out {effect!r}")

    def _write(self, effect: fx.WriteManifest) -> None:
        checkpoint = effect.info.checkpoint
        try:
            # A job resumes with all its groups or not at all.
            groups = tuple(sorted({group for group, _ in list(self.role.plans)}))
            path = write_manifest(Path(checkpoint), _manifest(effect, groups))
            root = path.parent.parent.parent
            remove_incomplete(root)
            if self._keep > 0:
                prune(root, self._keep)
        except ParadisError as error:
            self.driver.post(ManifestWritten(checkpoint, "", error.message))
            return
        self.driver.post(ManifestWritten(checkpoint, str(path.parent.parent)))

    def _broken(self, error: ParadisError) -> None:
        self.error = error
        self.ended.set()

    def close(self) -> None:
        """End the streams and the store; idempotent."""
        for writer in self._writers:
            writer.join(10.0)
        self.driver.stop()
        if self._control is not None:
            self._control.close()
        self._store.close()


def _named(join: Join, node: NodeId) -> Join:
    return msgspec.structs.replace(join, node=node)


def _manifest(effect: fx.WriteManifest, groups: tuple[int, ...]) -> Manifest:
    parameters = tuple(p for plan in effect.plans for p in plan.parameters)
    step, options = effect.info.step, effect.info.options
    if effect.info.as_is:  # each server's part is of the step that it was at
        least = min(effect.parts, key=lambda part: part.step)
        step, options = least.step, least.options
    scalars: dict[str, dict[str, float]] = {}
    for part in effect.parts:
        scalars.update(part.scalars)
    return Manifest(
        paradis=version.VERSION,
        step=step,
        group=effect.info.group,
        groups=groups,
        parameters=parameters,
        optimizer=effect.plans[0].optimizer,
        options=options,
        scalars=scalars,
        extra=effect.info.extra,
        pieces=tuple(piece for part in effect.parts for piece in part.pieces),
        layouts={p.name: p.strides for p in parameters if p.strides},
        aliases={alias: p.name for p in parameters for alias in p.aliases},
        mode=effect.plans[0].mode,
        benefit=effect.benefit,
    )
