"""The layout of a bucket's parts in memory, and the bytes that its message reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fdp.plan.plan import Bucket
from fdp.verify.combined import IN_PLACE, SPLIT, STACKED

_ALIGNMENT_BYTES = 64
_HEADER_NUMEL = 64
_CARRIERS = ("mean", "sum", "max", "min")
SCATTERS = tuple(op for op in SPLIT if op not in STACKED)
"""Reductions of which each rank gets its part."""


@dataclass(frozen=True)
class Parts:
    """The parts of a bucket, in elements but for `behind_bytes`; the members are its first `numel` elements.

    Attributes:
        numel: the members.
        header: what stands behind them, and says which call a message belongs to.
        sent: what this rank sends: members and header, filled up where ranks share them evenly.
        behind_bytes: where what others send begins, if it is in the bucket and beside the members.
        arriving: what others send there.
        result: elements of results in memory of their own; 0 if they are in the bucket, in the place of its members.
        itemsize: bytes of an element.
        whole: whether it is sent as a whole, with the header, in several messages: ranks add it up in a wider dtype,
            each a share, and send the results back; or they do it in two levels, on a mesh.
    """

    numel: int
    header: int
    sent: int
    behind_bytes: int
    arriving: int
    result: int
    itemsize: int
    whole: bool

    def regions(self) -> Iterator[tuple[str, int, int]]:
        """The bytes that the message reads or writes: the kind of memory, offset and length there."""
        yield "bucket", 0, self.sent * self.itemsize
        if self.arriving:
            yield "bucket", self.behind_bytes, self.arriving * self.itemsize
        if self.result:
            yield "result", 0, self.result * self.itemsize


def bucket_parts(bucket: Bucket, world_size: int) -> Parts:
    """The parts of a bucket on a number of ranks."""
    itemsize, numel = bucket.dtype.itemsize, bucket.numel
    # The first of all that start; where ranks compute with what they send, and 256 ones are not zero.
    carries = bucket.index == 0 and bucket.op in _CARRIERS and (itemsize > 1 or world_size < 256)
    carries = carries and bucket.along == ""  # all ranks have to see it
    header = _HEADER_NUMEL if carries and world_size > 1 else 0
    sent = numel + header
    wide = bucket.accumulate_dtype is not None and bucket.op in IN_PLACE
    sharing = bucket.pieces or (world_size if wide else 1)
    sent = -(-sent // sharing) * sharing
    behind_bytes = -(-sent * itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    received = math.prod(received_shape(bucket, world_size) or (0,))
    if bucket.op in SCATTERS:
        # A rank adds up its own row and those of the others.
        return Parts(numel, header, sent, behind_bytes, received, numel // world_size, itemsize, False)
    arriving = sent if wide else 0
    if bucket.pieces:
        # The piece of this rank, and what arrives of it.
        arriving = sent // bucket.pieces * (1 + rows_added_to(bucket.pieces))
    return Parts(numel, header, sent, behind_bytes, arriving, received, itemsize, wide or bucket.pieces > 0)


def rows_added_to(world_size: int) -> int:
    """The number of rows for received data, beside the sent ones and the result: one of each other rank but for the one
    that the result is made in; with more than four ranks, one of each."""
    return world_size if world_size > 4 else max(world_size - 2, 0)


def received_shape(bucket: Bucket, world_size: int) -> tuple[int, ...] | None:
    """The shape of received data in separate memory: a row from each rank, or from each other rank; or one rank's
    value."""
    if bucket.op in IN_PLACE:
        return None
    if bucket.op in SPLIT:
        return rows_added_to(world_size) if bucket.op in SCATTERS else world_size, bucket.numel // world_size
    return (world_size, bucket.numel) if bucket.op == "all_gather" else (bucket.numel,)
