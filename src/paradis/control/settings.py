"""Settings of both ends of a control stream, and the gRPC options they stand for."""

from __future__ import annotations

from dataclasses import dataclass

from paradis.control.codec import MESSAGE_BYTES_MAX
from paradis.errors import ConfigError

Options = list[tuple[str, int | str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig:
    """Settings of the control plane.

    Attributes:
        keepalive_s: a client pings the leader after this many quiet seconds.
        keepalive_timeout_s: an unanswered ping ends the stream after this many seconds.
        leader_keepalive_s: the leader pings quiet clients this rarely: it only clears half-open
            connections. Liveness comes from the host agents' beats, so that a worker stopped in a
            debugger, be it over lunch, is slow and never dead.
        queue_messages_max: bound of one stream's send queue, in messages.
        queue_bytes_max: the same in bytes; four messages of the largest size.
        sessions_max: streams that a leader serves at once.
        close_timeout_s: deadline of an orderly end.
    """

    keepalive_s: float = 2.0
    keepalive_timeout_s: float = 5.0
    leader_keepalive_s: float = 7200.0
    queue_messages_max: int = 10_000
    queue_bytes_max: int = 4 * MESSAGE_BYTES_MAX
    sessions_max: int = 10_000
    close_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("keepalive_s", "keepalive_timeout_s", "leader_keepalive_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"control setting {name}: expected > 0, got {getattr(self, name)}"
                )


def client_options(config: ControlConfig) -> Options:
    """Return the channel options of a client.

    All three keepalive settings are needed: without the last one a frozen peer is not noticed.
    """
    return [
        *_limits(),
        *_keepalive(config.keepalive_s, config.keepalive_timeout_s),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def server_options(config: ControlConfig) -> Options:
    """Return the options of the leader's server.

    Port sharing is off, or a second job on the same port would silently steal half the nodes.
    """
    return [
        *_limits(),
        *_keepalive(config.leader_keepalive_s, config.leader_keepalive_s),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _limits() -> Options:
    return [
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", 16 << 10),
    ]


def _keepalive(time_s: float, timeout_s: float) -> Options:
    return [
        ("grpc.keepalive_time_ms", int(time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
