"""Views that change nothing: `detach`, `t` of `t`, a `view` to the shape that is there already.

In an emitted step nothing is recorded for autograd, so a view with the geometry of its base can be replaced by the
base. Each one costs a call into the dispatcher.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fdp.pytorch.tensors import geometry
from fdp.trace.operators.effects import effects_of


def redundant_views(graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
    """Find, for each view that is geometrically its own base (or its base's base, ...), that base."""
    base_of: dict[fx.Node, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not effects_of(node).view or not isinstance(node.args[0], fx.Node):
            continue
        base = node.args[0]
        if not all(isinstance(each.meta["val"], torch.Tensor) for each in (base, node)):
            continue
        base_of[node] = base
        candidate: fx.Node | None = base
        while candidate is not None:
            if geometry(candidate.meta["val"]) == geometry(node.meta["val"]):
                same[node] = same.get(candidate, candidate)
                break
            candidate = base_of.get(candidate)
    return same
