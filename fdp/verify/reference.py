"""What a trace computes: its graph runs on terms in its own order, with separate memory for each value."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload
from fdp.pytorch.tensors import storage_id
from fdp.trace.trace import Trace
from fdp.verify.combined import OwnRank, axis_dimension
from fdp.verify.extents import comparable_number
from fdp.verify.higher import apply_loop, function_name, higher_order
from fdp.verify.machine import TermMachine, holds_tensors, views_in
from fdp.verify.memory import Block, View, marks_of, view_of
from fdp.verify.schemas import Operator, operator_of
from fdp.verify.terms import Term
from fdp.verify.values import Values


@dataclass(frozen=True)
class Record:
    """A call in the trace, and the layout of its results in new memory.

    Attributes:
        reads: the tensors that it was given.
        layout: its arguments that decide on nothing but how results lie.
        results: views, lists of views, or numbers; those of one call that share memory share a block.
        examples: the same as the trace has them.
        single: whether a function that takes functions returned one tensor, not in a list.
    """

    reads: list[View]
    layout: tuple[Any, ...]
    results: list[Any]
    examples: list[Any]
    single: bool


@dataclass
class Memories:
    """Maps storages of example tensors to memory: a block, and the byte at which the storage begins."""

    blocks: dict[int, tuple[Block, int]] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    _views: dict[int, tuple[View, torch.Tensor]] = field(default_factory=dict)

    def view(self, tensor: torch.Tensor) -> View:
        """A tensor as a view; unknown memory gets a new block."""
        found = self._views.get(id(tensor))
        if found is None:
            found = self._views[id(tensor)] = self._looked_at(tensor), tensor  # kept, so that no other has its number
        return found[0]

    def _looked_at(self, tensor: torch.Tensor) -> View:
        if tensor.layout is not torch.strided:
            entry = self.blocks.get(id(tensor))
            if entry is None:
                entry = self.blocks[id(tensor)] = Block("fresh"), 0
                self.kept.append(tensor)
            return view_of(entry[0], 0, tensor.shape, _steps(tensor.shape), tensor.dtype)
        storage = storage_id(tensor.untyped_storage())
        entry = self.blocks.get(storage)
        if entry is None:
            entry = self.blocks[storage] = Block("fresh"), 0
            self.kept.append(tensor)
        block, start = entry
        marks = marks_of(tensor)
        view = view_of(block, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, marks)
        return view._replace(start=view.start + start) if start else view

    def join(self, value: Any, base: torch.Tensor) -> None:
        """Put tensors of unknown memory into that of another, as its views."""
        if isinstance(value, (list, tuple)):
            for each in value:
                self.join(each, base)
        elif value.layout is base.layout is torch.strided and not self.knows(value):
            self.blocks[storage_id(value.untyped_storage())] = self.blocks[storage_id(base.untyped_storage())]
            self.kept.append(value)

    def place(self, value: torch.Tensor, view: View) -> None:
        """Say where a tensor without strides lies."""
        self.blocks[id(value)] = view.block, 0
        self._views[id(value)] = view, value

    def knows(self, value: object) -> bool:
        """Whether the memory of a tensor, or of any in a list, is known."""
        if isinstance(value, torch.Tensor):
            strided = value.layout is torch.strided
            return (storage_id(value.untyped_storage()) if strided else id(value)) in self.blocks
        return isinstance(value, (list, tuple)) and any(map(self.knows, value))


def _is_sparse(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def _steps(shape: Sequence[Any]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size if type(size) is int else 1
    return tuple(reversed(steps))


class Reference(TermMachine):
    """One run of a trace on terms.

    Attributes:
        trace: it.
        inputs: its inputs.
        closed: the tensors that it closes over, by identity: the real ones, with their views.
        outputs: its results, and what they are at its end.
        markers: for each reduction, by the name of its node, what it computes.
        shares: for each value whose mean is taken, divided by the number of ranks, and the dimension along which it is
            taken, the value itself.
        records: of its calls.
        sizes: of the memory from outside, in bytes.
        pristine: what that memory holds before anything runs.
        bodies: of its loops, by node.
        higher: the operators of other kinds in it: functions that take functions.
    """

    def __init__(self, trace: Trace, rank: int) -> None:
        self.trace = trace
        values = Values(OwnRank(rank, trace.world_size, trace.dimensions))
        self._begin(values)
        self._run()
        while values.late:  # each time more is known, and of calls there is an end
            values.anew()
            self._begin(values)
            self._run()
        values.terms.tracing = False

    def _begin(self, values: Values) -> None:
        super().__init__(values)
        self.memories = Memories()
        self.inputs: list[View] = []
        self.closed: dict[int, tuple[torch.Tensor, View]] = {}
        self.outputs: list[tuple[View, Term]] = []
        self.markers: dict[str, Term] = {}
        self.shares: dict[tuple[Term, str], Term] = {}
        self.records: dict[Term, list[Record]] = {}
        self.sizes: dict[Block, int] = {}
        self.pristine: dict[Block, Block] = {}
        self.bodies: dict[str, Reference] = {}
        self.higher: dict[int, Any] = {}
        self._means: list[tuple[Term, str]] = []
        self._node: Any = None
        self._loops = {loop.node: loop for loop in self.trace.loops}

    @property
    def changed(self) -> list[int]:
        """The operands whose memory the body of a loop changes. (Its first input is a number.)"""
        return [at for at, view in enumerate(self.inputs[1:]) if view.block.writes > view.block.initial]

    def wrote(self, term: Term) -> None:
        if term.origin is None:
            term.origin = self._node.name

    def _run(self) -> None:
        module = self.trace.graph
        self._hold(module)
        for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
            self.inputs.append(self._input(node, index))
        for block in self.sizes:
            block.initial = block.writes
            self.pristine[block] = block.copied()
        for node in module.graph.nodes:
            self._node = node
            if node.op == "call_function":
                self._function(node)
        for term, along in self._means:
            self.shares[self.values.share(term, along), along] = term
        made: Any = module.graph.output_node().args[0]
        for node in made:
            view = self.memories.view(node.meta["val"])
            self.outputs.append((view, self.values.read(view)))

    def _input(self, node: fx.Node, index: int) -> View:
        tensor = node.meta["val"]
        known = self.memories.knows(tensor)
        view = self.memories.view(tensor)
        if not known:
            name, size = self.trace.inputs[index].name, _bytes_of(tensor, view)
            view.block.kind, view.block.name = "input", name
            self.sizes[view.block] = size
            fill_with_own(self.values, view, ("input", index), size, name)
        return view

    def _hold(self, module: fx.GraphModule) -> None:
        """Closed-over tensors share memory where they do so in truth: by address."""
        nodes = []
        for node in module.graph.find_nodes(op="get_attr"):
            held = getattr(module, str(node.target), None)
            if isinstance(held, torch.Tensor):
                nodes.append((node, held))
        places, sizes = _by_address([held for _, held in nodes])
        for index, (block, size) in enumerate(sizes):
            whole = view_of(block, 0, (size,), (1,), torch.uint8)
            held_bytes = self.values.terms.make(("closed over", index, size), (size,), torch.uint8)
            held_bytes.origin = "what the step closes over"
            self.memory.write(whole, held_bytes)
            self.sizes[block] = size
        for node, held in nodes:
            example = node.meta["val"]
            key = storage_id(example.untyped_storage()) if example.layout is torch.strided else id(example)
            self.memories.blocks[key] = places[id(held)]
            self.memories.kept.append(example)
            self.closed[id(held)] = held, self.memories.view(example)

    def _function(self, node: fx.Node) -> None:
        target = node.target
        if isinstance(target, OpOverload):
            self._operator(node, target)
        elif node.name in self._loops:
            self._loop(node)
        elif target is not python_operator.getitem and holds_tensors(node.meta.get("val")):
            self.higher[id(target)] = target
            given = [self._given(value) for value in (*node.args, *node.kwargs.values())]
            higher_order(self, function_name(target), given, self._fresh(node, (), None))

    def _operator(self, node: fx.Node, target: object) -> None:
        operator = operator_of(target)
        value = node.meta.get("val")
        if operator.views and _is_sparse(value) and not self.memories.knows(value):
            self._as_if_dense(node, value)
        elif operator.views:
            # What looks at a closed-over tensor has an example storage of its own, and yet the same memory.
            self.memories.join(value, node.args[0].meta["val"])  # type: ignore[union-attr]
        if operator.number or operator.reshapes or (operator.views and self.memories.knows(value)):
            return
        given = [self._given(each) for each in operator.bind(node.args, node.kwargs)]
        layout = layout_arguments(self.values, operator, given)
        self.perform(operator, given, self._fresh(node, layout, operator))
        if operator.name == "fdp::all_reduce":
            self._note_marker(node, given)
        elif operator.name.startswith("fdp::") and isinstance(value, torch.Tensor):
            self.markers[node.name] = self.values.read(self.memories.view(value))

    def _as_if_dense(self, node: fx.Node, value: Any) -> None:
        """A sparse tensor transposed, say: it has no strides, and is followed as a dense one of its shape would be."""
        base: Any = node.args[0]
        view, target = self.memories.view(base.meta["val"]), cast(Any, node.target)
        dense = torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device="meta")
        seen = target(dense, *node.args[1:], **node.kwargs)
        self.memories.place(value, view_of(view.block, seen.storage_offset(), seen.shape, seen.stride(), seen.dtype))

    def _note_marker(self, node: fx.Node, given: list[Any]) -> None:
        self.markers[node.name] = self.values.read(self.memories.view(node.meta["val"]))
        if given[1] == "mean":
            self._means.append((self.values.read(given[0]), axis_dimension(given[2])))

    def _loop(self, node: fx.Node) -> None:
        loop = self._loops[node.name]
        body = self.bodies[node.name] = Reference(loop.body, self.values.ranks.own)
        operands: Any = node.args[2]
        views = [self._given(operand) for operand in operands]
        apply_loop(self, node.name, loop.count, views, body.changed, body.draws)

    def _given(self, value: object) -> Any:
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                held = getattr(self.trace.graph, str(value.target), None)
                if not isinstance(held, torch.Tensor):
                    return held
            return self._views(value.meta["val"])
        if isinstance(value, (list, tuple)):
            return [self._given(each) for each in value]
        return value

    def _views(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return self.memories.view(value)
        if isinstance(value, (list, tuple)):
            return [self._views(each) for each in value]
        return value

    def _fresh(self, node: fx.Node, layout: tuple[Any, ...], operator: Operator | None) -> Any:
        """Give results the layout of the example values."""

        def fresh(call: Term, reads: list[View]) -> list[Any]:
            value: Any = node.meta.get("val")
            results = list(value) if operator is None or len(operator.results) > 1 else [value]
            if operator is None and isinstance(value, torch.Tensor):
                results = [value]
            if operator is not None:
                results = [each for each, owner in zip(results, operator.results, strict=True) if owner is None]
            known = [self.memories.knows(each) for each in results]
            views = [self._views(each) for each in results]
            self.records.setdefault(call, []).append(
                Record(reads, layout, views, results, isinstance(value, torch.Tensor))
            )
            self._same_numbers(call, results)
            views = [hidden(each) if was else each for each, was in zip(views, known, strict=True)]
            if operator is not None and not operator.uninitialised and operator.known:
                self._fold(node, call, operator, views)
            return views

        return fresh

    def _same_numbers(self, call: Term, results: list[Any]) -> None:
        """Make a number that is read twice from the same value one number."""
        first = self.records[call][0].results
        for one, two in zip(first, results, strict=True):
            if isinstance(two, (torch.SymInt, torch.SymFloat, torch.SymBool)) and one is not two:
                self.values.symbols[comparable_number(two)] = comparable_number(one)

    def _fold(self, node: fx.Node, call: Term, operator: Operator, results: list[Any]) -> None:
        if not self.values.is_constant(call) or operator.random or operator.entrywise:
            return
        views = [view for result in results for _, view in views_in(result)]
        if not views or len(operator.new) < len(operator.results) or not operator.name.startswith("aten::"):
            return
        target: Any = node.target

        def actual(argument: fx.Node) -> Any:
            view = self._given(argument)
            device = argument.meta["val"].device
            return self.values.realised(self.values.read(view), device)

        def compute() -> Any:
            return target(*fx.map_arg(node.args, actual), **fx.map_arg(node.kwargs, actual))

        self.values.fold(call, views, compute)


def hidden(value: object) -> Any:
    """Results that are arguments themselves: nothing is written to them."""
    if isinstance(value, View):
        return None
    return [hidden(each) for each in value] if isinstance(value, list) else value


def layout_arguments(values: Values, operator: Operator, given: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of a call that decide only on the layout of its results."""
    return tuple(
        values.encode(value)
        for parameter, value in zip(operator.parameters, given, strict=True)
        if not parameter.matters and not parameter.written
    )


