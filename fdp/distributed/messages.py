"""How a message starts, and what waits for it: each collective by functions of torch.distributed, by backend."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from fdp.distributed.liveness.aborting import abort_when_ranks_are_gone
from fdp.distributed.liveness.patience import explain, finish
from fdp.distributed.liveness.report import report_on_signal
from fdp.distributed.liveness.watch import is_known, watch, watched_ranks
from fdp.distributed.liveness.watched import Watched

_AVERAGING_BACKENDS = ("gloo", "nccl", "xccl", "hccl")
"""Backends known to take ReduceOp.AVG; on any other a mean is a sum and a division."""

_SCATTERING_BACKENDS = ("nccl", "xccl", "hccl")
"""Backends whose reduce-scatter is better than an all-to-all and a sum. That of gloo is an all-reduce and a slice:
twice the bytes."""

_PIECE_BYTES = 2**20
"""Up to so many bytes of a message to one rank gloo sends in one piece; larger ones, which it does not pipeline, in
several at once."""

_MOST_PIECES = 8

MOST_RANKS_IN_ROWS = 4
"""Up to so many ranks exchange rows: there is a message for each distance between two ranks, in which each sends a row
to one other rank, and nothing to the rest."""

Pairs: TypeAlias = "Sequence[tuple[int, int]]"
"""Which rank sends to which."""

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

    def store(self) -> Any:
        """The rendezvous store of the group."""

    def backend_for(self, device: torch.device) -> str | None:
        """The name of the backend that carries tensors of a device."""


def start_all_reduce(
    buffer: torch.Tensor, op: str, group: Members, arrived: Arrived | None = None
) -> Callable[[], None]:
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


def way_to_reduce(op: str, dtype: torch.dtype, device: torch.device, group: Members) -> tuple[str, str | None]:
    """How the backend of a group reduces: by which operation ("avg", "sum", "max", "min"), and whether the values have
    to be divided by the number of ranks "before" or "after" it."""
    if op != "mean":
        return op, None
    if dtype == torch.float16:
        # Two large values of sixteen bits have no sum, but a mean.
        return "sum", "before"
    return ("avg", None) if group.backend_for(device) in _AVERAGING_BACKENDS else ("sum", "after")


def start_broadcast(
    buffer: torch.Tensor, root: int, group: Members, arrived: Arrived | None = None
) -> Callable[[], None]:
    """Start overwriting a buffer with the one of rank `root` of the group; returns the function that waits."""
    if group.process_group is None:
        return _nothing
    return _start(
        "a broadcast", buffer, group, arrived,
        lambda ranks: dist.broadcast(_as_bytes(buffer), group=ranks, group_src=root, async_op=True),
    )  # fmt: skip


def start_all_gather(
    out: torch.Tensor, own: torch.Tensor, group: Members, arrived: Arrived | None = None
) -> Callable[[], None]:
    """Start filling `out` ([size, *own.shape]) with every rank's `own`; returns the function that waits."""
    if group.process_group is None:
        out[0].copy_(own)
        return _nothing
    what, to, sent = "an all-gather", _as_bytes(out).view(group.size, -1), _as_bytes(own)
    if in_rows(own, group):
        finish_gather = _start_rows(what, own, group, arrived, to.unbind(0), [sent] * group.size)
        to[group.rank].copy_(sent)
        return finish_gather
    many = _pieces(sent.numel(), own, group)
    columns = list(zip(to.chunk(many, 1), sent.chunk(many), strict=True))

    def send(at: int, ranks: Any) -> Any:
        into, given = columns[at]
        return dist.all_gather(list(into.unbind(0)), given, group=ranks, async_op=True)

    return _start_pieces(what, own, group, arrived, len(columns), send)


