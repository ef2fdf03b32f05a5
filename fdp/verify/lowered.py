"""The proof that a graph for a compiler computes what the trace says, message by message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fdp.context.garbage import without_collections
from fdp.errors import build_message
from fdp.plan.plan import Plan
from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.trace.trace import Trace
from fdp.verify.combined import OPERATORS, OwnRank, combination_of
from fdp.verify.decomposed import CHANGED, Decomposed, changed_by, decompose
from fdp.verify.drawn import drawn_as_said, drawn_in_trace, drawn_inside, higher_order_draws
from fdp.verify.extents import general_extent
from fdp.verify.failure import VerificationError
from fdp.verify.graphs import GraphOnTerms, Special
from fdp.verify.higher import apply_loop
from fdp.verify.memory import Block, View, view_of
from fdp.verify.message_checks import Messages
from fdp.verify.reference import fill_with_own
from fdp.verify.schemas import operator_of
from fdp.verify.terms import Term, term_text
from fdp.verify.values import Values

Returned = tuple[str, int]
"""Where a result of the step is: ("given", number of an input) or ("made", number of a result of the graph)."""


def verify_lowered(
    plan: Plan,
    graph: fx.GraphModule,
    held: Sequence[torch.Tensor],
    program: Any,
    returned: Sequence[Returned],
    rank: int,
    communicates: bool,
    decompositions: Mapping[Any, Callable[..., Any]],
    generators: Sequence[torch.Generator] | None,
) -> None:
    """Prove that a graph computes what the trace of a plan says, before a compiler gets it.

    What the compiler makes of it is not proved: that is compared with the step, on numbers.

    Args:
        plan: the plan.
        graph: takes the inputs of the step, `held`, and the places of `program`; changes some of them in place.
        held: tensors that are the same at every call: closed-over ones, and the rank.
        program: places and layouts of its buckets (`places`, `layouts`, `scaled`).
        returned: where each result of the step is.
        rank: this process's.
        communicates: False in a world of one, where a mean or sum of one value is that value.
        decompositions: how the compiler wants operators taken apart.
        generators: what draws in the graph mean by the numbers of generators; None if draws are not the trace's own,
            but the compiler's, of which nothing is proved but their order.

    Raises:
        VerificationError: it does not, or it cannot be followed.
    """
    trace = plan.trace
    apart = decompose(trace, decompositions, generators is not None)
    with without_collections():
        reference = _Decomposed(trace, apart, rank)
        lowered = _Lowered(reference, graph, held, program, generators or ())
        lowered.messages = messages = Messages(trace, plan, program, reference, communicates)
        try:
            made = lowered.graph.run()
        except VerificationError as error:
            raise _failure(trace, lowered, [str(error)]) from error
        offenders = [*messages.missing(), *_wrong(trace, reference, lowered, made, returned)]
        if lowered.graph.drawn is not reference.graph.drawn:
            offenders.append("random numbers are not drawn by the same operators in the same order")
        if lowered.graph.checked != reference.graph.checked:
            offenders.append("values are not checked by the same operators")
        if offenders:
            raise _failure(trace, lowered, offenders)


def _failure(trace: Trace, lowered: _Lowered, offenders: list[str]) -> VerificationError:
    if lowered.graph.suspect is not None:
        offenders = [f"first at {lowered.graph.suspect}, which the trace does not compute", *offenders]
    return VerificationError(
        build_message(
            f"the graph to compile of step {trace.name!r} does not compute what its trace says.",
            offenders,
            remedy="report this to the authors of fdp, with the step.",
        )
    )


def _wrong(
    trace: Trace, reference: _Decomposed, lowered: _Lowered, made: Sequence[Any], returned: Sequence[Returned]
) -> Iterator[str]:
    values, given_back = reference.values, set()
    donates, owners = any(item.donated for item in trace.inputs), dict[Block, str]()
    named = [output for output in trace.outputs if output.node is not None]
    for output, (view, term), (where, number) in zip(named, reference.outputs, returned, strict=True):
        found = lowered.inputs[number] if where == "given" else made[number]
        value = values.read(found)
        if value is not term:
            yield f"{output.name} is {term_text(value)}, not {term_text(term)}"
        said = trace.nodes[str(output.node)].meta["val"]
        extent = general_extent(said.shape, said.stride())
        if (found.shape, found.stride, found.dtype) != (extent.shape, extent.stride, view.dtype):
            yield f"{output.name} has shape {found.shape}, strides {found.stride}, {found.dtype}"
        if where == "given":
            given_back.add(number)
            if output.slot != number and trace.inputs[number].donated:
                yield f"{output.name} is returned as {trace.inputs[number].name}"
        elif found.numel:
            whose = next((at for at, each in enumerate(lowered.inputs) if each.block is found.block), None)
            kept = whose is not None and not trace.inputs[whose].donated and reference.inputs[whose].block is view.block
            if found.block.kind != "fresh" and not kept:
                yield f"{output.name} lies in memory that is not its own ({found.block.kind} {found.block.name})"
            other = owners.setdefault(found.block, output.name)
            if other != output.name and donates:
                yield f"{output.name} shares memory with {other}"
    for number, item in enumerate(trace.inputs):
        if number in given_back and any(output.slot == number for output in named):
            continue
        one, two = values.read(lowered.inputs[number]), values.read(reference.inputs[number])
        if one is not two:
            yield f"{item.name} holds something else at the end: {term_text(one)}, not {term_text(two)}"


class _Decomposed:
    """One run of a decomposed trace on terms.

    Attributes:
        graph: it.
        inputs: its inputs.
        outputs: its results, and what they are at its end.
        markers: for each reduction, by the name of its node in the trace, what it computes.
        shares: for each value whose mean is taken, divided by the number of ranks, and the dimension along which it is
            taken, the value itself.
        held: what it closes over, by identity.
    """

    def __init__(self, trace: Trace, found: Decomposed, rank: int) -> None:
        self.trace, self._found = trace, found
        self.values = values = Values(OwnRank(rank, trace.world_size, trace.dimensions))
        self.markers: dict[str, Term] = {}
        self.shares: dict[tuple[Term, str], Term] = {}
        self.held: dict[int, Term] = {}
        self.inputs = [input_view(values, trace, number) for number in range(len(trace.inputs))]
        closed_over = []
        for number, node in enumerate(found.closed_over):
            tensor: Any = getattr(trace.graph, str(node.target))
            term = self.held.get(id(tensor))
            if term is None:
                key = ("closed over", number, tuple(tensor.shape), tensor.dtype)
                term = self.held[id(tensor)] = values.terms.make(key, tuple(tensor.shape), tensor.dtype)
                term.origin = str(node.target)
            closed_over.append(held_view(values, tensor, term))
        special: dict[str, Special] = {schema_of(CHANGED).name: self._changed}
        special.update(dict.fromkeys(OPERATORS, self._marker))
        self.graph = GraphOnTerms(values, found.graph, [*self.inputs, *closed_over], special)
        made = self.graph.run()
        self.outputs = [(view, values.read(view)) for view in made]
        values.terms.tracing = False

    def _marker(self, graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View:
        schema = schema_of(node.target)
        given = {argument.name: each for argument, each in zip(schema.arguments, args, strict=False)}
        values, value = self.values, self.values.read(args[0])
        how = combination_of(schema.name, given)
        term = values.combined(how, value)
        if how.op == "mean":
            self.shares[values.share(value, how.along), how.along] = value
        view = graph.fresh_view(node.meta["val"])
        graph.memory.write(view, term)
        self.markers[self._found.markers[node]] = values.read(view)
        return view

    def _changed(
        self, graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[View]:
        """A call that changes its arguments, on copies."""
        call = self._found.calls[args[2]]
        if call.draws:
            return drawn_in_trace(graph, self.trace.graph, call, node, args[1])
        copies = {}
        for each, view in zip(call.tensors, args[1], strict=True):
            copies[each] = view._replace(block=Block("fresh"), start=0)
            graph.memory.write(copies[each], self.values.read(view))

        def given(value: object) -> Any:
            if isinstance(value, fx.Node):
                return copies[value] if value in copies else getattr(self.trace.graph, str(value.target))
            return [given(each) for each in value] if isinstance(value, (list, tuple)) else value

        target: Any = call.node.target
        if isinstance(target, OpOverload):
            operator = operator_of(target)
            keywords = {name: given(value) for name, value in call.node.kwargs.items()}
            graph.perform(operator, operator.bind(given(call.node.args), keywords), _nothing_new)
        else:
            _, count, operands = call.node.args
            loop_on(graph, self.trace, call.node.name, count, given(operands))
        return [copies[each] for each in call.changed]


class _Lowered:
    """One run of the graph to compile on terms; the checks of messages read it.

    Attributes:
        graph: it.
        inputs: the inputs of the step.
        messages: is called when a message starts, and when it is waited for.
    """

    def __init__(
        self,
        reference: _Decomposed,
        module: fx.GraphModule,
        held: Sequence[torch.Tensor],
        program: Any,
        generators: Sequence[torch.Generator],
    ) -> None:
        self.reference, self.values, self.generators = reference, reference.values, generators
        self.memory = self.values.memory
        self.messages: Messages | None = None
        trace = reference.trace
        self.arena = {device: Block("arena", f"memory of the step on {device}") for device in program.layouts}
        self.where = {
            memory: (device, offset)
            for device, layout in program.layouts.items()
            for memory, offset in layout.offsets.items()
        }
        self.inputs = [input_view(self.values, trace, number) for number in range(len(trace.inputs))]
        constants = []
        for tensor in held:
            term = reference.held.get(id(tensor))
            constants.append(held_view(self.values, tensor, self.values.constant(tensor) if term is None else term))
        slots = [self._slot(place) for place in program.places.values()]
        special = {
            f"fdp_compiled::{name}": run
            for name, run in {
                "start_": self._start, "wait_": self._wait, "loop_": self._loop, "snapshot": _snapshot,
                "multiply_into": _multiply_into, "draw": self._draw,
                "draw_without_inputs": self._draw_without_inputs, "replay_": _generator("replay"),
                "resume_": _generator("resume"), **_fused(),
            }.items()
        }  # fmt: skip
        self.graph = GraphOnTerms(self.values, module, [*self.inputs, *constants, *slots], special)

    def _slot(self, place: Any) -> View:
        device, offset = self.where[place.memory]
        view = view_of(self.arena[device], place.offset, place.shape, place.stride, place.dtype)
        return view._replace(start=view.start + offset + place.start_bytes)

    def _start(self, graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        assert self.messages is not None
        self.messages.start(self, args[1])

    def _wait(self, graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        assert self.messages is not None
        self.messages.wait(self, args[1])

    def _loop(self, graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        changed, others, number = args
        trace = self.reference.trace
        if number >= len(trace.loops):
            apart = higher_order_draws(trace.graph)[number - len(trace.loops)]
            for place, result in zip(changed, drawn_inside(graph, trace.graph, apart, others), strict=True):
                graph.memory.write(place, self.values.read(result))
            return
        loop = trace.loops[number]
        writes = changed_by(loop.body)
        rest, first = iter(others), iter(changed)
        count = len(changed) + len(others)
        operands = [next(first) if at in writes else next(rest) for at in range(count)]
        loop_on(graph, trace, loop.node, loop.count, operands)

    def _draw(self, graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[View]:
        return drawn_as_said(graph, node, args[0], args[1], self.generators)

    def _draw_without_inputs(
        self, graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[View]:
        return drawn_as_said(graph, node, (), args[0], self.generators)


def input_view(values: Values, trace: Trace, number: int) -> View:
    """An input of a step, in separate memory, with its own value."""
    item = trace.inputs[number]
    view = view_of(Block("input", item.name), item.offset, item.shape, item.stride, item.dtype)
    fill_with_own(values, view, ("input", number), view.start + view.span, item.name)
    return view


def held_view(values: Values, tensor: torch.Tensor, term: Term) -> View:
    """A tensor that is the same at every call, in separate memory."""
    view = view_of(Block("closed over"), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    values.memory.write(view, term)
    return view


def loop_on(graph: GraphOnTerms, trace: Trace, name: str, count: int, operands: Sequence[View]) -> None:
    """A loop, as one call."""
    body = next(loop.body for loop in trace.loops if loop.node == name)
    draws = any(
        isinstance(node.target, OpOverload) and operator_of(node.target).random for node in body.graph.graph.nodes
    )
    apply_loop(graph, name, count, operands, sorted(changed_by(body)), draws)


def _nothing_new(call: Term, reads: list[View]) -> list[Any]:
    return []


def _snapshot(graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View:
    view = graph.fresh_view(node.meta["val"])
    graph.memory.write(view, graph.values.read(args[0]))
    return view


def _multiply_into(graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A product in its place, times a number. It is read with the shape of the place, then multiplied."""
    target, one, two, factor = args
    values = graph.values
    product: list[View] = []

    def fresh(call: Term, reads: list[View]) -> list[Any]:
        shape = (one.shape[0], two.shape[1])
        product.append(view_of(Block("fresh"), 0, shape, (shape[1], 1), one.dtype))
        return list(product)

    operator = operator_of(torch.ops.aten.mm.default)
    graph.perform(operator, operator.bind((one, two), {}), fresh)
    term = values.read(product[0]._replace(shape=target.shape, stride=target.stride, span=target.span))
    if factor != 1.0:
        term = values.apply("aten::mul", {"self": term, "other": values.encode(factor)}, target.shape, target.dtype)
    graph.memory.write(target, term)


def _generator(name: str) -> Any:
    """An operator on the state of a generator, which it declares as an argument for the compiler."""
    target = getattr(torch.ops.fdp_generator, name).default

    def run(graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        operator = operator_of(target)
        value: Any = node.meta.get("val")
        made = graph.perform(operator, operator.bind(args, kwargs), lambda call, reads: [graph.fresh_view(value)])
        return made[0] if made else None

    return run


def _fused() -> dict[str, Any]:
    """Updates by fused optimizers, in the form of the graph to compile."""
    found: dict[str, Any] = {}
    for stem in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        packet = getattr(torch.ops.aten, stem)
        for overload in packet.overloads():
            name = stem.strip("_") + ("_" if overload == "default" else f"__{overload}_")
            found[name] = _update(getattr(packet, overload))
    return found


def _update(target: object) -> Any:
    def run(graph: GraphOnTerms, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        operator = operator_of(target)
        graph.perform(operator, operator.bind(args, kwargs), _nothing_new)

    return run
