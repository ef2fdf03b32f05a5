"""Which values of a traced step are divided among ranks, if some of its inputs are.

The step is traced on whole values. Here it is decided, for each piece of memory in that graph, whether a rank holds its
own part of it or the whole. Three rules:

- What is computed element by element of something that lies in parts is computed in parts.
- What only such operators and reductions read lies in parts as well: a gradient is then reduce-scattered.
- Everything else is whole; who needs the whole of what lies in parts gathers it.

Only values that are equal on every rank can lie in parts: of another rank's own value no rank has a part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from fdp.distributed.mesh import Dimensions
from fdp.state.shards import Part
from fdp.trace.graph.loops import regions_of
from fdp.trace.graph.variance import ever_varying
from fdp.trace.operators.effects import effects_of, storages_of, tensors_with_storage
from fdp.trace.sharding.scatters import is_scattered
from fdp.trace.sharding.units import (
    Unit,
    is_elementwise,
    is_own_memory,
    is_reduction,
    is_same_view,
    units_of,
)


@dataclass
class _MemoryUse:
    """How a graph uses a piece of memory."""

    made_by: list[Unit] = field(default_factory=list)
    written_by: list[Unit] = field(default_factory=list)
    read_by: list[Unit] = field(default_factory=list)
    has_views: bool = False
    is_returned: bool = False
    shape: tuple[int, ...] | None = None


def placements(
    graph: fx.Graph,
    sharded: Mapping[fx.Node, Part],
    varying_inputs: Iterable[fx.Node],
    dimensions: Dimensions = (),
) -> Mapping[int, Part]:
    """Decide which memory is divided among ranks.

    Args:
        graph: a traced graph, on whole values.
        sharded: the placeholders of which each rank holds a part.
        varying_inputs: those that differ from rank to rank.
        dimensions: of the mesh.

    Returns:
        For each piece of memory that lies in parts (`storages_of` a node) how it is divided.
    """
    return _Decision(graph, sharded, varying_inputs, dimensions).decide()


class _Decision:
    """One decision about a graph."""

    def __init__(
        self,
        graph: fx.Graph,
        sharded: Mapping[fx.Node, Part],
        varying_inputs: Iterable[fx.Node],
        dimensions: Dimensions,
    ) -> None:
        self._graph, self._sharded, self._dimensions = graph, sharded, dimensions
        self._varying = ever_varying(graph, varying_inputs, dimensions)
        self._units = [unit for node in graph.nodes if node.op == "call_function" for unit in units_of(node)]
        self._memory: defaultdict[int, _MemoryUse] = defaultdict(_MemoryUse)
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
        """Find how the graph uses memory, and which memory cannot be divided."""
        for node in self._graph.nodes:
            value = node.meta.get("val")
            for number, x in tensors_with_storage(value):
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
        """Forwards from the inputs: results that are computed element by element from divided values."""
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
        """Backwards from the results: values that only operators on parts read."""
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
                made_in_parts = self._may_compute(unit, part) or is_scattered(unit.node, self._dimensions)
                if made_in_parts and memory.shape is not None and part.divides(memory.shape):
                    trial = {**parts, number: part}
                    for reader in readers:
                        self._follow(reader, part, either, trial)
                    if all(self._computes_parts(reader, trial) or self._reduces(reader) for reader in readers):
                        parts.update(trial)

    def _reads_either_way(self, unit: Unit, either: set[int]) -> bool:
        """Whether a unit reduces to something small, or computes what is only used for that."""
        results = unit.results
        return self._reduces(unit) or (is_elementwise(unit) and bool(results) and either.issuperset(results))

    def _reduces(self, unit: Unit) -> bool:
        """Whether a unit may reduce parts to something small. In a loop it may not: it would send in each round."""
        return unit.node not in self._in_loops and is_reduction(unit)

    def _follow(self, unit: Unit, part: Part, either: set[int], parts: dict[int, Part]) -> None:
        """Let a unit whose results are only used for such numbers compute parts, and its readers, too."""
        results = unit.results
        if self._reduces(unit) or not results or not either.issuperset(results) or not self._may_compute(unit, part):
            return
        for number in results:
            if number not in parts:
                parts[number] = part
                for reader in (*self._memory[number].read_by, *self._memory[number].written_by):
                    self._follow(reader, part, either, parts)

    def _part_of_operands(self, unit: Unit, parts: Mapping[int, Part]) -> Part | None:
        """How an operand of the shape of a unit's results is divided; None if none is."""
        for x in (*unit.writes, *unit.reads):
            if unit.shape is not None and tuple(x.meta["val"].shape) == unit.shape and is_own_memory(x):
                for number in storages_of(x):
                    if number in parts:
                        return parts[number]
        return None

    def _may_compute(self, unit: Unit, part: Part) -> bool:
        """Whether a unit can compute its results in parts: operands are divided, or each rank can take its part."""
        return (
            is_elementwise(unit)
            and unit.shape is not None
            and part.divides(unit.shape)
            and not self._whole.intersection(unit.results)
            and all(self._memory[number].shape == unit.shape for number in unit.results)
            and self._varying.isdisjoint(number for x in unit.reads for number in storages_of(x))
        )

    def _computes_parts(self, unit: Unit, parts: Mapping[int, Part]) -> bool:
        """Whether all results of a unit are divided in one way, and the unit can compute them so."""
        found = [parts.get(number) for number in unit.results]
        if not found or found[0] is None or any(part != found[0] for part in found):
            return False
        return self._may_compute(unit, found[0]) or is_scattered(unit.node, self._dimensions)
