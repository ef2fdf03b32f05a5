"""A mistake that is made on purpose: one replacement in one file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: short and unique.
        file: where, below the package.
        old: text that is there exactly once.
        new: what stands there with the mistake.
        why: what is wrong, in a sentence.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
