"""Configuration: every way of giving a value, every refusal with its origin."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paradis.cli import config as cli_config
from paradis.config import (
    JobConfig,
    LoadedConfig,
    example_yaml,
    job_keys,
    job_values,
    load_config,
    shared_settings,
)
from paradis.config_relations import COMBINATIONS
from paradis.config_sections import CommunicationConfig
from paradis.config_topology import DispatcherNode, TopologyConfig, WorkerGroup
from paradis.config_training import TrainingConfig
from paradis.core.worker_groups import decode
from paradis.errors import ConfigError, RemoteProtocolError, VersionMismatch
from paradis.quantities import format_duration, format_size, parse_duration, parse_size
from paradis.settings import SharedSettings, settings_from


def from_text(folder: Path, text: str, environ: dict[str, str] | None = None) -> LoadedConfig:
    """Load a configuration file with this text."""
    path = folder / "job.yaml"
    path.write_text(text)
    return load_config(path, environ or {}, {})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2000ms", 2),
        ("5s", 5),
        ("1h30m", 5400),
        ("2300ms", 2.3),
        ("0.5h", 1800),
        ("1m1s1ms", 61.001),
    ],
)
def test_durations_are_exact(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 s", "s", "-1s", "5S", "1m1h", "1ms1s", "1d", "1.s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="2000ms"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("32GB", 32 * 10**9), ("32GiB", 32 << 30), ("4MiB", 4 << 20), ("1.5KiB", 1536), ("7B", 7)],
)
def test_sizes_are_exact(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4", "4M", "4mib", "-1MB", "4 MB", "0.3B", "MB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="4MiB"):
        parse_size(text)


@given(st.integers(0, 10**12))
def test_quantities_read_what_they_write(number: int) -> None:
    assert parse_size(format_size(number)) == number
    assert parse_duration(format_duration(number / 1000)) == number / 1000


def test_no_source_gives_the_defaults() -> None:
    loaded = load_config(None, {}, {})
    assert loaded.config == JobConfig()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.origins.keys() == job_keys().keys()


def test_precedence_is_default_file_environment_flag(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("communication: {rpc_timeout: 1s, join_timeout: 1m, retry_interval: 1s}")
    environ = {
        "PARADIS_COMMUNICATION_RPC_TIMEOUT": "2s",
        "PARADIS_COMMUNICATION_JOIN_TIMEOUT": "2m",
        "PARADIS_DISPATCHERS": "somewhere:1",
        "PARADISE": "lost",
    }
    loaded = load_config(path, environ, {"communication.rpc_timeout": "3s"})
    config = loaded.config.communication
    assert (config.rpc_timeout, config.join_timeout, config.retry_interval) == (3, 120, 1)
    origins = [loaded.origins[f"communication.{key}"] for key in ("rpc_timeout", "join_timeout",
               "retry_interval", "sync_timeout")]  # fmt: skip
    assert origins == [
        "flag",
        "environment PARADIS_COMMUNICATION_JOIN_TIMEOUT",
        f"file {path}",
        "default",
    ]


REFUSALS = [
    ("scheduler: {cache_size: 32GB}", "expected one of virtual_nodes, load_epsilon"),
    ("schedule: {}", "did you mean scheduler?"),
    ("communication: {hartbeat_interval: 3s}", "did you mean communication.heartbeat_interval?"),
    ("workers: 3", "did you mean topology.workers?"),
    ("training: {shard_size: 1MiB}", "did you mean communication.shard_size?"),
    ("communication: {rpc_timeout: 3}", "communication.rpc_timeout = 3 from"),
    ("communication: {rpc_timeout: 3 parsecs}", "'3 parsecs'"),
    ("communication: {rpc_timeout: 3 parsecs}", "a duration such as 2000ms, 5s, 10m or 1h30m"),
    ("communication: {rpc_timeout: 0s}", "expected at least 1ms"),
    ("communication: {shard_size: 4}", "32GB (powers of 1000)"),
    ("communication: {shard_size: 32KiB}", "expected at least 64KiB"),
    ("communication: {heartbeat_interval: 5s}", "less than communication.failure_timeout = 5s"),
    ("communication: {retry_interval: 1h}", "less than communication.sync_timeout = 30m"),
    ("communication: {small_tensor: 2MiB}", "at most communication.bucket_size = 1MiB"),
    ("communication: {bucket_size: 8MiB}", "at most communication.shard_size = 4MiB"),
    ("communication: {shard_size: 1GiB}", "at most communication.contribution_store = 256MiB"),
    ("topology: {workers: 99}", "communication.contribution_store = 256MiB"),
    ("communication: {payload_checksum: maybe}", "auto or on or off"),
    ("communication: {control_address: host}", "a port from 1 to 65535"),
    ("communication: {data_interface: 3}", "put it in quotes"),
    ("training: {mode: bsp}", "this version supports sync or ssp or async"),
    ("training: {mode: ssp, overlap: double_buffer}", "mode ssp with compression none and overlap"),
    ("training: {mode: async, compression: int8}", "expected one of the table"),
    ("training: {overlap: double_buffer, compression: bf16}", "expected one of the table"),
    ("training: {overlap: double_buffer, early_update: true}", "a late gradient is no hurry"),
    ("training: {mode: async, early_update: true}", "training.early_update = true with"),
    ("training: {mode: async, local_reduction: on}", "an update by itself"),
    ("training: {overlap: double_buffer, local_reduction: on}", "from the parameters"),
    ("training: {early_update: true, local_reduction: on}", "after step() only"),
    ("training: {overlap: double_buffer, free_gradients: true}", "is kept for a step"),
    ("training: {mode: ssp, free_gradients: true}", "training.free_gradients = true with"),
    ("training: {mode: ssp, staleness: -1}", "expected at least 0"),
    ("training: {mode: ssp, staleness_scaling: true}", "only async knows it"),
    ("training: {mode: async, on_early_finish: fail}", "training.on_early_finish = fail with"),
    ("{training: {mode: async}, communication: {rack_aggregation: 'on'}}", "rack_aggregation = on"),
    ("{training: {early_update: true}, communication: {rack_aggregation: on}}", "push directly"),
    ("{topology: {workers: 3}, training: {backup_workers: 3}}", "somebody must make a step"),
    ("{topology: {workers: 3}, training: {backup_workers: 1, mode: ssp}}", "expected mode sync"),
    (
        "{topology: {workers: 3}, training: {backup_workers: 1, overlap: double_buffer}}",
        "a version that is gone",
    ),
    (
        "{topology: {workers: 3}, training: {backup_workers: 1, free_gradients: true}}",
        "is given back",
    ),
    (
        "{topology: {workers: 3}, training: {backup_workers: 1, early_update: true}}",
        "before it is known who makes the step",
    ),
    (
        "{topology: {workers: 3}, training: {backup_workers: 1, local_reduction: on}}",
        "a host's sum may hold",
    ),
    (
        "{topology: {workers: 3}, training: {backup_workers: 1}, "
        "communication: {rack_aggregation: on}}",
        "a rack's sum may hold",
    ),
    ("training: {backup_workers: -1}", "expected at least 0"),
    ("training: {overlap: one}", "this version supports layerwise"),
    ("training: {check_finite: 1}", "true or false"),
    ("checkpoint: {keep: 0}", "expected at least 1"),
    ("checkpoint: {keep: 2.5}", "a whole number"),
    ("launch: {run_directory: ''}", "launch.run_directory"),
    ("scheduler: {load_epsilon: .nan}", "expected at least 0.001"),
    ("scheduler: {load_epsilon: much}", "a number such as 0.1"),
    ("topology: {workers: true}", "a whole number"),
    ("topology: {racks: 2}", "topology.workers = 1"),
    ("topology: {servers: 0}", "at least 1 without topology.colocated"),
    ("topology: {colocated: true}", "everything and nothing has to travel"),
    ("topology: {colocated: true, workers: 2, servers: 2}", "alone are already optimal"),
    ("topology: {colocated: 1}", "true or false"),
    ("topology: {servers: 1, ps_nodes: [a:1, b:1]}", "as many as topology.ps_nodes"),
    ("topology: {ps_nodes: [a:1, a:1]}", "each address once"),
    ("topology: {ps_nodes: a:1}", "a list of addresses"),
    ("topology: {disp_nodes: [{address: a:1}]}", "the keys address, rack"),
    ("topology: {disp_nodes: [{address: a:1, rack: 0}]}", "a rack name"),
    ("topology: {workers: 2, racks: 1, disp_nodes: [{address: a:1, rack: r}, "
     "{address: b:1, rack: s}]}", "at least 2"),
    ("topology: {dispatchers: 3, disp_nodes: [{address: a:1, rack: r}]}", "as many as"),
    ("topology: {worker_groups: {a: {workers: 1, bound: 2}}}", "unknown: bound"),
    ("topology: {worker_groups: {a: {staleness: -1}}}", "a number of updates"),
    ("topology: {worker_groups: {a: {mode: bsp}}}", "topology.worker_groups.a.mode = bsp"),
    ("topology: {worker_groups: {a: {compression: 1bit}}}", "a.compression = 1bit"),
    ("topology: {worker_groups: {a: {parameters: []}}}", "a pattern or a list of them"),
    ("topology: {worker_groups: {a: {}, b: {}}}", "at least 1, as there are several"),
    (
        "topology: {workers: 4, worker_groups: {a: {workers: 2}, b: {workers: 1}}}",
        "topology.workers = 4; expected 3, the sum of the groups",
    ),
    (
        "topology: {worker_groups: {a: {workers: 1, mode: async, compression: int8}}}",
        "mode async with compression int8 and overlap layerwise of the worker group a",
    ),
    (
        "{topology: {worker_groups: {a: {workers: 1}, b: {workers: 1}}}, "
        "training: {early_update: true}}",
        "training.early_update = true with several topology.worker_groups",
    ),
    (
        "{topology: {worker_groups: {a: {workers: 1}, b: {workers: 1}}}, "
        "training: {overlap: double_buffer}}",
        "training.overlap = double_buffer with several topology.worker_groups",
    ),
    (
        "{topology: {worker_groups: {a: {workers: 1}, b: {workers: 1}}}, "
        "training: {free_gradients: true}}",
        "training.free_gradients = true with several topology.worker_groups",
    ),
    (
        "{topology: {worker_groups: {a: {mode: ssp}}}, training: {local_reduction: on}}",
        "training.local_reduction = on with training.mode = ssp",
    ),
    ("topology: {workers: 2, worker_groups: {a: {workers: 3}}}", "a.workers = 3"),
    ("topology: {worker_groups: {a: {workers: many}}}", "a number of workers"),
    ("topology: {worker_groups: {a: {mode: 1}}}", "text for mode"),
    ("topology: {worker_groups: [a]}", "a mapping of group names"),
    ("topology: {worker_groups: {a: 3}}", "for the group a a mapping"),
    ("topology: {workers: 3, reduction_groups: [[0, 1]]}", "each rank from 0 to 2"),
    ("topology: {reduction_groups: rack}", '"auto" or lists of ranks'),
    ("topology: {workers: 2, workers: 3}", "stands twice"),
    ("topology: [", "not YAML"),
    ("topology: 3", "indent them below it"),
    ("- topology", "expected sections"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "told"), REFUSALS)
def test_refusals_say_what_is_expected_and_where(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, text)
    assert told in caught.value.message
    assert str(tmp_path / "job.yaml") in caught.value.message


def test_a_relation_names_the_origin_of_both_sides(tmp_path: Path) -> None:
    environ = {"PARADIS_COMMUNICATION_FAILURE_TIMEOUT": "2s"}
    with pytest.raises(ConfigError, match="failure_timeout: environment PARADIS_COMM") as caught:
        from_text(tmp_path, "communication: {heartbeat_interval: 3s}", environ)
    assert f"heartbeat_interval: file {tmp_path / 'job.yaml'}" in caught.value.message


@pytest.mark.parametrize(
    ("environ", "flags", "told"),
    [
        ({"PARADIS_TOPOLOGY_WORKRS": "2"}, {}, "did you mean topology.workers?"),
        ({"PARADIS_TOPOLOGY_WORKERS": "two"}, {}, "environment PARADIS_TOPOLOGY_WORKERS"),
        ({}, {"topology.wrkers": "2"}, "from flag; this key is unknown"),
        ({}, {"topology.workers": "2.0"}, "'2.0' from flag"),
        ({}, {"topology.ps_nodes": "[a:1"}, "flag: not YAML"),
    ],
)
def test_environment_and_flags_are_checked_too(
    environ: dict[str, str], flags: dict[str, str], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, environ, flags)
    assert told in caught.value.message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml", {}, {})
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path, {}, {})


def test_an_empty_file_or_section_is_the_default(tmp_path: Path) -> None:
    assert from_text(tmp_path, "").config == JobConfig()
    assert from_text(tmp_path, "topology:\n").config == JobConfig()


def test_lists_give_the_counts(tmp_path: Path) -> None:
    loaded = from_text(
        tmp_path,
        "topology:\n"
        "  ps_nodes: [a:7000, '[::1]:7000']\n"
        "  disp_nodes: [{address: c:1, rack: r0}, {address: d:1, rack: r1}]\n"
        "  worker_groups: {all: {workers: 6}}\n"
        "  reduction_groups: [[0, 1, 2], [3, 4, 5]]\n",
    )
    topology = loaded.config.topology
    assert (topology.workers, topology.servers, topology.dispatchers, topology.racks) == (
        6,
        2,
        2,
        2,
    )
    assert topology.disp_nodes[1] == DispatcherNode(address="d:1", rack="r1")
    assert topology.worker_groups == (WorkerGroup(name="all", workers=6),)
    assert topology.reduction_groups == ((0, 1, 2), (3, 4, 5))
    assert loaded.origins["topology.servers"] == "from topology.ps_nodes"


def test_lists_can_be_flags_and_words_can_be_booleans_of_yaml(tmp_path: Path) -> None:
    config = from_text(tmp_path, "communication: {payload_checksum: off}").config
    assert config.communication.payload_checksum == "off"
    loaded = load_config(
        None,
        {"PARADIS_TRAINING_CHECK_FINITE": "no", "PARADIS_SCHEDULER_LOAD_EPSILON": "0.2"},
        {"topology.ps_nodes": "[a:1, b:2]", "communication.rack_aggregation": "on"},
    )
    assert loaded.config.topology.ps_nodes == ("a:1", "b:2")
    assert loaded.config.communication.rack_aggregation == "on"
    assert not loaded.config.training.check_finite
    assert loaded.config.scheduler.load_epsilon == 0.2


def test_what_a_worker_group_does_not_say_is_as_in_training(tmp_path: Path) -> None:
    loaded = from_text(
        tmp_path,
        "topology:\n"
        "  worker_groups:\n"
        '    body: {workers: 3, parameters: ["body.*", stem], mode: sync, compression: int8}\n'
        "    head: {workers: 2, parameters: 'head.*', staleness: 4}\n"
        "training: {mode: ssp, staleness: 2}\n",
    )
    assert loaded.config.topology.workers == 5
    assert loaded.origins["topology.workers"] == "from topology.worker_groups"
    shown = job_keys()["topology.worker_groups"].kind.show(loaded.config.topology.worker_groups)
    assert shown == (
        '{"body": {workers: 3, parameters: ["body.*", "stem"], mode: "sync", '
        'compression: "int8"}, "head": {workers: 2, parameters: ["head.*"], staleness: 4}}'
    )
    body, head = decode(str(shared_settings(loaded.config)["worker_groups"]), 5)
    assert (body.mode, body.staleness, body.compression) == ("sync", 2, "int8")
    assert (head.mode, head.staleness, head.compression) == ("ssp", 4, "none")


def test_what_is_shown_reads_back(tmp_path: Path) -> None:
    config = JobConfig(
        topology=TopologyConfig(
            workers=2,
            servers=2,
            dispatchers=1,
            ps_nodes=("a:1", "b:1"),
            disp_nodes=(DispatcherNode(address="c:1", rack='r"0'),),
            worker_groups=(WorkerGroup(name="a b", workers=2, parameters=("x*",), staleness=0),),
            reduction_groups=((1,), (0,)),
        ),
        communication=CommunicationConfig(rpc_timeout=1.5, payload_checksum="on", shard_size=10**6,
                                          bucket_size=1000, small_tensor=0),
        training=TrainingConfig(debug_gradients=True),
    )  # fmt: skip
    tree: dict[str, dict[str, object]] = {}
    for name, value in job_values(config).items():
        key = job_keys()[name]
        tree.setdefault(key.section, {})[key.name] = yaml.safe_load(key.kind.show(value))
    assert from_text(tmp_path, yaml.safe_dump(tree)).config == config


def test_sections_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        JobConfig().topology.workers = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        TopologyConfig(2)  # type: ignore[call-arg]


def test_shared_settings_carry_the_defaults_and_the_values() -> None:
    assert settings_from(shared_settings(JobConfig())) == SharedSettings()
    given = load_config(None, {}, {"communication.shard_size": "2MiB", "checkpoint.keep": "7"})
    settings = settings_from(shared_settings(given.config))
    assert (settings.shard_bytes, settings.checkpoint_keep) == (2 << 20, 7)
    names = [field.name for field in dataclasses.fields(SharedSettings)]
    assert sorted(shared_settings(JobConfig())) == sorted(names)


def test_settings_of_another_version_are_refused() -> None:
    sent: dict[str, object] = dict(shared_settings(JobConfig()))
    assert settings_from({**sent, "rpc_timeout_s": 10}).rpc_timeout_s == 10.0
    with pytest.raises(VersionMismatch, match="unknown .'wings'"):
        settings_from({**sent, "wings": 2})
    del sent["restore"]
    with pytest.raises(VersionMismatch, match="missing .'restore'"):
        settings_from(sent)
    with pytest.raises(RemoteProtocolError, match="shard_bytes: expected int"):
        settings_from({**sent, "restore": "", "shard_bytes": "4MiB"})
    with pytest.raises(RemoteProtocolError, match="shard_bytes: expected int"):
        settings_from({**sent, "restore": "", "shard_bytes": True})


def run_command(*words: str) -> int:
    """Run ``paradis config ...`` in this process."""
    parser = argparse.ArgumentParser()
    cli_config.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["config", *words])
    code: int = arguments.run(arguments)
    return code


def test_config_show_prints_every_key_with_origin_and_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("training: {on_early_finish: fail}")
    code = run_command("show", "--config", str(path), "--set", "topology.servers=3")
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    table = {line.split()[0]: line for line in lines if line and not line.startswith(" ")}
    assert job_keys().keys() <= table.keys()
    assert table["training.on_early_finish"].split()[1:3] == ['"fail"', "file"]
    assert table["topology.servers"].split()[1:] == ["3", "flag", "count"]
    assert any("sync + none + none" in line for line in lines)
    assert any("sync + none + layerwise" in line for line in lines)
    assert any("sync + none + double_buffer" in line for line in lines)
    assert any("sync + int8 + layerwise" in line for line in lines)
    assert len(COMBINATIONS) == 13


@pytest.mark.parametrize("flag", ["topology.servers", "topology.servers=none"])
def test_config_show_says_why_it_fails(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("show", "--set", flag) == 1
    assert capsys.readouterr().err.startswith("error: config refused: ")


def test_config_example_prints_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("example") == 0
    assert capsys.readouterr().out == example_yaml()
