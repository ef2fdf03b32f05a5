"""When whole values are gathered (once, or again for the backward pass), and when parts are taken.

References:
    Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel (VLDB 2023), sections 3.2 and 3.3.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.state.shards import Part
from fdp.trace.operators.effects import effects_of, list_arguments, storages, storages_of
from fdp.trace.sharding.inserted import Link
from fdp.trace.sharding.units import is_same_view


@dataclass(frozen=True, eq=False)
class Gather:
    """A whole value that is put together from its parts.

    Attributes:
        own: this rank's part.
        rows: the message, whose value has the part of each rank as a row.
        whole: the value.
        link: what the message stands for.
        when: values are gathered together if this is equal.
    """

    own: fx.Node
    rows: fx.Node
    whole: fx.Node
    link: Link
    when: Hashable

    @property
    def numel(self) -> int:
        """The number of elements in a part."""
        count: int = self.own.meta["val"].numel()
        return count

    @property
    def size_bytes(self) -> int:
        """Of the whole."""
        value = self.own.meta["val"]
        return int(value.numel() * value.element_size() * self.link.part.ranks)


@dataclass(frozen=True, eq=False)
class Taken:
    """This rank's part, taken of a whole value.

    Attributes:
        node: the value, in the graph on whole values.
        whole: the value here.
        nodes: a view of it in rows, the copy of one row, and a view of that: the part.
        part: which part.
        changed: the node, in the graph on whole values, that made or changed the memory of the value last before.
    """

    node: fx.Node
    whole: fx.Node
    nodes: tuple[fx.Node, fx.Node, fx.Node]
    part: Part
    changed: fx.Node

    @property
    def is_of_input(self) -> bool:
        """Whether the value is an input of the step."""
        return origin_of(self.node).op == "placeholder"


class RankNumber:
    """The number of this rank in a graph, on any device, as a tensor of one element."""

    def __init__(self, like: fx.Node, axis: str, new: Callable[..., fx.Node]) -> None:
        self._like, self._axis, self._new = like, axis, new
        self._known: dict[torch.device, fx.Node] = {}

    def on(self, device: torch.device) -> fx.Node:
        """Its node; put into the graph at first."""
        if device not in self._known:
            cpu, aten = torch.device("cpu"), torch.ops.aten
            if device == cpu:
                index = self._new(torch.ops.fdp.axis_index.default, self._like, self._axis)
                self._known[cpu] = self._new(aten.view.default, index, [1])
            else:
                self._known[device] = self._new(aten._to_copy.default, self.on(cpu), device=device)
        return self._known[device]


def part_taken(
    whole: fx.Node, part: Part, number: RankNumber, new: Callable[..., fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Take this rank's part of a whole value: as `Taken.nodes`."""
    aten: Any = torch.ops.aten
    value = whole.meta["val"]
    rows = new(aten.view.default, whole, part.in_rows(value.shape))
    own = new(aten.index_select.default, rows, part.dim, number.on(value.device))
    return rows, own, new(aten.view.default, own, list(part.of(value.shape)))


def joined_parts(rows: fx.Node, part: Part, shape: Sequence[int], new: Callable[..., fx.Node]) -> fx.Node:
    """Put together a whole value from the parts of all ranks, which are rows of a message; `new` puts in a call."""
    aten: Any = torch.ops.aten
    if not part.dim:
        return new(aten.view.default, rows, list(shape))
    each = [new(aten.select.int, rows, 0, rank) for rank in range(part.ranks)]
    return new(aten.cat.default, each, part.dim)


def phases_of(graph: fx.Graph, in_loops: Container[fx.Node], again: bool) -> Mapping[fx.Node, int]:
    """Number the forward and backward passes of a step; a whole value is gathered at most once in each.

    Args:
        graph: of the step on whole values.
        in_loops: the nodes that run in loops. A loop belongs to the pass in which it begins: in each of its rounds a
            value would be gathered anew.
        again: whether there are passes. If not, all of the step is one.

    Returns:
        For each node the number of its pass.
    """
    found: dict[fx.Node, int] = {}
    number, backward = 0, False
    for node in graph.nodes:
        if again and node.op == "call_function" and node not in in_loops:
            number += bool(node.meta.get("backward")) != backward
            backward = bool(node.meta.get("backward"))
        found[node] = number
    return found


