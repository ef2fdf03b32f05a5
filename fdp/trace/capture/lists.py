"""Operators on lists whose entries depend on each other, taken apart: in the graph they become a call for each entry.

`torch._foreach_add_([a, c], [c, a])` changes `a` and then adds the new `a` to `c`. Functionalization reads all old
values first. Apart, nothing that reads a graph has to know of the order within a list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fdp.trace.operators.effects import entries_of, list_arguments, storages


def take_lists_apart(graph: fx.Graph) -> None:
    """Replace each in-place operator on lists by one call for each entry, where an entry reads what an earlier changes.

    Args:
        graph: it is changed.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and entries_of(node) and _carries_over(node):
            _take_apart(node)


def _carries_over(node: fx.Node) -> bool:
    """Whether an entry reads or changes memory that an entry before it changes."""
    count = entries_of(node)
    lists = [(argument, list(value)) for argument, value in list_arguments(node) if len(value) == count]
    changing = [value for argument, value in lists if argument.alias_info is not None and argument.alias_info.is_write]
    if not changing:
        return False
    entries = {id(each) for _, value in lists for each in value}
    common = [each for each in node.all_input_nodes if id(each) not in entries]
    before: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for at in range(len(changing[0])):
        found = [place for each in (*(value[at] for _, value in lists), *common) for place in _places(each)]
        if any(start < stop and begin < end for memory, start, end in found for begin, stop in before[memory]):
            return True
        for value in changing:
            for memory, start, end in _places(value[at]):
                before[memory].append((start, end))
    return False


def _places(node: object) -> Iterator[tuple[int, int, int]]:
    """The memory of a tensor, and from which to which byte its elements lie."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, torch.Tensor) and value.numel():
        reach = sum((int(size) - 1) * int(step) for size, step in zip(value.shape, value.stride(), strict=True))
        start, size_bytes = int(value.storage_offset()), value.element_size()
        yield storages(value)[0], start * size_bytes, (start + reach + 1) * size_bytes


def _take_apart(node: fx.Node) -> None:
    target: Any = node.target
    lists = {id(value) for _, value in list_arguments(node) if len(value)}

    def entry(value: Any, at: int) -> Any:
        return [value[at]] if id(value) in lists else value

    for at in range(entries_of(node) or 0):
        with node.graph.inserting_before(node):
            args = tuple(entry(value, at) for value in node.args)
            one = node.graph.call_function(target, args, {k: entry(v, at) for k, v in node.kwargs.items()})
        one.meta = {key: value for key, value in node.meta.items() if key != "effects"}
    node.graph.erase_node(node)
