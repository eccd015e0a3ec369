"""What a server knows of a step ahead of its commits (see `paradis.roles.server_early`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from paradis.wire.messages import StepCommit


@dataclass(slots=True)
class Ahead:
    """One group's present step.

    Attributes:
        begun: rank -> what it said with its first gradient.
        alike: of these members, whether all have begun or committed alike.
    """

    begun: dict[int, StepCommit] = field(default_factory=dict)
    alike: tuple[tuple[int, ...], bool] = ((), False)

    def said(self, rank: int, commit: StepCommit) -> None:
        """A worker has begun the step."""
        self.begun[rank] = commit
        self.renew()

    def renew(self) -> None:
        """Somebody has said more: compare anew."""
        self.alike = ((), False)
