"""The programs that a step keeps: one for each of the signatures that were called last.

A signature is that of the arguments, and what besides them decides on a trace: the group, settings of torch, and the
values that the function reads from outside.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fdp.compare import Again
from fdp.context.ambient import ambient_context
from fdp.distributed.group import Group
from fdp.runtime import Emitted
from fdp.step.progress import Progress
from fdp.trace import Flat, OutsideValues, RememberedCall, RememberedCalls, Roles, Trace

_MOST_SIGNATURES = 64
"""So many signatures a step keeps, those that were called last; each has a program and bucket memory of its own."""

_WITHOUT_ATTRIBUTES = frozenset({bool, int, float, str, type(None)})

call_numbers = itertools.count()
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
    remembered: RememberedCall[Known] | None = None
    last_call: int = 0
    progress: Progress | None = None


CallPlace = tuple[int, Group, Any, int]
"""Where a call happens: its number of arguments, the group, what `ambient_context` says, and the number of the values
that the function reads from outside."""


class Signatures(dict[Any, Known]):
    """The prepared signatures.

    Args:
        step: the name of the step, for warnings.
        function: the step.

    Attributes:
        calls: the calls that are recognised without their signature.
    """

    def __init__(self, step: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self._step = step
        self._forgotten: set[int] | None = set()
        self._outside = OutsideValues(function)
        self._offsets_matter = False  # whether programs differ where inputs begin elsewhere in their memory
        self._warned = self._said = False
        self.calls: RememberedCalls[Known] = RememberedCalls()

    def place(self, args: tuple[Any, ...], roles: Roles, group: Group) -> CallPlace:
        """Where a call happens."""
        static = _objects(args, roles) if roles.static else ()
        return len(args), group, ambient_context(), self._outside.version(static)

    def key(self, flat: Flat, place: CallPlace) -> Any:
        """The key by which the program of a call is found."""
        offsets = tuple(tensor.storage_offset() for tensor in flat.tensors) if self._offsets_matter else ()
        return flat.key, place, offsets

    def find(self, key: object) -> Known | None:
        """The preparation of a signature, if it is kept."""
        try:
            return self.get(key)
        except TypeError:
            return None  # an argument cannot be hashed; which one, is said when the signature is prepared

    def with_other_values(self, flat: Flat, place: CallPlace) -> list[tuple[Known, str]]:
        """The preparations of the same arguments with other values from outside, latest first.

        Args:
            flat: the arguments.
            place: where they are called.

        Returns:
            Each with what has changed since, as text.
        """
        found = [(key[1][3], known) for key, known in self.items() if (key[0], key[1][:3]) == (flat.key, place[:3])]
        found.sort(key=lambda item: (item[1].last_call, item[0]), reverse=True)
        return [(known, self._outside.describe(version, place[3])) for version, known in found]

    def keep(self, flat: Flat, place: CallPlace, known: Known) -> None:
        """Keep a preparation, and forget the one that was called longest ago if there are too many."""
        self._offsets_matter |= known.emitted.plan.trace.depends_on_storage_offsets
        key = self.key(flat, place)
        known.last_call = next(call_numbers)
        if self._forgotten is not None and hash(key) in self._forgotten:
            self._forgotten = None  # said once
            warnings.warn(
                f"fdp: step {self._step!r} was traced again for arguments that it had been traced for: it keeps the "
                f"{_MOST_SIGNATURES} signatures that were called last. Pad batches to fewer sizes; or make a step for "
                "each range of sizes.",
                stacklevel=6,
            )
        if (warning := self._forget_other_tensors(place)) is not None:
            warnings.warn(warning, stacklevel=6)
        if serves := [other[1][3] for other, earlier in self.items() if earlier is known]:
            if given_up := self._outside.in_vain(serves, place[3]):
                warnings.warn(
                    f"fdp: step {self._step!r} was traced again and again because of {' and '.join(given_up)}, which "
                    "it reads from outside, and each trace was the same. From now on fdp does not look at that any "
                    "more: if it makes a difference, pass it as an argument.",
                    stacklevel=6,
                )
        else:
            self._outside.in_effect()
        if len(self) >= _MOST_SIGNATURES:
            oldest = min(self, key=lambda other: self[other].last_call)
            del self[oldest]
            if self._forgotten is not None:
                self._forgotten.add(hash(oldest))
        self[key] = known

    def forget_all(self) -> None:
        """Forget all programs: other ranks would meet them with others."""
        self.clear()
        self.calls = RememberedCalls()

    def settle(self, trace: Trace | None = None) -> None:
        """After the function has run as Python: what it changes itself is not part of its signature."""
        self._outside.settle([] if trace is None else [trace])

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """As `settle`, around runs of the function; warns of numbers that each of them changes, and that it reads."""
        before = {} if self._said else self._outside.own_numbers()
        try:
            yield
        finally:
            self.settle()
        now = self._outside.own_numbers() if before else {}
        kept = ((name, repr(was), repr(now[name])) for name, was in before.items() if name in now)
        moved = [f"{name} (it was {was}, and is {found})" for name, was, found in kept if was != found]
        if moved:
            self._said = True
            warnings.warn(
                f"fdp: step {self._step!r} reads what it changes itself: {', '.join(moved)}. fdp runs it as Python to "
                "trace it and to compare, not at every call: all calls do what the first one did. Pass a number that "
                "counts calls as a tensor in the state, and choose by torch.where or torch.cond; or count outside of "
                "the step.",
                stacklevel=8,
            )

    def _forget_other_tensors(self, place: CallPlace) -> str | None:
        """Forget programs that hold closed-over tensors which the user has let go of; returns a warning, once."""
        old = [key for key in self if self._outside.tensors_differ(key[1][3], place[3])]
        if not old:
            return None
        changed = self._outside.describe(old[-1][1][3], place[3])
        for key in old:
            del self[key]
        for version in {key[1][3] for key in old}:
            self._outside.forget(version)
        self.calls = RememberedCalls()
        if self._warned:
            return None
        self._warned = True
        return (
            f"fdp: step {self._step!r} was traced again, because of {changed}. It will be traced again each time, "
            "which takes as long as several steps: pass the tensor as an argument."
        )


def _objects(args: tuple[Any, ...], roles: Roles) -> tuple[tuple[str, Any], ...]:
    """The static arguments that have attributes which a step may read, with their names."""
    fixed = ((roles.names[at], args[at]) for at in sorted(roles.static))
    return tuple(item for item in fixed if type(item[1]) not in _WITHOUT_ATTRIBUTES)