def start_all_to_all(
    out: torch.Tensor, own: torch.Tensor, group: Members, arrived: Arrived | None = None
) -> Callable[[], None]:
    """Start sending each rank its piece of `own`, and filling `out` with the pieces that all ranks have for this one.

    Both are contiguous, of as many elements as ranks can share evenly. Returns the function that waits.
    """
    if group.process_group is None:
        out.view(-1).copy_(own.view(-1))
        return _nothing
    what, to, sent = "an all-to-all", _as_bytes(out).view(group.size, -1), _as_bytes(own).view(group.size, -1)
    if in_rows(own, group):
        finish_exchange = _start_rows(what, own, group, arrived, to.unbind(0), sent.unbind(0))
        to[group.rank].copy_(sent[group.rank])
        return finish_exchange
    return _start(what, own, group, arrived, lambda ranks: dist.all_to_all_single(to, sent, group=ranks, async_op=True))


def in_rows(buffer: torch.Tensor, group: Members) -> bool:
    """Whether ranks exchange rows: on gloo, whose all-gather makes copies of all that it gathers."""
    return group.backend_for(buffer.device) == "gloo" and group.size <= MOST_RANKS_IN_ROWS


def _start_rows(
    what: str,
    buffer: torch.Tensor,
    group: Members,
    arrived: Arrived | None,
    into: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
) -> Callable[[], None]:
    """Start sending each other rank the row of `given` that is its, and filling the rows of `into` with theirs.

    Args:
        what: what is sent, for messages.
        buffer: says on which device.
        group: the ranks.
        arrived: what to call when all of it has arrived.
        into: for each rank contiguous bytes; those of this rank stay as they are.
        given: likewise, equally many.

    Returns:
        A function that waits for all of it.
    """
    size, rank = group.size, group.rank
    pieces: list[tuple[int, torch.Tensor, int, torch.Tensor]] = []
    for shift in range(1, size):
        source, destination = (rank - shift) % size, (rank + shift) % size
        many = _pieces(given[destination].numel(), buffer, group)
        both = zip(into[source].chunk(many), given[destination].chunk(many), strict=True)
        pieces.extend((source, to, destination, sent) for to, sent in both)

    def send(at: int, ranks: Any) -> Any:
        source, to, destination, sent = pieces[at]
        arriving = [to.numel() if other == source else 0 for other in range(size)]
        leaving = [sent.numel() if other == destination else 0 for other in range(size)]
        return dist.all_to_all_single(to, sent, arriving, leaving, group=ranks, async_op=True)

    return _start_pieces(what, buffer, group, arrived, len(pieces), send)


