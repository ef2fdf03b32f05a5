"""The arithmetic behind replicated results, as text: ranks compare it besides their messages.

The analysis of what varies believes that a Python number is the same everywhere. One that a step makes from the
length of its batch, or from its rank, is not; where such a number goes into a replicated result, ranks would drift
apart in silence. So ranks compare the calls, numbers and all, that lead from arguments and collectives to results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fdp.distributed.comparable import comparable
from fdp.distributed.fingerprint import fingerprint
from fdp.trace.operators.effects import effects_of, inner_nodes, is_marker, operator_name, storages_of, target_text


def replicated_calls(graph_module: fx.GraphModule, varying: Mapping[fx.Node, Any]) -> Iterator[str]:
    """Describe every call that a replicated result depends on, back to arguments and collectives.

    Args:
        graph_module: the traced graph.
        varying: the nodes that may differ from rank to rank.

    Yields:
        One line a call, in the order of the graph: equal on two ranks exactly if they do the same arithmetic.
    """
    graph = graph_module.graph
    writers: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for target in effects_of(node).writes:
            for storage in storages_of(target):
                writers[storage].append(node)
    wanted: set[fx.Node] = set()
    pending = list(graph.output_node().all_input_nodes)
    while pending:
        node = pending.pop()
        if node in wanted or node in varying or is_marker(node):
            continue
        wanted.add(node)
        pending.extend(node.all_input_nodes)
        for storage in storages_of(node):
            pending.extend(writers.pop(storage, ()))  # once is enough: a buffer may have as many views as writers
    for node in graph.nodes:
        for call in (node, *inner_nodes(node)) if node in wanted else ():
            if call.op == "call_function":
                arguments = [_text(graph_module, value) for value in (*call.args, *call.kwargs.values())]
                yield f"{target_text(call)}({', '.join(arguments)}) at {call.meta.get('source')}"


def closed_over(graph_module: fx.GraphModule, names: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """List the tensors that a step uses without being passed them: attribute of the graph module, and name."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, node.target, None)
        if isinstance(value, torch.Tensor) and not _is_made_by_step(node):
            yield str(node.target), names.get(id(value), f"of shape {list(value.shape)}")


def _is_made_by_step(node: fx.Node) -> bool:
    """Whether a constant was made by the step from a Python number, as in torch.tensor(len(batch))."""
    return all(operator_name(user) == "lift_fresh_copy" for user in node.users)


def _text(graph_module: fx.GraphModule, value: object) -> str:
    if isinstance(value, fx.Node):
        held = getattr(graph_module, str(value.target), None) if value.op == "get_attr" else None
        if isinstance(held, torch.Tensor) and _is_made_by_step(value):
            return f"{held.item()!r}" if held.dim() == 0 else f"a constant {fingerprint(held):x}"
        return "_"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(graph_module, item) for item in value) + "]"
    if isinstance(value, torch.device):
        return value.type  # ranks use different devices of one kind
    return comparable(value)
