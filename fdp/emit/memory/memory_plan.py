"""The memory plan: which values have a fixed place, where, and what is copied when."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from fdp.emit.memory.donation import Placement
from fdp.emit.memory.instructions import Instruction
from fdp.emit.memory.layout import Layout
from fdp.emit.memory.planning import Places
from fdp.emit.memory.savings import Savings
from fdp.plan import Plan
from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.tables import Printed, count, format_bytes, short_name
from fdp.trace.operators.effects import mesh_dimension_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class MemoryPlan(Printed):
    """All decisions about the memory of a plan, for one backend.

    It prints as a table: which value lies where, from which instruction of the program to which, and why.

    Attributes:
        plan: the plan.
        savings: what the backend makes use of.
        same: views that are their own base.
        added: for each addition in place that computes the product which it adds, that product.
        unused: nodes that only compute what nothing reads.
        placement: where outputs live.
        markers: for each bucket that is sent, the markers of its members.
        alone: markers that send nothing.
        places: values at fixed places.
        instructions: what the program does, each with the position in the schedule that it belongs to.
        bodies: the memory plans of the bodies of loops, by node.
        layouts: for each device, where the pieces of memory lie.
    """

    plan: Plan
    savings: Savings
    same: Mapping[fx.Node, fx.Node]
    added: Mapping[fx.Node, fx.Node]
    unused: frozenset[fx.Node]
    placement: Placement
    markers: Mapping[int, tuple[fx.Node, ...]]
    alone: frozenset[fx.Node]
    places: Places
    instructions: tuple[tuple[int, Instruction], ...]
    bodies: Mapping[str, MemoryPlan]
    layouts: Mapping[torch.device, Layout]

    def value_of(self, node: fx.Node) -> fx.Node:
        """The node whose memory holds a value: its base, or the donated input that it is computed in."""
        node = self.same.get(node, node)
        node = self.placement.replaced.get(node, node)
        return self.placement.written.get(node, node)

    def is_called(self, node: fx.Node) -> bool:
        """Whether a node is called: not if another value takes its place, another computes it, or nothing reads it."""
        if any(node in nodes for nodes in (self.same, self.placement.replaced, self.places.constants)):
            return False
        if node in self.unused or node in self.added.values():
            return False
        if node in self.places.out_variants:
            return self.places.out_variants[node].kind != "nothing"
        # A view of a fixed place is one itself.
        return node in self.placement.written or node.name not in self.places.named or _changes_memory(node)

    def share_of(self, marker: fx.Node) -> float:
        """What the value of one rank counts for in the mean that a marker stands for."""
        return 1 / self.plan.trace.ranks_along(mesh_dimension_of(marker))

    def piece_of(self, node: fx.Node) -> Hashable | None:
        """The piece of memory that holds a value; None if it has no fixed place."""
        return self.places.memory.get(self.value_of(node).name)

    def draw(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the pieces in the block of each device as rectangles, address against time.

        Buckets have colours. Values are grey: light where they are the first in their place, dark where they lie in
        memory that others are done with.

        Args:
            path: the file to write, whose suffix says how: .png, .svg or .pdf; None writes nothing.

        Returns:
            The figure, of matplotlib.

        Raises:
            ArgumentError: matplotlib is not installed, or the suffix names no kind of picture.
        """
        from fdp.emit.memory.memory_table import draw_plan

        return draw_plan(self, path)

    def __repr__(self) -> str:
        pieces = sum(len(layout.pieces) for layout in self.layouts.values())
        total = format_bytes(sum(layout.size_bytes for layout in self.layouts.values()))
        return f"<MemoryPlan of {short_name(self.plan.trace.name)}: {count(pieces, 'piece')}, {total}>"

    def __str__(self) -> str:
        from fdp.emit.memory.memory_table import memory_text

        return memory_text(self)


def _changes_memory(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and schema_of(target).is_mutable
