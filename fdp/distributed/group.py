"""The process group: its size, its ranks' names for each other, its store, and how a message starts.

Everything that fdp needs from torch.distributed beyond its documented interface is in this file:
`_world.pg_map` (the groups that there are, and the store that each was made with), `_world.pg_backend_config`, and
`ProcessGroup._get_backend(device).options._timeout`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fdp.distributed.liveness.aborting import abort_when_ranks_are_gone
from fdp.distributed.liveness.patience import explain, finish
from fdp.distributed.liveness.report import report_on_signal
from fdp.distributed.liveness.watch import is_known, watch, watched_ranks
from fdp.distributed.liveness.watched import Watched
from fdp.errors import ArgumentError, build_message
from fdp.pytorch.parts import require

_AVERAGING_BACKENDS = ("gloo", "nccl", "xccl", "hccl")
"""Backends known to take ReduceOp.AVG; on any other a mean is a sum and a division."""


Ranks: TypeAlias = "dist.ProcessGroup | DeviceMesh | Group | None"
"""What says which ranks: a process group, a mesh of one dimension, or None for the default process group."""

Arrived = Callable[[], None]
"""Called once when a message has arrived, perhaps by another thread."""


@dataclass(frozen=True)
class Group:
    """The ranks that a step runs on: a c10d process group, or a world of one.

    The group is not kept alive. A step outlives `destroy_process_group()`, and a process group that is still referred
    to when the interpreter ends can abort the process: its threads then want a lock that is gone.

    Attributes:
        reference: to the c10d group; None for a world of one.
        size: number of ranks.
        rank: this process's rank in the group.
    """

    reference: weakref.ref[dist.ProcessGroup] | None
    size: int
    rank: int

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
            raise ArgumentError(
                build_message(
                    "a step was called on a process group that has been destroyed.",
                    remedy="call it before destroy_process_group(), or make the group anew.",
                )
            )
        return group

    @property
    def name(self) -> str:
        """The name that all ranks of the group share."""
        return "one" if self.process_group is None else str(self.process_group.group_name)

    def store(self) -> Any:
        """The rendezvous store that the group was made with."""
        from torch.distributed import distributed_c10d as c10d

        assert self.process_group is not None
        return c10d._world.pg_map[self.process_group][1]

    def backend_for(self, device: torch.device) -> str | None:
        """The name of the backend that carries tensors of a device, None if there is none."""
        if self.process_group is None:
            return "none"
        from torch.distributed import distributed_c10d as c10d

        return _backends(str(c10d._world.pg_backend_config[self.process_group])).get(device.type)

    def all_reduce(self, buffer: torch.Tensor, op: str, arrived: Arrived | None = None) -> Callable[[], None]:
        """As `start_all_reduce`, on these ranks."""
        return start_all_reduce(buffer, op, self, arrived)

    def broadcast(self, buffer: torch.Tensor, root: int, arrived: Arrived | None = None) -> Callable[[], None]:
        """As `start_broadcast`, on these ranks."""
        return start_broadcast(buffer, root, self, arrived)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, arrived: Arrived | None = None) -> Callable[[], None]:
        """As `start_all_gather`, on these ranks."""
        return start_all_gather(out, own, self, arrived)

    def all_to_all(self, out: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
        """As `start_all_to_all`, on these ranks."""
        return start_all_to_all(out, own, self)


@functools.cache
def _backends(config: str) -> dict[str, str]:
    """By type of device the backend, from a text such as "cpu:gloo,cuda:nccl"."""
    if ":" not in config:  # a backend of one's own prints as its bare name and serves every device
        return dict.fromkeys(("cpu", "cuda", "xpu", "mps"), config)
    return dict(part.split(":", 1) for part in config.split(",") if ":" in part)


def resolve_group(group: Ranks = None) -> Group:
    """Turn what a user may pass as a group into a `Group`.

    Args:
        group: a `torch.distributed.ProcessGroup`, a one-dimensional `DeviceMesh`, a `Group`, or None for the
            default group; None without an initialised process group is a world of one.

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
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ArgumentError(
                build_message(
                    f"a mesh of {group.ndim} dimensions {group.mesh_dim_names} was given as the group of a step, "
                    "which has one axis.",
                    remedy='pass one dimension of it: mesh["dp"].',
                )
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            build_message(
                f"group is {type(group).__name__}, not a process group.",
                remedy="pass a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh, or None.",
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
    return Group(weakref.ref(group), dist.get_world_size(group), rank)


def group_beside(ranks: Group) -> dist.ProcessGroup:
    """Make a process group of the same ranks, for messages beside theirs, which are paired by their order.

    Every rank takes part.

    Returns:
        The group, by gloo, with the time limit of theirs. It is not kept alive by anything but the process's list.
    """
    assert ranks.process_group is not None
    everybody = dist.get_process_group_ranks(ranks.process_group)
    options = getattr(ranks.process_group._get_backend(_device_of(ranks)), "options", None)
    made = dist.new_group(
        everybody,
        getattr(options, "_timeout", None),
        backend="gloo",
        use_local_synchronization=len(everybody) < dist.get_world_size(),
    )
    assert made is not None
    return made


def _device_of(ranks: Group) -> torch.device:
    """A device whose tensors a group carries."""
    kinds = ("cpu", "cuda", "xpu", "mps")
    return torch.device(next(kind for kind in kinds if ranks.backend_for(torch.device(kind)) is not None))


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Whether a process group has been destroyed, perhaps together with all of them."""
    from torch.distributed import distributed_c10d as c10d

    return group not in c10d._world.pg_map


def start_all_reduce(buffer: torch.Tensor, op: str, group: Group, arrived: Arrived | None = None) -> Callable[[], None]:
    """Start reducing a buffer in place over the ranks of a group.

    Args:
        buffer: contiguous tensor; holds the result once the returned function has returned.
        op: "mean", "sum", "max" or "min".
        group: the ranks; with a world of one nothing is sent.
        arrived: what to call when the message has arrived, if the backend says so.

    Returns:
        A function that waits for the result.
    """
    if group.process_group is None:
        return _nothing
    name, divide = way_to_reduce(op, buffer.dtype, buffer.device, group)
    if divide == "before":
        buffer.div_(group.size)
    operation = getattr(dist.ReduceOp, name.upper())
    finish_message = _start(
        "an all-reduce", buffer, group, arrived,
        lambda ranks: dist.all_reduce(buffer, operation, group=ranks, async_op=True),
    )  # fmt: skip
    if divide != "after":
        return finish_message

    def wait() -> None:
        finish_message()
        buffer.div_(group.size)

    return wait


def way_to_reduce(op: str, dtype: torch.dtype, device: torch.device, group: Group) -> tuple[str, str | None]:
    """How the backend of a group reduces: by which operation ("avg", "sum", "max", "min"), and whether the values have
    to be divided by the number of ranks "before" or "after" it."""
    if op != "mean":
        return op, None
    if dtype == torch.float16:
        # Two large values of sixteen bits have no sum, but a mean.
        return "sum", "before"
    return ("avg", None) if group.backend_for(device) in _AVERAGING_BACKENDS else ("sum", "after")


def start_broadcast(
    buffer: torch.Tensor, root: int, group: Group, arrived: Arrived | None = None
) -> Callable[[], None]:
    """Start overwriting a buffer with the one of rank `root` of the group; returns the function that waits."""
    if group.process_group is None:
        return _nothing
    return _start(
        "a broadcast", buffer, group, arrived,
        lambda ranks: dist.broadcast(_as_bytes(buffer), group=ranks, group_src=root, async_op=True),
    )  # fmt: skip


def start_all_gather(
    out: torch.Tensor, own: torch.Tensor, group: Group, arrived: Arrived | None = None
) -> Callable[[], None]:
    """Start filling `out` ([size, *own.shape]) with every rank's `own`; returns the function that waits."""
    if group.process_group is None:
        out[0].copy_(own)
        return _nothing
    parts = list(_as_bytes(out).view(group.size, -1).unbind(0))
    return _start(
        "an all-gather", own, group, arrived,
        lambda ranks: dist.all_gather(parts, _as_bytes(own), group=ranks, async_op=True),
    )  # fmt: skip


def start_all_to_all(out: torch.Tensor, own: torch.Tensor, group: Group) -> Callable[[], None]:
    """Start sending each rank its piece of `own`, and filling `out` with the pieces that all ranks have for this one.

    Both are flat, of as many elements as ranks can share evenly. Returns the function that waits.
    """
    return _start(
        "an all-to-all", own, group, None,
        lambda ranks: dist.all_to_all_single(_as_bytes(out), _as_bytes(own), group=ranks, async_op=True),
    )  # fmt: skip


def _start(
    what: str, buffer: torch.Tensor, group: Group, arrived: Arrived | None, send: Callable[[Any], Any]
) -> Callable[[], None]:
    """Start a message; returns the function that waits for it, and that knows when a rank will not come."""
    ranks = group.process_group
    watch_over(group)
    try:
        work = send(ranks)
    except RuntimeError as error:
        if (explained := explain(ranks, what)) is not None:
            raise explained from error
        raise
    _call_back(work, arrived)
    # A wait of gloo's that has run out of time may be made again. Of other backends that is not known, and those of
    # devices do not block this thread.
    return functools.partial(finish, work, ranks, what) if group.backend_for(buffer.device) == "gloo" else work.wait


def watch_over(group: Group) -> Watched | None:
    """Watch the ranks of a group from now on; None where they are not watched."""
    ranks = group.process_group
    if ranks is None or is_known(ranks):
        return watched_ranks(ranks)
    made = watch(ranks, group.name, group.rank, group.size, group.store)
    if made is not None:
        report_on_signal()
        if any(group.backend_for(torch.device(kind)) not in (None, "gloo", "mpi") for kind in ("cuda", "xpu")):
            abort_when_ranks_are_gone(ranks, made)
    return made


def _call_back(work: Any, arrived: Arrived | None) -> None:
    """Have the end of a message told; a backend whose work has no future tells nothing."""
    if arrived is None:
        return
    try:
        future = work.get_future()
    except (RuntimeError, NotImplementedError, AttributeError):
        return
    future.add_done_callback(lambda _: arrived())


def _as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: what is only moved needs no dtype that the backend can add."""
    # Not view(-1): of a single element it keeps whatever stride that has, and then there is no view as bytes.
    return buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8)


def _nothing() -> None:
    """There is nothing to wait for."""
