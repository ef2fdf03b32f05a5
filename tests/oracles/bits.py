"""Trees of tensors compared bit for bit, and copied with the memory that they lie in."""

from __future__ import annotations

from typing import Any

import optree
import torch

Tree = Any


def copied(tree: Tree) -> Tree:
    """The same tree with tensors in memory of their own, each in the layout that it had.

    The layout matters: a matrix product of the same numbers in another one may differ in its last bit.
    """

    def copy(x: torch.Tensor) -> torch.Tensor:
        new = torch.empty(0, dtype=x.dtype)
        return new.set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())

    return optree.tree_map(copy, tree)


def same_bits(one: Tree, two: Tree) -> bool:
    """Whether two trees have one structure and tensors of the same shape, dtype and bits; a NaN equals a NaN."""
    return optree.tree_structure(one) == optree.tree_structure(two) and same_leaves(one, two)


def same_leaves(one: Tree, two: Tree) -> bool:
    """Likewise, in whatever structures the tensors are."""
    xs, ys = optree.tree_leaves(one), optree.tree_leaves(two)
    return len(xs) == len(ys) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(_bits(x), _bits(y))
        for x, y in zip(xs, ys, strict=True)
    )


def same_bits_or_equal(one: Tree, two: Tree) -> bool:
    """The same with leaves that are no tensors, equal in type and text."""
    if optree.tree_structure(one) != optree.tree_structure(two):
        return False

    def equal(x: Any, y: Any) -> bool:
        return same_bits(x, y) if isinstance(x, torch.Tensor) else (type(x), repr(x)) == (type(y), repr(y))

    return all(map(equal, optree.tree_leaves(one), optree.tree_leaves(two)))


def _bits(x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().contiguous().reshape(-1)
    if flat.is_floating_point():
        flat = torch.where(flat.isnan(), torch.nan, flat)
    return flat.view(torch.uint8)


def memory(x: torch.Tensor) -> int:
    """A number for the memory that a tensor lies in."""
    return x.untyped_storage().data_ptr()
