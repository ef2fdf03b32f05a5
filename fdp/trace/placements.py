"""Which values of a traced step are computed in parts, where some of its inputs are sharded.

The step is traced on whole values. Here it is decided, for each piece of memory in that graph, whether a rank holds its
own part of it or the whole. Three rules:

- What is computed element by element of something that lies in parts is computed in parts.
- What only such operators read, and reductions to one number, lies in parts as well: a gradient is then
  reduce-scattered.
- Everything else is whole; who needs the whole of what lies in parts gathers it.

Only values that are equal on every rank can lie in parts: of another rank's own value no rank has a part.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fdp.state.shards import Part
from fdp.trace.effects import (
    FUSED_OPTIMIZERS,
    collective_of,
    effects_of,
    entries_of,
    is_marker,
    list_arguments,
    nodes_in,
    operator_name,
    storages,
    storages_of,
)
from fdp.trace.loops import regions_of
from fdp.trace.variance import ever_varying

_ELEMENTWISE = frozenset({
    # Beside those that torch tags as pointwise.
    "_to_copy", "copy_", "copy", "clone", "fill_", "fill", "zero_", "zeros_like", "ones_like", "full_like",
    "lift_fresh_copy", "where", "masked_fill", "masked_fill_", "zero",
})  # fmt: skip

_REDUCES = frozenset({"sum", "linalg_vector_norm", "mean", "amax", "amin", "max", "min", "all", "any"})
_LIST_REDUCES = frozenset({"_foreach_norm"})
_NUMBERS = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
})  # fmt: skip
"""Dtypes of numbers that ranks can put together."""


@dataclass(frozen=True)
class Unit:
    """An operator call, or one entry of the lists of one.

    Attributes:
        node: the call.
        entry: which entry; None for a call as a whole.
        reads: the tensors that it takes and does not write.
        writes: those that it writes.
        makes: the memory of its results that is new.
        shape: of what it makes or writes, if that is one shape.
    """

    node: fx.Node
    entry: int | None
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    makes: tuple[int, ...]
    shape: tuple[int, ...] | None

    @property
    def results(self) -> tuple[int, ...]:
        """The memory of what it makes and writes."""
        return (*self.makes, *(number for x in self.writes for number in storages_of(x)))


@dataclass
class _Memory:
    """What a graph does with a piece of memory."""

    made_by: list[Unit] = field(default_factory=list)
    written_by: list[Unit] = field(default_factory=list)
    read_by: list[Unit] = field(default_factory=list)
    has_views: bool = False
    is_returned: bool = False
    shape: tuple[int, ...] | None = None


def placements(
    graph: fx.Graph, sharded: Mapping[fx.Node, Part], varying_inputs: Iterable[fx.Node]
) -> Mapping[int, Part]:
    """Decide which memory lies in parts.

    Args:
        graph: a traced graph, on whole values.
        sharded: the placeholders of which each rank holds a part.
        varying_inputs: those that differ from rank to rank.

    Returns:
        For each piece of memory that lies in parts (`storages_of` a node) how it is divided.
    """
    return _Decision(graph, sharded, varying_inputs).decide()


def units_of(node: fx.Node) -> Iterator[Unit]:
    """The units of a call."""
    effects = effects_of(node)
    entries = entries_of(node)
    value = node.meta.get("val")
    for entry in range(entries) if entries is not None else (None,):
        own = node.all_input_nodes if entry is None else list(_of_entry(node, entry))
        writes = tuple(x for x in own if x in effects.writes)
        reads = tuple(x for x in own if x not in writes and _is_tensor(x))
        written = {number for x in writes for number in storages_of(x)}
        made = value if entry is None or not isinstance(value, (list, tuple)) else value[entry]
        makes = () if effects.view else tuple(number for number in storages(made) if number not in written)
        shapes = {tuple(x.meta["val"].shape) for x in writes if _is_tensor(x)}
        if makes:
            shapes |= {tuple(x.shape) for x in _tensors(made)}
        yield Unit(node, entry, reads, writes, makes, shapes.pop() if len(shapes) == 1 else None)


def is_same_view(node: fx.Node) -> bool:
    """Whether a node is its argument under another name: of the same shape, strides and dtype, in the same memory."""
    if node.op != "call_function" or not effects_of(node).view or len(node.all_input_nodes) != 1:
        return False
    one, two = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if isinstance(one, (list, tuple)):
        return not effects_of(node.all_input_nodes[0]).view  # one of several results
    if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)):
        return False
    return _lie(one) == _lie(two)


def _lie(x: torch.Tensor) -> Any:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()


def is_elementwise(unit: Unit) -> bool:
    """Whether each element of what a unit makes or writes comes of the elements of its operands at the same place."""
    target, name = unit.node.target, operator_name(unit.node)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or effects_of(unit.node).random:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if unit.entry is not None:
        return name in FUSED_OPTIMIZERS or _is_elementwise_list(name)
    return torch.Tag.pointwise in target.tags or name in _ELEMENTWISE


@functools.cache
def _is_elementwise_list(name: str) -> bool:
    """Whether an operator on lists does to each tensor what one that works element by element does."""
    single = name.removeprefix("_foreach_").rstrip("_")
    packet = getattr(torch.ops.aten, single, None)
    if packet is None or single in _REDUCES:  # `max` is one of two tensors, too
        return False
    return single in _ELEMENTWISE or any(
        torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads()
    )


def reduces_all(unit: Unit) -> bool:
    """Whether a unit makes one number of one tensor, in a way that parts can be put together."""
    value: Any = unit.node.meta.get("val")
    name = operator_name(unit.node)
    if unit.entry is not None:
        return name in _LIST_REDUCES and value[unit.entry].dtype in _NUMBERS
    target: Any = unit.node.target
    return (
        name in _REDUCES
        and isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and isinstance(value, torch.Tensor)
        and value.numel() == 1
        and (value.dtype in _NUMBERS or name in ("all", "any"))
        and len(unit.node.all_input_nodes) == 1
        and not unit.writes
    )


class _Decision:
    """One decision about a graph."""

    def __init__(self, graph: fx.Graph, sharded: Mapping[fx.Node, Part], varying_inputs: Iterable[fx.Node]) -> None:
        self._graph, self._sharded = graph, sharded
        self._varying = ever_varying(graph, varying_inputs)
        self._units = [unit for node in graph.nodes if node.op == "call_function" for unit in units_of(node)]
        self._memory: defaultdict[int, _Memory] = defaultdict(_Memory)
        self._whole: set[int] = set()
        self._look()

    def decide(self) -> Mapping[int, Part]:
        """See `placements`."""
        while True:
            parts = self._forwards()
            wrong = {
                number
                for unit in self._units
                for x in unit.writes
                for number in storages_of(x)
                if number in parts and not self._computes_parts(unit, parts)
            }
            wrong |= {
                number
                for number, part in parts.items()
                if not all(self._computes_parts(unit, parts) for unit in self._memory[number].made_by)
            }
            if not wrong:
                break
            self._whole |= wrong
        self._backwards(parts)
        return parts

    def _look(self) -> None:
        """What the graph does with its memory, and which memory cannot lie in parts."""
        for node in self._graph.nodes:
            value = node.meta.get("val")
            for number, x in zip(storages(value), _tensors(value), strict=False):
                memory = self._memory[number]
                if memory.shape is None:
                    memory.shape = tuple(x.shape)
                    if not x.is_contiguous() or x.storage_offset() or x.is_complex():
                        self._whole.add(number)
            if node.op == "call_function" and effects_of(node).view and not is_same_view(node):
                for number in storages_of(node):
                    self._memory[number].has_views = True
            if node.op == "get_attr" or (node.op == "placeholder" and node not in self._sharded):
                self._whole.update(storages_of(node))
        for unit in self._units:
            if not effects_of(unit.node).view:
                for number in unit.makes:
                    self._memory[number].made_by.append(unit)
                for written in unit.writes:
                    for number in storages_of(written):
                        self._memory[number].written_by.append(unit)
                for read in unit.reads:
                    for number in storages_of(read):
                        self._memory[number].read_by.append(unit)
        for returned in self._graph.output_node().all_input_nodes:
            for number in storages_of(returned):
                self._memory[number].is_returned = True
        self._in_loops = {node for _, region, _ in regions_of(self._graph) for node in region}
        for begin, region, _ in regions_of(self._graph):
            # What a loop makes or changes stays whole; what it only reads is gathered before it.
            for node in (begin, *region):
                for unit in units_of(node) if node.op == "call_function" else ():
                    self._whole.update(unit.results)
        for number, memory in self._memory.items():
            if number in self._varying or (memory.has_views and memory.written_by):
                self._whole.add(number)

    def _forwards(self) -> dict[int, Part]:
        """What is computed element by element of what lies in parts, from the inputs on."""
        parts = {
            number: part
            for node, part in self._sharded.items()
            for number in storages_of(node)
            if number not in self._whole
        }
        changed = True
        while changed:
            changed = False
            for unit in self._units:
                part = self._part_of_operands(unit, parts)
                if part is None or not self._may_compute(unit, part):
                    continue
                for number in unit.results:
                    if number not in parts:
                        parts[number] = part
                        changed = True
        return parts

    def _backwards(self, parts: dict[int, Part]) -> None:
        """What only those read that compute parts, from the results on."""
        either: set[int] = set()  # what only numbers are made of, and may lie as its operands do
        for unit in reversed(self._units):
            for number in unit.makes:
                memory = self._memory[number]
                if number in parts or number in self._whole or memory.is_returned or memory.has_views:
                    continue
                if memory.made_by != [unit]:
                    continue
                readers = [*memory.read_by, *memory.written_by]
                if is_elementwise(unit) and all(self._reads_either_way(reader, either) for reader in readers):
                    either.add(number)
                wanted = {
                    parts[result]
                    for reader in readers
                    for result in reader.results
                    if result in parts and reader.shape == memory.shape
                }
                if len(wanted) != 1:
                    continue
                (part,) = wanted
                made_in_parts = self._may_compute(unit, part) or is_scattered(unit.node)
                if made_in_parts and memory.shape is not None and part.divides(memory.shape):
                    trial = {**parts, number: part}
                    for reader in readers:
                        self._follow(reader, part, either, trial)
                    if all(self._computes_parts(reader, trial) or self._reduces(reader) for reader in readers):
                        parts.update(trial)

    def _reads_either_way(self, unit: Unit, either: set[int]) -> bool:
        """Whether a unit makes numbers, or what only numbers are made of."""
        results = unit.results
        return self._reduces(unit) or (is_elementwise(unit) and bool(results) and either.issuperset(results))

    def _reduces(self, unit: Unit) -> bool:
        """Whether a unit makes one number of parts. In a loop it does not: it would send in each round."""
        return unit.node not in self._in_loops and reduces_all(unit)

    def _follow(self, unit: Unit, part: Part, either: set[int], parts: dict[int, Part]) -> None:
        """Have a unit compute parts of what only numbers are made of, and those that read it."""
        results = unit.results
        if self._reduces(unit) or not results or not either.issuperset(results) or not self._may_compute(unit, part):
            return
        for number in results:
            if number not in parts:
                parts[number] = part
                for reader in (*self._memory[number].read_by, *self._memory[number].written_by):
                    self._follow(reader, part, either, parts)

    def _part_of_operands(self, unit: Unit, parts: Mapping[int, Part]) -> Part | None:
        """How operands of the shape of a unit's results are divided, if any is."""
        for x in (*unit.writes, *unit.reads):
            if unit.shape is not None and tuple(x.meta["val"].shape) == unit.shape and is_own_memory(x):
                for number in storages_of(x):
                    if number in parts:
                        return parts[number]
        return None

    def _may_compute(self, unit: Unit, part: Part) -> bool:
        """Whether a unit can compute parts, of operands that lie in parts or of which a rank can take its own."""
        return (
            is_elementwise(unit)
            and unit.shape is not None
            and part.divides(unit.shape)
            and not self._whole.intersection(unit.results)
            and all(self._memory[number].shape == unit.shape for number in unit.results)
            and self._varying.isdisjoint(number for x in unit.reads for number in storages_of(x))
        )

    def _computes_parts(self, unit: Unit, parts: Mapping[int, Part]) -> bool:
        """Whether all results of a unit lie in parts, in the same way, and it can make them so."""
        found = [parts.get(number) for number in unit.results]
        if not found or found[0] is None or any(part != found[0] for part in found):
            return False
        return self._may_compute(unit, found[0]) or is_scattered(unit.node)


def is_scattered(node: fx.Node) -> bool:
    """Whether a node is a sum or a mean over ranks that can be scattered instead."""
    collective = collective_of(node)
    if collective is None or not is_marker(node, "all_reduce") or collective.name not in ("sum", "mean"):
        return False
    return len(node.args) < 6 or node.args[5] is None  # what is sent in another dtype is not


def is_own_memory(node: fx.Node) -> bool:
    """Whether a node is a whole piece of memory, and no view of it in another shape."""
    while is_same_view(node):
        if isinstance(node.all_input_nodes[0].meta.get("val"), (list, tuple)):
            return True
        node = node.all_input_nodes[0]
    return not (node.op == "call_function" and effects_of(node).view)


def _of_entry(node: fx.Node, entry: int) -> Iterator[fx.Node]:
    """The nodes that an entry takes: its own in the lists, and those that entries share."""
    lists = [value for _, value in list_arguments(node)]
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, (list, tuple)) and any(value is one for one in lists):
            yield from nodes_in(value[entry : entry + 1])
        else:
            yield from nodes_in(value)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in value if isinstance(x, torch.Tensor)] if isinstance(value, (list, tuple)) else []
