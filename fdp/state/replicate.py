"""State on many ranks: give every rank the values of one, and check that they still are the same."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from fdp import pytree
from fdp.context.axis import refuse_inside
from fdp.distributed.comparable import comparable
from fdp.distributed.desynchronised import carry_out, refuse_desynchronised
from fdp.distributed.exchange import tell_all
from fdp.distributed.fingerprint import fingerprint
from fdp.distributed.group import Group, Ranks, refuse_unknown_root, resolve_group
from fdp.distributed.messages import start_all_gather, start_broadcast
from fdp.errors import AgreementError, ReplicationError, build_message
from fdp.pytree import Tree
from fdp.state import rank_local
from fdp.state.containers import Container, containers_of, lies_in_parts
from fdp.state.shards import part_of, places_of_parts
from fdp.tracebacks import hiding_frames

NO_MARK = 0
"""In place of a number for the bits of a leaf that no rank holds as a whole."""


@hiding_frames
def replicate(tree: Tree, root: int = 0, group: Ranks = None) -> Tree:
    """Give every rank the tensors of one rank, as a job does with its initial state.

    Args:
        tree: pytree of tensors of the same structure, shapes and dtypes on every rank; other leaves are kept. Leaves
            labelled with `fdp.per_rank`, and sharded ones, stay what they are on each rank; they are copied, too.
        root: the rank whose values are taken.
        group: as for `data_parallel`.

    Returns:
        The tree with new tensors, equal bit for bit on every rank but for labelled ones; the argument is not changed.

    Raises:
        AgreementError: ranks hold trees of different structure, shapes or dtypes, or name different roots.
        ArgumentError: there is no such rank.

    Example:
        >>> replicate({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}
    """
    ranks = resolve_group(group)
    refuse_inside("replicate")
    refuse_unknown_root("fdp.replicate", root, ranks.size)
    leaves, spec = pytree.flatten(tree)
    containers = containers_of(leaves, spec)
    names = pytree.names_in(spec, "tree")
    compare_structure("fdp.replicate", names, _saved(leaves, containers), containers, ranks, [f"root={root}"])
    out, beside = [], _devices(leaves)
    for leaf, container in zip(leaves, containers, strict=True):
        tensor = container.tensor(leaf)
        if isinstance(tensor, torch.Tensor):
            # Sent in contiguous form, and laid out as it was: a broadcast sends memory, not values. NCCL does not send
            # what is on the CPU, as a learning rate is.
            message = tensor.detach().contiguous().to(ranks.carrier(tensor.device, *beside), copy=True)
            if message.numel() and container.role == "state":
                carry_out("fdp.replicate", ranks, functools.partial(start_broadcast, message, root, ranks))
            leaf = container.with_tensor(leaf, torch.empty_like(tensor, requires_grad=False).copy_(message))
        out.append(leaf)
    return pytree.unflatten(spec, out)


@hiding_frames
def assert_replicated(tree: Tree, group: Ranks = None) -> None:
    """Check that ranks hold the same bits.

    Tensors that do may go into a step as replicated state, also where a step had returned them as each rank's own.

    Args:
        tree: pytree of tensors, of the same structure on every rank; other leaves are compared by their text. Leaves
            labelled with `fdp.per_rank` are left out, and so are sharded ones, but for those on a mesh of several
            dimensions: of such, each part is compared between the ranks that hold it.
        group: as for `data_parallel`.

    Raises:
        ReplicationError: names, on every rank, each leaf that differs and the ranks that differ from rank 0.
        AgreementError: ranks hold trees of different structure, shapes or dtypes.

    Example:
        >>> assert_replicated({"w": torch.ones(2)})
    """
    ranks = resolve_group(group)
    refuse_inside("assert_replicated")
    leaves, spec = pytree.flatten(tree)
    offenders = differing("fdp.assert_replicated", "tree", leaves, spec, ranks)
    if offenders:
        raise ReplicationError(
            build_message(
                f"{len(offenders)} of {len(leaves)} leaves do not hold the bits that they hold on rank 0.",
                offenders,
                remedy="start from fdp.replicate(state), and let every update be a function of replicated values.",
            )
        )
    found = zip(leaves, containers_of(leaves, spec), strict=True)
    same = [container.tensor(leaf) for leaf, container in found if container.role == "state"]
    rank_local.forget([x for x in same if isinstance(x, torch.Tensor)])


def differing(
    caller: str, root: str, leaves: list[Any], spec: pytree.Spec, ranks: Group, marks: list[int] | None = None
) -> list[str]:
    """Compare the leaves of a tree that are not labelled between ranks; all ranks call this together.

    Args:
        caller: the function that the user called, for messages.
        root: the name of the tree.
        leaves: of the tree.
        spec: its structure.
        ranks: the ranks.
        marks: `mark_of` of each leaf, where that is known.

    Returns:
        A line for each leaf that differs, with the ranks that differ from rank 0; the same on every rank.

    Raises:
        AgreementError: ranks hold trees of different structure, shapes or dtypes.
    """
    names, containers = pytree.names_in(spec, root), containers_of(leaves, spec)
    leaves = _saved(leaves, containers)
    compare_structure(caller, names, leaves, containers, ranks)
    if ranks.size == 1:
        return []
    compared = [at for at, container in enumerate(containers) if container.role != "per rank"]
    places = {at: places_of_parts(leaves[at], ranks.size) for at in compared}
    own = [
        fingerprint(part_of(leaves[at])) if places[at] > 1 else marks[at] if marks else mark_of(leaves[at])
        for at in compared
    ]
    table = _gather_marks(own, ranks, leaves)
    offenders = []
    for index, at in enumerate(compared):
        column = [row[index] for row in table]
        odd = [rank for rank, mark in enumerate(column) if mark != column[rank % places[at]]]
        if odd:
            offenders.append(
                f"{names[at]}: rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} of {ranks.size}"
            )
    return offenders


def mark_of(leaf: object) -> int:
    """A number to compare a leaf by: of its bits, or of its type if it has none; `NO_MARK` for one in parts."""
    if lies_in_parts(leaf):
        return NO_MARK  # each rank has bits of its own
    if isinstance(leaf, torch.Tensor):
        parts = [fingerprint(part) for part in _parts(plain_tensor(leaf))]
        return parts[0] if len(parts) == 1 else _text_mark(f"{_leaf_text(leaf)} {parts}")
    if isinstance(leaf, (set, frozenset)):  # its order depends on the process
        return _text_mark(comparable(leaf))
    if hasattr(leaf, "tobytes"):  # an array of NumPy, of which the text shows a part
        return _bytes_mark(leaf.tobytes())
    text = repr(leaf)
    if " at 0x" not in text:
        return _text_mark(text)
    try:
        return _bytes_mark(pickle.dumps(leaf))
    except Exception:  # whatever its class raises
        return _text_mark(_leaf_text(leaf))


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of a tensor subclass, unless only the subclass knows its numbers."""
    found = tensor.detach()
    if type(found) is torch.Tensor or found.layout != torch.strided or _has_numbers_of_its_own(found):
        return found
    return found.as_subclass(torch.Tensor)


def _has_numbers_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether only the class of a tensor knows its numbers, as for a `DTensor`."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that hold the numbers of a tensor; none if only its class knows them."""
    if _has_numbers_of_its_own(tensor) or tensor.is_nested or tensor.is_meta:
        return []
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor] if tensor.layout == torch.strided else []


