"""Meshes of two dimensions and more: which process groups belong to one, and where this process is in it.

What fdp needs of torch's `DeviceMesh` is documented: `mesh`, `ndim`, `mesh_dim_names`, `get_group`, `get_coordinate`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fdp.errors import ArgumentError, build_message

WHOLE = ""
"""Stands for all dimensions of a mesh, where the name of one could stand."""

Dimensions: TypeAlias = "Sequence[tuple[str, int]]"
"""Names and sizes of the dimensions of a mesh, the last one counted fastest; none for ranks without a mesh."""

_ALONG = " along "


@dataclass(frozen=True)
class MeshDimension:
    """A dimension of a mesh, as this process sees it.

    Attributes:
        name: its name.
        size: number of ranks along it.
        rank: this process's place among them.
        reference: to the process group of those that differ from this process along this dimension alone; None where
            no group is made. Two meshes of the same ranks are equal, and so are their dimensions.
    """

    name: str
    size: int
    rank: int
    reference: weakref.ref[dist.ProcessGroup] | None = field(default=None, compare=False, repr=False)


def dimension_of(axis: str) -> str:
    """The dimension in the axis of a marker; `WHOLE` for all of them.

    Example:
        >>> dimension_of("traced along hosts"), dimension_of("traced")
        ('hosts', '')
    """
    return axis.partition(_ALONG)[2]


def text_along(name: str, dimension: str) -> str:
    """A collective, or what a marker has as its axis, together with the dimension that it is along.

    Example:
        >>> text_along("mean", "hosts"), text_along("mean", WHOLE)
        ('mean along hosts', 'mean')
    """
    return f"{name}{_ALONG}{dimension}" if dimension else name


def mesh_text(sizes: Dimensions) -> str:
    """The dimensions of a mesh, in words.

    Example:
        >>> mesh_text((("hosts", 2), ("local", 4)))
        'hosts=2, local=4'
    """
    return ", ".join(f"{name}={size}" for name, size in sizes)


def sharded_along(dimensions: Dimensions) -> str:
    """The dimension of a mesh that state is divided along: the last one. Along the others each part is replicated.

    Args:
        dimensions: names and sizes; none for ranks without a mesh, which divide state among all of them.
    """
    return dimensions[-1][0] if dimensions else WHOLE


def place_along(rank: int, sizes: Dimensions, dimension: str) -> int:
    """The place of a rank along a dimension of a mesh; the rank itself for `WHOLE`.

    Args:
        rank: among all ranks of the mesh, which are numbered in ascending order, the last dimension fastest.
        sizes: the names and sizes of its dimensions.
        dimension: the name of one.

    Example:
        >>> place_along(5, (("hosts", 2), ("ranks", 4)), "hosts"), place_along(5, (("hosts", 2), ("ranks", 4)), "ranks")
        (1, 1)
    """
    for name, size in reversed(sizes if dimension else ()):
        if name == dimension:
            return rank % size
        rank //= size
    return rank


def dimensions_of(mesh: DeviceMesh) -> tuple[MeshDimension, ...]:
    """The dimensions of a mesh, with the place of this process along each.

    Raises:
        ArgumentError: they have no names; ranks are not in ascending order along one; this process is not in the mesh.
    """
    names = mesh.mesh_dim_names
    if not names or len(set(names)) != len(names) or not all(names):
        raise ArgumentError(
            build_message(
                f"a mesh of {mesh.ndim} dimensions was given as the group of a step, and not each has a name: {names}.",
                remedy='give it names: init_device_mesh(..., mesh_dim_names=("hosts", "ranks")).',
            )
        )
    place = mesh.get_coordinate()
    if place is None:
        raise ArgumentError(
            build_message(
                f"this process is not in the mesh {mesh}.", remedy="call the step only on the ranks of the mesh."
            )
        )
    ranks = mesh.mesh.flatten()
    if bool((torch.diff(ranks) <= 0).any()):
        # In a process group ranks are in ascending order, and collectives of fdp number them as the group does.
        raise ArgumentError(
            build_message(
                f"the ranks of a mesh are not in ascending order: {mesh.mesh.tolist()}.",
                remedy="make it with init_device_mesh, which numbers them so.",
            )
        )
    return tuple(
        MeshDimension(name, mesh.size(dim), place[dim], weakref.ref(mesh.get_group(dim)))
        for dim, name in enumerate(names)
    )