def _pieces(part_bytes: int, buffer: torch.Tensor, group: Members) -> int:
    """In how many pieces a message is sent, of so many bytes to one rank; all ranks decide alike."""
    many = min(-(-part_bytes // _PIECE_BYTES), _MOST_PIECES) if group.backend_for(buffer.device) == "gloo" else 1
    return max(many, 1)


def _start_pieces(
    what: str,
    buffer: torch.Tensor,
    group: Members,
    arrived: Arrived | None,
    count: int,
    send: Callable[[int, Any], Any],
) -> Callable[[], None]:
    """Start a message in pieces; returns the function that waits for all of them."""
    one_arrived = None if arrived is None else _after(count, arrived)
    waits = [_start(what, buffer, group, one_arrived, functools.partial(send, at)) for at in range(count)]

    def wait() -> None:
        for each in waits:
            each()

    return wait


def _after(count: int, arrived: Arrived) -> Arrived:
    """What is called so often, perhaps by several threads, until it calls `arrived`."""
    left = itertools.count(count - 1, -1)

    def one() -> None:
        if next(left) == 0:
            arrived()

    return one


def rows_arriving(size: int) -> int:
    """How many rows arrive for a reduce-scatter: of all other ranks, or of all where they do not exchange rows."""
    return size - 1 if size <= MOST_RANKS_IN_ROWS else size


def start_reduce_scatter(
    arriving: torch.Tensor, own: torch.Tensor, op: str, group: Members, arrived: Arrived | None = None
) -> Callable[[], None]:
    """Start reducing each row of `own` over the ranks of a group, the row of this rank into the first one.

    Where the values are added up here, that is done in the order of ranks, of sixteen-bit values in float32 and
    rounded once: the result is a function of the values alone. A backend that does it adds in an order of its own.

    Args:
        arriving: [`rows_arriving(size)`, n], contiguous; memory for what arrives.
        own: [size, n], contiguous; a row for each rank. Once the returned function has returned, the first row is the
            result, and the others are anything.
        op: "mean" or "sum".
        group: the ranks; with a world of one nothing is sent.
        arrived: what to call when the message has arrived, if the backend says so.

    Returns:
        A function that waits for the result.
    """
    what, size = "a reduce-scatter", group.size
    if size == 1:
        return _nothing
    if group.backend_for(own.device) in _SCATTERING_BACKENDS:
        name, divide = way_to_reduce(op, own.dtype, own.device, group)
        if divide == "before":
            own.div_(size)
        operation, total = getattr(dist.ReduceOp, name.upper()), arriving[0].view(-1)
        finish_scatter = _start(
            what, own, group, arrived,
            lambda ranks: dist.reduce_scatter_tensor(total, own.view(-1), operation, group=ranks, async_op=True),
        )  # fmt: skip

        def copy() -> None:
            finish_scatter()
            own[0].copy_(arriving[0])

        return copy
    if in_rows(own, group):
        rows = list(arriving.unbind(0))
        rows.insert(group.rank, own[group.rank])
        into, given = [[_as_bytes(row) for row in each] for each in (rows, own)]
        finish_message = _start_rows(what, own, group, arrived, into, given)
    else:
        whole = arriving if arriving.shape == own.shape else torch.empty_like(own)
        rows = list(whole.unbind(0))
        finish_message = start_all_to_all(whole, own, group, arrived)

    def wait() -> None:
        finish_message()
        _add_up(own[0], rows, size if op == "mean" else 1)

    return wait


def _add_up(result: torch.Tensor, rows: Sequence[torch.Tensor], divided_by: int) -> None:
    """Add up rows in their order, and divide; `result` may be the first of them."""
    if result.dtype in (torch.float16, torch.bfloat16):
        total = rows[0].float()
        for row in rows[1:]:
            total += row
    else:
        total = torch.add(rows[0], rows[1], out=result) if len(rows) > 1 else rows[0]
        for row in rows[2:]:
            total += row
    if divided_by > 1:
        total /= divided_by
    if total is not result:
        result.copy_(total)


def start_permute(
    out: torch.Tensor, own: torch.Tensor, pairs: Pairs, group: Members, arrived: Arrived | None = None
) -> Callable[[], None]:
    """Start sending `own` to the rank that this one is paired with, and filling `out` with what is sent to this one.

    Args:
        out: contiguous, like `own`; zeros where nothing is sent to this rank.
        own: contiguous.
        pairs: of source and destination; no rank is a source twice, or a destination.
        group: the ranks.
        arrived: what to call when the message has arrived, if the backend says so.

    Returns:
        A function that waits for the result.
    """
    source = next((one for one, other in pairs if other == group.rank), None)
    destination = next((other for one, other in pairs if one == group.rank), None)
    if source is None:
        out.zero_()
    if group.process_group is None:
        if source is not None:
            out.copy_(own)
        return _nothing
    # What one rank sends is all that it sends, and what arrives is of one rank: the others have nothing for each other.
    many = _pieces(own.numel() * own.itemsize, own, group)
    columns = list(zip(_as_bytes(out).chunk(many), _as_bytes(own).chunk(many), strict=True))

    def send(at: int, ranks: Any) -> Any:
        into, given = columns[at]
        sizes = [given.numel() if rank == source else 0 for rank in range(group.size)]
        own_sizes = [given.numel() if rank == destination else 0 for rank in range(group.size)]
        into, given = into[: sum(sizes)], given[: sum(own_sizes)]
        return dist.all_to_all_single(into, given, sizes, own_sizes, group=ranks, async_op=True)

    return _start_pieces("a permutation", own, group, arrived, len(columns), send)


def _start(
    what: str, buffer: torch.Tensor, group: Members, arrived: Arrived | None, send: Callable[[Any], Any]
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


def watch_over(group: Members) -> Watched | None:
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
