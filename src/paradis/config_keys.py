"""What a configuration key is: how its text is read, checked and shown, and what it means.

A section is a frozen dataclass whose fields are made by `key`; everything else (reading, errors,
``paradis config show``, the example file, the settings sent to nodes) is derived from the `Key`
that each field carries, so a key is described in exactly one place.
Invariant: what `Kind.show` writes, read as YAML, is what `Kind.parse` turns into the same value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from paradis.errors import ConfigError
from paradis.quantities import (
    DURATION_FORMS,
    SIZE_FORMS,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

T = TypeVar("T")
_KEY = "paradis"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A type of value.

    Attributes:
        unit: what the value counts or how it is written, for ``paradis config show``.
        parse: value from YAML, or text, to the stored value; raises ValueError with the forms it
            expects as its message.
        show: stored value to YAML text.
        structured: text from the environment or a flag is read as YAML before ``parse``.
        share: stored value to what travels among the settings that nodes share.
    """

    unit: str
    parse: Callable[[object], Any]
    show: Callable[[Any], str] = str
    structured: bool = False
    share: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One configuration key.

    Attributes:
        meaning: what it does and why its default is what it is.
        least: smallest legal value, of numbers.
        choices: legal values, of words; empty: any.
        shared: name in `SharedSettings`, or empty when only the launcher needs it.
    """

    section: str
    name: str
    kind: Kind
    default: Any
    meaning: str
    least: float
    choices: tuple[str, ...]
    shared: str

    @property
    def path(self) -> str:
        """``section.name``, as in the file."""
        return f"{self.section}.{self.name}"

    def check(self, value: Any) -> None:
        """Check a stored value against the limits.

        Raises:
            ConfigError: it is too small or not one of the choices.
        """
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"config refused: {self.path} = {value!r}; this version supports "
                f"{' or '.join(self.choices)}; choose one of them",
                keys=(self.path,),
            )
        if isinstance(value, int | float) and not value >= self.least:
            raise ConfigError(
                f"config refused: {self.path} = {self.kind.show(value)}; expected at least "
                f"{self.kind.show(type(value)(self.least))}; raise it",
                keys=(self.path,),
            )


def key(
    default: T, kind: Kind, meaning: str, *, least: float = 0, shared: str = "", choices: str = ""
) -> T:
    """Declare a field of a section; ``choices`` are words separated by blanks.

    The return type is that of the default, which is what type checkers know of dataclass fields.
    """
    made: Any = field(
        default=default,
        metadata={_KEY: (kind, meaning, least, tuple(choices.split()), shared)},
    )
    return made  # type: ignore[no-any-return]


def keys_of(section_class: Any) -> dict[str, Key]:
    """Return the keys of a section dataclass by name, in order."""
    found = {}
    for item in fields(section_class):
        kind, meaning, least, choices, shared = item.metadata[_KEY]
        found[item.name] = Key(
            section=section_class.SECTION,
            name=item.name,
            kind=kind,
            default=item.default,
            meaning=meaning,
            least=least,
            choices=choices,
            shared=shared,
        )
    return found


def check_values(section: Any) -> None:
    """Check every value of a section by its own key; relations are the section's business.

    Raises:
        ConfigError: a value breaks its limits.
    """
    for name, each in keys_of(type(section)).items():
        each.check(getattr(section, name))


# ------------------------------------------------------------------------------------- parsers


def _as_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("text (put it in quotes)")
    return value


def _as_word(value: object) -> str:
    # YAML 1.1 reads the words on and off as booleans.
    if isinstance(value, bool):
        return "on" if value else "off"
    return _as_text(value)


def _as_bool(value: object) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError("true or false")


def _as_count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value.strip()):
        return int(value)
    raise ValueError("a whole number")


def _as_ratio(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?([eE]-?\d+)?", value.strip()):
        return float(value)
    raise ValueError("a number such as 0.1")


def _as_duration(value: object) -> float:
    if not isinstance(value, str):
        raise ValueError(f"{DURATION_FORMS} (with its unit)")
    return parse_duration(value)


def _as_size(value: object) -> int:
    if not isinstance(value, str):
        raise ValueError(f"{SIZE_FORMS} (with its unit)")
    return parse_size(value)


def parse_address(value: object) -> str:
    """Return a ``host:port`` address, IPv6 hosts in brackets, as it was given.

    Raises:
        ValueError: it is none.
    """
    host, _, port = str(value).rpartition(":")
    plain = re.fullmatch(r"[^\s:/\[\]]+|\[[0-9a-fA-F:.]+(%\w+)?\]", host)
    if not (isinstance(value, str) and plain and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("an address host:port with a port from 1 to 65535")
    return value


def parse_fields(value: object, required: tuple[str, ...], optional: tuple[str, ...]) -> Any:
    """Return a mapping after checking that it has the required and no unknown keys.

    Raises:
        ValueError: it has others.
    """
    expected = ", ".join((*required, *(f"{name} (optional)" for name in optional)))
    if not isinstance(value, Mapping):
        raise ValueError(f"a mapping with the keys {expected}")
    unknown = [name for name in value if name not in required + optional]
    if unknown or any(name not in value for name in required):
        told = f"; unknown: {', '.join(map(str, unknown))}" if unknown else ""
        raise ValueError(f"a mapping with the keys {expected}{told}")
    return value


def listed(value: object, parse: Callable[[object], T], what: str) -> tuple[T, ...]:
    """Return a YAML list as a tuple of parsed items.

    Raises:
        ValueError: it is no list, or an item is not what ``parse`` takes.
    """
    if not isinstance(value, list):
        raise ValueError(f"a list of {what}")
    return tuple(parse(item) for item in value)


def _as_addresses(value: object) -> tuple[str, ...]:
    return listed(value, parse_address, "addresses host:port")


def _show_addresses(value: tuple[str, ...]) -> str:
    return f"[{', '.join(map(quote, value))}]"


def quote(text: str) -> str:
    """Return the text in double quotes, as YAML and JSON read it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _as_optional_address(value: object) -> str:
    return "" if value == "" else parse_address(value)


COUNT = Kind(unit="count", parse=_as_count)
RATIO = Kind(unit="ratio", parse=_as_ratio, show=repr)
BOOL = Kind(unit="true/false", parse=_as_bool, show=lambda value: str(value).lower())
WORD = Kind(unit="word", parse=_as_word, show=quote)
TEXT = Kind(unit="text", parse=_as_text, show=quote)
DURATION = Kind(unit="duration", parse=_as_duration, show=format_duration)
SIZE = Kind(unit="size", parse=_as_size, show=format_size)
ADDRESS = Kind(unit="host:port", parse=_as_optional_address, show=quote)
ADDRESSES = Kind(unit="host:port list", parse=_as_addresses, show=_show_addresses, structured=True)
