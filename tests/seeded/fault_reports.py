"""The result of a seeded fault, as values that can be sent between processes. Imports nothing of fdp."""

from __future__ import annotations

import dataclasses

from seeded_fault import Fault


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one program under one fault.

    Attributes:
        numbers: what is wrong with the numbers of the program that was emitted, None if nothing is.
        raised: the error that planning, emitting or running it raised by itself.
        refusal: why the validator refused it, None if it did not.
        user: what is wrong with the numbers that a user gets of the verified step; None if they are right, or an error
            comes in their place.
    """

    numbers: str | None = None
    raised: str | None = None
    refusal: str | None = None
    user: str | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of all programs under one fault.

    Attributes:
        fault: which; None for the sources as they are.
        outcomes: for each program, what became of it.
        error: why nothing could be run, if nothing could.
    """

    fault: Fault | None
    outcomes: dict[str, Outcome]
    error: str | None = None

    @property
    def changed(self) -> list[str]:
        """The programs of which a number changes without an error."""
        return [name for name, found in self.outcomes.items() if found.numbers is not None]

    @property
    def uncaught(self) -> list[str]:
        """The programs of which a number changes, and that the validator lets pass or that its user gets wrong."""
        return [name for name in self.changed if self.outcomes[name].refusal is None or self.outcomes[name].user]

    @property
    def refused(self) -> list[str]:
        """The programs that the validator refuses."""
        return [name for name, found in self.outcomes.items() if found.refusal is not None]

    @property
    def raised(self) -> list[str]:
        """The programs that raise an error by themselves."""
        return [name for name, found in self.outcomes.items() if found.raised is not None]

    @property
    def verdict(self) -> str:
        """In one or two words."""
        if self.error is not None:
            return "raises"
        if self.uncaught:
            return "UNCAUGHT"
        if self.changed:
            return "caught"
        return "raises" if self.raised else "harmless"