def _text_mark(text: str) -> int:
    return _bytes_mark(text.encode())


def _bytes_mark(data: bytes) -> int:
    return fingerprint(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8))


def _leaf_text(leaf: object) -> str:
    return f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _saved(leaves: list[Any], containers: list[Container]) -> list[Any]:
    return [container.saved(leaf) for leaf, container in zip(leaves, containers, strict=True)]


def compare_structure(
    caller: str,
    names: list[str],
    leaves: list[Any],
    containers: list[Container],
    ranks: Group,
    also: Sequence[str] = (),
) -> None:
    """Compare trees between ranks, in one exchange of fixed size, so that a difference cannot make them hang.

    Args:
        caller: the function that the user called, for messages.
        names: of the leaves.
        leaves: of the tree.
        containers: what each leaf lies in.
        ranks: the ranks; all of them call this.
        also: what else has to be the same on all ranks.

    Raises:
        AgreementError: structure, shapes, dtypes, or `also` differ.
    """
    if ranks.size == 1:
        return
    refuse_desynchronised(ranks, caller)
    kinds = [
        f"{name}: {container.adjective}{', ' if container.adjective else ''}{_leaf_text(leaf)}"
        for name, leaf, container in zip(names, leaves, containers, strict=True)
    ]
    kinds += also
    (marks,) = zip(*_gather_marks([_text_mark("\n".join(kinds))], ranks, leaves), strict=True)
    odd = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if odd:
        # All ranks saw the same row of numbers, so all of them are here.
        found = tell_all(ranks, {"kinds": kinds}, caller, "was called with another tree")
        lines = []
        for rank in odd:
            first, other = found[0]["kinds"], found[rank]["kinds"]
            lines += [f"rank 0: {kind}" for kind in first if kind not in set(other)][:4]
            lines += [f"rank {rank}: {kind}" for kind in other if kind not in set(first)][:4]
        raise AgreementError(
            build_message(
                f"{caller} was called with trees that have different structure, shapes or dtypes on different ranks"
                f"{', or with other arguments' if also else ''}.",
                lines or [f"ranks {odd} have the leaves of rank 0 in another order"],
                remedy="build the state by the same code on every rank.",
            )
        )


def _devices(leaves: list[Any]) -> list[torch.device]:
    """Where tensors are: messages that cannot start on the CPU start there, and not on the first card of all ranks."""
    return list(dict.fromkeys(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)))


def _gather_marks(marks: list[int], ranks: Group, leaves: list[Any]) -> list[list[int]]:
    device = ranks.carrier(torch.device("cpu"), *_devices(leaves))
    own = torch.tensor(marks, dtype=torch.int64, device=device)
    out = torch.empty((ranks.size, len(marks)), dtype=torch.int64, device=device)
    if marks:
        carry_out("a comparison of ranks", ranks, lambda: start_all_gather(out, own, ranks))
    rows: list[list[int]] = out.tolist()
    return rows
