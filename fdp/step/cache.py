"""The programs that a step keeps: one for each of the signatures that were called last."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from typing import Any

from fdp.compare import Again
from fdp.runtime import Emitted
from fdp.step.progress import Progress

_MOST_SIGNATURES = 64
"""So many signatures a step keeps, those that were called last; each has a program and bucket memory of its own."""

clock = itertools.count()
"""Counts calls, to find the signature that was called last."""


@dataclass
class Known:
    """A signature that has been prepared.

    Attributes:
        emitted: what runs.
        again: when it is compared with the function again; None for never.
        looks_at: the next of its calls for which that is asked; 0 for none.
        calls: how often it has been called.
        remembered: what is remembered of a call of it.
        last_call: when it was called last.
        progress: what has been told of its first call, until that is over.
    """

    emitted: Emitted
    again: Again | None = None
    looks_at: int = 0
    calls: int = 0
    remembered: Any = None
    last_call: int = 0
    progress: Progress | None = None


class Signatures(dict[Any, Known]):
    """The prepared signatures.

    Args:
        step: the name of the step, for the warning.
    """

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step
        self._forgotten: set[int] | None = set()

    def find(self, key: Any) -> Known | None:
        """The preparation of a signature, if it is kept."""
        try:
            return self.get(key)
        except TypeError:
            return None  # an argument cannot be hashed; which one, is said when the signature is prepared

    def keep(self, key: Any, known: Known) -> None:
        """Keep a preparation, and forget the one that was called longest ago if there are too many."""
        known.last_call = next(clock)
        if self._forgotten is not None and hash(key) in self._forgotten:
            self._forgotten = None  # said once
            warnings.warn(
                f"fdp: step {self._step!r} was traced again for arguments that it had been traced for: it keeps the "
                f"{_MOST_SIGNATURES} signatures that were called last. Pad batches to fewer sizes; or make a step for "
                "each range of sizes.",
                stacklevel=6,
            )
        if len(self) >= _MOST_SIGNATURES:
            oldest = min(self, key=lambda other: self[other].last_call)
            del self[oldest]
            if self._forgotten is not None:
                self._forgotten.add(hash(oldest))
        self[key] = known
