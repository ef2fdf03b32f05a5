"""Each collective by functions of torch.distributed, by backend: what starts it, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from fdp.distributed.sending import Arrived, Members, piece_count, start_message, start_pieces

_AVERAGING_BACKENDS = ("gloo", "nccl", "xccl", "hccl")
"""Backends known to take ReduceOp.AVG; on any other a mean is a sum and a division."""

_SCATTERING_BACKENDS = ("nccl", "xccl", "hccl")
"""Backends whose reduce-scatter is better than an all-to-all and a sum. That of gloo is an all-reduce and a slice:
twice the bytes."""

MOST_RANKS_IN_ROWS = 4
"""Up to so many ranks exchange rows: there is a message for each distance between two ranks, in which each sends a row
to one other rank, and nothing to the rest."""

Pairs: TypeAlias = "Sequence[tuple[int, int]]"
"""Which rank sends to which."""


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
    finish_message = start_message(
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
    return start_message(
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
    if _in_rows(own, group):
        finish_gather = _start_rows(what, own, group, arrived, to, [sent] * group.size)
        to[group.rank].copy_(sent)
        return finish_gather
    many = piece_count(sent.numel(), own, group)
    columns = list(zip(to.chunk(many, 1), sent.chunk(many), strict=True))

    def send(at: int, ranks: dist.ProcessGroup | None) -> dist.Work:
        into, given = columns[at]
        work: dist.Work = dist.all_gather(list(into.unbind(0)), given, group=ranks, async_op=True)
        return work

    return start_pieces(what, own, group, arrived, len(columns), send)


def start_all_to_all(
    out: torch.Tensor, own: torch.Tensor, group: Members, arrived: Arrived | None = None, what: str = "an all-to-all"
) -> Callable[[], None]:
    """Start sending each rank its piece of `own`, and filling `out` with the pieces of all ranks for this one.

    Both are contiguous, of as many elements as ranks can share evenly. Returns the function that waits.
    """
    if group.process_group is None:
        out.view(-1).copy_(own.view(-1))
        return _nothing
    to, sent = _as_bytes(out).view(group.size, -1), _as_bytes(own).view(group.size, -1)
    if _in_rows(own, group):
        finish_exchange = _start_rows(what, own, group, arrived, to, sent)
        to[group.rank].copy_(sent[group.rank])
        return finish_exchange
    many = piece_count(sent.shape[1], own, group)
    if many == 1:
        return start_message(
            what, own, group, arrived, lambda ranks: dist.all_to_all_single(to, sent, group=ranks, async_op=True)
        )
    columns = list(zip(to.chunk(many, 1), sent.chunk(many, 1), strict=True))

    def send(at: int, ranks: dist.ProcessGroup | None) -> dist.Work:
        into, given = columns[at]
        work: dist.Work = dist.all_to_all(list(into.unbind(0)), list(given.unbind(0)), group=ranks, async_op=True)
        return work

    return start_pieces(what, own, group, arrived, len(columns), send)


def _in_rows(buffer: torch.Tensor, group: Members) -> bool:
    """Whether ranks exchange rows: on gloo, whose all-gather makes copies of all that it gathers."""
    return group.backend_for(buffer.device) == "gloo" and group.size <= MOST_RANKS_IN_ROWS


class _Transfer(NamedTuple):
    """What a rank sends to one other rank, and where it receives from one: contiguous bytes.

    Attributes:
        source: the rank that it gets something from; None for no rank.
        into: where that goes.
        destination: the rank that it sends something to; None for no rank.
        given: what it sends, as long as what it gets.
    """

    source: int | None
    into: torch.Tensor
    destination: int | None
    given: torch.Tensor

    def start(self, size: int, ranks: dist.ProcessGroup | None) -> dist.Work:
        """Start the transfer, as an all-to-all in which the other ranks get nothing."""
        arriving = [self.into.numel() if rank == self.source else 0 for rank in range(size)]
        leaving = [self.given.numel() if rank == self.destination else 0 for rank in range(size)]
        into, given = self.into[: sum(arriving)], self.given[: sum(leaving)]
        work: dist.Work = dist.all_to_all_single(into, given, arriving, leaving, group=ranks, async_op=True)
        return work


def _start_transfers(
    what: str, buffer: torch.Tensor, group: Members, arrived: Arrived | None, transfers: Sequence[_Transfer]
) -> Callable[[], None]:
    """Start some transfers, in pieces; returns the function that waits for all of them."""
    parts: list[_Transfer] = []
    for source, into, destination, given in transfers:
        many = piece_count(given.numel(), buffer, group)
        both = zip(into.chunk(many), given.chunk(many), strict=True)
        parts.extend(_Transfer(source, to, destination, sent) for to, sent in both)
    return start_pieces(what, buffer, group, arrived, len(parts), lambda at, ranks: parts[at].start(group.size, ranks))


def _start_rows(
    what: str,
    buffer: torch.Tensor,
    group: Members,
    arrived: Arrived | None,
    into: Sequence[torch.Tensor] | torch.Tensor,
    given: Sequence[torch.Tensor] | torch.Tensor,
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
    pairs = [((group.rank - shift) % group.size, (group.rank + shift) % group.size) for shift in range(1, group.size)]
    transfers = [_Transfer(source, into[source], to, given[to]) for source, to in pairs]
    return _start_transfers(what, buffer, group, arrived, transfers)


def rows_arriving(size: int) -> int:
    """How many rows arrive for a reduce-scatter, beside the one that becomes the result.

    Those of all other ranks but one; where ranks do not exchange rows, one of each rank.
    """
    return max(0, size - 2) if size <= MOST_RANKS_IN_ROWS else size


def start_reduce_scatter(
    result: torch.Tensor,
    arriving: torch.Tensor,
    own: torch.Tensor,
    op: str,
    group: Members,
    arrived: Arrived | None = None,
    accumulate: torch.dtype | None = None,
) -> Callable[[], None]:
    """Start reducing each row of `own` over the ranks of a group, the row of this rank into `result`.

    Where the values are added up here, that is done in the order of ranks, of sixteen-bit values in float32 and
    rounded once: the result is a function of the values alone. A backend that does it adds in an order of its own.

    Args:
        result: [n], contiguous; written from the start of the message on.
        arriving: [`rows_arriving(size)`, n], contiguous; memory for what arrives.
        own: [size, n], contiguous; a row for each rank. Once the returned function has returned, they are anything.
        op: "mean" or "sum".
        group: the ranks; with a world of one nothing is sent.
        arrived: what to call when the message has arrived, if the backend says so.
        accumulate: float32, where sixteen-bit values have to be added up in it: then no backend does it. None where any
            way will do.

    Returns:
        A function that waits for the result.
    """
    what, size = "a reduce-scatter", group.size
    if size == 1:
        result.copy_(own[0])
        return _nothing
    if accumulate is None and group.backend_for(own.device) in _SCATTERING_BACKENDS:
        name, divide = way_to_reduce(op, own.dtype, own.device, group)
        if divide == "before":
            own.div_(size)
        operation = getattr(dist.ReduceOp, name.upper())
        return start_message(
            what, own, group, arrived,
            lambda ranks: dist.reduce_scatter_tensor(
                result.view(-1), own.view(-1), operation, group=ranks, async_op=True
            ),
        )  # fmt: skip
    if _in_rows(own, group):
        # The first two rows are added up first: that the result is one of them does no harm.
        rows = [result, *arriving.unbind(0)]
        rows.insert(group.rank, own[group.rank])
        into, given = [[_as_bytes(row) for row in each] for each in (rows, own)]
        finish_message = _start_rows(what, own, group, arrived, into, given)
    else:
        whole = arriving if arriving.shape == own.shape else torch.empty_like(own)
        rows = list(whole.unbind(0))
        finish_message = start_all_to_all(whole, own, group, arrived, what)

    def wait() -> None:
        finish_message()
        _add_up(result, rows, size if op == "mean" else 1)

    return wait


def _add_up(result: torch.Tensor, rows: Sequence[torch.Tensor], divided_by: int) -> None:
    """Add up two rows or more in their order, and divide; `result` may be one of the first two."""
    if result.dtype in (torch.float16, torch.bfloat16):
        total = rows[0].float()
        for row in rows[1:]:
            total += row
    else:
        total = torch.add(rows[0], rows[1], out=result)
        for row in rows[2:]:
            total += row
    if divided_by > 1:
        total /= divided_by
    if total is not result:
        result.copy_(total)


def start_permute(
    out: torch.Tensor, own: torch.Tensor, pairs: Pairs, group: Members, arrived: Arrived | None = None
) -> Callable[[], None]:
    """Start sending `own` to this rank's destination, and filling `out` with the value of its source.

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
    transfer = _Transfer(source, _as_bytes(out), destination, _as_bytes(own))
    return _start_transfers("a permutation", own, group, arrived, [transfer])


def _as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: a value that is only moved needs no dtype that the backend can add."""
    # Not view(-1): of a single element it keeps whatever stride that has, and then there is no view as bytes.
    return buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8)


def _nothing() -> None:
    """Wait for nothing."""
