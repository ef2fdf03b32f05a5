"""Dependencies between operations: by values, and by shared memory.

A list operator that does the same to each entry (a fused optimizer, a `_foreach` operator) becomes one operation
an entry, so that a plan may run the update of one bucket while the next is on the wire.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch import fx

from fdp.trace.operators.effects import (
    Effects,
    bound_arguments,
    effects_of,
    entries_of,
    is_marker,
    storages_of,
    target_text,
)
from fdp.trace.trace import Operation


@dataclass
class _LastAccesses:
    """The last writer of a piece of memory, and its readers since."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)


def operations_of(graph: fx.Graph) -> tuple[list[Operation], dict[fx.Node, int], dict[fx.Node, int]]:
    """List the operations of a graph with what each of them needs.

    Args:
        graph: a traced graph without dead code.

    Returns:
        One operation for each operator call, or for each of its entries, in the order of the graph. Then, for each
        node that is a marker, the index of its operation, and the index of the operation that last wrote what
        it reads (-1 if that is an input of the step).
    """
    markers: dict[fx.Node, int] = {}
    produced: dict[fx.Node, int] = {}
    made_by: dict[fx.Node, list[int]] = {}
    memory: defaultdict[int, _LastAccesses] = defaultdict(_LastAccesses)
    first: dict[str, int] = {}
    last_random: int | None = None
    operations: list[Operation] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        effects = effects_of(node)
        entries = entries_of(node)
        made_by[node] = []
        for entry in range(entries) if entries is not None else (None,):
            index = len(operations)
            needs: set[int] = set()
            for argument in _arguments(node, entry):
                needs.update(_producers(node, argument, made_by))
            reads, writes = touched(node, effects, entry)
            needs.update(_earlier_accesses(memory, reads, writes))
            before = [first[name] for name in node.meta.get("after", ()) if name in first]
            needs.update(before)
            if is_marker(node):
                markers[node] = index
                writers = [*before, *(memory[storage].writer for storage in _sent(node, reads))]
                produced[node] = max((writer for writer in writers if writer is not None), default=-1)
            elif effects.random:
                # Random numbers come in the order of the user's program, whatever the order of buckets.
                if last_random is not None:
                    needs.add(last_random)
                last_random = index
            for storage in reads:
                memory[storage].readers.append(index)
            for storage in writes:
                memory[storage] = _LastAccesses(writer=index)
            if entry is None and not effects.view:
                for storage in set(storages_of(node)) - writes:
                    memory[storage].writer = index
            needs.discard(index)
            made_by[node].append(index)
            first.setdefault(node.name, index)
            operations.append(
                Operation(
                    node=node.name,
                    target=target_text(node),
                    needs=tuple(sorted(needs)),
                    entry=entry,
                    view=effects.view,
                    backward=bool(node.meta.get("backward")),
                    source=str(node.meta.get("source") or ""),
                )
            )
    return operations, markers, produced


def _earlier_accesses(memory: Mapping[int, _LastAccesses], reads: set[int], writes: set[int]) -> Iterator[int]:
    """The operations that must run before an operation that reads and writes this memory."""
    for storage in reads:
        if (writer := memory[storage].writer) is not None:
            yield writer
    for storage in writes:
        before = memory[storage]
        yield from before.readers
        if before.writer is not None:
            yield before.writer


def _sent(node: fx.Node, reads: set[int]) -> set[int]:
    """The memory of what a marker sends; of a concatenation that is only sent, the memory of each piece."""
    if not node.meta.get("together"):
        return reads
    return {
        number for pieces in node.all_input_nodes for piece in pieces.all_input_nodes for number in storages_of(piece)
    }


def _arguments(node: fx.Node, entry: int | None) -> Sequence[fx.Node]:
    """The arguments of an operation: all of a call's, or those of one list entry and those that entries share."""
    if entry is None:
        return node.all_input_nodes
    found: list[fx.Node] = []
    for _, value in bound_arguments(node):
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[entry], fx.Node):
            found.append(value[entry])
    return found


def _producers(node: fx.Node, argument: fx.Node, made_by: Mapping[fx.Node, list[int]]) -> Sequence[int]:
    produced = made_by.get(argument, [])
    if node.target is operator.getitem and len(produced) > 1:
        return [produced[int(node.args[1])]]  # type: ignore[arg-type]
    return produced


def touched(node: fx.Node, effects: Effects, entry: int | None) -> tuple[set[int], set[int]]:
    """The memory that an operation (a call, or one entry of it) reads, and that which it writes."""
    own = _arguments(node, entry)

    def memory_of(nodes: Set[fx.Node]) -> set[int]:
        # Not the other way round: a list operator reads several nodes an entry, and each entry would go through all.
        return {storage for n in own if n in nodes for storage in storages_of(n)}

    return memory_of(effects.read_nodes), memory_of(effects.written_nodes)
