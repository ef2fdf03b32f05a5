"""Small values that are gathered close together share a message, which saves latency.

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB 2020), section 3.2.3: what
    buckets do for gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fdp.trace.graph.loops import regions_of
from fdp.trace.operators.effects import effects_of, storages_of
from fdp.trace.sharding.gathers import Gather, start_gathers_late
from fdp.trace.sharding.inserted import Link

SMALL_BYTES = 2**20
"""A whole value of at most so many bytes may share a message. It is copied twice more than in a message of its own."""
TOGETHER_BYTES = 4 * SMALL_BYTES
"""So many bytes of whole values share a message. More would delay the first of them, and save little."""
AHEAD_BYTES = 32 * SMALL_BYTES
"""So much is gathered ahead of what is waited for: the network always has something to send, and few values lie whole
before they are read."""
WITHIN_A_LIMIT = 1 / 64
"""Of both, where few values are to be whole at once: those in a message are whole together."""


def share_messages(
    graph: fx.Graph,
    gathers: Sequence[Gather],
    new: Callable[..., fx.Node],
    few: bool,
    others: Sequence[tuple[fx.Node, fx.Node]] = (),
) -> list[Link]:
    """Let small values share messages, if each part has its value when the first of them is sent.

    Args:
        graph: of a step on one rank; it is changed.
        gathers: what is gathered in it, each by a message of its own, in the order of the graph.
        new: puts a call into the graph.
        few: whether few values are to be whole at once. Then less is sent together, and a message begins when the one
            before has arrived. Otherwise more are under way.
        others: messages that bring whole values, too, each with the node of its value; they are begun by the same rule.

    Returns:
        What the messages stand for now.
    """
    links = {gather: gather.link for gather in gathers}
    messages = {gather: gather.rows for gather in gathers}
    for group in _groups(graph, gathers, WITHIN_A_LIMIT if few else 1.0):
        message, starts = _together(graph, group, new)
        for gather, start in zip(group, starts, strict=True):
            links[gather] = replace(gather.link, node=message.name, start=start)
            messages[gather] = message
    ahead_bytes = 0 if few else AHEAD_BYTES
    start_gathers_late(graph, [*((messages[gather], gather.whole) for gather in gathers), *others], ahead_bytes)
    return list(links.values())


def _groups(graph: fx.Graph, gathers: Sequence[Gather], share: float) -> list[list[Gather]]:
    """The groups of values that share a message; it is sent where that of the first one was."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    ready = _ready(graph, gathers, order)
    in_loops = {node for _, region, _ in regions_of(graph) for node in region}
    last: dict[Hashable, list[Gather]] = {}
    found: list[list[Gather]] = []
    for gather in gathers:
        if gather.rows in in_loops or not 0 < gather.size_bytes <= share * SMALL_BYTES:
            continue
        value = gather.own.meta["val"]
        alike = value.dtype, value.device, gather.link.part.ranks, gather.when
        group = last.get(alike, [])
        is_full = sum(each.size_bytes for each in group) + gather.size_bytes > share * TOGETHER_BYTES
        if not group or is_full or ready[gather] > order[group[0].rows]:
            group = last[alike] = []
            found.append(group)
        group.append(gather)
    return [group for group in found if len(group) > 1]


def _ready(graph: fx.Graph, gathers: Sequence[Gather], order: Mapping[fx.Node, int]) -> Mapping[Gather, int]:
    """The position from which on each part has the value that is gathered."""
    changes: defaultdict[int, list[int]] = defaultdict(list)
    for node in graph.nodes:
        for written in effects_of(node).writes if node.op == "call_function" else ():
            for number in storages_of(written):
                changes[number].append(order[node])
    return {
        gather: max(
            [
                order[gather.own],
                *(at for number in storages_of(gather.own) for at in changes[number] if at < order[gather.rows]),
            ]
        )
        for gather in gathers
    }


def _together(graph: fx.Graph, group: Sequence[Gather], new: Callable[..., fx.Node]) -> tuple[fx.Node, list[int]]:
    """Concatenate the parts of several values, gather them in one message, and split the result.

    Returns:
        The message, and for each value how many elements of a rank's row lie before its own.
    """
    aten: Any = torch.ops.aten
    first, *others = group

    def put(target: object, *args: Any, **kwargs: Any) -> fx.Node:
        node = new(target, *args, **kwargs)
        node.meta |= {key: first.rows.meta[key] for key in ("source", "backward")}
        return node

    with graph.inserting_before(first.rows):
        flat, starts, start = [], [], 0
        for gather in group:
            own = gather.own
            if not own.meta["val"].is_contiguous():
                own = put(aten.clone.default, own, memory_format=torch.contiguous_format)
            flat.append(put(aten.view.default, own, [gather.numel]))
        sent = put(aten.cat.default, flat)
        message = put(first.rows.target, sent, *first.rows.args[1:-1], f"{first.link.label} and {len(others)} more")
        message.meta["together"] = True  # it may be sent as early as each of them by itself
        for gather in group:
            taken = put(aten.slice.Tensor, message, 1, start, start + gather.numel)
            rows = put(aten.view.default, taken, list(gather.rows.meta["val"].shape))
            apart = put(aten.clone.default, rows, memory_format=torch.contiguous_format)
            apart.meta["val"] = gather.rows.meta["val"]  # its views lie in this memory
            gather.rows.replace_all_uses_with(apart)
            starts.append(start)
            start += gather.numel
    for gather in group:
        graph.erase_node(gather.rows)
    return message, starts
