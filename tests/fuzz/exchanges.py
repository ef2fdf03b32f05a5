"""What ranks get of collectives that give each a part of its own, from a list of what all hold. No fdp in it."""

from __future__ import annotations

from typing import Any

import torch


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