def fill_with_own(values: Values, view: View, key: tuple[Any, ...], size: int, name: str) -> None:
    """Fill memory from outside: with bytes, and with the known tensor on top of them."""
    around = values.terms.make(("memory", *key, size), (size,), torch.uint8)
    around.origin = f"the memory of {name}"
    if not view.dense or view.span < size:
        values.memory.write(view_of(view.block, 0, (size,), (1,), torch.uint8), around)
    term = values.terms.make((*key, view.shape, view.dtype), view.shape, view.dtype)
    term.origin = name
    values.memory.write(view._replace(marks=()), term)


def _bytes_of(tensor: torch.Tensor, view: View) -> int:
    return int(tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else view.start + view.span


def _by_address(
    tensors: Sequence[torch.Tensor],
) -> tuple[dict[int, tuple[Block, int]], list[tuple[Block, int]]]:
    """For each tensor, a block, and where its storage begins in it; and all blocks with their sizes in bytes."""
    places: dict[int, tuple[Block, int]] = {}
    sizes: list[tuple[Block, int]] = []
    spans = []
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_meta:
            places[id(tensor)] = Block("closed"), 0
            sizes.append((places[id(tensor)][0], tensor.numel() * tensor.itemsize))
        else:
            storage = tensor.untyped_storage()
            spans.append((str(tensor.device), storage.data_ptr(), storage.nbytes(), id(tensor)))
    begin, end, device = 0, -1, ""
    for where, address, size, key in sorted(spans):
        if where != device or address >= end or not size:
            begin, device = address, where
            sizes.append((Block("closed"), 0))
        end = max(end, address + size) if begin != address else address + size
        sizes[-1] = sizes[-1][0], end - begin
        places[key] = sizes[-1][0], address - begin
    return places, sizes
