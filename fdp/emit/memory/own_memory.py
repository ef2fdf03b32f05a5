"""Values that have to lie in memory of their own: an operator means elements of them by their places in memory.

In the memory of a step, and in a bucket, the same places are those of other values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fdp.trace.operators.effects import effects_of, storage_indexed


def storage_indexed_values(graph: fx.Graph) -> Iterator[fx.Node]:
    """The values of which a call means elements by their places.

    Views are not called: they have places with what they are views of. But what stands for the conjugate of what lies
    in memory has no place.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not effects_of(node).view or value.is_conj() or value.is_neg():
            yield from storage_indexed(node)


def row_name(node: fx.Node) -> str:
    """The name, in a program, of all memory that such a value lies in, as a row, if that is part of a bucket."""
    return f"{node.name}_row"
