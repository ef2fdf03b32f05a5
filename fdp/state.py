"""State on many ranks: give every rank the values of one, and check that they still are the same."""

from __future__ import annotations

from typing import Any

import torch

from fdp import pytree
from fdp.axis import refuse_inside
from fdp.comparable import comparable
from fdp.errors import AgreementError, ReplicationError, build_message
from fdp.fingerprint import fingerprint
from fdp.group import Group, resolve_group, start_all_gather, start_broadcast
from fdp.in_step import refuse_left_behind
from fdp.pytree import Tree, leaf_names


def replicate(tree: Tree, root: int = 0, group: Any = None) -> Tree:
    """Give every rank the tensors of one: what a job does with its initial state.

    Args:
        tree: pytree of tensors of the same structure, shapes and dtypes on every rank; other leaves are kept.
        root: the rank whose values are taken.
        group: as for `data_parallel`.

    Returns:
        The tree with new tensors, equal bit for bit on every rank; the argument is not changed.

    Raises:
        AgreementError: ranks hold trees of different structure, shapes or dtypes.

    Example:
        >>> replicate({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}
    """
    ranks = resolve_group(group)
    refuse_inside("replicate")
    leaves, spec = pytree.flatten(tree)
    _compare_structure("fdp.replicate", tree, leaves, ranks)
    out = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            # Sent in contiguous form, and laid out as it was: a broadcast sends memory, not values.
            message = leaf.detach().contiguous().clone()
            if message.numel():
                start_broadcast(message, root, ranks)()
            leaf = torch.empty_like(leaf, requires_grad=False).copy_(message)
        out.append(leaf)
    return pytree.unflatten(spec, out)


def assert_replicated(tree: Tree, group: Any = None) -> None:
    """Check that ranks hold the same bits.

    Args:
        tree: pytree of tensors, of the same structure on every rank; other leaves are compared by their text.
        group: as for `data_parallel`.

    Raises:
        ReplicationError: names, on every rank, each leaf that differs and the ranks that differ from rank 0.
        AgreementError: ranks hold trees of different structure, shapes or dtypes.

    Example:
        >>> assert_replicated({"w": torch.ones(2)})
    """
    ranks = resolve_group(group)
    refuse_inside("assert_replicated")
    leaves = pytree.leaves_of(tree)
    _compare_structure("fdp.assert_replicated", tree, leaves, ranks)
    if ranks.size == 1:
        return
    marks = [fingerprint(leaf) if isinstance(leaf, torch.Tensor) else _text_mark(comparable(leaf)) for leaf in leaves]
    table = _gather_marks(marks, ranks, leaves)
    offenders = []
    for index, name in enumerate(leaf_names(tree, "tree")):
        column = [row[index] for row in table]
        odd = [rank for rank, mark in enumerate(column) if mark != column[0]]
        if odd:
            offenders.append(f"{name}: rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} of {ranks.size}")
    if offenders:
        raise ReplicationError(
            build_message(
                f"{len(offenders)} of {len(leaves)} leaves do not hold the bits that they hold on rank 0.",
                offenders,
                remedy="start from fdp.replicate(state), and let every update be a function of replicated values.",
            )
        )


def _text_mark(text: str) -> int:
    return fingerprint(torch.tensor(list(text.encode()) or [0], dtype=torch.uint8))


def _compare_structure(caller: str, tree: Tree, leaves: list[Any], ranks: Group) -> None:
    """All ranks take part in one exchange of fixed size, so that a difference cannot make them hang."""
    if ranks.size == 1:
        return
    refuse_left_behind(ranks, caller)
    kinds = [
        f"{name}: {list(leaf.shape)} {leaf.dtype}"
        if isinstance(leaf, torch.Tensor)
        else f"{name}: {type(leaf).__name__}"
        for name, leaf in zip(leaf_names(tree, "tree"), leaves, strict=True)
    ]
    (marks,) = zip(*_gather_marks([_text_mark("\n".join(kinds))], ranks, leaves), strict=True)
    odd = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if odd:
        raise AgreementError(
            build_message(
                f"{caller} was called with trees that have different structure, shapes or dtypes on different ranks.",
                [f"ranks {odd} differ from rank 0; on rank {ranks.rank}: {'; '.join(kinds[:8])}"],
                remedy="build the state by the same code on every rank.",
            )
        )


def _gather_marks(marks: list[int], ranks: Group, leaves: list[Any]) -> list[list[int]]:
    device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), torch.device("cpu"))
    if ranks.backend_for(torch.device("cpu")) is not None:
        device = torch.device("cpu")
    own = torch.tensor(marks, dtype=torch.int64, device=device)
    out = torch.empty((ranks.size, len(marks)), dtype=torch.int64, device=device)
    if marks:
        start_all_gather(out, own, ranks)()
    rows: list[list[int]] = out.tolist()
    return rows
