"""Matrix products that are only added to something: they are computed by the addition, without memory of their own.

A gradient that `fdp.accumulate` adds to a total is most often the product of a layer's input and what came back to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from fdp.emit.memory.liveness import Liveness
from fdp.emit.memory.out_variants import out_variant_of
from fdp.trace.operators.effects import effects_of, storages_of

_aten = torch.ops.aten


def find_added(graph: fx.Graph, same: Mapping[fx.Node, fx.Node], accesses: Liveness) -> dict[fx.Node, fx.Node]:
    """Find the products that only an in-place addition reads, and defer them to it.

    From here on `accesses` says that the addition reads what the product is made of. So it has to be the first decision
    about a program: all others, such as what is computed in a bucket or may replace donated state, then see the reads
    where they happen.

    Args:
        graph: of the step.
        same: views that are their own base.
        accesses: what the plan does to memory, and when; it is updated.

    Returns:
        For each addition, the product that it adds.
    """
    donated = {storage for node in accesses.donated for storage in storages_of(node)}
    found = {}
    for node in graph.nodes:
        if node.target is not _aten.add_.Tensor or node.kwargs or not isinstance(node.args[1], fx.Node):
            continue
        product = same.get(node.args[1], node.args[1])
        if (
            product.target is _aten.mm.default
            and out_variant_of(product) is not None
            and _is_like(node.args[0], product)
            and set(storages_of(node.args[0])).isdisjoint(storages_of(product))  # not a product that is added to itself
            and _readers(product) == {node}
            and not _may_change(product, node, accesses, donated)
        ):
            found[node] = product
            accesses.defer(product, node)
    return found


def _is_like(total: Any, product: fx.Node) -> bool:
    one, two = total.meta["val"], product.meta["val"]
    return bool((one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device))


def _readers(node: fx.Node) -> set[fx.Node]:
    """The nodes that read a value, perhaps through views."""
    found: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "call_function" and effects_of(user).view:
            pending.extend(user.users)
        else:
            found.add(user)
    return found


def _may_change(product: fx.Node, node: fx.Node, accesses: Liveness, donated: AbstractSet[int]) -> bool:
    """Whether a factor of a product changes before the addition reads it, or by the addition itself.

    Donated state may become the new state at any time after its last reader, which is better if it comes early.
    """
    first, last = accesses.ran[product], accesses.ran[node]
    operands = {storage for argument in product.all_input_nodes for storage in storages_of(argument)}
    return not operands.isdisjoint(donated) or any(
        first < at <= last for storage in operands for at in accesses.writes.get(storage, ())
    )
