"""A job's configuration: the only reader of the file, the environment and the flags.

Precedence: default < file < environment (``PARADIS_<SECTION>_<KEY>``) < flag. Every value keeps its
origin, and every refusal names the key, the value, what is allowed and where the value came from.
Invariant: a `JobConfig` that exists is legal as a whole.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from paradis.config_keys import Key, keys_of
from paradis.config_relations import (
    as_in_training,
    check_backup,
    check_combination,
    check_groups,
    check_relations,
    check_store,
)
from paradis.config_sections import (
    CheckpointConfig,
    CommunicationConfig,
    LaunchConfig,
    ObserveConfig,
    SchedulerConfig,
)
from paradis.config_topology import TopologyConfig, derived_counts
from paradis.config_training import TrainingConfig
from paradis.errors import ConfigError

SECTIONS: Final[dict[str, Any]] = {
    section.SECTION: section
    for section in (
        TopologyConfig,
        CommunicationConfig,
        TrainingConfig,
        CheckpointConfig,
        LaunchConfig,
        SchedulerConfig,
        ObserveConfig,
    )
}
_PREFIX: Final = "PARADIS_"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """The whole configuration of a job."""

    topology: TopologyConfig = field(default_factory=TopologyConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        """Check relations between sections.

        Raises:
            ConfigError: a relation is broken, or the combination is not in `COMBINATIONS`.
        """
        check_store(self.topology, self.communication)
        for group in self.topology.worker_groups:
            whole = as_in_training(group, self.training)
            check_combination(self.training, whole)
            check_relations(replace(self.training, mode=whole.mode), self.communication)
        if not self.topology.worker_groups:
            check_combination(self.training)
            check_relations(self.training, self.communication)
        check_groups(self.topology, self.training, self.communication)
        check_backup(self.topology, self.training, self.communication)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration and, for every ``section.key``, where its value came from."""

    config: JobConfig
    origins: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """A value somebody set: as read, and where."""

    raw: object
    origin: str


