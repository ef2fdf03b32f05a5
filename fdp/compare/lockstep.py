"""Compare a program with the graph of its trace operator by operator, each on exactly the inputs that it had in the
program.

Rounding may be amplified by what comes after it: of a gradient that is zero but for rounding, Adam makes a whole step
to one side or the other. End to end that looks like a mistake. Here the graph runs beside the program, in the order of
the plan; after each operator its result is compared with the program's, and then takes the program's value. So nothing
is amplified: each difference is the one that a single operator makes, and may be as large as that operator rounds.

How much an operator rounds is measured, where results differ in a bit: it runs again on inputs that differ in their
last places.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fdp.compare.copies import copy_of
from fdp.compare.leaves import distances, gap_of, pieces_of, usual_size
from fdp.compare.replay import Lookup, call_node, held_value, makes_values
from fdp.compare.restored import RandomState, random_states, set_random_states, undisturbed
from fdp.compare.ulps import change_last_places_, rounds
from fdp.context.ambient import plain_context
from fdp.distributed.other_ranks import OtherRanks
from fdp.emit.memory.planning import result_name
from fdp.plan import Run, Start
from fdp.runtime.emitted import Emitted
from fdp.trace.operators.effects import effects_of, is_marker
from fdp.trace.operators.source import located

_VARIANTS = 4
_LAST_PLACES = 4
_TIMES = 16
"""An element may differ by so many times what changes of the inputs in their last places make of it, or of elements
usually; and by so many units in its last place, or in that of a usual element."""

_SHOWN = 5


def unlike_graph(
    emitted: Emitted, inputs: list[torch.Tensor], others: OtherRanks
) -> tuple[list[str], list[torch.Tensor]]:
    """Run a program in lockstep with the graph of its trace.

    Args:
        emitted: the program, operator by operator.
        inputs: of the step, for the program; they are changed. The graph runs on copies of them.
        others: what this rank takes the other ranks to hold.

    Returns:
        The operators whose results in the program are not theirs, with their lines and by how much; the first few. And
        the tensors among the results of the program.
    """
    runs: list[_GraphRun] = []

    def tick() -> None:
        runs[0].look(sys._getframe(1))

    timed = emitted.timed(tick)
    runs.append(_GraphRun(timed, [copy_of(tensor) for tensor in inputs], others))
    try:
        made = timed.dry_run_apart(inputs, others.kind)
    finally:
        timed.residence.release()
    found = [tensor.clone() for tensor in made]
    runs[0].compare_outputs(found)
    return runs[0].offenders[:_SHOWN], found


def in_order_of_plan(emitted: Emitted, inputs: Sequence[torch.Tensor], others: OtherRanks) -> list[torch.Tensor]:
    """Run the graph of a trace in the order of the plan, with the graph's operators and in separate memory.

    Where the plan waits for all that an operator needs, the results are those of the graph in its own order: the bits.

    Returns:
        The tensors among its results.
    """
    with torch.no_grad(), undisturbed(emitted), plain_context():
        return _GraphRun(emitted, inputs, others, alone=True).run()


class _GraphRun:
    """A run of the graph in the order of the plan, in lockstep with a program.

    Args:
        timed: the program.
        inputs: of the step, for the graph.
        others: what this rank takes the other ranks to hold.
        alone: whether there is no program to compare with.
    """

    def __init__(self, timed: Emitted, inputs: Sequence[torch.Tensor], others: OtherRanks, alone: bool = False) -> None:
        self._timed, self._others, self._alone = timed, others, alone
        trace = timed.plan.trace
        graph = trace.graph.graph
        self._values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        self._variants: dict[fx.Node, list[Any]] = {}
        self._before: RandomState | None = None
        self._parts, self._ended, self._next = timed.program.parts, -1, 0
        self._outputs: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        self._last = self._last_positions()
        self.offenders: list[str] = []

    def run(self) -> list[torch.Tensor]:
        """Run all of it without the program; returns the outputs."""
        for at in range(len(self._timed.plan.schedule)):
            self._carry_out(at, {})
        return [self._value(node) for node in self._outputs]

    def look(self, frame: Any) -> None:
        """Compare the values of the program's part that has just ended; `frame` is the program's."""
        names = {**frame.f_globals, **frame.f_locals}
        after = self._before if self._before is None else random_states(self._timed)
        if self._ended >= 0:
            with torch.no_grad():
                position = self._position(self._ended)
                while self._next <= position:
                    # An operator without a line in the program cannot be seen there at its moment: its value may be
                    # overwritten by now.
                    self._carry_out(self._next, names if self._next == position else {})
                    self._next += 1
        self._ended += 1
        if after is not None:
            set_random_states(self._timed, after)
        draws = self._ended < len(self._parts) and self._draws(self._position(self._ended))
        self._before = random_states(self._timed) if draws else None

    def compare_outputs(self, found: Sequence[torch.Tensor]) -> None:
        """Compare the results of the program."""
        for node, shown in zip(self._outputs, found, strict=True):
            own, variants = self._value(node), self._variants.get(node, [])
            self._judge(node, own, shown, lambda own=own, variants=variants: [(own, value) for value in variants])

    def _position(self, part: int) -> int:
        """The position of a program's part in the schedule."""
        kind, index = self._parts[part].kind, self._parts[part].index
        if kind == "run":
            return index
        if kind == "pack":
            return -1  # what is packed is compared when the message is there
        schedule = self._timed.plan.schedule
        starts = kind == "start"
        return next(
            at
            for at, item in enumerate(schedule)
            if not isinstance(item, Run) and item.bucket == index and isinstance(item, Start) is starts
        )

    def _draws(self, position: int) -> bool:
        item = self._timed.plan.schedule[position] if position >= 0 else None
        return isinstance(item, Run) and any(effects_of(node).random for node, _ in self._calls_of(item))

    def _calls_of(self, item: Run) -> list[tuple[fx.Node, list[int]]]:
        operations = [self._timed.plan.trace.operations[index] for index in item.operations]
        entries = [operation.entry for operation in operations if operation.entry is not None]
        return [(self._timed.plan.trace.nodes[operations[0].node], entries)]

    def _members(self, bucket: int) -> list[fx.Node]:
        trace, members = self._timed.plan.trace, self._timed.plan.buckets[bucket].members
        return [trace.marker(member) for member in members]

    def _last_positions(self) -> dict[int, list[fx.Node]]:
        """For each position in the schedule, the values that are not needed after it."""
        last: dict[fx.Node, int] = {}
        for at, item in enumerate(self._timed.plan.schedule):
            nodes = [node for node, _ in self._calls_of(item)] if isinstance(item, Run) else self._members(item.bucket)
            for node in nodes:
                last.update(dict.fromkeys((node, *_with_owners(node)), at))
        found: dict[int, list[fx.Node]] = {}
        for node in {each for output in self._outputs for each in (output, _owner(output))}:
            last.pop(node, None)
        for node, at in last.items():
            found.setdefault(at, []).append(node)
        return found

    def _carry_out(self, at: int, names: Mapping[str, Any]) -> None:
        item = self._timed.plan.schedule[at]
        if isinstance(item, Run):
            for node, entries in self._calls_of(item):
                if node not in self._values or entries:
                    self._call(node, entries, names)
        else:
            for marker in self._members(item.bucket):
                if marker not in self._values:
                    self._call(marker, [], {})
                if not isinstance(item, Start) and not self._alone:
                    self._settle(marker, names)
        for node in self._last.get(at, ()):
            self._values.pop(node, None)
            self._variants.pop(node, None)

    def _value(self, node: fx.Node) -> Any:
        if node not in self._values:
            self._values[node] = (
                held_value(node) if node.op == "get_attr" else call_node(node, self._value, self._others)
            )
        return self._values[node]

    def _call(self, node: fx.Node, entries: list[int], names: Mapping[str, Any]) -> None:
        """Call the same operator as the program, on the same values, and compare."""
        effects = effects_of(node)
        arguments = node.all_input_nodes
        for argument in arguments:
            self._value(argument)
        if not makes_values(node):
            self._keep(node, entries, call_node(node, self._value, self._others, entries))
            if any(argument in self._variants for argument in arguments):
                self._variants[node] = [
                    call_node(node, functools.partial(self._varied, at), self._others) for at in range(_VARIANTS)
                ]
            return
        if self._alone:
            self._keep(node, entries, call_node(node, self._value, self._others, entries))
            return
        kept = {argument: self._values[argument].clone() for argument in effects.writes}
        state = self._before if effects.random else None
        if state is not None:
            set_random_states(self._timed, state)
        self._keep(node, entries, call_node(node, self._value, self._others, entries))

        def again(at: int) -> tuple[Any, dict[fx.Node, torch.Tensor]]:
            """The call once more, on inputs that differ in their last places."""
            if state is not None:
                set_random_states(self._timed, state)
            given = {
                argument: self._varied(at, argument) if argument not in kept else _varied(kept[argument].clone(), at)
                for argument in arguments
                if isinstance(self._values[argument], torch.Tensor)
            }
            look_up: Lookup = lambda argument: given.get(argument, self._values.get(argument))  # noqa: E731
            return call_node(node, look_up, self._others, entries), given

        written = [argument for argument in effects.writes if not entries or argument in _of_entries(node, entries)]
        if is_marker(node) and not is_marker(node, "vary", "axis_index"):
            if any(argument in self._variants for argument in arguments) or self._timed.group.size > 1:
                self._variants[node] = [again(at)[0] for at in range(_VARIANTS)]
            return
        self._compare(node, entries, written, names, again)

    def _keep(self, node: fx.Node, entries: list[int], result: object) -> None:
        if entries and isinstance(result, (list, tuple)):
            values = self._values.setdefault(node, [None] * len(node.meta["val"]))
            for entry, value in zip(entries, result, strict=True):
                values[entry] = value
        else:
            self._values[node] = result

    def _varied(self, at: int, node: fx.Node) -> Any:
        """A value with changed last places: the computed one, where the program's value is not visible."""
        if node in self._variants:
            return self._variants[node][at]
        value = self._value(node)
        return _varied(value.clone(), at) if isinstance(value, torch.Tensor) else value

    def _compare(self, node: fx.Node, entries: list[int], written: list[fx.Node], names: Any, again: Any) -> None:
        """Compare results and changed arguments with those of the program, and continue with the program's."""
        varied: list[tuple[Any, dict[fx.Node, torch.Tensor]]] = []

        def variants() -> list[tuple[Any, dict[fx.Node, torch.Tensor]]]:
            if not varied:
                varied.extend(again(at) for at in range(_VARIANTS))
            return varied

        result = self._values[node]
        if not written and isinstance(result, torch.Tensor):
            shown = self._shown(node, names)
            if shown is None:
                if node.users and rounds(result):
                    self._variants[node] = [value for value, _ in variants()]
            elif not effects_of(node).uninitialised:
                self._judge(node, result, shown, lambda: [(result, value) for value, _ in variants()])
        elif not written and isinstance(result, (list, tuple)):
            for index, one in enumerate(result):
                at = entries.index(index) if index in entries else index
                shown = self._entry(node, index, names) if not entries or index in entries else None
                if isinstance(one, torch.Tensor) and shown is not None:
                    self._judge(node, one, shown, lambda one=one, at=at: [(one, value[at]) for value, _ in variants()])
        for argument in written:
            owner, own = _owner(argument), self._values[argument]
            shown = self._shown(owner, names)
            if shown is not None:
                self._judge(
                    node,
                    self._value(owner),
                    shown,
                    lambda a=argument, own=own: [(own, given[a]) for _, given in variants()],
                )

    def _settle(self, node: fx.Node, names: Mapping[str, Any]) -> None:
        """Compare the result of a message that has arrived."""
        result, shown = self._values[node], self._shown(node, names)
        if shown is not None:
            variants = self._variants.pop(node, [])
            self._judge(node, result, shown, lambda: [(result, value) for value in variants])

    def _shown(self, node: fx.Node, names: Mapping[str, Any]) -> torch.Tensor | None:
        """The program's value of a node, if it is visible."""
        value = names.get(self._timed.program.names.get(node.name, ""))
        return value if isinstance(value, torch.Tensor) else None

    def _entry(self, node: fx.Node, index: int, names: Mapping[str, Any]) -> torch.Tensor | None:
        whole = names.get(self._timed.program.names.get(node.name, ""))
        if isinstance(whole, (list, tuple)):
            value = whole[index]
        else:
            value = names.get(f"{node.name}_entry{index}", names.get(result_name(node, index)))
        return value if isinstance(value, torch.Tensor) else None

    def _judge(self, node: fx.Node, own: torch.Tensor, shown: torch.Tensor, pairs: Any) -> None:
        """Check that a value of the program is within rounding of the graph's, which continues with the program's."""
        if (own.shape, own.dtype) != (shown.shape, shown.dtype):
            return
        if (gap := gap_of(shown, own)[0]) == 0:
            return
        if not (own.is_floating_point() or own.is_complex()):
            self.offenders.append(f"{located(node)}: differs")
        elif beyond := _beyond_rounding(own, shown, [pair for pair in pairs() if pair[0].shape == pair[1].shape]):
            self.offenders.append(f"{located(node)}: differs by {gap:.3g}, where it rounds by {beyond:.3g}")
        own.copy_(shown)


