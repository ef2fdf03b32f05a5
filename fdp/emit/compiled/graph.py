"""`Plan` -> one functional graph: everything that a step does, in the order of the plan, decomposed for a compiler.

The plan is carried out once on fake tensors, under a tracer that turns changes of memory into new values. Only what
must stay where the plan put it is kept as an operator with effects (see `barriers`): starts and waits, gradients that
are put into their buckets, and updates by fused optimizers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fdp.emit.compiled.barriers import FUSED, copy_into, loop, snapshot, start, wait
from fdp.emit.compiled.drawing import draw_with_inputs, draw_without_inputs
from fdp.emit.compiled.draws import Draw, describe_draw, draws, operands_of
from fdp.emit.compiled.layouts import Branch, StrideKeeper, empty_like, with_strides_of, with_traced_strides
from fdp.emit.memory.instructions import (
    Await,
    Compute,
    Divide,
    Instruction,
    Keep,
    Pack,
    Send,
    Update,
    arguments_of,
    is_part,
)
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.emit.memory.planning import Place, slot_name
from fdp.errors import CompileError, FdpError, build_message, first_line
from fdp.plan import Plan
from fdp.pytorch.overloads import OpOverload
from fdp.trace import Geometry, capture_functional
from fdp.trace.capture.functional import bring_up_to_date
from fdp.trace.graph.loops import changed_operands, is_loop
from fdp.trace.operators.effects import effects_of, is_marker

_aten = torch.ops.aten

_VIEWS = {
    _aten.unsafe_split.Tensor: _aten.split.Tensor,
    _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
    _aten._unsafe_view.default: _aten.view.default,
}
"""Operators that return views and do not declare it, with equivalents that do, so that passes know of the alias."""


class _Lowering:
    """Executes a plan on the values of a tracer."""

    def __init__(self, memory: MemoryPlan, drawn: Mapping[fx.Node, Draw], apart: Sequence[fx.Node]) -> None:
        self.memory, self.plan, self.trace = memory, memory.plan, memory.plan.trace
        self.drawn, self.last_drawn = drawn, list[torch.Tensor]()
        graph = self.trace.graph
        placeholders = graph.graph.find_nodes(op="placeholder")
        inside = {node for node, item in zip(placeholders, self.trace.inputs, strict=True) if item.offset}
        self.changes = StrideKeeper(graph.graph, inside)
        # Branches of a condition, and generators of random numbers; tensors come in as inputs.
        self.values: dict[fx.Node, Any] = {
            node: getattr(graph, str(node.target), None) for node in graph.graph.find_nodes(op="get_attr")
        }
        self.entries: dict[tuple[fx.Node, int], Any] = {}
        self.slots: dict[str, torch.Tensor] = {}
        by_number = [*(found.node for found in self.trace.loops), *(node.name for node in apart)]
        self.numbers = {name: number for number, name in enumerate(by_number)}

    def run(self) -> list[torch.Tensor]:
        for _, instruction in self.memory.instructions:
            self._carry_out(instruction)
        outputs, placement = [], self.memory.placement
        for position, node in enumerate(placement.returned):
            if node.op == "placeholder" and position not in placement.cloned:
                continue  # it goes back to the caller as the object that it is
            value = self._value(node)
            value = with_strides_of(node.meta["val"], value)
            outputs.append(_copy_with_strides(value) if position in placement.cloned else value)
        return outputs

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Compute(node, entries):
                self._call(node, entries)
            case Keep(marker):
                value, example = self._value(marker.args[0]), marker.meta["val"]  # type: ignore[arg-type]
                if example.numel() == 0:  # the argument of an all-gather has another shape
                    self.values[marker] = empty_like(example)
                else:
                    self.values[marker] = value.contiguous() if marker in self.memory.places.alone else _copy(value)
            case Pack(bucket, members):
                for member in members:
                    self._pack(bucket, member)
            case Send(bucket):
                start(self._slots_of(bucket), bucket)
            case Await(bucket):
                wait(self._slots_of(bucket), bucket)
                for at, marker in enumerate(self.memory.markers[bucket]):
                    self.values[marker] = self.slots[received_name(bucket, at)]
            case Update(target, new):
                self.values[target].copy_(self._value(new))
            case Divide():
                raise AssertionError("nothing is computed in a bucket by a compiler")

    def _value(self, node: fx.Node) -> Any:
        return self.values[self.memory.value_of(node)]

    def _found(self, node: fx.Node) -> Any:
        """The value of a node; None if it has none yet."""
        return self.values.get(self.memory.value_of(node))

    def _slots_of(self, bucket: int) -> list[torch.Tensor]:
        """All tensors that the message of a bucket reads or writes."""
        names: dict[str, None] = {}
        for at in range(len(self.memory.markers[bucket])):
            names[slot_name(bucket, at)] = names[received_name(bucket, at)] = None
        return [self.slots[name] for name in names]

    def _pack(self, index: int, member: int) -> None:
        """Put a member into its bucket, divided by the number of ranks if a sum is to make the mean."""
        marker = self.memory.markers[index][member]
        source: Any = marker.args[0]
        value = self._value(source)
        if index in self.memory.places.scaled:
            value = value * self.memory.share_of(marker)
        copy_into(self.slots[slot_name(index, member)], value)

    def _call(self, node: fx.Node, entries: Sequence[int]) -> None:
        if node in self.memory.same or node in self.memory.placement.replaced:
            return  # another value takes its place
        target: Any = node.target
        if target is operator.getitem:
            sequence: Any = node.args[0]
            index: Any = node.args[1]
            found = self.entries.get((sequence, index))
            self.values[node] = self._value(sequence)[index] if found is None else found
            return
        if is_loop(node):
            self._loop(node)
            return
        if node.name in self.numbers:
            self._uncompiled(node)
            return
        if is_marker(node, "vary"):
            self.values[node] = _copy(self._value(node.args[0]))  # type: ignore[arg-type]
            return
        if is_marker(node, "axis_index"):
            self.values[node] = self.values[node].clone()
            return
        split = is_part(node, entries)
        args, kwargs = arguments_of(node, entries)
        args, kwargs = fx.map_arg(args, self._value), fx.map_arg(kwargs, self._value)
        args = self.changes.applied_to_base(node, args, self._found)
        bring_up_to_date(target, args)
        try:
            result = self._draw(node) if node in self.drawn else self._run(target, args, kwargs)
        except FdpError:
            raise
        except Exception as error:
            raise self._refusal(node, error) from error
        example: Any = node.meta.get("val")
        result = with_traced_strides(
            target, [example[entry] for entry in entries] if split and example else example, result
        )
        if split:
            if isinstance(result, (list, tuple)):
                self.entries.update(((node, entry), one) for entry, one in zip(entries, result, strict=True))
        else:
            self.values[node] = result
        if (donated := self.memory.placement.written.get(node)) is not None:
            self.values[donated].copy_(result)
            self.values[node] = self.values[donated]
        self.changes.restore_strides(node, self._found)

    def _loop(self, node: fx.Node) -> None:
        """Insert the call of a loop, opaque to all passes. The tensors that it changes are new values from here on."""
        operands: Any = node.args[2]
        changed, others = changed_operands(node)
        for each in changed:
            self.values[operands[each]] = snapshot(self._value(operands[each]))
        given = ([self._value(operands[each]) for each in group] for group in (changed, others))
        loop(*given, self.numbers[node.name])

    def _uncompiled(self, node: fx.Node) -> None:
        """Insert the call of a higher-order operator that runs uncompiled, opaque to all passes."""
        example: Any = node.meta["val"]
        results = example if isinstance(example, (list, tuple)) else [example]
        operands = [self._value(each) for each in operands_of(node)]
        places = [snapshot(empty_like(each)) for each in results]
        loop(places, operands, self.numbers[node.name])
        self.values[node] = places if isinstance(example, (list, tuple)) else places[0]

    def _draw(self, node: fx.Node) -> Any:
        """Insert a draw; tensors that the operator changes get the drawn values.

        Each draw takes the result of the draw before as one more operand, which it ignores. A compiler orders draws by
        their results; without this operand it may reorder a draw whose result is not used.
        """
        found = self.drawn[node]
        read = [*(self._value(each) for each in found.read), *self.last_drawn]
        made = draw_with_inputs(read, found.text) if read else draw_without_inputs(found.text)
        self.last_drawn = made[:1] or self.last_drawn
        for each, value in zip(reversed(found.written), reversed(made), strict=False):
            self._value(each).copy_(value)
        results = [
            made[what] if kind == "made" else self._value(what) if kind == "changed" else what
            for kind, what in found.results
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def _refusal(self, node: fx.Node, error: Exception) -> CompileError:
        first = first_line(error).split(". ")[0]
        remedy = "compile=False runs it as it is."
        if getattr(node.target, "namespace", "aten") not in ("aten", "prims"):
            remedy = f"an operator of your own must return new tensors, and change none; {remedy}"
        if "internal overlap" in first:
            remedy = "write to elements by indexing (x[places] = values); compile=False runs it as it is."
        if "an as_strided() call" in first:
            remedy = "write through other views than as_strided, or into a clone; compile=False runs it as it is."
        return CompileError(
            build_message(
                f"step {self.trace.name!r} cannot be compiled: operator {node.target} cannot be taken apart.",
                [f"{node.meta.get('source') or 'at an unknown line'}: {type(error).__name__}: {first}"],
                remedy=remedy,
            )
        )

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in FUSED:
            if kwargs.get("grad_scale") is not None:
                raise CompileError(
                    build_message(
                        f"step {self.trace.name!r} calls {target} with grad_scale, which changes gradients in place.",
                        remedy="divide the gradients before the update; compile=False runs it as it is.",
                    )
                )
            return FUSED[target](*args, **kwargs)
        if target is _aten.native_batch_norm.default:
            return _batch_norm(*args, **kwargs)
        if target is _aten.cudnn_batch_norm.default:
            found = _batch_norm(*args, **kwargs)
            return (*found, args[0].new_zeros((0,), dtype=torch.uint8))
        if target is _aten.native_dropout.default and args[2] is False:
            # The kernel for CPUs makes a copy; that of other devices hands its argument back.
            kept = args[0].clone() if args[0].device.type == "cpu" else args[0]
            return kept, torch.ones_like(args[0], dtype=torch.bool)
        if not isinstance(target, OpOverload):
            args = [Branch(each) if isinstance(each, fx.GraphModule) else each for each in args]
        return _VIEWS.get(target, target)(*args, **kwargs)


def _copy_with_strides(value: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of a value; `clone` would close gaps, and copy repeated elements separately."""
    return value.clone() if _aten.is_non_overlapping_and_dense.default(value) else snapshot(value)


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Normalise with operators whose schemas say that they update the statistics."""
    if mean is None:
        return _aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    return _aten._native_batch_norm_legit.default(x, weight, bias, mean, variance, training, momentum, eps)


def received_name(bucket: int, member: int) -> str:
    """The name of a received value; it is the member's slot, unless results have memory of their own.

    A compiler may use the memory that it filled itself again, if it sees nothing read it as it was then.
    """
    return f"received{bucket}_{member}"


def functional_graph(
    memory: MemoryPlan,
    constants: Sequence[fx.Node],
    slots: Mapping[str, Place],
    decompositions: Mapping[Any, Callable[..., Any]],
    apart: Sequence[fx.Node] | None,
) -> fx.GraphModule:
    """Execute a plan on fake tensors, and record it as a functional graph.

    Args:
        memory: where values lie, and what is done when.
        constants: nodes whose values are the same at every call.
        slots: places of members in their buckets, and of what comes back.
        decompositions: how the compiler wants operators taken apart.
        apart: functions of functions that run as they are, since they draw; they are counted behind loops. None if
            the compiler draws random numbers in its own way.

    Returns:
        A graph that takes the inputs of the step, constants and slots, and returns those outputs that are no donated
        input.

    Raises:
        CompileError: an operator cannot be taken apart, or there are sparse tensors; names it.
    """
    plan = memory.plan
    _refuse_sparse(plan)
    placeholders = plan.trace.graph.graph.find_nodes(op="placeholder")
    inputs: list[Geometry] = [(i.shape, i.stride, i.offset, i.dtype, i.device) for i in plan.trace.inputs]
    for node in constants:
        value = node.meta["val"]
        inputs.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.device))
    for place in slots.values():
        assert place.bucket is not None
        device = plan.buckets[place.bucket].device
        inputs.append((place.shape, place.stride, place.offset, place.dtype, device))

    for node in plan.trace.nodes.values():
        if effects_of(node).checks and isinstance(node.target, OpOverload):
            torch.fx.has_side_effect(node.target)  # so that no pass takes it for dead code
    drawn = {node: describe_draw(node) for node in plan.trace.graph.graph.nodes if apart is not None and draws(node)}

    def carry_out(*values: torch.Tensor) -> list[torch.Tensor]:
        given = (*placeholders, *constants)
        lowering = _Lowering(memory, drawn, apart or ())
        lowering.values.update(zip(given, values, strict=False))
        lowering.slots.update(zip(slots, values[len(given) :], strict=True))
        return lowering.run()

    graph = capture_functional(carry_out, inputs, decompositions)
    _give_numbers_examples(graph)
    _refuse_unused_draws_before_loops(plan, graph.graph)
    return graph


def _refuse_sparse(plan: Plan) -> None:
    """Refuse tensors of other layouts than the usual one, of sparse ones above all: inductor has no code for them."""
    for node in plan.trace.graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            users = (node, *node.users) if node.op == "get_attr" else (node,)
            source = next((each.meta["source"] for each in users if each.meta.get("source")), "at an unknown line")
            raise CompileError(
                build_message(
                    f"step {plan.trace.name!r} cannot be compiled: it computes with tensors of the layout "
                    f"{value.layout}.",
                    [str(source)],
                    remedy="pass A.to_dense(); compile=False runs it as it is.",
                )
            )


def _give_numbers_examples(graph: fx.GraphModule) -> None:
    """Give operands of conditions that are numbers an example value in the branches: a compiler needs one.

    Dynamo hands a branch the sizes of its operands where it has seen the branch with others before.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond):
        operands: Any = node.args[3]
        for branch in node.args[1:3]:
            inside = getattr(graph, str(branch.target))
            placeholders = inside.graph.find_nodes(op="placeholder")
            for placeholder, operand in zip(placeholders, operands, strict=True):
                if placeholder.meta.get("val") is None and isinstance(operand, int):
                    placeholder.meta["val"] = operand
            _give_numbers_examples(inside)


def _refuse_unused_draws_before_loops(plan: Plan, graph: fx.Graph) -> None:
    """Refuse an unused draw right before a higher-order operator: a compiler might change their order.

    A compiler orders draws by their results, so each has to be used. The next draw uses it; behind the loop of an
    accumulation there is one, that of the last microbatch. Other functions of functions take only their own operands.
    """
    last: fx.Node | None = None
    for node in graph.nodes:
        if node.target in (draw_with_inputs, draw_without_inputs):
            last = node
        elif (
            node.target is loop
            and node.args[2] >= len(plan.trace.loops)
            and last is not None
            and not any(part.users for part in last.users)
        ):
            raise CompileError(
                build_message(
                    f"step {plan.trace.name!r} cannot be compiled: it draws random numbers that it does not use, "
                    "right before a function of functions that draws, and a compiler might change their order.",
                    remedy="leave them out; compile=False runs the step as it is.",
                )
            )
