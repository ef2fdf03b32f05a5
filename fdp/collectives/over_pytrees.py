"""Collectives over pytrees: differentiable, recorded inside a step, run at once outside of one.

Inside a step (a function under `fdp.data_parallel`) a collective becomes a node of the traced graph, which
the planner puts into a bucket. Outside it communicates with the other ranks of the default process group before it
returns; with no process group it is the collective of a world of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fdp import pytree
from fdp.collectives import markers
from fdp.context.accumulating import refuse_while_accumulating
from fdp.context.axis import Axis, current_axis
from fdp.distributed.group import refuse_unknown_root
from fdp.errors import ArgumentError, build_message
from fdp.pytree import Tree
from fdp.state.containers import bare, container_of
from fdp.tracebacks import hiding_frames

_SUMMABLE = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64, torch.complex128,
})  # fmt: skip


Given = Sequence[tuple[torch.Tensor, str]]
"""Leaves, each with what messages and errors call it."""


def map_tensors(
    name: str,
    tree: Tree,
    fn: Callable[[torch.Tensor, str], torch.Tensor],
    op: str | None = None,
    check: Callable[[Given], None] | None = None,
) -> Tree:
    """Apply fn(tensor, label) to every leaf; a Python number becomes a tensor that may differ between ranks.

    Args:
        name: of the collective.
        tree: what it was given.
        fn: makes a leaf of the result.
        op: by which leaves are reduced; those of a dtype for which it has no meaning are refused, all in one error.
        check: called with all leaves, to refuse those that the collective cannot take.

    Returns:
        The tree of results.

    Raises:
        ArgumentError: a leaf is sparse, or no tensor, or was refused.
    """
    refuse_while_accumulating(f"fdp.{name}")
    leaves, spec = pytree.flatten(bare(tree))  # what comes out is the same on every rank
    given = []
    for leaf, path in zip(leaves, pytree.names_in(spec, ""), strict=True):
        label = f"{name}({path})" if path else name
        if isinstance(leaf, bool) or not isinstance(leaf, (torch.Tensor, int, float, complex)):
            raise ArgumentError(
                build_message(
                    f"fdp.{name} was given {type(leaf).__name__} at {path or 'its argument'}.",
                    remedy="pass tensors or numbers; convert booleans with .int() and arrays with torch.as_tensor.",
                )
            )
        if not isinstance(leaf, torch.Tensor):
            leaf = markers.vary(torch.tensor(leaf), "number")
        if (container := container_of(leaf)).role == "part":
            what = f"a {container.adjective} leaf at {path or 'its argument'}, of which each rank has a part"
            raise ArgumentError(
                build_message(
                    f"fdp.{name} was given {what}.",
                    remedy=f"call it in a step, where such a leaf is whole; or on {container.undone_by}(tree).",
                )
            )
        if leaf.layout != torch.strided:
            raise ArgumentError(
                build_message(
                    f"fdp.{name} was given a sparse tensor ({leaf.layout}) at {path or 'its argument'}.",
                    remedy="pass a dense tensor, for instance x.to_dense().",
                )
            )
        given.append((leaf, label))
    if op is not None:
        _refuse_dtypes(op, given)
    if check is not None:
        check(given)
    return pytree.unflatten(spec, [fn(leaf, label) for leaf, label in given])


def _refuse_dtypes(op: str, given: Given) -> None:
    """Refuse tensors of a dtype that the collective does not support."""
    undefined = [
        f"{label}: a {op} over ranks is not defined for {x.dtype}."
        for x, label in given
        if x.dtype not in _SUMMABLE or (op in ("max", "min") and x.is_complex())
    ]
    whole = [
        f"{label}: the mean of {x.dtype} over ranks is not an integer."
        for x, label in given
        if op == "mean" and x.dtype in _SUMMABLE and not (x.is_floating_point() or x.is_complex())
    ]
    for texts, remedy in (
        (undefined, "convert the tensor first, for instance with .int() or .float()."),
        (
            whole,
            "leave out what is equal on every rank already, such as the counters of BatchNorm; or convert with "
            ".float(), or use fdp.psum, or fdp.pmax.",
        ),
    ):
        if texts:
            raise ArgumentError(build_message(texts[0], texts[1:], remedy))


def _reduce(x: torch.Tensor, op: str, axis: Axis, label: str) -> torch.Tensor:
    if x.is_complex():
        pairs = markers.all_reduce(torch.view_as_real(x.resolve_conj()), op, axis.name, "value", label)
        return torch.view_as_complex(pairs)
    if op in ("max", "min") and x.is_floating_point():
        # Backends compare with <, which loses a NaN of one rank or another: it is sent beside.
        lost = markers.all_reduce(x.detach().isnan().to(x.dtype), "max", axis.name, "value", label)
        worst = -torch.inf if op == "max" else torch.inf
        found = markers.all_reduce(x.masked_fill(x.detach().isnan(), worst), op, axis.name, "value", label)
        return torch.where(lost > 0, torch.nan, found)
    return markers.all_reduce(x, op, axis.name, "value", label)


@hiding_frames
def psum(tree: Tree, axis: str | None = None) -> Tree:
    """Sum every leaf over the ranks.

    Args:
        tree: pytree of tensors of any shape (floating point, complex, or integer but for int16) and numbers.
        axis: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for all
            ranks.

    Returns:
        The tree with each leaf replaced by its sum, equal on every rank, and contiguous, as what all collectives
        return. Differentiable: the transpose of `psum` is `psum`.

    Raises:
        ArgumentError: a leaf is boolean, of 16-bit integers, sparse, or no tensor; there is no such axis.

    Example:
        >>> psum({"right": torch.tensor(3)})
        {'right': tensor(3)}

    References:
        JAX, `jax.lax.psum`.
    """
    over = current_axis().along(axis, "psum")
    return map_tensors("psum", tree, lambda x, label: _reduce(x, "sum", over, label), "sum")


@hiding_frames
def pmean(tree: Tree, weight: torch.Tensor | float | None = None, axis: str | None = None) -> Tree:
    """Average every leaf over the ranks, exactly for uneven batches when given a weight.

    Args:
        tree: pytree of floating-point or complex tensors of any shape, and numbers.
        weight: this rank's share, a scalar (a 0-dim tensor or a number), for instance the number of samples
            of this rank's batch; None weighs all ranks alike. A rank whose weight is zero contributes nothing,
            also where its leaf is infinite or NaN. If it is zero on every rank the result is NaN.
        axis: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for all
            ranks.

    Returns:
        The tree with each leaf replaced by `sum(weight * leaf) / sum(weight)` over ranks, equal on every
        rank. Differentiable in the tree and in the weight: the transpose of `pmean` is `pmean`.

    Raises:
        ArgumentError: a leaf is an integer tensor, boolean, sparse, or no tensor; the weight is no scalar; there is no
            such axis.

    Example:
        >>> pmean({"loss": torch.tensor(0.5)}, weight=32)
        {'loss': tensor(0.5000)}

    References:
        JAX, `jax.lax.pmean`.
    """
    over = current_axis().along(axis, "pmean")
    if weight is None:
        return map_tensors("pmean", tree, lambda x, label: _reduce(x, "mean", over, label), "mean")
    if isinstance(weight, bool) or not isinstance(weight, (torch.Tensor, int, float)):
        raise ArgumentError(
            build_message(
                f"fdp.pmean was given a weight of type {type(weight).__name__}.",
                remedy="pass one real scalar a rank, for instance the number of samples in its batch.",
            )
        )
    if not isinstance(weight, torch.Tensor):
        # A number here is usually the length of this rank's batch: it may differ between ranks.
        share: torch.Tensor = markers.vary(torch.tensor(float(weight), dtype=torch.float64, device="cpu"), "number")
    else:
        share = weight
    if share.dim() != 0 or share.is_complex():
        raise ArgumentError(
            build_message(
                f"fdp.pmean was given a weight of shape {tuple(share.shape)} and {share.dtype}.",
                remedy="pass one real scalar a rank, for instance the number of samples in its batch.",
            )
        )
    share = share.double()
    total = _reduce(share, "sum", over, "pmean(weight)")

    def weighted(x: torch.Tensor, label: str) -> torch.Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            # A weight such as 100,000 tokens does not fit into sixteen bits, nor does 257 exactly.
            return weighted(x.float(), label).to(x.dtype)
        real = x.real.dtype if x.is_complex() else x.dtype
        local = share.to(device=x.device, dtype=real)
        if isinstance(weight, torch.Tensor) or weight == 0:
            # What does not count may be anything, such as the mean of no samples, and 0 * NaN is NaN. Finite values
            # stay, for the sake of the derivative with respect to the weight.
            x = x.masked_fill((local == 0) & ~x.detach().isfinite(), 0)
        # Dividing first would need the total before anything is sent: one round trip more.
        scaled = x * local
        return _reduce(scaled, "sum", over, label) / total.to(device=x.device, dtype=real)

    return map_tensors("pmean", tree, weighted, "mean")


@hiding_frames
def pmax(tree: Tree, axis: str | None = None) -> Tree:
    """Take the maximum of every leaf over the ranks, element by element.

    Args:
        tree: pytree of real tensors (but for int16) and numbers.
        axis: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for all
            ranks.

    Returns:
        The tree of maxima, equal on every rank. Not differentiable.

    Raises:
        ArgumentError: a leaf is boolean, complex, of 16-bit integers, sparse, or no tensor; there is no such axis.

    Example:
        >>> pmax(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    over = current_axis().along(axis, "pmax")
    return map_tensors("pmax", tree, lambda x, label: _reduce(x, "max", over, label), "max")


@hiding_frames
def pmin(tree: Tree, axis: str | None = None) -> Tree:
    """Take the minimum of every leaf over the ranks, element by element.

    Args:
        tree: pytree of real tensors (but for int16) and numbers.
        axis: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for all
            ranks.

    Returns:
        The tree of minima, equal on every rank. Not differentiable.

    Raises:
        ArgumentError: a leaf is boolean, complex, of 16-bit integers, sparse, or no tensor; there is no such axis.

    Example:
        >>> pmin(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    over = current_axis().along(axis, "pmin")
    return map_tensors("pmin", tree, lambda x, label: _reduce(x, "min", over, label), "min")


@hiding_frames
def all_gather(tree: Tree, axis: str | None = None) -> Tree:
    """Stack every rank's leaf along a new first dimension.

    Args:
        tree: pytree of tensors (the same shape on every rank) and numbers.
        axis: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for all
            ranks.

    Returns:
        The tree with each leaf of shape `[*s]` replaced by one of shape `[ranks, *s]`, equal on every rank.
        Differentiable: the transpose sums what all ranks send back to this one.

    Raises:
        ArgumentError: a leaf is sparse, or no tensor; there is no such axis.

    Example:
        >>> all_gather(torch.tensor([1.0, 2.0]))
        tensor([[1., 2.]])

    References:
        JAX, `jax.lax.all_gather`.
    """
    over = current_axis().along(axis, "all_gather")
    return map_tensors("all_gather", tree, lambda x, label: markers.all_gather(x, over.size, over.name, label))


@hiding_frames
def broadcast(tree: Tree, root: int = 0, axis: str | None = None) -> Tree:
    """Give every rank the leaves of one rank.

    Args:
        tree: pytree of tensors (the same shapes and dtypes on every rank) and numbers.
        root: the rank whose values are taken; along an axis, the place of that rank on it.
        axis: a dimension of the step's mesh, by name: only ranks that differ along it alone take part. None for all
            ranks.

    Returns:
        The root's tree, equal on every rank. Differentiable: the root receives the sum of what all ranks
        send back, the others zero.

    Raises:
        ArgumentError: there is no such rank, or axis; a leaf is sparse, or no tensor.

    Example:
        >>> broadcast(torch.tensor([1.0, 2.0]), root=0)
        tensor([1., 2.])
    """
    over = current_axis().along(axis, "broadcast")
    refuse_unknown_root("fdp.broadcast", root, over.size)
    return map_tensors("broadcast", tree, lambda x, label: markers.broadcast(x, root, over.name, label))
