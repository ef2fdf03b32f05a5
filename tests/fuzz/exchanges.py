"""What ranks get of collectives that give each a part of its own, from a list of what all hold. No fdp in it.

Four ranks are on a mesh, along whose dimensions they meet in pairs.
"""

from __future__ import annotations

from typing import Any

import torch

MESHES = {4: (("hosts", 2), ("local", 2))}
"""For numbers of ranks the names and sizes of their mesh; the last one is counted fastest."""


def along(axis: Any, combine: Any) -> Any:
    """What ranks get that combine their values along one dimension of their mesh, from the values of all."""

    def each(xs: Any) -> Any:
        if axis is None:
            return combine(xs)
        found = list(xs)
        for members in members_along(axis, len(xs)):
            for rank, mine in zip(members, combine([xs[rank] for rank in members]), strict=True):
                found[rank] = mine
        return found

    return each


def members_along(axis: str, ranks: int) -> Any:
    """The ranks that meet along a dimension: of two hosts of two ranks, those of a host, or those of one place."""
    return {"hosts": [[0, 2], [1, 3]], "local": [[0, 1], [2, 3]]}[axis] if ranks in MESHES else None


def sum_of(xs: Any) -> Any:
    """The sum in the order of ranks."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def scattered(xs: Any, axis: int, mean: bool) -> Any:
    """Each rank gets its part of the sum, or of the mean."""
    total = sum_of(xs)
    return (total / len(xs) if mean else total).chunk(len(xs), axis)


def exchanged(xs: Any, split_axis: int, concat_axis: int) -> Any:
    """Each rank gets its part of every rank's."""
    sent = [x.chunk(len(xs), split_axis) for x in xs]
    return [torch.cat([parts[rank] for parts in sent], concat_axis) for rank in range(len(xs))]


def permuted(xs: Any, perm: Any) -> Any:
    """Each rank gets what is sent to it, or zeros."""
    return [next((xs[source] for source, to in perm if to == rank), x * 0) for rank, x in enumerate(xs)]
