"""State that does not fit: each rank keeps its own part of each large leaf."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fdp import pytree
from fdp.context.axis import refuse_inside
from fdp.distributed.desynchronised import carry_out
from fdp.distributed.group import Group, Ranks, resolve_group
from fdp.distributed.mesh import sharded_along
from fdp.errors import ArgumentError, build_message
from fdp.pytorch.tensors import copy_of
from fdp.pytree import Tree
from fdp.state.containers import PLAIN, Container, containers_of
from fdp.state.replicate import compare_structure
from fdp.state.shards import Part, assembled_over, contiguous_strides, is_sharded, layout_of, part_of
from fdp.tracebacks import hiding_frames


@hiding_frames
def shard(tree: Tree, min_size: int = 1024, group: Ranks = None) -> Tree:
    """Let each rank keep 1/N of each leaf: parameters, or the state of an optimizer.

    A step takes and returns such leaves, and does not change: inside of it each has its whole, logical shape. Its plan
    says what is computed on parts, and what is gathered or scattered. The optimizer's state alone is ZeRO-1 and 2, all
    of the state is ZeRO-3. `optimizer.init` of sharded parameters makes a sharded state.

    A leaf is divided along its first dimension that the number of ranks divides. One without such a dimension stays
    whole. On a mesh of several dimensions, the ranks along the last one divide it, and along the others each rank holds
    the same part: state is sharded within hosts and replicated between them (hybrid sharding).

    Args:
        tree: pytree of tensors of the same values on every rank (as `fdp.replicate` makes them), of any shape and
            dtype. Leaves that are sharded already, leaves labelled with `fdp.per_rank`, and what is no tensor stay
            what they are.
        min_size: leaves of fewer elements stay whole. Such a leaf saves little, and has to be gathered all the same.
        group: as for `data_parallel`: the ranks to divide by.

    Returns:
        The tree with a `DTensor` in the place of each leaf that is divided; in a world of one none is. Parts are
        copies, and so are leaves that stay whole: a step may overwrite them, where they are donated.

    Raises:
        ArgumentError: `min_size` is no number of elements.

    Example:
        >>> shard({"w": torch.ones(4, 2)}, min_size=0)  # alone, nothing is divided
        {'w': tensor([[1., 1.],
                [1., 1.],
                [1., 1.],
                [1., 1.]])}

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020), section 5;
        Zhao et al., PyTorch FSDP (VLDB 2023), section 3.2.2 (hybrid sharding).
    """
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ArgumentError(
            build_message(f"fdp.shard was given min_size={min_size!r}.", remedy="pass a number of elements.")
        )
    whole = resolve_group(group)
    ranks = whole.along(sharded_along(whole.sizes))
    refuse_inside("shard")
    leaves, spec = pytree.flatten(tree)
    made = []
    for leaf, container in zip(leaves, containers_of(leaves, spec), strict=True):
        if container is PLAIN:
            part = part_for(leaf.shape, ranks.size) if _is_large(leaf, min_size) and ranks.size > 1 else None
            leaf = _copied(leaf, container) if part is None else _divided(leaf, part, whole)
        made.append(leaf)
    return pytree.unflatten(spec, made)


@hiding_frames
def unshard(tree: Tree) -> Tree:
    """Give every rank the whole of each sharded leaf; all ranks call this together.

    Args:
        tree: pytree; what is not sharded stays what it is.

    Returns:
        The tree with a plain tensor in the place of each `DTensor`. Its tensors are new, also those that were whole.

    Raises:
        AgreementError: ranks hold sharded leaves of different names, shapes or dtypes, or in another order.
        ArgumentError: the process group that a leaf was sharded over has ended.

    Example:
        >>> unshard({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}
    """
    refuse_inside("unshard")
    leaves, spec = pytree.flatten(tree)
    containers = containers_of(leaves, spec)
    by_ranks: dict[Group, list[int]] = {}
    for at, leaf in enumerate(leaves):
        if is_sharded(leaf):
            by_ranks.setdefault(resolve_group(leaf.device_mesh), []).append(at)
    names = pytree.names_in(spec, "tree")
    for ranks, chosen in by_ranks.items():
        compare_structure(
            "fdp.unshard", [names[at] for at in chosen], [leaves[at] for at in chosen],
            [containers[at] for at in chosen], ranks,
        )  # fmt: skip
    whole = [_gathered(x) if is_sharded(x) else _copied(x, each) for x, each in zip(leaves, containers, strict=True)]
    return pytree.unflatten(spec, whole)


def part_for(shape: Sequence[int], ranks: int) -> Part | None:
    """How a tensor of some shape is divided among ranks; None if it has no dimension that they divide."""
    found = (Part(dim, ranks) for dim in range(len(shape)))
    return next((part for part in found if part.divides(shape)), None)


def _copied(leaf: object, container: Container) -> Any:
    """A leaf with memory of its own, if it has memory."""
    tensor = container.tensor(leaf)
    return container.with_tensor(leaf, copy_of(tensor)) if isinstance(tensor, torch.Tensor) else leaf


def _is_large(leaf: object, min_size: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.numel() >= min_size


def _divided(leaf: torch.Tensor, part: Part, ranks: Group) -> torch.Tensor:
    from torch.distributed.tensor import Replicate, Shard

    own = torch.empty(part.of(leaf.shape), dtype=leaf.dtype, device=leaf.device)
    own.copy_(part.taken(leaf.detach(), ranks.along(sharded_along(ranks.sizes)).rank))
    mesh = _mesh_of(ranks, leaf.device.type)
    placements = [*([Replicate()] * (mesh.ndim - 1)), Shard(part.dim)]
    return assembled_over(mesh, own, placements, leaf.shape, contiguous_strides(leaf.shape))


def _gathered(leaf: Any) -> torch.Tensor:
    """The whole of a sharded leaf."""
    part = layout_of(leaf).part
    if part is None:  # divided in another way, by other code
        whole: torch.Tensor = leaf.full_tensor().detach()
        return whole
    whole_mesh = resolve_group(leaf.device_mesh)
    ranks = whole_mesh.along(sharded_along(whole_mesh.sizes))
    own = part_of(leaf).contiguous()
    rows = torch.empty((ranks.size, *own.shape), dtype=own.dtype, device=own.device)
    carry_out("fdp.unshard", ranks, lambda: ranks.all_gather(rows, own))
    return part.joined(rows)


_meshes: weakref.WeakKeyDictionary[Any, dict[Any, weakref.ref[DeviceMesh]]] = weakref.WeakKeyDictionary()
"""The meshes that were made, by process group, type of device and dimensions. None is kept alive: tensors keep their
mesh."""


def _mesh_of(ranks: Group, kind: str) -> DeviceMesh:
    """The mesh over some ranks: of one dimension, or of those that they have."""
    made, key = _meshes.setdefault(ranks.process_group, {}), (kind, ranks.sizes)
    mesh = made[key]() if key in made else None
    if mesh is None:
        if ranks.dimensions:
            names, sizes = zip(*ranks.sizes, strict=True)
            everyone = torch.tensor(dist.get_process_group_ranks(ranks.process_group), device="cpu").view(sizes)
            groups = [ranks.along(name).process_group for name in names]
            mesh = DeviceMesh.from_group(groups, kind, mesh=everyone, mesh_dim_names=names)  # type: ignore[arg-type]
        else:
            mesh = DeviceMesh.from_group(ranks.process_group, kind)  # type: ignore[arg-type]
        made[key] = weakref.ref(mesh)
    return mesh
