"""Put reductions into buckets: in production order, by kind, up to a size, and without cyclic dependencies.

References: Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, TypeAlias

from fdp.distributed.mesh import WHOLE, Dimensions
from fdp.errors import ArgumentError, build_message
from fdp.plan.plan import Bucket
from fdp.trace.trace import Operation, Reduction, Trace

MIB = 2**20
_ALIGNMENT_BYTES = 64
_ALONE_BYTES = 4 * MIB
"""From this size on, a value that is split between ranks has a message of its own. In a bucket with others its rows
would not be contiguous, and it would have to be copied there."""
_TWO_LEVEL_BYTES = MIB // 4
"""From this size on, the sum or mean over a mesh goes within hosts first, and then between them. That takes more
messages, one after the other, and fewer bytes between hosts (measured: `benchmarks/two_levels.py`)."""
AUTO_CAP_MB = (1.0, 25.0)
"""What "auto" means: a small first bucket, so that communication begins early, then DDP's usual size."""


Caps: TypeAlias = float | Sequence[float] | Literal["auto"]
"""How large buckets may be, in MiB: a number, a list of them (first bucket, next, ...), or "auto"."""

ReductionKind: TypeAlias = tuple[Hashable, ...]
"""What reductions of one bucket have in common."""


def resolve_caps(bucket_cap_mb: Caps) -> tuple[float, ...]:
    """Turn `bucket_cap_mb` into caps in MiB: of the first bucket, the next, ..., the last for all that follow.

    Raises:
        ArgumentError: it is neither "auto", nor a positive number, nor a list of such.

    Example:
        >>> resolve_caps("auto"), resolve_caps(5), resolve_caps([0.5, 10])
        ((1.0, 25.0), (5.0,), (0.5, 10.0))
    """
    if isinstance(bucket_cap_mb, str) and bucket_cap_mb == "auto":
        return AUTO_CAP_MB
    listed = bucket_cap_mb if isinstance(bucket_cap_mb, (list, tuple)) else [bucket_cap_mb]
    numbers = [cap for cap in listed if isinstance(cap, (int, float)) and not isinstance(cap, bool) and cap > 0]
    if not numbers or len(numbers) != len(listed):
        raise ArgumentError(
            build_message(
                f"bucket_cap_mb={bucket_cap_mb!r}.",
                remedy='pass a positive number of MiB, a list of them (first bucket, next, ...), or "auto".',
            )
        )
    return tuple(float(cap) for cap in numbers)


def partition_by_caps(
    reductions: Sequence[Reduction], operations: Sequence[Operation], caps_mb: Sequence[float]
) -> list[tuple[int, ...]]:
    """Decide which reductions share a message.

    A bucket takes reductions of one operation, device and dtype (to send in and to add in), in the order in which
    they are produced, until the next one would carry it over its cap. A reduction that is computed from the result of
    another one never joins a bucket that is still open when that other one is in it, or it would wait for itself; nor
    does it join those that need no other, which would then have to wait with it.

    Args:
        reductions: in production order.
        operations: of the trace; what each reduction is computed from.
        caps_mb: the cap of the first bucket of a kind, the next, ..., the last for all that follow, in MiB.

    Returns:
        The members of each bucket, by index; buckets in the order in which they can start. A reduction of no
        elements is in none.
    """
    upstream = upstream_of(reductions, operations)
    open_members: dict[ReductionKind, list[int]] = {}
    open_bytes: dict[ReductionKind, int] = {}
    open_bits: dict[ReductionKind, int] = {}
    closed_count: defaultdict[ReductionKind, int] = defaultdict(int)
    buckets: list[tuple[int, ...]] = []

    def close(kind: ReductionKind) -> None:
        buckets.append(tuple(open_members.pop(kind)))
        del open_bits[kind]
        closed_count[kind] += 1

    for index, reduction in enumerate(reductions):
        if reduction.numel == 0:
            continue
        for needed in [k for k, bits in open_bits.items() if upstream[index] & bits]:
            close(needed)
        kind = kind_of(reductions, upstream, index)
        cap = caps_mb[min(closed_count[kind], len(caps_mb) - 1)] * MIB
        if kind in open_members and open_bytes[kind] + reduction.size_bytes > cap:
            close(kind)
        if kind not in open_members:
            open_members[kind], open_bytes[kind], open_bits[kind] = [], 0, 0
        open_members[kind].append(index)
        open_bytes[kind] += reduction.size_bytes
        open_bits[kind] |= 1 << index
    for kind in list(open_members):
        close(kind)
    return arrange(buckets, upstream)


def kind_of(reductions: Sequence[Reduction], upstream: Sequence[int], index: int) -> ReductionKind:
    """The properties that all reductions of a bucket share."""
    reduction = reductions[index]
    kind: ReductionKind = (
        reduction.op, reduction.root, str(reduction.dtype), str(reduction.accumulate_dtype), str(reduction.device),
        reduction.pairs, reduction.along, bool(upstream[index]),
    )  # fmt: skip
    alone = reduction.collective.splits and reduction.size_bytes >= _ALONE_BYTES
    return (*kind, index) if alone or not reduction.collective.shares else kind


