"""Sharded leaves: `DTensor`s of which each rank holds one part along one dimension.

When a step flattens its arguments, a sharded leaf is a container of one tensor: this rank's part. So the structure
of a tree says which leaves are sharded, and how. Everywhere else it is a tensor, as for torch.

torch.distributed.tensor takes half a second to import. So it is imported only when a leaf is sharded or found.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from optree.accessors import PyTreeEntry
from torch.distributed.device_mesh import DeviceMesh

from fdp import pytree
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
        return rows.movedim(0, self.dim).flatten(self.dim, self.dim + 1)

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
        """The part that each rank holds; None if they are no equal parts along one dimension."""
        from torch.distributed.tensor import Shard

        mesh = self.mesh
        if mesh.ndim != 1 or len(self.placements) != 1 or type(self.placements[0]) is not Shard:
            return None
        part = Part(self.placements[0].dim, mesh.size())
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


@dataclass(frozen=True)
class Whole:
    """A stand-in for a part: a tree that is put together has it there unchanged."""

    value: Any


def layout_of(tensor: DTensor) -> ShardLayout:
    """What a `DTensor` is besides its own part."""
    mesh = tensor.device_mesh
    return ShardLayout(weakref.ref(mesh), _text_of(mesh), tuple(tensor.placements), tensor.shape, tensor.stride())


def part_of(tensor: DTensor) -> torch.Tensor:
    """The tensor that this rank holds, itself."""
    with torch.no_grad():  # with gradients it would be a view of it, with a way back
        return tensor.to_local()


def assembled_over(
    mesh: DeviceMesh, part: torch.Tensor, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """The `DTensor` of which this rank holds a part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def assembled(part: torch.Tensor, layout: ShardLayout) -> DTensor:
    """The `DTensor` of some layout of which this rank holds a part."""
    return assembled_over(layout.mesh, part, layout.placements, layout.shape, layout.stride)


class _ShardEntry(PyTreeEntry):
    """The step of a key path into a sharded leaf. It adds nothing to the name of the leaf."""

    def __call__(self, obj: Any) -> Any:
        return part_of(obj)

    def codify(self, /, node: str = "") -> str:
        """The expression for the leaf."""
        return node


def _parts(tensor: Any) -> tuple[tuple[Any], ShardLayout, tuple[str]]:
    return (part_of(tensor),), layout_of(tensor), ("part",)


def _whole(layout: ShardLayout, children: Iterable[Any]) -> Any:
    (child,) = children
    if type(child) is Whole:
        return child.value
    return assembled(child, layout) if isinstance(child, torch.Tensor) else _Held(layout)


@dataclass(frozen=True)
class _Held:
    """Stands for the sharded leaf where its part is not a tensor."""

    layout: ShardLayout


@functools.cache
def sharded_type() -> type[DTensor]:
    """`DTensor`, which is a container from now on when a step flattens its arguments."""
    from torch.distributed.tensor import DTensor

    pytree.register_where_taken_apart(DTensor, _parts, _whole, _ShardEntry)
    return DTensor


def is_sharded(leaf: Any) -> bool:
    """Whether a leaf is a `DTensor`."""
    return type(leaf).__name__ == "DTensor" and type(leaf) is sharded_type()


def is_shard(entry: PyTreeEntry) -> bool:
    """Whether an entry of a key path leads into a sharded leaf."""
    return isinstance(entry, _ShardEntry)


def flatten_to_parts(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves of a tree, with this rank's parts in the place of sharded ones, and its structure."""
    leaves, spec = pytree.flatten(tree, apart=True)
    # The first one that is met makes its type known.
    return pytree.flatten(tree, apart=True) if any(map(is_sharded, leaves)) else (leaves, spec)


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


def without_shards(spec: Spec) -> Spec:
    """The structure of a tree in which each sharded leaf is a single leaf."""
    return pytree.structure_of(spec.unflatten([0 if shard is None else Whole(0) for shard in sharded(spec)]))


def with_sharded(spec: Spec, which: Sequence[Spec | None]) -> Spec:
    """The structure of a tree in which some leaves are sharded.

    Args:
        spec: the structure.
        which: for each leaf, the structure of the sharded leaf in its place; None to leave it as it is.
    """
    wanted = iter(which)
    return spec.transform(None, lambda leaf: (next(wanted) or leaf) if leaf.num_leaves else leaf)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
