"""Sharded leaves: `DTensor`s of which each rank holds one part along one dimension.

When a step flattens its arguments, a sharded leaf is a container of one tensor: this rank's part. So the structure
of a tree says which leaves are sharded, and how. Everywhere else it is a tensor, as for torch.

torch.distributed.tensor takes half a second to import. So it is imported only when a leaf is sharded or found.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fdp.errors import ArgumentError, build_message
from fdp.pytree import Spec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class Part:
    """How a tensor is divided among ranks: into equal parts along one dimension.

    Attributes:
        dim: the dimension.
        ranks: how many parts there are; the part of rank r is the r-th.
    """

    dim: int
    ranks: int

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one part of a tensor."""
        sizes = list(shape)
        sizes[self.dim] //= self.ranks
        return tuple(sizes)

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether a tensor has such parts."""
        return self.dim < len(shape) and shape[self.dim] > 0 and shape[self.dim] % self.ranks == 0

    def in_rows(self, shape: Sequence[int]) -> list[int]:
        """The shape of a whole tensor with its parts along a dimension of their own."""
        sizes = list(shape)
        return [*sizes[: self.dim], self.ranks, sizes[self.dim] // self.ranks, *sizes[self.dim + 1 :]]

    def joined(self, rows: torch.Tensor) -> torch.Tensor:
        """The whole tensor, of all parts in the order of ranks: `rows` has them along its first dimension."""
        whole = rows.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        return whole.contiguous()  # a part of size one may be flattened as a view with strides of its own

    def taken(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of one rank, as a view."""
        size = whole.shape[self.dim] // self.ranks
        return whole.narrow(self.dim, rank * size, size)


@dataclass(frozen=True)
class ShardLayout:
    """The layout of a `DTensor`, without its own part.

    It does not keep the mesh alive: a mesh holds its process group, which has to end before the interpreter does.

    Attributes:
        reference: to the mesh of the ranks.
        ranks: what tells them from others, as text.
        placements: how it is divided among them.
        shape: of the whole tensor.
        stride: of the whole tensor, in elements.
    """

    reference: weakref.ref[DeviceMesh] = field(compare=False)
    ranks: str
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks.

        Raises:
            ArgumentError: the last tensor of the mesh is gone, and with it every mesh of these ranks.
        """
        mesh = self.reference() or _alive.get(self.ranks)
        if mesh is None:
            raise ArgumentError(
                build_message(
                    "a step returns sharded state whose DeviceMesh is gone.",
                    remedy="keep the sharded state that the step is called with, or the mesh, while the step is used.",
                )
            )
        return mesh

    @property
    def part(self) -> Part | None:
        """The part that each rank holds; None if they are no equal parts along one dimension.

        On a mesh of several dimensions ranks divide it along the last one, and hold the same along the others.
        """
        from torch.distributed.tensor import Shard

        mesh = self.mesh
        *others, last = self.placements
        if type(last) is not Shard or not all(each.is_replicate() for each in others):
            return None
        part = Part(last.dim, mesh.size(mesh.ndim - 1))
        return part if part.divides(self.shape) else None


_texts: weakref.WeakKeyDictionary[DeviceMesh, str] = weakref.WeakKeyDictionary()
_alive: weakref.WeakValueDictionary[str, DeviceMesh] = weakref.WeakValueDictionary()
"""The newest mesh of some ranks: state that is sharded anew for each call has one of its own each time."""


def _text_of(mesh: DeviceMesh) -> str:
    """The ranks of a mesh, their order and the group that they form, as text."""
    text = _texts.get(mesh)
    if text is None:
        group = mesh.get_group().group_name if mesh.ndim == 1 else mesh.mesh_dim_names
        text = _texts[mesh] = f"{mesh.device_type} {mesh.mesh.tolist()} {group}"
    _alive[text] = mesh
    return text


def layout_of(tensor: DTensor) -> ShardLayout:
    """What a `DTensor` is besides its own part."""
    mesh = tensor.device_mesh
    return ShardLayout(weakref.ref(mesh), _text_of(mesh), tuple(tensor.placements), tensor.shape, tensor.stride())


def part_of(tensor: DTensor) -> torch.Tensor:
    """The tensor that this rank holds, itself."""
    with torch.no_grad():  # with gradients it would be a view of it, with a way back
        return tensor.to_local()


def places_of_parts(leaf: Any, ranks: int) -> int:
    """How many parts a leaf has of which several ranks hold each: rank r holds the part of r modulo that number.

    Args:
        leaf: a leaf of a state.
        ranks: the number of ranks that it is compared between.

    Returns:
        The number; 1 for a leaf that is whole, or of which each rank has a part of its own.
    """
    if not is_sharded(leaf) or leaf.device_mesh.ndim == 1 or leaf.device_mesh.size() != ranks:
        return 1
    return int(leaf.device_mesh.size(leaf.device_mesh.ndim - 1)) if layout_of(leaf).part is not None else 1


def assembled_over(
    mesh: DeviceMesh, part: torch.Tensor, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """The `DTensor` of which this rank holds a part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def assembled(part: torch.Tensor, layout: ShardLayout) -> DTensor:
    """The `DTensor` of some layout of which this rank holds a part."""
    return assembled_over(layout.mesh, part, layout.placements, layout.shape, layout.stride)


def apart(tensor: DTensor) -> tuple[tuple[Any], ShardLayout, tuple[str]]:
    """Take a sharded leaf apart: this rank's part, its layout, and a name of the part."""
    return (part_of(tensor),), layout_of(tensor), ("part",)


def together(layout: ShardLayout, children: Iterable[Any]) -> Any:
    """The sharded leaf of some layout of which this rank holds a part."""
    (child,) = children
    return assembled(child, layout) if isinstance(child, torch.Tensor) else _Held(layout)


@dataclass(frozen=True)
class _Held:
    """Stands for the sharded leaf where its part is not a tensor."""

    layout: ShardLayout


def is_sharded_type(kind: type) -> bool:
    """Whether a type is `DTensor`."""
    if kind.__name__ != "DTensor":
        return False
    from torch.distributed.tensor import DTensor

    return kind is DTensor


def is_sharded(leaf: object) -> bool:
    """Whether a leaf is a `DTensor`."""
    return is_sharded_type(type(leaf))


def whole_unless_divided(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor itself, if it is whole or divided as a sharded leaf is; the whole of another `DTensor`."""
    if not is_sharded(tensor):
        return tensor
    found: DTensor = tensor  # type: ignore[assignment]
    return tensor if layout_of(found).part is not None else found.full_tensor()


def sharded(spec: Spec) -> list[Spec | None]:
    """For each leaf of a structure, the structure of the sharded leaf that it is a part of; None if there is none."""
    if spec.type is not None and spec.type.__name__ == "DTensor":
        return [spec]
    if not spec.num_children:
        return [None] * spec.num_leaves
    return [found for child in spec.children() for found in sharded(child)]


def layout_in(spec: Spec) -> ShardLayout:
    """The layout of a sharded leaf, from its structure."""
    held: _Held = spec.unflatten([None])
    return held.layout


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
