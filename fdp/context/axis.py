"""The ranks that the code now running belongs to: a step's group inside a step, the default group elsewhere.

Marker operators carry the axis by name, so that a backward pass on another thread needs no Python context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fdp.distributed.desynchronised import carry_out
from fdp.distributed.group import Group, Ranks, resolve_group
from fdp.distributed.mesh import mesh_text, text_along
from fdp.distributed.other_ranks import OtherRanks
from fdp.distributed.wire import Wire
from fdp.errors import ArgumentError, FdpError, build_message
from fdp.tables import count


@dataclass(frozen=True)
class Axis:
    """An axis of ranks.

    Attributes:
        name: "traced" while a step is being traced (its collectives are recorded and never run),
            that of an `OtherRanks` while a step runs on this rank alone (as in a comparison), else "eager".
        size: number of ranks.
        rank: this process's rank.
        group: the group that an "eager" axis talks to.
        wire: in which dtype gradients are sent; None for their own.
    """

    name: str
    size: int
    rank: int
    group: Group
    wire: Wire | None = None

    def along(self, dimension: str | None, collective: str) -> Axis:
        """This axis, or the one along one dimension of its mesh.

        Args:
            dimension: its name; None for this axis itself.
            collective: what asks for it.

        Raises:
            ArgumentError: there is no such dimension.
        """
        if dimension is None or (dimension and dimension == self.group.label):
            return self
        names = [each.name for each in self.group.dimensions]
        if dimension not in names:
            where = f"the mesh of the step has {', '.join(map(repr, names))}" if names else "there is no mesh here"
            raise ArgumentError(
                build_message(
                    f"fdp.{collective} was given axis={dimension!r}, and {where}.",
                    remedy="pass one of its dimensions, or no axis for all ranks."
                    if names
                    else "call it in a step under fdp.data_parallel(group=mesh), with a DeviceMesh of two dimensions; "
                    "leave axis out for all ranks.",
                )
            )
        group = self.group.along(dimension)
        others = OtherRanks.of_axis(self.name)
        if others is None:
            return Axis(text_along(self.name, dimension), group.size, group.rank, group)
        return Axis(group.others(others.kind).axis_name, group.size, group.rank, group)


_local = threading.local()


def current_axis() -> Axis:
    """The axis of the innermost step that this thread is tracing, or the default group."""
    stack = getattr(_local, "stack", None)
    if stack:
        axis: Axis = stack[-1]
        return axis
    group = resolve_group(None)
    return Axis("eager", group.size, group.rank, group)


def send_now(collective: str, start: Callable[[Group], Callable[[], None]]) -> None:
    """Carry out a collective that was called outside of a step.

    Args:
        collective: its name.
        start: starts it among some ranks; returns the function that waits for it.

    Raises:
        PeerError: this rank is desynchronised, or another one will not come.
    """
    group = current_axis().group
    carry_out(f"fdp.{collective}", group, lambda: start(group))


def inside_step() -> bool:
    """Whether this thread is tracing a step, or running one beside its trace."""
    return bool(getattr(_local, "stack", None))


def refuse_inside(name: str) -> None:
    """Refuse a call that only makes sense between steps."""
    if inside_step():
        raise FdpError(
            build_message(
                f"fdp.{name} was called inside a step.",
                remedy="call it outside; inside a step use fdp.broadcast, or return the value and compare it outside.",
            )
        )


def refuse_other_group(step: str, group: Ranks) -> None:
    """Refuse to run a step as part of another one that is on other ranks: its collectives are those of that one."""
    own, around = resolve_group(group), current_axis().group
    # One that names no dimensions may run where there are some.
    if own.reference != around.reference or own.size != around.size or (own.sizes and own.sizes != around.sizes):
        raise FdpError(
            build_message(
                f"step {step!r}, which has a group of its own, was called inside a step on another group.",
                [f"its own: {_group_text(own)}", f"around it: {_group_text(around)}"],
                remedy="a step inside another one is a plain function: give both the same group, or call it outside.",
            )
        )


def _group_text(group: Group) -> str:
    where = f" on a mesh of {mesh_text(group.sizes)}" if group.sizes else ""
    return f"{count(group.size, 'rank')}{where}"


@contextmanager
def step_axis(name: str, group: Group, wire: Wire | None = None) -> Iterator[None]:
    """Make collectives on this thread belong to a step on `group`.

    Args:
        name: "traced", to have them recorded; "different ranks" or "equal ranks", to have them computed on this rank
            alone, which takes the others to hold something else, or the same (see `OtherRanks`).
        group: the ranks.
        wire: in which dtype gradients are sent.
    """
    if name != "traced":
        name = group.others("equal" if name == "equal ranks" else "different").axis_name
    stack = _local.__dict__.setdefault("stack", [])
    stack.append(Axis(name, group.size, group.rank, group, wire))
    try:
        yield
    finally:
        stack.pop()
