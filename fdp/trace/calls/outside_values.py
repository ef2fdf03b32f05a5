"""The values that a step reads from outside are part of its signature: a trace holds for those that it was made with.

Such a value is a number, a flag such as `module.training`, a setting, or a closed-over tensor, which counts by its
identity: what is changed in place, a program sees. Each combination that a step was called with has a number, so that
the program for it is found again.

Two things are not part of it. What the function itself assigns while it is traced (a counter, a cache) would be another
one after every trace. And what has changed many times without a difference to the trace is most likely not read by it.
"""

from __future__ import annotations

import collections
import decimal
import fractions
import numbers
import threading
import types
from collections.abc import Iterable
from typing import Any

import torch

from fdp.trace.calls.arguments import PLAIN_TYPES
from fdp.trace.calls.expressions import last_name_of, of_contents, says_which_items
from fdp.trace.calls.names_in_code import names_read_for_more
from fdp.trace.calls.outside_search import Search
from fdp.trace.calls.watched_places import WatchedPlaces
from fdp.trace.trace import Trace

_MOST_VERSIONS = 64
_MOST_IN_VAIN = 8
"""So many changes without an effect on the trace, and a value is no longer followed."""

_MOST_SEARCHES = 20
"""Each search follows the names that the one before has found."""

_EXACT = frozenset({*PLAIN_TYPES, decimal.Decimal, fractions.Fraction})
"""Types whose objects are the same if their texts are."""

_NUMBERS = frozenset({bool, int, float})

_Leaves = list[tuple[str, Any]]


