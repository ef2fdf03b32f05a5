"""Runs calls of operators on memory that holds terms, for both sides: trace and program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp.pytorch.dispatch import TorchDispatchMode
from fdp.verify.memory import View
from fdp.verify.rules import NEEDS_NO_ARGUMENT, RULES
from fdp.verify.schemas import Operator
from fdp.verify.terms import Term
from fdp.verify.values import ReadArguments, Values

_BY_PLACES = frozenset({"aten::as_strided_scatter", "aten::as_strided_copy"})
"""Operators that say by its place in memory which element of their first argument they mean."""

Fresh = Callable[[Term, list[View]], list[Any]]
"""(call, the tensors that it is given) -> its results in new memory: views, numbers; None for what is an argument."""


class Dispatch(TorchDispatchMode):
    """Passes each called operator to a function, unless it is idle."""

    def __init__(self, carry_out: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch's
        self._carry_out = carry_out
        self.idle = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if self.idle else self._carry_out(func, args, kwargs or {})


class TermMachine:
    """Runs calls of operators on terms.

    Attributes:
        values: makes terms.
        memory: what they lie in.
        drawn: all that has been drawn from generators of random numbers so far, in order.
        checked: calls without results, which are made for what they do besides (an error, a line in a log), counted.
    """

    def __init__(self, values: Values) -> None:
        self.values, self.memory = values, values.memory
        self._undrawn = self.drawn = values.terms.make(("generators",))
        self._matter: dict[Operator, list[tuple[int, str, bool, Any]]] = {}
        self.checked: Counter[Term] = Counter()

    @property
    def draws(self) -> bool:
        """Whether anything has been drawn."""
        return self.drawn is not self._undrawn

    def wrote(self, term: Term) -> None:
        """Note that a value was computed or copied."""

    def perform(self, operator: Operator, given: Sequence[Any], fresh: Fresh) -> list[Any]:
        """Run a call.

        Args:
            operator: what is called.
            given: what it is given for each of its parameters, with views in place of tensors.
            fresh: makes its results, if it has some in new memory.

        Returns:
            Each result, or None for one that is an argument.
        """
        if not operator.entrywise:
            return self._call(operator, given, fresh)
        lists = [value for p, value in zip(operator.parameters, given, strict=True) if p.entries and value]
        made: list[Any] = []

        def all_entries(call: Term, reads: list[View]) -> list[Any]:
            # The results of all entries come at once; each entry then fills its own.
            if not made:
                made.extend(fresh(call, reads))
            return [each[entry] for each in made]

        for entry in range(max(map(len, lists), default=0)):
            own = [
                (value[entry] if value else None) if p.entries and isinstance(value, (list, tuple)) else value
                for p, value in zip(operator.parameters, given, strict=True)
            ]
            self._call(operator, own, all_entries)
        return made or [None] * len(operator.results)

    def _call(self, operator: Operator, given: Sequence[Any], fresh: Fresh) -> list[Any]:
        values, name = self.values, operator.name
        written = operator.written(given)
        arguments, reads, values_read = self._arguments(operator, given, written)
        draws = operator.draws(given)
        if draws:
            # Which number is drawn for which element depends on their order in memory.
            arguments["*drawn"] = self.drawn
            arguments["*layout"] = tuple(map(_memory_order, values_read))
        elif name in _BY_PLACES:
            # Without an offset it looks from where the tensor begins, wherever that is.
            relative = operator.by_name(given).get("storage_offset") is None
            arguments["*layout"] = steps(values_read[0]) if relative else places(values_read[0])
        call = values.call(name, arguments)
        if not operator.results and not written:
            self.checked[call] += 1
        results: list[Any] = [None] * len(operator.results)
        if operator.new:
            for position, made in zip(operator.new, fresh(call, reads), strict=True):
                results[position] = made
        targets: list[tuple[Any, View]] = []
        for at in written:
            parameter = operator.parameters[at]
            index: Any = parameter.name if parameter.returned is None else parameter.returned
            for place, view in views_in(given[at]):
                targets.append((index if place is None else (index, place), view))
        if not operator.uninitialised:
            for index, made in enumerate(results):
                targets += [(index if place is None else (index, place), view) for place, view in views_in(made)]
        rule = RULES.get(name)
        if rule is not None and any(type(key) is tuple for key in arguments):
            rule = None  # an operator that writes where it reads computes what it computes, and not what a rule says
        by_name = {} if rule is None else operator.by_name(given)
        stores = []
        for index, view in targets:
            term = None if rule is None else rule(values, arguments, by_name, index, view.shape, view.dtype)
            made = values.result(call, index, view.shape, view.dtype)
            if term is not None:
                # What is known by its bytes is so by every name.
                made = values.same(term, made) if values.folded(call) else term
            stores.append((view, made))
        for view, term in stores:
            self.memory.write(view, term)
            self.wrote(term)
        if draws:
            orders = tuple((_memory_order(view), view.dtype) for _, view in targets)
            self.drawn = values.terms.make(("drawn", call, orders))
        return results

    def _arguments(
        self, operator: Operator, given: Sequence[Any], written: list[int]
    ) -> tuple[ReadArguments, list[View], list[View]]:
        values = self.values
        unread = operator.unread(given)
        if operator.name in NEEDS_NO_ARGUMENT:
            unread = (*unread, *NEEDS_NO_ARGUMENT[operator.name](operator.by_name(given)))
        arguments: ReadArguments = {}
        views: list[View] = []
        read: list[tuple[int, str, View]] = []
        for at, name, is_read, default in self._matters(operator):
            value = given[at]
            kind = type(value)
            found: Sequence[View] = ()
            if kind is View:
                found = (value,)
            elif kind is list or kind is tuple:
                found = [view for _, view in views_in(value)]
            elif value is default:
                continue
            views += found
            if not found:
                encoded = values.encode(value)
            elif is_read and name not in unread:
                read.extend((at, name, view) for view in found)
                encoded = values.encode(value)
            elif at not in written:  # looked at for its shape alone
                encoded = tuple(("like", view.shape, view.dtype) for view in found)
            else:
                continue
            if encoded != default or type(encoded) is not type(default):
                arguments[name] = encoded
        for at in written:
            for _, view in views_in(given[at]):
                self._mark_overlaps(operator, arguments, at, view, read, written, given)
        return arguments, views, [view for _, _, view in read]

    def _matters(self, operator: Operator) -> list[tuple[int, str, bool, Any]]:
        """The arguments that the result of an operator depends on: position, name, whether its values do, default."""
        found = self._matter.get(operator)
        if found is None:
            found = self._matter[operator] = [
                (at, p.name, p.read, self.values.encode(p.default))
                for at, p in enumerate(operator.parameters)
                if p.matters
            ]
        return found

    def _mark_overlaps(
        self,
        operator: Operator,
        arguments: ReadArguments,
        at: int,
        target: View,
        read: list[tuple[int, str, View]],
        written: list[int],
        given: Sequence[Any],
    ) -> None:
        """An operator that writes memory which it still reads computes something else. So both layouts are part of the
        call.

        Not so if it looks at each element before it writes it, and reads and writes the same ones.
        """
        for other, name, view in read:
            if other != at and view.overlaps(target) and not (operator.pointwise and view.lies_like(target)):
                arguments["*overlaps", at, name] = (view.start - target.start, view.shape, view.stride, view.dtype)
        for other in written:
            for _, view in views_in(given[other]) if other > at else ():
                if view.overlaps(target):
                    arguments["*both written", at, other] = (view.start - target.start, view.shape, view.stride)


def _memory_order(view: View) -> tuple[Any, ...]:
    """The memory order of a tensor's elements, as far as random draws depend on it.

    That is in which order, and where there are gaps, however wide; of elements that share memory, all of it.
    """
    if view.numel == 0:
        return ()
    found, reach = [], 1
    dims = [(step, at) for at, (step, number) in enumerate(zip(view.stride, view.shape, strict=True)) if number != 1]
    for step, at in sorted(dims):
        if step < reach:
            return view.stride
        found.append((at, step == reach))
        reach = step * view.shape[at]
    return tuple(found)


def steps(view: View) -> tuple[Any, ...]:
    """The distances of the elements of a tensor, along the dimensions that have more than one."""
    return tuple(step for step, size in zip(view.stride, view.shape, strict=True) if size != 1)


def places(view: View) -> tuple[Any, ...]:
    """Where a tensor begins in its memory, and the distances of its elements.

    Memory of a step's arguments is told apart from other memory: at run time an argument may begin late in its own.
    """
    return view.block.kind == "input", view.start, *steps(view)


def holds_tensors(value: object) -> bool:
    """Whether a value is a tensor, or a list with one in it."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_tensors, value))
    return isinstance(value, torch.Tensor)


def views_in(value: Any) -> Sequence[tuple[Any, View]]:
    """The views in an argument or a result, with their positions if it is a list."""
    kind = type(value)
    if kind is View:
        return ((None, value),)
    if kind is list or kind is tuple:
        return [(at, each) for at, each in enumerate(value) if type(each) is View]
    return ()
