"""The memory that the message of a bucket needs: how large its parts are, and where they begin."""

from __future__ import annotations

import math

from fdp.distributed.by_collective import arriving_shape
from fdp.distributed.header import NUMEL, carries
from fdp.distributed.messages import rows_arriving
from fdp.emit.memory.layout import round_up
from fdp.plan import Bucket


def result_numel(bucket: Bucket, world_size: int) -> int:
    """The elements of a bucket's results, where they have memory of their own."""
    return bucket.row_numel if bucket.collective.scatters else math.prod(arriving_shape(bucket, world_size))


def arrives_at_bytes(bucket: Bucket) -> int:
    """The offset, in the memory of a bucket, of the rows that a reduce-scatter adds up: behind what this rank sends."""
    return round_up(bucket.numel * bucket.dtype.itemsize)


def header_numel(bucket: Bucket, world_size: int) -> int:
    """The number of header elements behind a bucket's members; only the bucket that starts first has a header.

    Along one dimension of a mesh it would tell the calls of some ranks alone apart.
    """
    first = bucket.index == 0 and not bucket.along
    return NUMEL if first and carries(bucket.collective, bucket.dtype, world_size) else 0


def shared_numel(bucket: Bucket, world_size: int) -> int:
    """The elements of a bucket and its header, padded so that ranks, or those of a host, can share them evenly."""
    pieces = bucket.pieces or world_size
    return -(-(bucket.numel + header_numel(bucket, world_size)) // pieces) * pieces


def received_at_bytes(bucket: Bucket, world_size: int) -> int:
    """The offset, in the memory of a bucket that takes several messages, of what arrives between them."""
    return round_up(shared_numel(bucket, world_size) * bucket.dtype.itemsize)


def received_numel(bucket: Bucket, world_size: int) -> int:
    """The elements of that: the pieces of all ranks; in two levels, this rank's piece and what arrives of it."""
    shared = shared_numel(bucket, world_size)
    return shared if bucket.is_wide else (1 + rows_arriving(bucket.pieces)) * (shared // bucket.pieces)


def memory_bytes(bucket: Bucket, world_size: int) -> int:
    """The memory that a bucket needs, beside that of results that lie apart."""
    if bucket.collective.scatters:
        return arrives_at_bytes(bucket) + math.prod(arriving_shape(bucket, world_size)) * bucket.dtype.itemsize
    if bucket.has_stages:
        beside_bytes = received_numel(bucket, world_size) * bucket.dtype.itemsize
        return received_at_bytes(bucket, world_size) + beside_bytes
    return (bucket.numel + header_numel(bucket, world_size)) * bucket.dtype.itemsize
