"""What each rank gets from a collective, computed in one process on a list of what all ranks hold. No fdp in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Values = list[torch.Tensor]


def added(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of ranks."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def psum_scatter(values: Values, axis: int = 0) -> Values:
    return [part.clone() for part in added(values).chunk(len(values), axis)]


def pmean_scatter(values: Values, axis: int = 0) -> Values:
    return [part.clone() for part in (added(values) / len(values)).chunk(len(values), axis)]


def all_to_all(values: Values, split_axis: int, concat_axis: int) -> Values:
    parts = [value.chunk(len(values), split_axis) for value in values]
    return [torch.cat([sent[rank] for sent in parts], concat_axis) for rank in range(len(values))]


def ppermute(values: Values, perm: Sequence[tuple[int, int]]) -> Values:
    found = [torch.zeros_like(value) for value in values]
    for source, destination in perm:
        found[destination] = values[source] + 0
    return found


COLLECTIVES: dict[str, Callable[..., Values]] = {
    "psum_scatter": psum_scatter,
    "pmean_scatter": pmean_scatter,
    "all_to_all": all_to_all,
    "ppermute": ppermute,
}
