"""The process group: its size, its ranks' names for each other, and its store.

Everything that fdp needs from torch.distributed beyond its documented interface is in this file:
`_world.pg_map` (the groups that there are, and the store that each was made with), `_world.pg_backend_config`, and
`ProcessGroup._get_backend(device).options._timeout`.
"""

from __future__ import annotations

import datetime
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fdp.distributed.mesh import MeshDimension, dimensions_of
from fdp.distributed.messages import (
    Pairs,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_permute,
    start_reduce_scatter,
)
from fdp.distributed.other_ranks import OtherRanks, OthersHold
from fdp.distributed.sending import Arrived
from fdp.errors import ArgumentError, build_message
from fdp.pytorch.dispatch import innermost_mode
from fdp.pytorch.parts import require

Ranks: TypeAlias = "dist.ProcessGroup | DeviceMesh | Group | None"
"""What says which ranks: a process group, a mesh, or None for the default process group."""


@dataclass(frozen=True)
class Group:
    """The ranks that a step runs on: a c10d process group, or a world of one.

    The group is not kept alive. A step outlives `destroy_process_group()`, and a process group that is still referred
    to when the interpreter ends can abort the process: its threads then want a lock that is gone.

    Attributes:
        reference: to the c10d group; None for a world of one.
        size: number of ranks.
        rank: this process's rank in the group.
        dimensions: of a mesh of several dimensions, each of them; of other ranks none.
        part_of: for ranks along one dimension of a mesh, the ranks of all of it; else None.
        label: the name of the only dimension of their mesh, if it has one.
    """

    reference: weakref.ref[dist.ProcessGroup] | None
    size: int
    rank: int
    dimensions: tuple[MeshDimension, ...] = ()
    part_of: Group | None = None
    label: str = field(default="", compare=False)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The c10d group, None for a world of one.

        Raises:
            ArgumentError: it has been destroyed.
        """
        if self.reference is None:
            return None
        group = self.reference()
        if group is None:
            raise destroyed()
        return group

    @property
    def name(self) -> str:
        """The name that all ranks of the group share."""
        return "one" if self.process_group is None else str(self.process_group.group_name)

    @property
    def exists(self) -> bool:
        """Whether none of its process groups has been destroyed."""
        references = [self.reference, *(each.reference for each in self.dimensions)]
        groups = [reference() for reference in references if reference is not None]
        return not any(group is None or is_destroyed(group) for group in groups)

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of the dimensions of the mesh."""
        return tuple((each.name, each.size) for each in self.dimensions)

    @property
    def watched(self) -> Group:
        """The ranks that are watched while these exchange messages: where one of a mesh is gone, all of it stops."""
        return self.part_of or self

    def along(self, dimension: str) -> Group:
        """The ranks that differ from this one along one dimension of the mesh alone; all of them for `WHOLE`."""
        if not dimension:
            return self
        found = next(each for each in self.dimensions if each.name == dimension)
        return Group(found.reference, found.size, found.rank, part_of=self)

    def others(self, kind: OthersHold = "different") -> OtherRanks:
        """What this rank takes the others to hold while nothing is sent."""
        return OtherRanks(self.size, self.rank, kind, self.sizes)

    def store(self) -> dist.Store:
        """The rendezvous store that the group was made with."""
        from torch.distributed import distributed_c10d as c10d

        assert self.process_group is not None
        if (found := c10d._world.pg_map.get(self.process_group)) is None:  # and the program still refers to it
            raise destroyed()
        return found[1]

    def backend_for(self, device: torch.device) -> str | None:
        """The name of the backend that carries tensors of a device, None if there is none."""
        if self.process_group is None:
            return "none"
        from torch.distributed import distributed_c10d as c10d

        if (found := c10d._world.pg_backend_config.get(self.process_group)) is None:
            raise destroyed()
        return _backends(str(found)).get(device.type)

    def carrier(self, *devices: torch.device) -> torch.device:
        """Where a message can lie to be sent: the first of some devices whose tensors a backend carries, or another."""
        carried = (device for device in devices if self.backend_for(device) is not None)
        return next(carried, None) or _device_of(self)

    def is_destroyed(self, group: dist.ProcessGroup) -> bool:
        """As the function `is_destroyed`."""
        return is_destroyed(group)

    def all_reduce(self, buffer: torch.Tensor, op: str, arrived: Arrived | None = None) -> Callable[[], None]:
        """As `start_all_reduce`, on these ranks."""
        return start_all_reduce(buffer, op, self, arrived)

    def broadcast(self, buffer: torch.Tensor, root: int, arrived: Arrived | None = None) -> Callable[[], None]:
        """As `start_broadcast`, on these ranks."""
        return start_broadcast(buffer, root, self, arrived)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, arrived: Arrived | None = None) -> Callable[[], None]:
        """As `start_all_gather`, on these ranks."""
        return start_all_gather(out, own, self, arrived)

    def all_to_all(self, out: torch.Tensor, own: torch.Tensor, arrived: Arrived | None = None) -> Callable[[], None]:
        """As `start_all_to_all`, on these ranks."""
        return start_all_to_all(out, own, self, arrived)

    def reduce_scatter(
        self,
        result: torch.Tensor,
        arriving: torch.Tensor,
        own: torch.Tensor,
        op: str,
        arrived: Arrived | None = None,
        accumulate: torch.dtype | None = None,
    ) -> Callable[[], None]:
        """As `start_reduce_scatter`, on these ranks."""
        return start_reduce_scatter(result, arriving, own, op, self, arrived, accumulate)

    def permute(
        self, out: torch.Tensor, own: torch.Tensor, pairs: Pairs, arrived: Arrived | None = None
    ) -> Callable[[], None]:
        """As `start_permute`, on these ranks."""
        return start_permute(out, own, pairs, self, arrived)


