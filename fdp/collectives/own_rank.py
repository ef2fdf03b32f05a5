"""The rank itself, and values that are each rank's own."""

from __future__ import annotations

from typing import Any

import torch

from fdp import pytree
from fdp.collectives import markers
from fdp.context.axis import current_axis, inside_step
from fdp.errors import ArgumentError, build_message
from fdp.pytorch.tensors import copy_of
from fdp.pytree import Tree
from fdp.state.containers import LABELS, PLAIN, Container, bare_spec, containers_of
from fdp.state.labels import PerRank
from fdp.tracebacks import hiding_frames


@hiding_frames
def axis_index(axis: str | None = None) -> torch.Tensor:
    """This process's rank, as a value of the step that differs from rank to rank.

    Args:
        axis: a dimension of the step's mesh, by name: then the place of this process along it. None for its rank among
            all of them.

    Returns:
        A 0-dim int64 tensor on the CPU. It is a tensor so that the trace is the same on every rank.

    Raises:
        ArgumentError: there is no such axis.

    Example:
        >>> axis_index()
        tensor(0)
    """
    over = current_axis().along(axis, "axis_index")
    out: torch.Tensor = torch.ops.fdp.axis_index.default(torch.empty((), device="cpu"), over.name)
    return out


@hiding_frames
def axis_size(axis: str | None = None) -> int:
    """The number of ranks that the running step, or the default process group, has.

    Args:
        axis: a dimension of the step's mesh, by name: then the number of ranks along it.

    Returns:
        The number.

    Raises:
        ArgumentError: there is no such axis.

    Example:
        >>> axis_size()
        1
    """
    return current_axis().along(axis, "axis_size").size


@hiding_frames
def per_rank(tree: Tree) -> Tree:
    """Say that tensors are each rank's own: inside of a step of its results, outside of one of leaves of a state.

    Inside, it declares outputs that are meant to differ from rank to rank: metrics and the like, which may not go in
    again as replicated state. Outside, it labels each leaf: what carries on from call to call and is each rank's own
    (the error of compressed gradients, a local model). A step sees the tensor of a labelled leaf in its place, and it
    varies; what the step returns there, under the same key path, comes out labelled, whether or not it was declared.

    Args:
        tree: pytree of tensors of any shape and dtype, and numbers, which become tensors. Inside: part of what the step
            returns, as it is returned. Outside: a state, or part of one; None and empty containers stay as they are,
            and so do leaves that are labelled already.

    Returns:
        Inside, the same values, contiguous. Outside, the tree with a `PerRank` leaf around a copy of each tensor: a
        step may overwrite it, where it is donated.

    Raises:
        ArgumentError: a leaf is neither a tensor nor a number.

    Example:
        >>> state = {"w": torch.zeros(2), "seen": per_rank(torch.tensor(0))}
        >>> state
        {'w': tensor([0., 0.]), 'seen': PerRank(tensor(0))}
        >>> import fdp
        >>> @fdp.data_parallel(donate_argnums=0)
        ... def step(state, batch):
        ...     return {"w": state["w"] + fdp.pmean(batch.mean(0)), "seen": state["seen"] + len(batch)}
        >>> step(state, torch.ones(4, 2))
        {'w': tensor([1., 1.]), 'seen': PerRank(tensor(4))}
    """
    inside = inside_step()

    def declare(x: Any, container: Container, path: str) -> Any:
        if container not in (PLAIN, LABELS):
            raise ArgumentError(
                build_message(
                    f"fdp.per_rank was given a {container.adjective} leaf{f' at {path}' if path else ''}.",
                    remedy=f"{container.verb} what is the same on every rank; label what is each rank's own.",
                )
            )
        if isinstance(x, (bool, int, float, complex)):
            x = torch.tensor(x)
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                build_message(
                    f"fdp.per_rank was given {type(x).__name__}{f' at {path}' if path else ''}.",
                    remedy="pass tensors, or convert them first.",
                )
            )
        return markers.vary(x, "per_rank") if inside else PerRank(copy_of(x))

    leaves, spec = pytree.flatten(tree)
    declared = map(declare, leaves, containers_of(leaves, spec), pytree.names_in(spec, ""))
    return pytree.unflatten(bare_spec(spec), list(declared))
