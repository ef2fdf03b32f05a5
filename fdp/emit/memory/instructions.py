"""The instructions of a program: the plan's schedule, and those that packing and donation add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fdp.emit.memory.analysis import Analysis
from fdp.emit.memory.donation import Placement
from fdp.emit.memory.planning import Places
from fdp.plan import Run, Start
from fdp.pytorch.overloads import schema_of
from fdp.trace.operators.effects import effects_of, entries_of, is_marker, list_arguments, storages_of


@dataclass(frozen=True)
class Compute:
    """Call an operator.

    Attributes:
        node: the call.
        entries: of a call that does the same to each entry of its lists, those that are due; empty for the whole call.
    """

    node: fx.Node
    entries: tuple[int, ...] = ()


@dataclass(frozen=True)
class Keep:
    """Use a value as its own reduction: over one rank, or of no elements."""

    marker: fx.Node


@dataclass(frozen=True)
class Pack:
    """Copy members into their bucket, divided by the number of ranks if a sum is to make the mean."""

    bucket: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Divide:
    """Divide a member by the number of ranks: it was computed in its bucket, undivided."""

    bucket: int
    member: int


@dataclass(frozen=True)
class Send:
    """Start the message of a bucket."""

    bucket: int


@dataclass(frozen=True)
class Await:
    """Wait for the message of a bucket."""

    bucket: int


@dataclass(frozen=True)
class Update:
    """Copy a new value into the donated input that it is the new value of."""

    target: fx.Node
    value: fx.Node


Instruction = Compute | Keep | Pack | Divide | Send | Await | Update

BEFORE = -1
"""The position of instructions before the whole schedule."""


def instructions_of(analysis: Analysis, placement: Placement, places: Places) -> tuple[tuple[int, Instruction], ...]:
    """List the instructions of a program.

    Args:
        analysis: of the plan.
        placement: where outputs live.
        places: values at fixed places.

    Returns:
        The instructions, each with the position in the schedule that it belongs to.
    """
    plan, markers, alone = analysis.plan, analysis.markers, analysis.alone
    early = _packed_early(analysis, places)
    found: list[tuple[int, Instruction]] = []
    seen: set[fx.Node] = set()
    packed: set[tuple[int, int]] = set()

    def update(at: int) -> None:
        found.extend((at, Update(target, value)) for target, value in placement.copies.get(at, ()))

    update(BEFORE)
    for at, item in enumerate(plan.schedule):
        if isinstance(item, Run):
            operations = [plan.trace.operations[index] for index in item.operations]
            node = plan.trace.nodes[operations[0].node]
            if node in alone:
                found.append((at, Keep(node)))
            elif node not in seen:
                found.append((at, Compute(node, tuple(o.entry for o in operations if o.entry is not None))))
            for bucket, member, views in early.get(node, ()):
                found += [(at, Compute(view)) for view in views if view not in seen]
                found.append((at, Pack(bucket, (member,))))
                seen.update(views)
                packed.add((bucket, member))
        elif item.bucket not in markers:
            if isinstance(item, Start):
                found += [(at, Keep(plan.trace.marker(index))) for index in plan.buckets[item.bucket].members]
        elif isinstance(item, Start):
            found += [(at, each) for each in _send(item.bucket, markers[item.bucket], places, packed)]
        else:
            found.append((at, Await(item.bucket)))
        update(at)
    return tuple(found)


def _send(
    bucket: int, markers: Sequence[fx.Node], places: Places, packed: set[tuple[int, int]]
) -> Iterator[Instruction]:
    """Pack what is missing in a bucket, and send it."""
    divided = set(places.divided.values())
    missing = []
    for member, marker in enumerate(markers):
        if marker not in places.direct:
            if (bucket, member) not in packed:
                missing.append(member)
        elif bucket in places.scaled and marker not in divided:
            yield Divide(bucket, member)
    if missing:
        yield Pack(bucket, tuple(missing))
    yield Send(bucket)


def _packed_early(analysis: Analysis, places: Places) -> dict[fx.Node, list[tuple[int, int, tuple[fx.Node, ...]]]]:
    """Members that are packed as soon as they are computed, so that their own memory can be reused.

    Smaller ones than the backend says are packed together, when their bucket is sent.

    Returns:
        For the call that computes them: bucket, member, and the views to look through, in order.
    """
    accesses, from_bytes = analysis.accesses, analysis.savings.pack_from_bytes
    found: dict[fx.Node, list[tuple[int, int, tuple[fx.Node, ...]]]] = {}
    for bucket, members in analysis.markers.items():
        for at, marker in enumerate(members):
            maker: Any = marker.args[0]
            value = maker.meta["val"]
            if marker in places.direct or value.numel() * value.itemsize < from_bytes:
                continue
            if any(storage in accesses.writes for storage in storages_of(maker)):
                continue
            views: list[fx.Node] = []
            while effects_of(maker).view and maker.op == "call_function":
                views.insert(0, maker)
                maker = maker.args[0]
            if maker.op == "call_function" and not is_marker(maker) and entries_of(maker) is None:
                found.setdefault(maker, []).append((bucket, at, tuple(views)))
    return found


def is_part(node: fx.Node, entries: Sequence[int]) -> bool:
    """Whether a call with these list entries is only a part of the call."""
    return bool(entries) and len(entries) < max(len(value) for _, value in list_arguments(node))


def arguments_of(node: fx.Node, entries: Sequence[int]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, with only these list entries; with all of them if none are given."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if not is_part(node, entries):
        return args, kwargs
    schema: Any = node.target
    positions = [argument.name for argument in schema_of(schema).arguments]
    for argument, value in list_arguments(node):
        if value:
            chosen = [value[entry] for entry in entries]
            if argument.name in kwargs:
                kwargs[argument.name] = chosen
            else:
                args[positions.index(argument.name)] = chosen
    return args, kwargs
