"""Sums over ranks of which each rank keeps its part: reduce-scatters, on a mesh followed by all-reduces of the parts.

References:
    Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel (VLDB 2023), section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fdp.distributed.mesh import WHOLE, Dimensions, dimension_of, sharded_along, text_along
from fdp.state.shards import Part
from fdp.trace.operators.effects import collective_of, is_marker, mesh_dimension_of


def is_scattered(node: fx.Node, dimensions: Dimensions) -> bool:
    """Whether a node is a sum or a mean over ranks that can be scattered instead."""
    collective = collective_of(node)
    if collective is None or not is_marker(node, "all_reduce") or collective.name not in ("sum", "mean"):
        return False
    return mesh_dimension_of(node) in (WHOLE, sharded_along(dimensions))


def in_rows(whole: fx.Node, part: Part, new: Callable[..., fx.Node]) -> fx.Node:
    """View a whole value as rows, of which each is the part of one rank."""
    aten: Any = torch.ops.aten
    rows = new(aten.view.default, whole, part.in_rows(whole.meta["val"].shape))
    if not part.dim:
        return rows
    order = [part.dim, *(dim for dim in range(len(rows.meta["val"].shape)) if dim != part.dim)]
    return new(aten.permute.default, rows, order)


def scattered(
    given: Mapping[str, Any], whole: fx.Node, part: Part, dimensions: Dimensions, new: Callable[..., fx.Node]
) -> fx.Node:
    """Put in a sum or mean over ranks of which this rank keeps its part.

    Args:
        given: the arguments of the marker that stands for all of it.
        whole: what this rank contributes.
        part: that it keeps.
        dimensions: of the mesh.
        new: puts a call into the graph.

    Returns:
        The node of the part.
    """
    rows = in_rows(whole, part, new)
    op, label, accumulate, inner = given["op"], given["label"], given.get("accumulate"), sharded_along(dimensions)
    axis = text_along("traced", inner)
    made = new(torch.ops.fdp.reduce_scatter.default, rows, op, axis, given["kind"], label, accumulate)
    if dimension_of(given["axis"]):
        return made  # it was along that dimension alone
    for name, _ in reversed(dimensions[:-1]):
        # The parts are added up between hosts: each rank those of one place in its host.
        axis, rest = text_along("traced", name), () if accumulate is None else (given["wire"], accumulate)
        made = new(torch.ops.fdp.all_reduce.default, made, op, axis, "value", text_along(label, name), *rest)
    return made