@functools.cache
def _backends(config: str) -> dict[str, str]:
    """By type of device the backend, from a text such as "cpu:gloo,cuda:nccl"."""
    if ":" not in config:  # a backend of one's own prints as its bare name and serves every device
        return dict.fromkeys(("cpu", "cuda", "xpu", "mps"), config)
    return dict(part.split(":", 1) for part in config.split(",") if ":" in part)


def resolve_group(group: Ranks = None) -> Group:
    """Turn what a user may pass as a group into a `Group`.

    Args:
        group: a `torch.distributed.ProcessGroup`, a `DeviceMesh`, a `Group`, or None for the default group; None
            without an initialised process group is a world of one. For a mesh that is not all ranks of the default
            group, the first call makes a process group of its ranks, which all of them have to call together.

    Returns:
        The group.

    Raises:
        ArgumentError: the argument is none of these, or this process is not a member.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Group(None, 1, 0)
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        return _of_mesh(group)
    return _of_process_group(group)


def _of_process_group(group: object, dimensions: tuple[MeshDimension, ...] = (), label: str = "") -> Group:
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            build_message(
                f"group is {type(group).__name__}, not a process group.",
                remedy="pass a torch.distributed.ProcessGroup, a DeviceMesh, or None.",
            )
        )
    require("a process group")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ArgumentError(
            build_message(
                "this process is not a member of the group that it was given.",
                remedy="call the step only on the group's own ranks.",
            )
        )
    return Group(weakref.ref(group), dist.get_world_size(group), rank, dimensions, label=label)


_of_meshes: weakref.WeakKeyDictionary[DeviceMesh, tuple[weakref.ref[DeviceMesh], Group]] = weakref.WeakKeyDictionary()
"""The ranks of meshes that were given before, since a step asks for them at each call; with the mesh that they were
found for: torch takes meshes over the same ranks for equal, whatever their process groups are."""


def _of_mesh(mesh: DeviceMesh) -> Group:
    """The ranks of a mesh."""
    if (found := _of_meshes.get(mesh)) is not None:
        found_for, known = found
        same = found_for() is mesh or mesh.ndim > 1
        if known.exists and (same or known.process_group is mesh.get_group()):
            return known
    if innermost_mode() is None:  # while a step is traced, its own ranks were looked at
        _refuse_of_other_ranks(mesh)
    names = mesh.mesh_dim_names or ("",)
    if mesh.ndim == 1:
        made = _of_process_group(mesh.get_group(), label=names[0])
    else:
        made = _of_process_group(_whole_group(mesh), dimensions_of(mesh))
    _of_meshes[mesh] = weakref.ref(mesh), made
    return made


def _refuse_of_other_ranks(mesh: DeviceMesh) -> None:
    """Refuse a mesh of ranks that have ended: torch takes it for one of those that have the same numbers now."""
    place, now = mesh.get_coordinate(), "no rank of any"
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        is_there = place is None or (mesh.mesh == rank).nonzero().flatten().tolist() == list(place)
        of_its_size = mesh.ndim > 1 or place is None or mesh.get_group().size() == mesh.size()
        if is_there and of_its_size and int(mesh.mesh.max()) < size:
            return
        now = f"rank {rank} of {size}"
    raise ArgumentError(
        build_message(
            f"a mesh, or what is sharded over it, belongs to {mesh.size()} ranks of a process group that has ended; "
            f"this process is {now} now.",
            remedy="save sharded state, or fdp.unshard it, before destroy_process_group(); load or shard it after the "
            "next init_process_group().",
        )
    )


def _whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh; made where that is not the world. torch keeps it."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made


def refuse_unknown_root(caller: str, root: object, size: int) -> None:
    """Refuse a root that is no rank.

    Args:
        caller: the function that the user called, for the message.
        root: what it was given.
        size: how many ranks there are.

    Raises:
        ArgumentError: it is not one of their numbers.
    """
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise ArgumentError(
            build_message(
                f"{caller} was given root={root!r} in a world of {size}.", remedy=f"pass a rank from 0 to {size - 1}."
            )
        )


def time_limit_of(ranks: Group) -> datetime.timedelta | None:
    """How long messages of a process group may take; None if its backend does not say."""
    assert ranks.process_group is not None
    options = getattr(ranks.process_group._get_backend(_device_of(ranks)), "options", None)
    limit: datetime.timedelta | None = getattr(options, "_timeout", None)
    return limit


def _device_of(ranks: Group) -> torch.device:
    """A device whose tensors a group carries: the CPU, the one that the group was made for, or the current one."""
    kinds = ("cpu", "cuda", "xpu", "mps")
    kind = next(kind for kind in kinds if ranks.backend_for(torch.device(kind)) is not None)
    bound: torch.device | None = None if kind == "cpu" else getattr(ranks.process_group, "bound_device_id", None)
    return torch.device(kind) if bound is None else bound


def destroyed() -> ArgumentError:
    """The error for a process group that this rank has destroyed."""
    return ArgumentError(
        build_message(
            "a step was called on a process group that has been destroyed.",
            remedy="call it before destroy_process_group(), or make the group anew.",
        )
    )


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Whether a process group has been destroyed, perhaps together with all of them."""
    from torch.distributed import distributed_c10d as c10d

    return group not in c10d._world.pg_map
