"""Matrix products fused with the addition that reads them (`addmm` and the like): the product needs no memory.

The library's kernel adds each tile of a product as it is done; what it rounds to differs from the product and the sum
one after the other in the last digit, as the sum over a larger batch does.
"""

from __future__ import annotations

import torch
from torch import fx

from fdp.emit.codegen.lines import Line
from fdp.emit.codegen.writer import Writer, bind_operator, literal

_aten = torch.ops.aten


def write_added(writer: Writer, node: fx.Node, product: fx.Node) -> None:
    """Write the call that computes a product and adds it."""
    uses: set[str] = set()
    total, one, two = (literal(writer, argument, uses) for argument in (node.args[0], *product.args))
    call = bind_operator(writer, _aten.addmm_.default, (node.args[0], *product.args))
    writer.lines.append(Line(f"{call}({total}, {one}, {two})", uses))
    if node.name not in writer.memory.places.named:
        writer.local[node] = total