def make_buckets(
    reductions: Sequence[Reduction], groups: Sequence[Sequence[int]], dimensions: Dimensions = ()
) -> tuple[Bucket, ...]:
    """Lay out each group of reductions as one contiguous bucket, with a row for each rank where they are split.

    Args:
        reductions: of a trace.
        groups: the members of each bucket.
        dimensions: of the mesh.
    """
    buckets = []
    for index, members in enumerate(groups):
        first = reductions[members[0]]
        rows = first.shape[0] if first.collective.splits else 1
        offsets, numel = [], 0
        step = max(1, _ALIGNMENT_BYTES // first.dtype.itemsize)
        for member in members:
            # Aligned as memory of its own would be: kernels write gradients here, and read results, by cache lines.
            numel = -(-numel // step) * step
            offsets.append(numel)
            numel += reductions[member].numel // rows
        size_bytes = sum(reductions[member].size_bytes for member in members)
        buckets.append(
            Bucket(
                index,
                first.op,
                first.root,
                first.dtype,
                first.device,
                tuple(members),
                tuple(offsets),
                rows * numel,
                size_bytes,
                first.accumulate_dtype,
                rows,
                first.pairs,
                first.along,
                _pieces_of(first, size_bytes, dimensions),
            )
        )
    return tuple(buckets)


def _pieces_of(first: Reduction, size_bytes: int, dimensions: Dimensions) -> int:
    """In how many pieces a bucket is reduced within each host; 0 where it is reduced in one level."""
    *between, within = [size for _, size in dimensions] or [1]
    two_levels = within > 1 and math.prod(between) > 1
    suits = first.op in ("sum", "mean") and first.along == WHOLE and first.accumulate_dtype is None
    return within if two_levels and suits and size_bytes >= _TWO_LEVEL_BYTES else 0


def arrange(buckets: Sequence[tuple[int, ...]], upstream: Sequence[int]) -> list[tuple[int, ...]]:
    """Sort buckets by the last bucket that they have to wait for, and then by when their last member is produced.

    Buckets that wait for each other, or for themselves, are left out.
    """
    needs = _needs_of(buckets, upstream)
    needed_by: defaultdict[int, list[int]] = defaultdict(list)
    for index, needed in enumerate(needs):
        for other in needed:
            needed_by[other].append(index)
    missing = [len(needed) for needed in needs]
    ready = [(-1, members[-1], index) for index, members in enumerate(buckets) if not needs[index]]
    heapq.heapify(ready)
    found: list[tuple[int, ...]] = []
    while ready:
        _, _, index = heapq.heappop(ready)
        found.append(buckets[index])
        for other in needed_by[index]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (len(found) - 1, buckets[other][-1], other))
    return found


def gathered_sooner(
    buckets: Sequence[tuple[int, ...]], reductions: Sequence[Reduction], upstream: Sequence[int], lag: int
) -> list[tuple[int, ...]]:
    """Start buckets that gather results of other buckets among those, and not behind all of them.

    With an optimizer whose state is sharded, new parameters are then gathered while gradients are still computed.

    Args:
        buckets: in an order in which they can start.
        reductions: of the trace.
        upstream: for each, those whose results it is computed from.
        lag: how many other buckets start after the last one that such a bucket waits for, and before it: so many
            messages are under way while that one is waited for.

    Returns:
        The same buckets, in another order in which they can start.
    """
    needs = _needs_of(buckets, upstream)
    free = [index for index, needed in enumerate(needs) if not needed]
    rank = {index: at for at, index in enumerate(free)}
    found: list[int] = []
    waiting = [
        index
        for index, needed in enumerate(needs)
        if needed and needed <= rank.keys() and reductions[buckets[index][0]].collective.gathers
    ]
    for at, index in enumerate(free):
        found.append(index)
        due = [other for other in waiting if max(rank[need] for need in needs[other]) + lag <= at]
        found += due
        waiting = [other for other in waiting if other not in due]
    placed = set(found)
    return [buckets[index] for index in (*found, *(index for index in range(len(buckets)) if index not in placed))]


def _needs_of(buckets: Sequence[tuple[int, ...]], upstream: Sequence[int]) -> list[set[int]]:
    """For each bucket, those whose results its members are computed from."""
    home = {member: index for index, members in enumerate(buckets) for member in members}
    return [
        {home[other] for member in members for other in _members_of(upstream[member]) if other in home}
        for members in buckets
    ]


def _members_of(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def upstream_of(reductions: Sequence[Reduction], operations: Sequence[Operation]) -> list[int]:
    """For each reduction, the set (as bits) of those whose results it is computed from."""
    at = {reduction.operation: index for index, reduction in enumerate(reductions)}
    reach = [0] * len(operations)
    for index, operation in enumerate(operations):
        for need in operation.needs:
            reach[index] |= reach[need]
            if need in at:
                reach[index] |= 1 << at[need]
    return [reach[reduction.operation] for reduction in reductions]


def key_of_messages(trace: Trace) -> Hashable:
    """What traces have in common that can have the same buckets: the reductions, and which depend on the results of
    which, since those may not share one."""
    sent = ((r.name, r.op_along, r.root, r.shape, r.dtype, r.accumulate_dtype, str(r.device)) for r in trace.reductions)
    return tuple(sent), tuple(upstream_of(trace.reductions, trace.operations))
