"""What a process of a role decides before it starts: addresses and bounds."""

from __future__ import annotations

import pytest

from paradis.config import JobConfig, shared_settings
from paradis.runtime.process import data_addresses, quota_bytes, store_bytes
from paradis.settings import SharedSettings, settings_from


def test_nodes_of_one_host_meet_at_an_unnamed_unix_socket_by_default() -> None:
    settings = settings_from(shared_settings(JobConfig()))
    assert settings == SharedSettings()
    addresses = data_addresses(settings, "127.0.0.1")
    assert addresses == ["unix://", "tcp://127.0.0.1:0"]


@pytest.mark.parametrize(
    ("listen", "address"),
    [("10.0.0.1", "tcp://10.0.0.1:0"), ("10.0.0.1:7000", "tcp://10.0.0.1:7000"),
     ("::1", "tcp://::1:0")],
)  # fmt: skip
def test_tcp_alone_where_the_socket_is_turned_off(listen: str, address: str) -> None:
    assert data_addresses(SharedSettings(same_host="tcp"), listen) == [address]


@pytest.mark.parametrize("contributors", [0, 1, 4, 64])
def test_the_store_has_room_for_what_all_quotas_allow(contributors: int) -> None:
    settings = SharedSettings()
    quota = quota_bytes(settings, contributors)
    assert quota >= 2 * settings.shard_bytes
    held = contributors * (quota * 3 // 2 + 2 * settings.shard_bytes)
    assert store_bytes(settings, contributors) >= max(held, settings.contribution_store_bytes)
