"""Another order of a graph: operators that belong together run one after the other, and each after what it needs."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import fx

from fdp.trace.graph.dependencies import operations_of
from fdp.trace.graph.loops import regions_of


class Precedence:
    """Which nodes of a graph must run before which.

    Loops stay where they are, and so does all that lies before the end of the last one.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        ends = [end for _, _, end in regions_of(graph)]
        nodes = list(graph.nodes)
        first = 1 + max((nodes.index(end) for end in ends), default=-1)
        self._rank = {node: at for at, node in enumerate(nodes[first:]) if node.op == "call_function"}
        self._needs = self._found()

    def covers(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether all of some nodes may get another place."""
        return all(node in self._rank for node in nodes)

    def _found(self) -> Mapping[fx.Node, set[fx.Node]]:
        named = {node.name: node for node in self._rank}
        operations, _, _ = operations_of(self._graph)
        needs: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)
        for operation in operations:
            node = named.get(operation.node)
            if node is not None:
                before = (named.get(operations[index].node) for index in operation.needs)
                needs[node].update(each for each in before if each is not None and each is not node)
        for node in self._rank:
            needs[node].update(each for each in node.all_input_nodes if each in self._rank)
        return needs

    def together(self, groups: Sequence[Collection[fx.Node]]) -> list[fx.Node] | None:
        """The nodes in an order in which those of each group follow one another; None if there is none.

        A group runs at the place of the last of its nodes that depend on no other node of it; the rest keeps its order.
        """
        member = {node: number for number, group in enumerate(groups) for node in group}
        heads: dict[int | fx.Node, int] = {}
        units: defaultdict[int | fx.Node, list[fx.Node]] = defaultdict(list)
        for node, rank in self._rank.items():
            unit = member.get(node, node)
            units[unit].append(node)
            if not any(member.get(each) == unit for each in self._needs[node]):
                heads[unit] = rank
        waits: dict[int | fx.Node, set[int | fx.Node]] = {
            unit: {member.get(each, each) for node in nodes for each in self._needs[node]} - {unit}
            for unit, nodes in units.items()
        }
        behind: defaultdict[int | fx.Node, list[int | fx.Node]] = defaultdict(list)
        for unit, before in waits.items():
            for each in before:
                behind[each].append(unit)
        left = {unit: len(before) for unit, before in waits.items()}
        at_rank = {heads[unit]: unit for unit in units}
        ready = [heads[unit] for unit in units if not left[unit]]
        heapq.heapify(ready)
        order: list[fx.Node] = []
        while ready:
            unit = at_rank[heapq.heappop(ready)]
            order += units[unit]
            for each in behind[unit]:
                left[each] -= 1
                if not left[each]:
                    heapq.heappush(ready, heads[each])
        return order if len(order) == len(self._rank) else None

    def apply(self, order: Sequence[fx.Node]) -> None:
        """Bring the graph into an order."""
        output = self._graph.output_node()
        for node in order:
            output.prepend(node)
