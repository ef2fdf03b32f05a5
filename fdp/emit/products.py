"""Matrix products that are added to something: computed and added in one pass, without memory for the product.

A gradient that `fdp.accumulate` adds to a total is most often the product of a layer's input and what came back to it.
The library's kernel adds each tile of a product as it is done; what it rounds to differs from the product and the sum
one after the other in the last digit, as the sum over a larger batch does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fdp.emit.accesses import Accesses
from fdp.emit.donation import Placement
from fdp.emit.lines import Line
from fdp.emit.places import Places
from fdp.emit.writer import Writer, bind_operator, literal
from fdp.trace.effects import effects_of, storages_of

_aten = torch.ops.aten


def find_added(
    graph: fx.Graph, same: Mapping[fx.Node, fx.Node], placement: Placement, accesses: Accesses, places: Places
) -> dict[fx.Node, fx.Node]:
    """Find the products that nobody needs but an addition in place.

    Args:
        graph: of the step.
        same: views that are their own base.
        placement: where outputs live.
        accesses: what the plan does to memory, and when.
        places: values at fixed places.

    Returns:
        For each addition, the product that it adds.
    """
    found = {}
    for node in graph.nodes:
        if node.target is not _aten.add_.Tensor or node.kwargs or not isinstance(node.args[1], fx.Node):
            continue
        product = same.get(node.args[1], node.args[1])
        if (
            product.target is _aten.mm.default
            and product in places.forms
            and product not in places.divided
            and _is_like(node.args[0], product)
            and _readers(product) == {node}
            and not _changes_between(product, node, placement, accesses)
        ):
            found[node] = product
    return found


def write_added(writer: Writer, node: fx.Node, product: fx.Node) -> None:
    """Write the call that computes a product and adds it."""
    uses: set[str] = set()
    total, one, two = (literal(writer, argument, uses) for argument in (node.args[0], *product.args))
    call = bind_operator(writer, _aten.addmm_.default, (node.args[0], *product.args))
    writer.lines.append(Line(f"{call}({total}, {one}, {two})", uses))
    if node.name not in writer.places.named:
        writer.local[node] = total


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


def _changes_between(product: fx.Node, node: fx.Node, placement: Placement, accesses: Accesses) -> bool:
    """Whether what a product is made of changes, or may, before it is added."""
    owned = {storage for donated in placement.replaced.values() for storage in storages_of(donated)}
    owned |= {storage for donated in placement.written.values() for storage in storages_of(donated)}
    owned |= {storage for pairs in placement.copies.values() for target, _ in pairs for storage in storages_of(target)}
    first, last = accesses.ran[product], accesses.ran[node]
    for argument in product.all_input_nodes:
        for storage in storages_of(argument):
            if storage in owned or any(first < at < last for at in accesses.writes.get(storage, ())):
                return True
    return False
