"""Every configuration key is explained, and the shipped example holds them all."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from paradis.config import JobConfig, example_yaml, job_keys, load_config
from paradis.settings import SharedSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "job.yaml"

KEYS = {
    "topology": "workers servers colocated dispatchers racks ps_nodes disp_nodes worker_groups "
    "reduction_groups",
    "communication": "heartbeat_interval failure_timeout rpc_timeout control_interface "
    "data_interface control_address shard_size bucket_size small_tensor contribution_store "
    "straggler_warning sync_timeout join_timeout retry_interval payload_checksum user_timeout "
    "socket_buffer congestion_control same_host rack_aggregation rack_codes",
    "training": "mode staleness staleness_scaling backup_workers overlap watch_views "
    "delay_warmup_steps compression compression_benefit compression_threshold local_reduction "
    "on_early_finish early_update free_gradients detect_value_changes debug_gradients "
    "check_finite",
    "checkpoint": "directory every_steps keep restore",
    "launch": "grace_period drain_timeout run_directory omp_threads",
    "scheduler": "virtual_nodes load_epsilon",
    "observe": "trace",
}
"""The keys are a promise: a renamed key breaks the files of users."""


def test_the_keys_are_those_promised() -> None:
    promised = [f"{section}.{name}" for section, names in KEYS.items() for name in names.split()]
    assert list(job_keys()) == promised


@pytest.mark.parametrize("name", job_keys())
def test_every_key_has_a_meaning_and_a_unit(name: str) -> None:
    key = job_keys()[name]
    assert len(key.meaning) > 20
    assert key.meaning.rstrip().endswith(".")
    assert key.kind.unit
    assert key.kind.parse(yaml.safe_load(key.kind.show(key.default))) == key.default


def test_the_shipped_example_is_the_generated_one() -> None:
    told = "write it anew: paradis config example > examples/job.yaml"
    assert EXAMPLE.read_text() == example_yaml(), told


def test_the_example_is_complete_and_means_the_defaults() -> None:
    tree = yaml.safe_load(EXAMPLE.read_text())
    named = [f"{section}.{name}" for section, body in tree.items() for name in body]
    assert named == list(job_keys())
    loaded = load_config(EXAMPLE, {}, {})
    assert loaded.config == JobConfig()
    assert set(loaded.origins.values()) == {f"file {EXAMPLE}"}


def test_every_shared_setting_comes_from_exactly_one_key() -> None:
    shared = [key.shared for key in job_keys().values() if key.shared]
    assert sorted(shared) == sorted(field.name for field in fields(SharedSettings))
    for key in job_keys().values():
        if key.kind.unit == "duration" and key.shared:
            assert key.shared.endswith("_s")
        if key.kind.unit == "size" and key.shared:
            assert key.shared.endswith("_bytes")
