"""Values that need a storage of their own, because an operator (such as as_strided) indexes it by position.

In the memory of a step, and in a bucket, the same positions belong to other values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fdp.trace.operators.effects import effects_of, storage_indexed


def storage_indexed_values(graph: fx.Graph) -> Iterator[fx.Node]:
    """The values whose storage a call indexes by position.

    Most views are not called: they have a fixed place with their base. But a lazily conjugated or negated view has
    none.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not effects_of(node).view or value.is_conj() or value.is_neg():
            yield from storage_indexed(node)


def row_name(node: fx.Node) -> str:
    """The name, in a program, of the whole storage of such a value as a flat tensor, if it is a part of a bucket."""
    return f"{node.name}_row"
