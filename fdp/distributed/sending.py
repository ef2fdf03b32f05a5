"""How a message starts at its backend, is watched, and ends; a large one in pieces."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Protocol, cast

import torch
import torch.distributed as dist

from fdp.distributed.liveness.on_signal import report_on_signal
from fdp.distributed.liveness.once_a_second import look_after
from fdp.distributed.liveness.patience import explain, finish
from fdp.distributed.liveness.watch import is_known, watch, watched_ranks
from fdp.distributed.liveness.watched import Watched
from fdp.errors import ArgumentError, build_message

_PIECE_BYTES = 2**20
"""Up to so many bytes of a message to one rank gloo sends in one piece; larger ones, which it does not pipeline, in
several at once."""

_MOST_PIECES = 8

Arrived = Callable[[], None]
"""Called once when a message has arrived, perhaps by another thread."""


class Members(Protocol):
    """The ranks that a message is for, as a `Group` says who they are."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The c10d group, None for a world of one."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def name(self) -> str:
        """The name that all ranks of the group share."""

    @property
    def watched(self) -> Members:
        """The ranks that are watched meanwhile: these, or more."""

    def store(self) -> dist.Store:
        """The rendezvous store of the group."""

    def backend_for(self, device: torch.device) -> str | None:
        """The name of the backend that carries tensors of a device."""

    def is_destroyed(self, group: dist.ProcessGroup) -> bool:
        """Whether a process group has been destroyed."""


def start_message(
    what: str,
    buffer: torch.Tensor,
    group: Members,
    arrived: Arrived | None,
    send: Callable[[dist.ProcessGroup | None], dist.Work],
) -> Callable[[], None]:
    """Start a message; returns the function that waits for it, and that raises if a rank is lost."""
    ranks, all_ranks = group.process_group, group.watched.process_group
    if (backend := group.backend_for(buffer.device)) is None:
        raise no_backend(what, buffer.device)
    watched = watch_over(group.watched)
    # A wait of gloo's that has run out of time may be made again. Of other backends that is not known, and those of
    # devices do not block this thread.
    gloo = backend == "gloo"
    # Others are not counted: a rank that replays a CUDA graph starts them unseen, and a rank beside it may not replay.
    number = 0 if watched is None else watched.starts_message(counts=gloo)
    try:
        work = send(ranks)
    except RuntimeError as error:
        if (explained := explain(all_ranks, what)) is not None:
            raise explained from error
        raise
    _call_back(work, arrived)
    return functools.partial(finish, work, all_ranks, what, number) if gloo else cast("Callable[[], None]", work.wait)


def no_backend(what: str, device: torch.device) -> ArgumentError:
    """The error for a message on a device whose tensors the process group does not send."""
    return ArgumentError(
        build_message(
            f"{what} carries tensors on {device}, and the process group has no backend for {device.type}.",
            remedy='initialise it with one for each device: init_process_group("cpu:gloo,cuda:nccl").',
        )
    )


def watch_over(group: Members) -> Watched | None:
    """Watch the ranks of a group from now on; None where they are not watched."""
    ranks = group.process_group
    if ranks is None or is_known(ranks):
        return watched_ranks(ranks)
    made = watch(ranks, group.name, group.rank, group.size, group.store)
    if made is not None:
        report_on_signal()
        kinds = [group.backend_for(torch.device(kind)) for kind in ("cuda", "xpu")]
        look_after(ranks, made, group.is_destroyed, aborts=any(kind not in (None, "gloo", "mpi") for kind in kinds))
    return made


def _call_back(work: dist.Work, arrived: Arrived | None) -> None:
    """Report the end of a message. A backend whose work has no future reports nothing."""
    if arrived is None:
        return
    try:
        future = work.get_future()
    except (RuntimeError, NotImplementedError, AttributeError):
        return
    future.add_done_callback(lambda _: arrived())


def piece_count(part_bytes: int, buffer: torch.Tensor, group: Members) -> int:
    """The number of pieces of a message of so many bytes to one rank; the same on all ranks."""
    many = min(-(-part_bytes // _PIECE_BYTES), _MOST_PIECES) if group.backend_for(buffer.device) == "gloo" else 1
    return max(many, 1)


def start_pieces(
    what: str,
    buffer: torch.Tensor,
    group: Members,
    arrived: Arrived | None,
    count: int,
    send: Callable[[int, dist.ProcessGroup | None], dist.Work],
) -> Callable[[], None]:
    """Start a message in pieces; returns the function that waits for all of them."""
    one_arrived = None if arrived is None else _after(count, arrived)
    waits = [start_message(what, buffer, group, one_arrived, functools.partial(send, at)) for at in range(count)]

    def wait() -> None:
        for each in waits:
            each()

    return wait


def _after(count: int, arrived: Arrived) -> Arrived:
    """A function that calls `arrived` after so many calls, perhaps from several threads."""
    left = itertools.count(count - 1, -1)

    def one() -> None:
        if next(left) == 0:
            arrived()

    return one