def start_gathers_late(graph: fx.Graph, gathers: Sequence[tuple[fx.Node, fx.Node]], ahead_bytes: int = 0) -> None:
    """Start each gather when an earlier one has arrived, and no sooner: a gathered value takes memory.

    So the next values are under way while an earlier one is used.

    Args:
        graph: of the step on one rank. The nodes of messages get a `meta["after"]`: the names of those to
            wait for.
        gathers: for each whole value the node of its message, and its own.
        ahead_bytes: how much may be under way beside the value that is waited for first.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    found = [(rows, reader) for rows, whole in gathers if (reader := _first_reader(whole, order)) is not None]
    found.sort(key=lambda pair: order[pair[1]], reverse=True)
    readers = sorted(dict(found).items(), key=lambda pair: order[pair[1]])  # the first of each message
    under_way: collections.deque[tuple[fx.Node, fx.Node]] = collections.deque()
    beside_bytes, before = 0, None
    for rows, reader in readers:
        under_way.append((rows, reader))
        beside_bytes += rows.meta["val"].nbytes if len(under_way) > 1 else 0
        while beside_bytes > ahead_bytes and under_way[0][1] is not reader:
            before, _ = under_way.popleft()
            beside_bytes -= under_way[0][0].meta["val"].nbytes
        if before is not None and order[before] < order[rows]:
            rows.meta["after"] = (before.name,)


def take_parts_late(graph: fx.Graph, parts: Sequence[tuple[fx.Node, ...]]) -> None:
    """Take the part of an input right before its first reader, and no earlier: it takes memory.

    Args:
        graph: of the step on one rank. Nodes are moved, and those that copy get a `meta["after"]`.
        parts: of inputs that do not change: for each a view of it in rows, the copy of one row, and a view of that.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for nodes in parts:
        _, copy, taken = nodes
        reader = _first_reader(taken, order)
        if reader is None or any(order[user] < order[reader] for user in taken.users):
            continue
        with_it = [node for node in _read_with(reader, taken) if node.op == "call_function"]
        if with_it:
            copy.meta["after"] = tuple(node.name for node in with_it)
            for node in nodes:
                reader.prepend(node)


def _read_with(reader: fx.Node, value: fx.Node) -> list[fx.Node]:
    """The other arguments of a reader of a value; of an operator on lists, those of the same entry."""
    lists = [listed for _, listed in list_arguments(reader) if listed]
    entries = {at for listed in lists for at, each in enumerate(listed) if each is value}
    if not entries:
        return [node for node in reader.all_input_nodes if node is not value]
    found = [listed[at] for listed in lists for at in entries if at < len(listed)]
    return [node for node in found if isinstance(node, fx.Node) and node is not value]


def _first_reader(value: fx.Node, order: Mapping[fx.Node, int]) -> fx.Node | None:
    """The first operator that reads a value, or a view of it."""
    found: list[fx.Node] = []
    pending = list(value.users)
    while pending:
        user = pending.pop()
        if user.op == "call_function" and effects_of(user).view:
            pending.extend(user.users)
        elif user.op == "call_function":
            found.append(user)
    return min(found, key=order.__getitem__, default=None)


def origin_of(node: fx.Node) -> fx.Node:
    """The node that a chain of identical views begins with."""
    while is_same_view(node) and node.target is not operator.getitem:
        node = node.all_input_nodes[0]
    return node


def entry_of(value: fx.Node, node: fx.Node) -> int | None:
    """Which of several results of `value` a node is; None if there is one."""
    made = value.meta.get("val")
    return storages(made).index(storages_of(node)[0]) if isinstance(made, (list, tuple)) else None