def _beyond_rounding(
    own: torch.Tensor, shown: torch.Tensor, moved: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> float | None:
    """The rounding of a value, if one of its elements differs from the graph's by more than rounding. None if none
    does.

    Args:
        own: the graph's value.
        shown: the program's.
        moved: pairs of what the operator computes, and what it computes of inputs that differ in their last places.
    """
    step = torch.finfo(own.dtype).eps
    usual = step * usual_size(own) + max((usual_size(two, one) for one, two in moved), default=0.0)
    values = [own, shown, *itertools.chain(*moved)]
    for mine, other, *rest in pieces_of(*values):
        away = distances(other, mine)
        moves = torch.zeros_like(away)
        for one, two in zip(rest[::2], rest[1::2], strict=True):
            torch.maximum(moves, distances(two, one), out=moves)
        lost = moves.isinf()  # rounding may turn a number into infinity or NaN: these are allowed, and no other number
        size = mine.detach().to(away.device).abs()
        allowed = _TIMES * (moves.masked_fill_(lost, 0.0) + step * size + usual)
        wrong = (away > allowed) & ~(lost & away.isinf())
        if wrong.any():
            return float(allowed[wrong].max())
    return None


def _varied(copy: torch.Tensor, seed: int) -> torch.Tensor:
    return change_last_places_(copy, _LAST_PLACES, torch.Generator(copy.device).manual_seed(seed))


def _owner(node: fx.Node) -> fx.Node:
    """The value that a node is a view of."""
    while node.op == "call_function" and effects_of(node).view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _with_owners(node: fx.Node) -> set[fx.Node]:
    """The arguments of a node, and the values that these are views of."""
    found: set[fx.Node] = set()
    for argument in node.all_input_nodes:
        found |= {argument, _owner(argument)}
    return found


def _of_entries(node: fx.Node, entries: Sequence[int]) -> set[fx.Node]:
    """The arguments of some entries of a call."""
    found: set[fx.Node] = set()
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, fx.Node):
            found.add(value)
        elif isinstance(value, (list, tuple)) and value:
            found.update(value[entry] for entry in entries if isinstance(value[entry], fx.Node))
    return found
