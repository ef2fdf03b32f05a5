"""Collectives that give each rank a part of its own: split over ranks, exchanged between them, or sent to one of them.

They have the semantics of `jax.lax` with `tiled=True`: an existing dimension is split or concatenated, and none is
added.
A result differs from rank to rank: inside of a step it is a varying value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from fdp.collectives import markers
from fdp.collectives.over_pytrees import Given, map_tensors
from fdp.context.axis import current_axis
from fdp.errors import ArgumentError, build_message
from fdp.pytree import Tree
from fdp.tracebacks import hiding_frames


@hiding_frames
def psum_scatter(tree: Tree, axis: int = 0, axis_name: str | None = None) -> Tree:
    """Sum every leaf over the ranks, and keep this rank's part of the sum.

    Rank r gets the r-th of as many equal parts as there are ranks. It costs half of what `psum` does, which is this and
    a gathering of the parts. Where fdp adds up (gloo), it does so in the order of ranks, sixteen-bit values in float32
    and rounded once; NCCL adds in an order of its own. `wire_dtype` does not apply: leaves are sent as they are.

    Args:
        tree: pytree of tensors (floating point, complex, or integer but for int16) with at least one dimension.
        axis: the dimension that is split; the number of ranks divides its size. Negative ones count from the end.
        axis_name: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for
            all ranks.

    Returns:
        The tree with each leaf of shape [..., s, ...] replaced by one of shape [..., s / ranks, ...], contiguous, which
        differs from rank to rank. Differentiable: the transpose gathers what all ranks send back for their parts.

    Raises:
        ArgumentError: a leaf has no such dimension, or ranks do not divide its size; it is boolean, of 16-bit integers,
            sparse, or no tensor; there is no such `axis_name`.

    Example:
        >>> psum_scatter({"grads": torch.tensor([1.0, 2.0])})
        {'grads': tensor([1., 2.])}

    References:
        JAX, `jax.lax.psum_scatter(..., tiled=True)`.
    """
    return _scatter("psum_scatter", tree, axis, axis_name, "sum")


@hiding_frames
def pmean_scatter(tree: Tree, axis: int = 0, axis_name: str | None = None) -> Tree:
    """Average every leaf over the ranks, and keep this rank's part of the mean.

    As `psum_scatter`, divided by the number of ranks after the sum.

    Args:
        tree: pytree of floating-point or complex tensors of any shape with at least one dimension.
        axis: the dimension that is split; the number of ranks divides its size. Negative ones count from the end.
        axis_name: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for
            all ranks.

    Returns:
        The tree with each leaf of shape [..., s, ...] replaced by one of shape [..., s / ranks, ...], contiguous, which
        differs from rank to rank. Differentiable: the transpose gathers what all ranks send back for their parts, and
        divides it by the number of ranks.

    Raises:
        ArgumentError: a leaf has no such dimension, or ranks do not divide its size; it is an integer tensor, boolean,
            sparse, or no tensor; there is no such `axis_name`.

    Example:
        >>> pmean_scatter({"grads": torch.tensor([[1.0, 2.0]])}, axis=1)
        {'grads': tensor([[1., 2.]])}

    References:
        JAX, `jax.lax.psum_scatter(..., tiled=True)`, divided by the size of the axis.
    """
    return _scatter("pmean_scatter", tree, axis, axis_name, "mean")


@hiding_frames
def all_to_all(x: Tree, split_axis: int, concat_axis: int, axis: str | None = None) -> Tree:
    """Split every leaf over the ranks along one dimension, and put what they send together along another.

    Rank r gets the r-th part of every rank's leaf, in the order of ranks.

    Args:
        x: a tensor of any shape with at least one dimension and of any dtype, or a pytree of such.
        split_axis: the dimension that is split; the number of ranks divides its size. Negative ones count from the end.
        concat_axis: the dimension along which the parts that arrive are put together.
        axis: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for all
            ranks.

    Returns:
        The tree with `split_axis` of each leaf divided by the number of ranks, and then `concat_axis` multiplied by it,
        contiguous; it differs from rank to rank. Differentiable: the transpose is `all_to_all` with the axes exchanged.

    Raises:
        ArgumentError: a leaf has no such dimensions, or ranks do not divide the size of `split_axis`; it is sparse, or
            no tensor; there is no such `axis`.

    Example:
        >>> all_to_all(torch.ones(2, 3), split_axis=0, concat_axis=1).shape
        torch.Size([2, 3])

    References:
        JAX, `jax.lax.all_to_all(..., tiled=True)`.
    """
    where = current_axis().along(axis, "all_to_all")
    size = where.size

    def exchange(leaf: torch.Tensor, label: str) -> torch.Tensor:
        split, concat = split_axis % leaf.dim(), concat_axis % leaf.dim()
        parts = markers.all_to_all(_rows(leaf, split, size), where.name, "value", label)
        if size == 1 or all(n == 1 for n in leaf.shape[:concat]):  # rows follow each other as they are
            shape = [*parts.shape[1 : concat + 1], size * parts.shape[concat + 1], *parts.shape[concat + 2 :]]
            result: torch.Tensor = torch.ops.aten._unsafe_view.default(parts, shape)  # the caller's own, and no view
            return result
        return parts.movedim(0, concat).flatten(concat, concat + 1).contiguous()

    def check(given: Given) -> None:
        _refuse_axis("all_to_all", "split_axis", split_axis, given, size)
        _refuse_axis("all_to_all", "concat_axis", concat_axis, given, None)

    return map_tensors("all_to_all", x, exchange, check=check)


@hiding_frames
def ppermute(tree: Tree, perm: Sequence[tuple[int, int]], axis: str | None = None) -> Tree:
    """Send every leaf to another rank, as pairs of ranks say.

    Args:
        tree: pytree of tensors (the same shapes and dtypes on every rank) and numbers.
        perm: pairs (source, destination), the same on every rank: the destination gets the source's leaf. No rank is a
            source twice, or a destination. A shift by one is `[(r, (r + 1) % n) for r in range(n)]`.
        axis: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for all
            ranks.

    Returns:
        The tree of what was sent to this rank, contiguous, with zeros if nothing was; it differs from rank to rank.
        Differentiable: the transpose is `ppermute` with the pairs turned round.

    Raises:
        ArgumentError: a source or a destination occurs twice, or is no rank; a leaf is sparse, or no tensor; there
            is no such `axis`.

    Example:
        >>> ppermute(torch.tensor([1.0, 2.0]), [(0, 0)]), ppermute(torch.tensor([1.0, 2.0]), [])
        (tensor([1., 2.]), tensor([0., 0.]))

    References:
        JAX, `jax.lax.ppermute`.
    """
    where = current_axis().along(axis, "ppermute")
    pairs = _pairs(perm, where.size)
    return map_tensors("ppermute", tree, lambda x, label: markers.permute(x, pairs, where.name, "value", label))


def _scatter(name: str, tree: Tree, axis: int, axis_name: str | None, op: str) -> Tree:
    where = current_axis().along(axis_name, name)

    def reduce(x: torch.Tensor, label: str) -> torch.Tensor:
        return markers.reduce_scatter(_rows(x, axis % x.dim(), where.size), op, where.name, "value", label)

    return map_tensors(name, tree, reduce, op, lambda given: _refuse_axis(name, "axis", axis, given, where.size))


def _rows(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Split a dimension into equal parts, one for each rank, which become the first dimension."""
    result: torch.Tensor = x.unflatten(axis, (size, x.shape[axis] // size)).movedim(axis, 0)
    return result


def _refuse_axis(name: str, argument: str, axis: Any, given: Given, ranks: int | None) -> None:
    """Refuse leaves without a dimension, or in which a number of ranks does not divide its size."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        of_mesh = "; one of the mesh goes to axis_name" if argument == "axis" else ""
        raise ArgumentError(
            build_message(
                f"fdp.{name} was given {argument}={axis!r}.", remedy=f"pass a dimension: a whole number{of_mesh}."
            )
        )
    missing = [
        f"{label}: shape {list(x.shape)}, {argument}={axis}" for x, label in given if not -x.dim() <= axis < x.dim()
    ]
    if missing:
        raise ArgumentError(
            build_message(
                f"fdp.{name} was given tensors without dimension {axis}.",
                missing,
                remedy=f"pass another {argument}, or tensors of more dimensions: x[None] has one more.",
            )
        )
    uneven = [
        f"{label}: shape {list(x.shape)}, {argument}={axis} has size {x.shape[axis]}, ranks {ranks}"
        for x, label in given
        if ranks is not None and x.shape[axis] % ranks
    ]
    if uneven:
        raise ArgumentError(
            build_message(
                f"fdp.{name} was given tensors that {ranks} ranks cannot share evenly.",
                uneven,
                remedy=f"pass another {argument}; or fill that dimension up to a multiple of fdp.axis_size(), with "
                "torch.nn.functional.pad.",
            )
        )


def _pairs(perm: Any, size: int) -> list[int]:
    """Sources and destinations, one after the other, in the order of sources."""
    try:
        pairs = sorted((_rank(source), _rank(destination)) for source, destination in perm)
    except (TypeError, ValueError):
        raise ArgumentError(
            build_message(
                f"fdp.ppermute was given perm={perm!r}.",
                remedy="pass pairs of ranks (source, destination), for instance [(0, 1), (1, 0)].",
            )
        ) from None
    ends: tuple[tuple[str, list[int]], ...] = (
        ("source", [source for source, _ in pairs]),
        ("destination", [destination for _, destination in pairs]),
    )
    wrong = [
        f"rank {rank} is {what} {ranks.count(rank)} times"
        for what, ranks in ends
        for rank in sorted(set(ranks))
        if ranks.count(rank) > 1
    ]
    wrong += [
        f"{what} {rank}: there is no such rank"
        for what, ranks in ends
        for rank in sorted(set(ranks))
        if not 0 <= rank < size
    ]
    if wrong:
        raise ArgumentError(
            build_message(
                f"fdp.ppermute was given pairs that are no permutation of some of {size} ranks.",
                wrong,
                remedy=f"let each rank from 0 to {size - 1} be a source at most once, and a destination at most once.",
            )
        )
    return [rank for pair in pairs for rank in pair]


def _rank(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)
