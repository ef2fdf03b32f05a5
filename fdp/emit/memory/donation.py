"""The memory of each output of a step: a donated input, memory of its own, or a copy.

An optimizer step is traced as a clone of the state that is updated in place. If the state is donated, and nothing
reads the old value after the update begins, the clone is the old state itself: no copy, no second state. A new value
made in any other way is written straight into the donated input if nothing reads the old one any more, also where it is
a view of all that an operator makes; or else copied there as soon as its last reader is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from fdp.emit.memory.analysis import Analysis
from fdp.emit.memory.elements import has_each_element_once, same_strides
from fdp.emit.memory.liveness import Liveness
from fdp.emit.memory.out_variants import out_variant_of
from fdp.plan import Plan
from fdp.pytorch.tensors import geometry
from fdp.trace.operators.effects import collective_of, effects_of, storage_indexed_memory, storages_of
from fdp.trace.trace import Trace


@dataclass(frozen=True)
class Placement:
    """The memory of results.

    Attributes:
        replaced: clones that are not made: for each, the donated input that takes its place.
        written: nodes whose operator writes its result straight into the donated input that it is the new value of.
        reshaped: nodes whose operator does so, where the new value is a view of the whole result, with another shape.
        gathered: all-gathers that fill the donated input whose new value they make.
        copies: for a position in the schedule, the (input, value) pairs to copy after it.
        returned: for each tensor output, the node that is returned.
        cloned: outputs (by position) to be copied at the end, because their memory belongs to something else.
    """

    replaced: Mapping[fx.Node, fx.Node]
    written: Mapping[fx.Node, fx.Node]
    reshaped: Mapping[fx.Node, fx.Node]
    gathered: Mapping[fx.Node, fx.Node]
    copies: Mapping[int, tuple[tuple[fx.Node, fx.Node], ...]]
    returned: tuple[fx.Node, ...]
    cloned: frozenset[int]


def place_outputs(analysis: Analysis) -> Placement:
    """Decide on the memory of every output of a plan.

    Args:
        analysis: of the plan.

    Returns:
        The placement.
    """
    plan, trace = analysis.plan, analysis.plan.trace
    placeholders = trace.graph.graph.find_nodes(op="placeholder")
    made: list[fx.Node] = list(trace.graph.graph.output_node().args[0])  # type: ignore[arg-type]
    slots = [output.slot for output in trace.outputs if output.node is not None]
    pairs = [(node, None if slot is None else placeholders[slot]) for node, slot in zip(made, slots, strict=True)]
    donated = {storage for node in analysis.accesses.donated for storage in storages_of(node)}
    gathering = _gathering(plan) if analysis.savings.results else {}
    builder = _PlacementBuilder(analysis, pairs, donated, gathering)
    builder.place_new_values()
    builder.copy_what_is_shared(_foreign_memory(trace))
    return builder.placement()


class _PlacementBuilder:
    """The placement so far.

    Args:
        analysis: of the plan.
        pairs: each tensor output, and the donated input that it is the new value of.
        donated: the memory of donated inputs.
        gathering: the all-gathers that may fill one.
    """

    def __init__(
        self,
        analysis: Analysis,
        pairs: Sequence[tuple[fx.Node, fx.Node | None]],
        donated: AbstractSet[int],
        gathering: Mapping[int, tuple[fx.Node, int]],
    ) -> None:
        self.analysis, self.pairs, self.donated, self.gathering = analysis, pairs, donated, gathering
        self.owned: set[int] = set()  # memory that is, or becomes, that of a donated input
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.written: dict[fx.Node, fx.Node] = {}
        self.reshaped: dict[fx.Node, fx.Node] = {}
        self.gathered: dict[fx.Node, fx.Node] = {}
        self.copies: dict[int, list[tuple[fx.Node, fx.Node]]] = {}
        self.returned = [node for node, _ in pairs]
        self.cloned: set[int] = set()

    def place_new_values(self) -> None:
        """Decide how the new value of each donated input gets into it."""
        # Memory of donated inputs that some other output reads until the end.
        taken = {
            storage
            for node, target in self.pairs
            if target is None or not _is_same(node, target)
            for storage in storages_of(node)
            if storage in self.donated
        }
        same, accesses, owned, gathering = self.analysis.same, self.analysis.accesses, self.owned, self.gathering
        clones = _clones(self.analysis.plan.trace.graph.graph, same)
        makers = _makers(self.analysis.plan.trace.graph.graph) if self.analysis.savings.results else {}
        # A donated input may have a storage offset.
        storage_indexed = storage_indexed_memory(self.analysis.plan.trace.graph.graph)
        for position, (node, target) in enumerate(self.pairs):
            if target is None:
                continue
            (home,), (memory,) = storages_of(target), storages_of(node)
            free = memory not in owned and memory not in storage_indexed
            if _is_same(node, target):
                owned.add(home)
            elif home in taken or home in accesses.writes or not _fits(node, target):
                continue
            elif not self.analysis.savings.donation:
                self.copies.setdefault(len(self.analysis.plan.schedule) - 1, []).append((target, node))
                owned.add(home)
            elif (
                (clone := clones.get((memory, target))) is not None
                and free
                and geometry(clone.meta["val"]) == geometry(node.meta["val"]) == geometry(target.meta["val"])
                and accesses.last_read(home, except_by=clone) < accesses.first_write(memory)
            ):
                self.replaced[clone] = target
                owned.update((memory, home))
            elif free and _can_write(same.get(node, node), node, target, accesses):
                self.written[same.get(node, node)] = target
                owned.update((memory, home))
            elif free and (maker := makers.get(memory)) is not None and _can_write(maker, node, target, accesses):
                self.reshaped[maker] = target
                owned.update((memory, home))
            elif free and _can_gather(node, target, gathering.get(memory), accesses):
                self.gathered[gathering[memory][0]] = target
                owned.update((memory, home))
            else:
                last = max(accesses.last_read(home), accesses.last_write(memory), accesses.made.get(memory, -1))
                self.copies.setdefault(last, []).append((target, node))
                owned.add(home)
            self.returned[position] = target

    def copy_what_is_shared(self, foreign: AbstractSet[int]) -> None:
        """Find the results to be copied at the end: their memory belongs to something else.

        Where state is donated, what is returned in new memory may be what is donated next (state that shared memory,
        or has grown): one result to a piece of memory, so that the next call changes no other.
        """
        others = {*self.donated, *self.owned, *foreign}
        for position, (node, target) in enumerate(self.pairs):
            if self.returned[position] is target:
                continue
            if not others.isdisjoint(storages_of(node)):
                self.cloned.add(position)
            elif self.donated:
                others.update(storages_of(node))

    def placement(self) -> Placement:
        """All of it."""
        frozen = MappingProxyType
        copies = {at: tuple(pairs) for at, pairs in self.copies.items()}
        return Placement(
            frozen(self.replaced), frozen(self.written), frozen(self.reshaped), frozen(self.gathered), frozen(copies),
            tuple(self.returned), frozenset(self.cloned),
        )  # fmt: skip


def _is_same(node: fx.Node, target: fx.Node) -> bool:
    """Whether a value is an input itself, unchanged or changed in place."""
    return storages_of(node) == storages_of(target) and geometry(node.meta["val"]) == geometry(target.meta["val"])


def _fits(node: fx.Node, target: fx.Node) -> bool:
    """Whether a value has the geometry of a donated input: a step that depends on strides must find those that it
    returned."""
    return same_strides(node.meta["val"], target.meta["val"]) and has_each_element_once(target.meta["val"])


def _can_write(maker: fx.Node, node: fx.Node, target: fx.Node, accesses: Liveness) -> bool:
    """Whether an operator can write its result into the donated input that it, or a view of it, is the new value of.

    The input must not be read afterwards; nor by the operator itself, unless it reads each element before writing it.
    """
    variant = out_variant_of(maker) if maker in accesses.ran else None
    # What is filled with a number is the same at every call, and so may be what is computed from it.
    if variant is None or variant.kind not in ("out", "copy") or len(variant.names) != 1:
        return False
    (home,), (memory,) = storages_of(target), storages_of(maker)
    if not _has_room_for(target, node) or memory in accesses.writes:
        return False
    if maker is not node and not _is_reshaped(maker, node):
        return False
    if accesses.last_read(home, except_by=maker) >= accesses.ran[maker]:
        return False
    read = [argument for argument in maker.all_input_nodes if home in storages_of(argument)]
    return not read or (
        variant.pointwise and all(geometry(each.meta["val"]) == geometry(maker.meta["val"]) for each in read)
    )


def _has_room_for(target: fx.Node, node: fx.Node) -> bool:
    """Whether a donated input lies where a value does, and in the same way."""
    wanted, value = target.meta["val"], node.meta["val"]
    return bool(geometry(value) == geometry(wanted) and value.device == wanted.device)


def _is_reshaped(maker: fx.Node, node: fx.Node) -> bool:
    """Whether a value has the elements of another in the same places, under the same shape or another."""
    made, value = maker.meta["val"], node.meta["val"]
    return geometry(made) == geometry(value) or (
        made.dtype == value.dtype
        and made.numel() == value.numel()
        and all(each.is_contiguous() and each.storage_offset() == 0 for each in (made, value))
        # A dimension of one element may have any stride, and results keep theirs; a view of the input has this one.
        and made.stride() == torch.empty(made.shape, device="meta").stride()
    )


def _makers(graph: fx.Graph) -> dict[int, fx.Node]:
    """For each piece of memory, the node that makes it."""
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for storage in storages_of(node):
            found.setdefault(storage, node)
    return found


def _gathering(plan: Plan) -> dict[int, tuple[fx.Node, int]]:
    """The all-gathers of a plan that are alone in their buckets: by the memory of the result, marker and bucket."""
    found = {}
    for bucket in plan.buckets:
        if bucket.collective.gathers and not bucket.collective.splits:
            marker = plan.trace.marker(bucket.members[0])
            found[storages_of(marker)[0]] = marker, bucket.index
    return found


def _can_gather(node: fx.Node, target: fx.Node, gathering: tuple[fx.Node, int] | None, accesses: Liveness) -> bool:
    """Whether a message can write into the donated input that its result is the new value of: no later node reads
    that."""
    if gathering is None:
        return False
    (home,), (memory,) = storages_of(target), storages_of(node)
    marker, bucket = gathering
    made, value = marker.meta["val"], node.meta["val"]
    return (
        _has_room_for(target, node)
        and value.dtype == made.dtype
        and value.numel() == made.numel()
        and value.is_contiguous()
        and value.storage_offset() == 0
        and memory not in accesses.writes
        and accesses.last_read(home) < accesses.starts[bucket]
    )


def _clones(graph: fx.Graph, same: Mapping[fx.Node, fx.Node]) -> dict[tuple[int, fx.Node], fx.Node]:
    """Clones of whole inputs: by the memory of the clone, and the input."""
    found = {}
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) == "aten.clone.default":
            source = same.get(node.args[0], node.args[0])
            if source.op == "placeholder":
                found[storages_of(node)[0], source] = node
    return found


def _foreign_memory(trace: Trace) -> set[int]:
    """Memory in which no result may be returned: that of closed-over tensors and of buckets.

    Each use of a closed-over tensor, and each first view of it, may have an example storage of its own.
    """
    foreign: set[fx.Node] = set()
    for node in trace.graph.graph.nodes:
        looks = node.op == "call_function" and effects_of(node).view and node.args[0] in foreign
        if looks or node.op == "get_attr" or collective_of(node) is not None:
            foreign.add(node)
    return {storage for node in foreign for storage in storages_of(node)}
