"""Which values of a step have a fixed place in its memory, and which of those places are in buckets."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fdp.emit.memory.analysis import Analysis
from fdp.emit.memory.constants import constant_values
from fdp.emit.memory.donation import Placement
from fdp.emit.memory.message_memory import memory_bytes, result_numel
from fdp.emit.memory.out_variants import OutVariant, out_variant_of
from fdp.emit.memory.own_memory import row_name, storage_indexed_values
from fdp.plan import Bucket
from fdp.pytorch.overloads import OpOverload
from fdp.pytorch.tensors import geometry
from fdp.trace.graph.loops import is_loop
from fdp.trace.operators.effects import storage_indexed_memory, storages, storages_of, tensors_in

_SCALED_WHEN_PACKED_BYTES = 2**20
"""From this size on, the division of a mean is part of packing the bucket; below, a call for each member would cost
more than the pass over memory that it saves."""


@dataclass(frozen=True)
class Place:
    """A tensor at a fixed place.

    Attributes:
        memory: the piece of memory that it is in: a number for one value, ("bucket", index) for a bucket, ("result",
            index) for what comes of it, where that lies apart.
        start_bytes: where its storage begins in that piece.
        shape: its shape.
        stride: its strides, in elements.
        offset: where it begins in its storage, in elements.
        dtype: its dtype.
    """

    memory: Hashable
    start_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def bucket(self) -> int | None:
        """The index of the bucket that it is in, or the result of; None if there is none."""
        match self.memory:
            case ("bucket" | "result", int(index)):
                return index
        return None


@dataclass(frozen=True)
class Places:
    """The fixed places of a program.

    Attributes:
        out_variants: for each node that is computed into a fixed place, how.
        named: the place of each value, by its name in the program.
        sizes: device and size in bytes of each piece of memory.
        memory: for each name, also of views that are made at every call, the piece of memory that it lies in.
        direct: markers whose argument is computed right into the bucket.
        scaled: buckets that are packed with values divided by the number of ranks.
        divided: nodes that compute such a value which nothing else reads, so that they can divide it at once; with
            the marker that it is for.
        alone: markers that send nothing and return their argument itself.
        constants: values that are the same at every call.
    """

    out_variants: Mapping[fx.Node, OutVariant]
    named: Mapping[str, Place]
    sizes: Mapping[Hashable, tuple[torch.device, int]]
    memory: Mapping[str, Hashable]
    direct: frozenset[fx.Node]
    scaled: frozenset[int]
    divided: Mapping[fx.Node, fx.Node]
    alone: frozenset[fx.Node]
    constants: Mapping[fx.Node, torch.Tensor]


def is_scaled(bucket: Bucket, world_size: int) -> bool:
    """Whether members of a bucket are divided by the number of ranks as it is packed, so that a sum makes the mean.

    All ranks decide alike: on the bucket alone.
    """
    fits = bucket.dtype.is_floating_point or bucket.dtype.is_complex
    # Two large values of sixteen bits have no sum, but a mean.
    large = bucket.size_bytes >= _SCALED_WHEN_PACKED_BYTES or bucket.dtype == torch.float16
    # What is added up in a wider dtype is divided in it.
    return world_size > 1 and bucket.op == "mean" and fits and large and bucket.accumulate_dtype is None


def find_places(analysis: Analysis, placement: Placement) -> Places:
    """Give a fixed place to every value that can have one.

    A value can if its operator writes where it is told to, and only the program holds it: it is no input, is
    not returned, and goes to no operator that might keep it or return it as its own.

    Args:
        analysis: of the plan.
        placement: where outputs live.

    Returns:
        The places.
    """
    builder, accesses = _PlacesBuilder(analysis, placement), analysis.accesses
    if analysis.savings.views:
        builder.join_alone(analysis.alone)
    if analysis.savings.results:
        builder.find_owners()
        builder.constants.update(constant_values(builder.graph, builder.kept | accesses.writes.keys()))
        builder.place_results()
    for index, members in analysis.markers.items():
        builder.place_bucket(analysis.plan.buckets[index], members)
    builder.name_places()
    return builder.places()


class _PlacesBuilder:
    """The places so far (see `Places`), and facts about each piece of memory of the trace.

    Such a piece is a number, see `storages`.

    Attributes:
        home: where a piece begins in the step's memory: key of the piece there, and byte.
        makers: the node that makes it, if it has memory of its own.
        kept: pieces that belong, or may come to belong, to something else.
        late: the position at which a piece is last read for the sake of outputs.
        storage_indexed: pieces that an operator indexes by position.
    """

    def __init__(self, analysis: Analysis, placement: Placement) -> None:
        self.plan, self.same, self.accesses = analysis.plan, analysis.same, analysis.accesses
        self.placement, self.graph = placement, analysis.plan.trace.graph.graph
        self.out_variants: dict[fx.Node, OutVariant] = {}
        self.named: dict[str, Place] = {}
        self.sizes: dict[Hashable, tuple[torch.device, int]] = {}
        self.memory: dict[str, Hashable] = {}
        self.direct: set[fx.Node] = set()
        self.scaled: set[int] = set()
        self.divided: dict[fx.Node, fx.Node] = {}
        self.alone: set[fx.Node] = set()
        self.constants: dict[fx.Node, torch.Tensor] = {}
        self.home: dict[int, tuple[Hashable, int]] = {}
        self.makers: dict[int, fx.Node] = {}
        self.kept: set[int] = set()
        self.late: dict[int, float] = {}
        self.storage_indexed = storage_indexed_memory(self.graph)
        self._root: dict[int, int] = {}

    def places(self) -> Places:
        """All of them."""
        frozen = MappingProxyType
        return Places(
            frozen(self.out_variants), frozen(self.named), frozen(self.sizes), frozen(self.memory),
            frozenset(self.direct), frozenset(self.scaled), frozen(self.divided), frozenset(self.alone),
            frozen(self.constants),
        )  # fmt: skip

    def _root_of(self, storage: int) -> int:
        """The memory that a piece is an alias of: a marker that sends nothing returns its argument."""
        return self._root.get(storage, storage)

    def join_alone(self, alone: AbstractSet[fx.Node]) -> None:
        """Find the markers that return their argument itself, and join their memory."""
        inputs = {
            storage
            for node in self.graph.nodes
            if node.op in ("placeholder", "get_attr")
            for storage in storages_of(node)
        }
        for node in self.graph.nodes:
            if node in alone and self._may_alias(node, inputs):
                self.alone.add(node)
                (own,), (other,) = storages_of(node), storages_of(node.args[0])
                self._root[own] = self._root_of(other)

    def _may_alias(self, node: fx.Node, inputs: AbstractSet[int]) -> bool:
        """Whether the result of a reduction over one rank may be its argument itself: neither is changed later.

        An input may be changed at any time after: by its owner, or when the new state is copied into it.
        """
        source: Any = node.args[0]
        written = self.accesses.writes
        return (
            source.meta["val"].numel() > 0
            and source.meta["val"].is_contiguous()
            # A dimension of one element may have any stride, and an operator that writes where it reads looks at it.
            and source.meta["val"].stride() == node.meta["val"].stride()
            and not any(storage in written for storage in storages_of(node))
            and self.storage_indexed.isdisjoint(storages_of(node))
            and not any(
                storage in inputs or self.accesses.last_write(storage) > self.accesses.last_read_by(storage, node)
                for storage in storages_of(source)
            )
        )

    def find_owners(self) -> None:
        """Find the memory that the program does not own alone, and until when outputs need each piece."""
        self.kept.update(map(self._root_of, _kept_elsewhere(self.graph, self.placement)))
        for at, pairs in self.placement.copies.items():
            for _, node in pairs:
                self._is_read_late(node, at)
        for position in self.placement.cloned:
            self._is_read_late(self.placement.returned[position], math.inf)

    def _is_read_late(self, node: fx.Node, at: float) -> None:
        for storage in map(self._root_of, storages_of(node)):
            self.late[storage] = max(at, self.late.get(storage, -1))

    def place_results(self) -> None:
        """Give results memory of their own."""
        passed_over = (self.same, self.placement.replaced, self.constants)
        for node in self.graph.nodes:
            if node.op != "call_function" or any(node in nodes for nodes in passed_over):
                continue
            own = [self._root_of(storage) for storage in storages_of(node)]
            if (
                not own
                or len(set(own)) != len(own)
                or any(number in self.kept or number in self.home for number in own)
            ):
                continue
            variant = out_variant_of(node)
            if variant is None:
                continue
            self.out_variants[node] = variant
            values = [node.meta["val"]] if isinstance(node.meta["val"], torch.Tensor) else node.meta["val"]
            for number, value in zip(own, values, strict=True):
                self.home[number], self.makers[number] = (number, 0), node
                self.sizes[number] = (value.device, value.untyped_storage().nbytes())

    def place_bucket(self, bucket: Bucket, markers: Sequence[fx.Node]) -> None:
        """Place the results of a bucket in it or apart, and the arguments in it where they can be computed there."""
        key, itemsize = ("bucket", bucket.index), bucket.dtype.itemsize
        size = self.plan.trace.ranks_along(bucket.along)
        collective = bucket.collective
        in_input = markers[0] in self.placement.gathered
        self.sizes[key] = (bucket.device, memory_bytes(bucket, size))
        result_key: Hashable = key if collective.in_place else ("result", bucket.index)
        if not (collective.in_place or in_input):
            self.sizes[result_key] = (bucket.device, result_numel(bucket, size) * itemsize)
        if is_scaled(bucket, size):
            self.scaled.add(bucket.index)
        for at, (marker, offset) in enumerate(zip(markers, bucket.offsets, strict=True)):
            source: Any = marker.args[0]
            (result,) = storages_of(marker)
            start_bytes = offset * itemsize
            if not in_input:
                self.home[result] = (result_key, start_bytes)
            shape = source.meta["val"].shape
            stride = tuple(torch.empty(shape, device="meta").stride())
            dense = not collective.splits or stride[0] == bucket.row_numel
            if not dense:
                stride = (bucket.row_numel, *stride[1:])
            slot = slot_name(bucket.index, at)
            self.named[slot] = Place(key, start_bytes, tuple(shape), stride, 0, bucket.dtype)
            self.memory[slot] = key
            if dense and self._fits_bucket(bucket, marker):
                self._place_directly(bucket, marker, start_bytes)

    def _fits_bucket(self, bucket: Bucket, marker: fx.Node) -> bool:
        """Whether a member is a whole result with memory of its own that nothing needs once the bucket has started."""
        source: Any = marker.args[0]
        value, number, start = source.meta["val"], storages_of(source)[0], self.accesses.starts[bucket.index]
        return (
            self._root_of(number) == number
            and self.home.get(number) == (number, 0)
            and value.is_contiguous()
            and value.storage_offset() == 0
            and value.untyped_storage().nbytes() == value.numel() * bucket.dtype.itemsize
            and self.accesses.last_read(number, except_by=marker) < start
            and self.accesses.last_write(number) < start
            and self.late.get(number, -1) < start
        )

    def _place_directly(self, bucket: Bucket, marker: fx.Node, start_bytes: int) -> None:
        """Let a member be computed in its bucket, and be divided there if nothing else needs it undivided."""
        source: Any = marker.args[0]
        number = storages_of(source)[0]
        self.home[number] = (("bucket", bucket.index), start_bytes)
        del self.sizes[number]
        self.direct.add(marker)
        untouched = self.accesses.first_write(number) == math.inf and number not in self.late
        unread = self.accesses.last_read(number, except_by=marker) < 0
        # A complex value is sent as real numbers. Its own division would make NaN of what is infinite.
        alike = all(x.dtype == bucket.dtype for x in tensors_in(self.makers[number].meta["val"]))
        if bucket.index in self.scaled and untouched and unread and alike:
            self.divided[self.makers[number]] = marker

    def name_places(self) -> None:
        """Give names to the places, and to those of all views of them."""
        for node in self.graph.nodes:
            for name, value in _named_values(node, self):
                roots = map(self._root_of, storages(value))
                found = next((self.home[number] for number in roots if number in self.home), None)
                if found is not None:
                    self.memory[name] = found[0]
                    if isinstance(value, torch.Tensor) and not value.is_conj() and not value.is_neg():
                        self.named[name] = _place(found, value)
        for argument in storage_indexed_values(self.graph):
            if (place := self.named.get(argument.name)) is not None:  # in a bucket: other memory was kept
                self.named[row_name(argument)] = _row(place, argument.meta["val"])
                self.memory[row_name(argument)] = place.memory


def _place(found: tuple[Hashable, int], value: torch.Tensor) -> Place:
    shape, stride, offset, dtype, *_ = geometry(value)
    return Place(*found, shape, stride, offset, dtype)


def _row(place: Place, value: torch.Tensor) -> Place:
    """The whole storage of a value, as a flat tensor."""
    numel = value.untyped_storage().nbytes() // value.itemsize
    return replace(place, shape=(numel,), stride=(1,), offset=0)


def _named_values(node: fx.Node, builder: _PlacesBuilder) -> Iterator[tuple[str, Any]]:
    """The results of a node, with their names in the program."""
    value: Any = node.meta.get("val")
    if node.op != "call_function" or node in builder.constants:
        return
    if node in builder.out_variants and not isinstance(value, torch.Tensor):
        for index, item in enumerate(value):
            yield result_name(node, index), item
    else:
        yield node.name, value


def result_name(node: fx.Node, index: int) -> str:
    """The name of one of several results of a node that are at fixed places.

    Not the node's name and a number: that is how the graph calls the next node of the same operator.
    """
    return f"{node.name}_result{index}"


def _kept_elsewhere(graph: fx.Graph, placement: Placement) -> Iterator[int]:
    """Memory that belongs, or may later belong, to something outside of the program."""
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            yield from storages_of(node)
        elif node.op == "call_function" and node.target is not operator.getitem and not _only_computes(node):
            for argument in node.all_input_nodes:
                yield from storages_of(argument)
    for argument in storage_indexed_values(graph):
        yield from storages_of(argument)
    for position, node in enumerate(placement.returned):
        if position not in placement.cloned:
            yield from storages_of(node)
    for node in (*placement.replaced, *placement.written, *placement.reshaped, *placement.gathered):
        yield from storages_of(node)


def _only_computes(node: fx.Node) -> bool:
    """Whether an operator neither keeps an argument, nor returns it, nor gives it another storage.

    A branch of a condition may return its argument; what operators of other libraries do is not known.
    """
    if is_loop(node):
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "fdp"):
        return False
    return torch.Tag.inplace_view not in node.target.tags


def slot_name(bucket: int, member: int) -> str:
    """The name, in a program, of the place of a member in its bucket."""
    return f"slot{bucket}_{member}"
