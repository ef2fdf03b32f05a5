"""Liveness: when, in the order of a plan, each piece of memory is made, read and written; and what is never read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container
from typing import Any

from torch import fx

from fdp.plan import Plan, Run, Start
from fdp.trace.graph.dependencies import touched
from fdp.trace.operators.effects import effects_of, is_marker, storages_of


class Liveness:
    """When each piece of memory is accessed, by position in the schedule of a plan.

    Attributes:
        reads: for each piece of memory, the position and node of each read; taking a view is none.
        writes: for each piece of memory, the positions at which an operator changes it.
        made: for each piece of memory, the position at which an operator returns it, or a view of it.
        ran: for each node, the position at which it runs, or the last of its entries does.
        starts: for each bucket, the position at which it starts.
        donated: the inputs that the step may write to.
    """

    def __init__(self, plan: Plan) -> None:
        self.reads: dict[int, list[tuple[int, fx.Node]]] = defaultdict(list)
        self.writes: dict[int, list[int]] = {}
        self.made: dict[int, int] = {}
        self.ran: dict[fx.Node, int] = {}
        self.starts: dict[int, int] = {}
        trace = plan.trace
        placeholders = trace.graph.graph.find_nodes(op="placeholder")
        self.donated = [node for node, item in zip(placeholders, trace.inputs, strict=True) if item.donated]
        for at, item in enumerate(plan.schedule):
            if isinstance(item, Run):
                node = trace.nodes[trace.operations[item.operations[0]].node]
                self.made.update(dict.fromkeys(storages_of(node), at))
                self.ran[node] = at
                effects = effects_of(node)
                for index in item.operations:
                    read, written = touched(node, effects, trace.operations[index].entry)
                    for storage in read:
                        self.reads[storage].append((at, node))
                    for storage in written:
                        self.writes.setdefault(storage, []).append(at)
                continue
            if isinstance(item, Start):
                self.starts[item.bucket] = at
            for member in plan.buckets[item.bucket].members:
                marker = trace.marker(member)
                if isinstance(item, Start):
                    source: Any = marker.args[0]
                    for storage in storages_of(source):
                        self.reads[storage].append((at, marker))
                else:
                    self.made.update(dict.fromkeys(storages_of(marker), at))

    def defer(self, node: fx.Node, to: fx.Node) -> None:
        """Let a later node compute this one, and read what this one reads."""
        at = self.ran[to]
        for storage in {storage for argument in effects_of(node).reads for storage in storages_of(argument)}:
            self.reads[storage] = [
                (at, to) if reader is node else (when, reader) for when, reader in self.reads[storage]
            ]
        self.ran[node] = at

    def last_read(self, memory: int, except_by: fx.Node | None = None) -> int:
        """Position of the last read, -1 if there is none."""
        return max((at for at, reader in self.reads.get(memory, ()) if reader is not except_by), default=-1)

    def last_read_by(self, memory: int, reader: fx.Node) -> int:
        """Position of the last read by a node, -1 if there is none."""
        return max((at for at, node in self.reads.get(memory, ()) if node is reader), default=-1)

    def first_write(self, memory: int) -> float:
        """Position of the first change, infinite if there is none."""
        return min(self.writes.get(memory, ()), default=math.inf)

    def last_write(self, memory: int) -> int:
        """Position of the last change, -1 if there is none."""
        return max(self.writes.get(memory, ()), default=-1)


def unused_nodes(graph: fx.Graph, constants: Container[fx.Node]) -> frozenset[fx.Node]:
    """Nodes whose results nothing reads, such as a loss of which only the gradient is used.

    Args:
        graph: of a trace.
        constants: values that are known ahead, and computed from nothing.

    Returns:
        Nodes that can be left out.
    """
    unused: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or is_marker(node) or not effects_of(node).pure:
            continue
        if all(user in unused or user in constants for user in node.users):
            unused.add(node)
    return frozenset(unused)