class OutsideValues:
    """The values that a function reads from outside, call by call.

    Args:
        function: the step.
    """

    def __init__(self, function: object) -> None:
        self._root = getattr(function, "__name__", "step"), function
        self._static: tuple[tuple[str, Any], ...] = ()
        self._names: frozenset[str] = frozenset()
        self._without: set[str] = set()
        self._own: set[str] = set()
        self._tensors: set[str] | None = None
        self._versions: dict[int, _Leaves] = {}
        self._vain: collections.Counter[str] = collections.Counter()
        self._now: tuple[WatchedPlaces, int, tuple[Any, ...]] | None = None  # in one, since threads read it
        self._last = 0
        self._changing = threading.Lock()

    def version(self, static: tuple[tuple[str, Any], ...] = ()) -> int:
        """The number of the values as they are now; the same for the same values.

        Args:
            static: objects that are passed to the step as they are, whose attributes it may read; with their names.
        """
        now = self._now
        if now is not None and _are_same(static, now[2]) and now[0].unchanged():
            return now[1]
        with self._changing:
            self._static = static
            found = self._search(self._tensors)
            same = (number for number, leaves in self._versions.items() if not _changed(leaves, found.leaves))
            number = next(same, None)
            if number is None:
                number = self._last = self._last + 1
                if len(self._versions) >= _MOST_VERSIONS:
                    del self._versions[next(iter(self._versions))]
                self._versions[number] = found.leaves
            else:
                self._versions[number] = self._versions.pop(number)  # to the end: it is the last one used
            self._now = found.watched, number, static
            return number

    def settle(self, traces: Iterable[Trace] = ()) -> None:
        """Leave out what the function itself has changed, after it ran.

        Args:
            traces: of the step; of closed-over tensors only those count that one of these uses.
        """
        with self._changing:
            used = {id(tensor) for trace in traces for tensor in _closed_over(trace)}
            if self._now is None or (not used and self._tensors is not None and self._now[0].unchanged()):
                return
            now = self._search(None)
            known = {label for label, value in now.leaves if id(value) in used}
            self._tensors = known if self._tensors is None else self._tensors | known
            before = self._versions.get(self._now[1], [])
            had = {label for label, _ in before}
            # Of tensors that have come to count, it is not known what they were.
            after = [x for x in now.leaves if self._counts(x) and (x[0] in had or not isinstance(x[1], torch.Tensor))]
            own = _changed([leaf for leaf in before if self._counts(leaf)], after)
            was, now_is = dict(before), dict(after)
            # (What an object has only from now on, it had from its class.)
            self._own.update(n for n in own if {type(was.get(n, 0)), type(now_is.get(n))} <= _NUMBERS)
            # Which keys a dict has is noted anew: somebody else may change others of them.
            self._leave_out(label for label in own if not says_which_items(label))

    def own_numbers(self) -> dict[str, Any]:
        """The numbers that the function itself has changed, of those that it reads not only to count them on."""
        if not self._own:
            return {}
        with self._changing:
            found = Search((self._root, *self._static), self._names, frozenset(), frozenset()).leaves
            read = {name for _, x in found if isinstance(x, types.CodeType) for name in names_read_for_more(x)}
            return {label: x for label, x in found if label in self._own and last_name_of(label) in read}

    def in_vain(self, earlier: Iterable[int], number: int) -> list[str]:
        """Learn that a version has the same trace as earlier ones.

        Returns:
            The expressions of values that are no longer followed from now on.
        """
        with self._changing:
            now = self._versions.get(number, [])
            changed = min(
                (_changed(self._versions[n], now) for n in earlier if n in self._versions), key=len, default=[]
            )
            self._vain.update(changed)
            known = {label for label, _ in now}
            given_up = [label for label in changed if self._vain[label] >= _MOST_IN_VAIN and label in known]
            given_up = [of_contents(label) or label for label in given_up]
            if given_up:
                self._leave_out(given_up)
            return given_up

    def in_effect(self) -> None:
        """Learn that a version has a trace of its own."""
        self._vain.clear()

    def describe(self, one: int, other: int) -> str:
        """What differs between two versions: one of the values, as text; empty for nothing."""
        before, after = self._versions.get(one, []), self._versions.get(other, [])
        changed = _changed(before, after) if before and after else []
        if not changed:
            return ""
        was, now = (_text(dict(leaves).get(changed[0])) for leaves in (before, after))
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        what = "another object was assigned to it" if was == now else f"{was} became {now}"
        return f"{changed[0]}, which the step reads from outside: {what:.200}{more}"

    def tensors_differ(self, one: int, other: int) -> bool:
        """Whether closed-over tensors are others in two versions."""
        before, after = self._versions.get(one, []), self._versions.get(other, [])
        changed = set(_changed(before, after) if before and after else [])
        return any(label in changed and isinstance(value, torch.Tensor) for label, value in before)

    def forget(self, number: int) -> None:
        """Let go of the values of a version."""
        with self._changing:
            self._versions.pop(number, None)

    def _search(self, tensors: Iterable[str] | None) -> Search:
        for _ in range(_MOST_SEARCHES):
            known = None if tensors is None else frozenset(tensors)
            found = Search((self._root, *self._static), self._names, frozenset(self._without), known)
            if found.names <= self._names:
                break
            self._names |= found.names
        return found

    def _counts(self, leaf: tuple[str, Any]) -> bool:
        label, value = leaf
        return not isinstance(value, torch.Tensor) or self._tensors is None or label in self._tensors

    def _leave_out(self, labels: Iterable[str]) -> None:
        if self._now is None:
            return
        self._without.update(labels)
        found, number = self._search(self._tensors), self._now[1]
        kept = {label for label, _ in found.leaves}
        for other, leaves in self._versions.items():
            self._versions[other] = [leaf for leaf in leaves if leaf[0] in kept]
        self._versions[number] = found.leaves
        self._now = found.watched, number, self._now[2]


def _changed(before: _Leaves, after: _Leaves) -> list[str]:
    """The expressions of leaves that are not the same; of all that one has and the other has not."""
    if len(before) == len(after) and all(map(_is_same, before, after)):
        return []
    one, other = dict(before), dict(after)
    names = [*one, *(name for name in other if name not in one)]
    return [n for n in names if n not in one or n not in other or not _is_same((n, one[n]), (n, other[n]))]


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one is other or (len(one) == len(other) and all(a[1] is b[1] for a, b in zip(one, other, strict=True)))


def _is_same(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    (name, a), (other_name, b) = one, other
    if name != other_name:
        return False
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is types.CodeType:
        return bool(a == b)
    # Not by `==`: -0.0 is another number than 0.0, and a NaN is no other than itself. A class of the user's may say
    # the same of different objects.
    is_of_numpy = kind.__module__ == "numpy" and issubclass(kind, numbers.Number)
    return (kind in _EXACT or is_of_numpy) and repr(a) == repr(b)


def _closed_over(trace: Trace) -> list[torch.Tensor]:
    whole = [] if trace.whole is None else _closed_over(trace.whole)
    return whole + [getattr(trace.graph, target) for target, _ in trace.closed_over]


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"
