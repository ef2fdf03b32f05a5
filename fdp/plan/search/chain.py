"""The planner's view of a step: gradients of one kind in production order, each with the work before and after it.

The reductions of one kind are cut into buckets; the buckets of all other kinds stay as they are, and start where their
last member comes. Work that needs no gradient (the body: forward and backward) runs first; work that needs some (the
tail: the optimizer) runs behind all of it, by the last gradient that it needs.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from fdp.plan.buckets import arrange, upstream_of
from fdp.plan.cost.ticks import Ticks
from fdp.plan.schedule import calls, real_needs
from fdp.trace.trace import Operation, Reduction, Trace


@dataclass(frozen=True)
class Fixed:
    """A bucket of another kind, which starts whatever the cuts are.

    Attributes:
        after: how many links of the chain come before it.
        ready: work of the body before it can be packed.
        packing: work to pack and start it.
        whole: how long its message takes.
        occupied: how long its message keeps the link.
        read: whether any work waits for it.
    """

    after: int
    ready: float
    packing: float
    whole: float
    occupied: float
    read: bool


@dataclass(frozen=True)
class Chain:
    """Reductions that may share buckets with their neighbours, with the work and messages around them, in nanoseconds.

    Attributes:
        members: their indices in `Trace.reductions`, in production order.
        op: what their messages do.
        ready: work of the body before each of them, and everything before it, exists.
        pack: work to copy each into its bucket.
        on_link: what the bytes of each take on the link.
        read: whether any work waits for each.
        not_with: for each, how many of the first links must not share its bucket: it is computed from their results.
        fixed: the buckets of other kinds, in the order in which they start.
        body: work that waits for no message of the chain.
        tail: work that does; `tail[j][e]` is that which needs at most the first j links and the first e other buckets.
        exact: whether this is all that there is to the step. It is not where a bucket is packed with what another
            bucket has to be waited for: the chain then has no such wait. Nor where something is read only together with
            what comes later: the chain then has it waited for too early.
    """

    members: tuple[int, ...]
    op: str
    ready: tuple[float, ...]
    pack: tuple[float, ...]
    on_link: tuple[float, ...]
    read: tuple[bool, ...]
    not_with: tuple[int, ...]
    fixed: tuple[Fixed, ...]
    body: float
    tail: tuple[tuple[float, ...], ...]
    exact: bool

    @property
    def cut_anywhere(self) -> bool:
        """Whether no other bucket starts in between, and any neighbours may share a bucket."""
        return not self.fixed and not any(self.not_with)

    def next_read(self) -> list[int]:
        """For each link, the first one from there on that some work waits for: a bucket that ends before is waited for
        last."""
        found = [len(self.read)] * (len(self.read) + 1)
        for link in range(len(self.read) - 1, -1, -1):
            found[link] = link if self.read[link] else found[link + 1]
        return found


def chain_of(trace: Trace, members: Sequence[int], others: Sequence[tuple[int, ...]], ticks: Ticks) -> Chain:
    """Describe the reductions of one kind as a chain.

    Args:
        trace: of the step.
        members: indices of the reductions of that kind, in production order.
        others: the buckets of all other reductions.
        ticks: what everything takes.

    Returns:
        The chain.
    """
    operations, reductions = trace.operations, trace.reductions
    upstream = upstream_of(reductions, operations)
    others = arrange(others, upstream)
    link_of = {reductions[member].operation: number for number, member in enumerate(members, 1)}
    fixed_of = {reductions[member].operation: number for number, group in enumerate(others, 1) for member in group}
    bucketed = link_of.keys() | fixed_of.keys()
    chained = {reductions[member].operation for member in members}

    links, fixes = _last_needed(operations, link_of, fixed_of)
    inside = max((fixes[operation] for operation in chained), default=0)
    todo = [k for k, operation in enumerate(operations) if not operation.view and k not in bucketed]
    in_body = [k for k in todo if not links[k] and fixes[k] <= inside]
    in_body.sort(key=lambda k: (fixes[k], k))

    body, finished = 0.0, dict[int, float]()
    for call in calls(operations, fixes, in_body):
        body += sum(ticks.operations[k] for k in call)
        finished.update(dict.fromkeys(call, body))

    def ready(group: Sequence[int]) -> float:
        roots = [reductions[member].operation for member in group]
        needs = real_needs(operations, roots, dict.fromkeys(bucketed, 0))
        return max((finished.get(need, 0.0) for need in needs), default=0.0)

    read = _read(trace, todo)
    own_ready = [ready([member]) for member in members]
    fixed_ready = [ready(group) for group in others]
    after = [bisect.bisect_left(members, group[-1]) for group in others]
    _start_in_order(own_ready, fixed_ready, after)
    fixed = [
        _fixed(group, behind, begin, reductions, read, ticks)
        for group, behind, begin in zip(others, after, fixed_ready, strict=True)
    ]
    body_operations = set(in_body)
    behind = [(links[k], fixes[k], ticks.operations[k]) for k in todo if k not in body_operations]
    inexact = any(upstream[member] for group in (members, *others) for member in group)
    alone = {links[k] for k in todo if not fixes[k] or after[fixes[k] - 1] < links[k]}
    fixed_alone = {fixes[k] for k in todo if not links[k]}
    return Chain(
        members=tuple(members),
        op=reductions[members[0]].op_along,
        ready=tuple(own_ready),
        pack=tuple(ticks.pack[member] for member in members),
        on_link=tuple(ticks.on_link[member] for member in members),
        read=tuple(reductions[member].operation in read for member in members),
        not_with=_last_upstream(members, upstream) if inexact else (0,) * len(members),
        fixed=tuple(fixed),
        body=body,
        tail=_tail(behind, len(members), len(others)),
        exact=not inexact
        and all(reductions[member].operation not in read or number in alone for number, member in enumerate(members, 1))
        and all(not known.read or number in fixed_alone for number, known in enumerate(fixed, 1)),
    )


def _last_needed(
    operations: Sequence[Operation], link_of: Mapping[int, int], fixed_of: Mapping[int, int]
) -> tuple[list[int], list[int]]:
    """For each operation, the last link that it needs, and the last fixed bucket; 0 for none."""
    links, fixes = [0] * len(operations), [0] * len(operations)
    for index, operation in enumerate(operations):
        for need in operation.needs:
            links[index] = max(links[index], links[need], link_of.get(need, 0))
            fixes[index] = max(fixes[index], fixes[need], fixed_of.get(need, 0))
    return links, fixes


def _fixed(
    group: Sequence[int],
    after: int,
    ready: float,
    reductions: Sequence[Reduction],
    read: AbstractSet[int],
    ticks: Ticks,
) -> Fixed:
    """A bucket of reductions of another kind, behind so many links."""
    whole, occupied = ticks.message(reductions[group[0]].op_along, sum(ticks.on_link[member] for member in group))
    packing = ticks.start + sum(ticks.pack[member] for member in group)
    known = any(reductions[member].operation in read for member in group)
    return Fixed(after, ready, packing, whole, occupied, known)


def _last_upstream(members: Sequence[int], upstream: Sequence[int]) -> tuple[int, ...]:
    """For each link, the last one in front of it that it depends on, and so cannot share a bucket with; 0 for none."""
    return tuple(
        max((at for at, earlier in enumerate(members[:number], 1) if upstream[member] >> earlier & 1), default=0)
        for number, member in enumerate(members)
    )


def _start_in_order(own: list[float], fixed: list[float], after: Sequence[int]) -> None:
    """Buckets start in one order, so delay each until those in front of it can start.

    Args:
        own: when each link could start; changed to when it can.
        fixed: likewise, of the buckets of other kinds.
        after: behind how many links each of those starts.
    """
    latest, number = 0.0, 0
    for link in range(len(own) + 1):
        while number < len(fixed) and after[number] == link:
            latest = fixed[number] = max(latest, fixed[number])
            number += 1
        if link < len(own):
            latest = own[link] = max(latest, own[link])


def _tail(work: Sequence[tuple[int, int, float]], members: int, others: int) -> tuple[tuple[float, ...], ...]:
    """The work of the tail that can be done when so many links, and so many buckets of other kinds, have arrived.

    Args:
        work: the last link and the last other bucket that each operation needs, and what it takes.
        members: how many links there are.
        others: how many other buckets.
    """
    table = [[0.0] * (others + 1) for _ in range(members + 1)]
    for link, fix, cost in work:
        table[link][fix] += cost
    for row in table:
        for column in range(1, len(row)):
            row[column] += row[column - 1]
    for above, row in itertools.pairwise(table):
        for column in range(len(row)):
            row[column] += above[column]
    return tuple(tuple(row) for row in table)


def _read(trace: Trace, todo: Sequence[int]) -> set[int]:
    """The operations that some of `todo` reads, or sees through views."""
    found: set[int] = set()
    pending = [need for index in todo for need in trace.operations[index].needs]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            if trace.operations[index].view:
                pending.extend(trace.operations[index].needs)
    return found
