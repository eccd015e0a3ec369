"""Control messages round-trip, bad bytes are refused, every error class has a status."""

from __future__ import annotations

import grpc
import msgspec
import pytest

from paradis.control import codec
from paradis.errors import (
    LocalProtocolError,
    PeerUnreachable,
    RemoteProtocolError,
    error_classes,
)
from paradis.wire.messages import (
    CONTROL_MESSAGES,
    Beat,
    ControlMessage,
    Join,
    ParameterSpec,
    Plan,
    Segment,
    ShardPlan,
    View,
)

PLAN = Plan(
    generation=3,
    group=0,
    part=1,
    first_parameter=2,
    parameters=(ParameterSpec(name="w", shape=(2, 3), dtype="float32", options_group=0),),
    optimizer="torch.optim.AdamW",
    options=[{"lr": 0.1, "betas": [0.9, 0.999], "foreach": None, "amsgrad": False}],
    shards=(
        ShardPlan(
            shard=5,
            server="server-0",
            dtype="float32",
            length=6,
            segments=(Segment(2, 0, 6, 0),),
            options_group=0,
            priority=0,
        ),
    ),
    step=4,
)
VIEW = View(
    generation=1,
    members=(0, 1),
    left={2: {0: 7}},
    tree=((0,), (1,)),
    addresses={"server-0": ("tcp://127.0.0.1:1",)},
    racks={"r0": ("", (0, 1))},
)


@pytest.mark.parametrize("message", [PLAN, VIEW, Beat(nodes=("worker-0",))])
def test_messages_round_trip(message: ControlMessage) -> None:
    assert codec.decode(codec.encode(message)) == message


def test_every_control_message_has_its_own_tag() -> None:
    tags = [cls.__struct_config__.tag for cls in CONTROL_MESSAGES]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xc1",
        codec.encode(PLAN)[:-3],
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode({"type": "Join", "node": 3, "role": "worker"}),
        b"\x91" * 5000,
    ],
)
def test_bad_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="control message refused"):
        codec.decode(data)


def test_foreign_and_oversized_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalProtocolError, match="not a control message"):
        codec.encode(ControlMessage())
    monkeypatch.setattr(codec, "MESSAGE_BYTES_MAX", 10)
    with pytest.raises(LocalProtocolError, match="exceed 10"):
        codec.encode(Join(node="worker-0", role="worker", host="h", pid=1))


@pytest.mark.parametrize("name", sorted(error_classes()))
def test_every_error_class_crosses_a_stream(name: str) -> None:
    cls = error_classes()[name]
    code, details, trailing = codec.status_of(cls("push refused: é"))
    back = codec.error_of(code, details, dict(trailing)[codec.ERROR_KEY], "h:1")
    assert type(back) is cls
    assert back.message == "push refused: é"
    assert code is not grpc.StatusCode.OK


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
def test_every_status_of_grpc_itself_becomes_an_error_that_names_the_peer(
    code: grpc.StatusCode,
) -> None:
    error = codec.error_of(code, "broken", "", "leader:7")
    assert "leader:7" in error.message
    assert type(error).__name__ in error_classes()
    assert isinstance(codec.error_of(grpc.StatusCode.UNAVAILABLE, "", "", "a:1"), PeerUnreachable)
