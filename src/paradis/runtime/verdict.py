"""Which of several failures is the one to show, and the exit code that goes with it.

When one node fails the others soon complain as well: their peers are gone, the leader ended the
job. Invariant: a node that failed for a reason of its own is shown before those complaints, and
within a kind the first one is; of our own errors, which the leader repeats to everybody, the one
with the most to say (the worker concerned adds what it knows).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paradis.errors import JobFailed, UnavailableError, error_classes
from paradis.ids import NodeId, index_of, role_of
from paradis.runtime.log_tail import failure_text

_CONSEQUENCES: Final = tuple(
    f"paradis.errors.{name}:"
    for name, cls in error_classes().items()
    if issubclass(cls, JobFailed | UnavailableError)
)
_OURS: Final = ("paradis: error: ", *(f"paradis.errors.{name}:" for name in error_classes()))

OWN_REASON: Final = 0
REPEATED: Final = 1
LEADER: Final = 2
CONSEQUENCE: Final = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure.

    Attributes:
        kind: ``OWN_REASON``, ``REPEATED``, ``LEADER`` or ``CONSEQUENCE``; the least is shown.
        message: text for the user.
        exit_code: what the launcher returns.
    """

    kind: int
    message: str
    exit_code: int


def of_node(node: str, code: int, text: str, log: str, *, seen: bool = False) -> Failure:
    """Judge a node that ended with an exit code other than 0, or too early.

    Args:
        node: its name.
        code: exit code, or minus the signal's number.
        text: traceback or last lines of its log, may be empty.
        log: path of the log, as shown to the user.
        seen: whether the text has gone to the terminal already.
    """
    who = f"{role_of(NodeId(node))} {index_of(NodeId(node))}"
    if code == 0:
        return Failure(OWN_REASON, f"{who} ended before the job did; its log: {log}", 1)
    if code < 0:
        name = signal_name(-code)
        message = f"{who} was killed by signal {-code} ({name}); its log: {log}"
        return Failure(OWN_REASON, message, 128 - code)
    if text.startswith(_OURS) and "\n" not in text:
        return _of_ours(who, code, text, log)
    lines = [] if seen else text.splitlines()
    shown = "".join(f"\n[{who}] {line}" for line in lines)
    last = text.rstrip().rpartition("\n")[2]
    message = f"{who} exited with code {code}; its log: {log}{shown}"
    # Not uncaught by our hook: the script caught it, or raised another because of it.
    kind = CONSEQUENCE if last.startswith(_CONSEQUENCES) else OWN_REASON
    return Failure(kind, message, code)


def _of_ours(who: str, code: int, text: str, log: str) -> Failure:
    """Judge a node that ended with an error of ours, which is one line."""
    lead, _, rest = text.partition(": ")
    if lead == "paradis":  # "paradis: error: ...", of a command that could not start
        return Failure(OWN_REASON, f"{who}: {rest.removeprefix('error: ')}; its log: {log}", code)
    kind = CONSEQUENCE if text.startswith(_CONSEQUENCES) else REPEATED
    name = lead.removeprefix("paradis.errors.")
    return Failure(kind, f"{who}: {rest} ({name}); its log: {log}", code)


def of_leader(error: str, text: str) -> Failure:
    """Judge what the leader said, or that it said nothing any more."""
    return Failure(LEADER, f"{text} ({error})", 1)


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


class Verdict:
    """Collects failures. ``decisive`` once there is no point in waiting for a better one."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []

    def add(self, failure: Failure) -> None:
        """Take a failure into account."""
        self._failures.append(failure)

    def add_dying(self, node: str, log: Path) -> None:
        """Judge a node that has logged why it ends but not ended: torch is slow to unload."""
        text = failure_text(log)
        raised = f"{role_of(NodeId(node))} {index_of(NodeId(node))} raised "
        told = any(failure.message.startswith(raised) for failure in self._failures)
        if told or text.startswith("paradis.errors."):
            self.add(of_node(node, 1, text, str(log)))

    @property
    def any(self) -> bool:
        """Whether anything failed."""
        return bool(self._failures)

    @property
    def decisive(self) -> bool:
        """Whether a failure has a reason of its own."""
        return any(failure.kind == OWN_REASON for failure in self._failures)

    def first(self) -> Failure:
        """Return the failure to show; there must be one."""
        return min(
            self._failures,
            key=lambda f: (f.kind, -len(f.message) if f.kind == REPEATED else 0),
        )