def load_config(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, str]
) -> LoadedConfig:
    """Read and check a job's configuration.

    Args:
        path: YAML file, or None for no file.
        environ: the environment; variables outside ``PARADIS_<SECTION>_`` are none of ours.
        overrides: flags, ``section.key`` -> text.

    Raises:
        ConfigError: something is unreadable, unknown or illegal; the message names its origin.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(job_keys(), "default")
    for given in (_from_file(path), _from_environment(environ), _from_flags(overrides)):
        for name, each in given.items():
            values[name] = _parsed(job_keys()[name], each)
            origins[name] = each.origin
    for name, (count, source) in derived_counts(_section_values("topology", values)).items():
        values[f"topology.{name}"] = count
        origins[f"topology.{name}"] = f"from topology.{source}"
    try:
        made = {name: cls(**_section_values(name, values)) for name, cls in SECTIONS.items()}
        return LoadedConfig(config=JobConfig(**made), origins=origins)
    except ConfigError as error:
        named: Any = error.fields.get("keys", ())
        told = "; ".join(f"{name}: {origins[name]}" for name in named)
        raise ConfigError(f"{error.message} ({told})", **error.fields) from error


def job_keys() -> dict[str, Key]:
    """Return every key of the configuration by ``section.key``, in order."""
    return {each.path: each for cls in SECTIONS.values() for each in keys_of(cls).values()}


def job_values(config: JobConfig) -> dict[str, Any]:
    """Return every stored value by ``section.key``."""
    return {
        name: getattr(getattr(config, each.section), each.name) for name, each in job_keys().items()
    }


def shared_settings(config: JobConfig) -> dict[str, int | float | str | bool]:
    """Return the flat settings that the leader sends; `paradis.settings` rebuilds them."""
    training = config.training
    groups = tuple(as_in_training(group, training) for group in config.topology.worker_groups)
    values = {**job_values(config), "topology.worker_groups": groups}
    return {
        each.shared: each.kind.share(values[name])
        for name, each in job_keys().items()
        if each.shared
    }


def example_yaml() -> str:
    """Return a complete configuration file: every key at its default, with unit and reason."""
    lines = [
        "# Every key of Paradis with its default, its unit and the reason for it.",
        "# Durations: 2000ms, 5s, 1h30m. Sizes: 4MiB (powers of 1024), 32GB (powers of 1000).",
        "# PARADIS_<SECTION>_<KEY> in the environment goes before this file, a flag before both.",
    ]
    for name, cls in SECTIONS.items():
        lines += ["", f"# {cls.__doc__}", f"{name}:"]
        for each in keys_of(cls).values():
            choices = f" ({' | '.join(each.choices)})" if each.choices else ""
            note = f"[{each.kind.unit}{choices}] {each.meaning}"
            lines += textwrap.wrap(note, 98, initial_indent="  # ", subsequent_indent="  # ")
            lines.append(f"  {each.name}: {each.kind.show(each.default)}")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------- sources


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML that refuses a key given twice, of which the last would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if name.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {name.value!r} stands twice", name.start_mark
                    )
                seen.add(name.value)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str, origin: str) -> object:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"config refused: {origin}: not YAML: {error}; correct it") from error


def _from_file(path: Path | None) -> dict[str, _Given]:
    if path is None:
        return {}
    origin = f"file {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config refused: {origin}: cannot be read: {error}; check the path"
        ) from error
    tree = _read_yaml(text, origin)
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"config refused: {origin}: expected sections such as topology:, "
            f"got {tree!r}; see `paradis config example`"
        )
    return {
        name: _Given(raw=raw, origin=origin)
        for section, body in tree.items()
        for name, raw in _section_items(str(section), body, origin)
    }


def _section_items(section: str, body: object, origin: str) -> Iterator[tuple[str, object]]:
    if section not in SECTIONS:
        raise _unknown(section, origin)
    if body is None:
        return
    if not isinstance(body, Mapping):
        raise ConfigError(
            f"config refused: {section} = {body!r} from {origin}; expected its keys, "
            f"{', '.join(keys_of(SECTIONS[section]))}; indent them below it"
        )
    for name, raw in body.items():
        if str(name) not in keys_of(SECTIONS[section]):
            raise _unknown(f"{section}.{name}", origin)
        yield f"{section}.{name}", raw


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    found = {}
    for variable in sorted(environ):
        section, _, name = variable.removeprefix(_PREFIX).lower().partition("_")
        if not variable.startswith(_PREFIX) or section not in SECTIONS:
            continue
        path, origin = f"{section}.{name}", f"environment {variable}"
        found[path] = _given_text(path, environ[variable], origin)
    return found


def _from_flags(overrides: Mapping[str, str]) -> dict[str, _Given]:
    return {path: _given_text(path, text, "flag") for path, text in overrides.items()}


def _given_text(path: str, text: str, origin: str) -> _Given:
    each = job_keys().get(path)
    if each is None:
        raise _unknown(path, origin)
    raw = _read_yaml(text, origin) if each.kind.structured else text
    return _Given(raw=raw, origin=origin)


def _parsed(each: Key, given: _Given) -> Any:
    try:
        return each.kind.parse(given.raw)
    except ValueError as error:
        raise ConfigError(
            f"config refused: {each.path} = {given.raw!r} from {given.origin}; "
            f"expected {error}; correct it"
        ) from error


def _section_values(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    start = f"{section}."
    return {
        path.removeprefix(start): value for path, value in values.items() if path.startswith(start)
    }


def _unknown(path: str, origin: str) -> ConfigError:
    section, _, name = path.partition(".")
    legal = list(keys_of(SECTIONS[section])) if section in SECTIONS else list(SECTIONS)
    elsewhere = [each for each in job_keys() if each.endswith(f".{name or section}")]
    near = difflib.get_close_matches(name if section in SECTIONS else section, legal, n=1)
    prefix = f"{section}." if section in SECTIONS else ""
    if elsewhere:
        advice = f"did you mean {elsewhere[0]}?"
    elif near:
        advice = f"did you mean {prefix}{near[0]}?"
    else:
        advice = f"expected one of {', '.join(legal)}"
    return ConfigError(f"config refused: {path} from {origin}; this key is unknown; {advice}")
