"""Which values of a step have a fixed place in its memory, and which of those places are in buckets."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fdp.emit.accesses import Accesses
from fdp.emit.constants import constant_values
from fdp.emit.donation import Placement
from fdp.emit.forms import Form, form_of
from fdp.emit.layout import ALIGNMENT_BYTES
from fdp.emit.views import geometry
from fdp.plan import Bucket, Plan
from fdp.trace.effects import effects_of, operator_name, storages, storages_of

_SCALED_WHEN_FILLED_BYTES = 2**20
"""From this size on, the division of a mean is part of filling the bucket; below, a call for each member would cost
more than the pass over memory that it saves."""


@dataclass(frozen=True)
class Place:
    """A tensor at a fixed place.

    Attributes:
        memory: the piece of memory that it is in: a number for one value, ("bucket", index) for a bucket.
        start_bytes: where its storage begins in that piece.
        shape: its shape.
        stride: its strides, in elements.
        offset: where it begins in its storage, in elements.
        dtype: its dtype.
    """

    memory: Any
    start_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class Places:
    """The fixed places of a program.

    Attributes:
        forms: for each node that is computed into a fixed place, how.
        named: the place of each value, by its name in the program.
        sizes: device and size in bytes of each piece of memory.
        memory: for each name, also of views that are made at every call, the piece of memory that it lies in.
        direct: markers whose argument is computed right into the bucket.
        scaled: buckets that are filled with values divided by the number of ranks.
        divided: nodes that compute such a value which nobody else reads, so that they can divide it at once; with
            the marker that it is for.
        alone: markers that send nothing and return their argument itself.
        constants: values that are the same at every call.
    """

    forms: dict[fx.Node, Form] = field(default_factory=dict)
    named: dict[str, Place] = field(default_factory=dict)
    sizes: dict[Any, tuple[torch.device, int]] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    direct: set[fx.Node] = field(default_factory=set)
    scaled: set[int] = field(default_factory=set)
    divided: dict[fx.Node, fx.Node] = field(default_factory=dict)
    alone: set[fx.Node] = field(default_factory=set)
    constants: dict[fx.Node, torch.Tensor] = field(default_factory=dict)


def is_scaled(bucket: Bucket, world_size: int) -> bool:
    """Whether members of a bucket are divided by the number of ranks as it is filled, so that a sum makes the mean.

    All ranks decide alike: on the bucket alone.
    """
    fits = bucket.dtype.is_floating_point or bucket.dtype.is_complex
    # Two large values of sixteen bits have no sum, but a mean.
    large = bucket.size_bytes >= _SCALED_WHEN_FILLED_BYTES or bucket.dtype == torch.float16
    return world_size > 1 and bucket.op == "mean" and fits and large


def find_places(
    plan: Plan,
    same: Mapping[fx.Node, fx.Node],
    placement: Placement,
    accesses: Accesses,
    travelling: Mapping[int, list[fx.Node]],
    alone: set[fx.Node],
) -> Places:
    """Give a fixed place to every value that can have one.

    A value can if its operator writes where it is told to, and nobody but the program holds it: it is no input, is
    not returned, and goes to no operator that might keep it or return it as its own.

    Args:
        plan: the plan.
        same: views that are their own base.
        placement: where outputs live.
        accesses: what the plan does to memory, and when.
        travelling: for each bucket that is sent, its markers.
        alone: markers that send nothing.

    Returns:
        The places.
    """
    graph = plan.trace.graph.graph
    places = Places()
    written_at = _last_writes(graph)
    places.alone = {node for node in alone if _may_alias(node, written_at)}
    root: dict[int, int] = {}
    for node in graph.nodes:
        if node in places.alone:
            (own,), (other,) = storages_of(node), storages_of(node.args[0])
            root[own] = root.get(other, other)

    def root_of(storage: int) -> int:
        return root.get(storage, storage)

    kept = {root_of(storage) for storage in _kept_elsewhere(graph, placement)}
    places.constants = constant_values(graph, kept)
    home: dict[int, tuple[Any, int]] = {}
    makers = _place_results(graph, same, placement, places, kept, home, root_of)
    late = _late_reads(placement, root_of)
    for index, markers in travelling.items():
        _place_bucket(plan, plan.buckets[index], markers, accesses, late, places, home, root_of, makers)
    for node in graph.nodes:
        for name, value in _named_values(node, places):
            found = next((home[root_of(number)] for number in storages(value) if root_of(number) in home), None)
            if found is not None:
                places.memory[name] = found[0]
                if isinstance(value, torch.Tensor) and not value.is_conj() and not value.is_neg():
                    places.named[name] = _place(found, value)
    return places


def _place(found: tuple[Any, int], value: torch.Tensor) -> Place:
    shape, stride, offset, dtype, *_ = geometry(value)
    return Place(*found, shape, stride, offset, dtype)


def _named_values(node: fx.Node, places: Places) -> Iterator[tuple[str, Any]]:
    """What a node makes, with the names in the program."""
    value: Any = node.meta.get("val")
    if node.op != "call_function" or node in places.constants:
        return
    if node in places.forms and not isinstance(value, torch.Tensor):
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
    """Memory that belongs, or may come to belong, to somebody else."""
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            yield from storages_of(node)
        elif node.op == "call_function" and node.target is not operator.getitem and not _only_computes(node):
            for argument in node.all_input_nodes:
                yield from storages_of(argument)
    for position, node in enumerate(placement.returned):
        if position not in placement.cloned:
            yield from storages_of(node)
    for node in (*placement.replaced, *placement.written):
        yield from storages_of(node)


def _only_computes(node: fx.Node) -> bool:
    """Whether an operator neither keeps an argument, nor returns it as its own, nor gives it other memory.

    A branch of a condition may return its argument; what operators of somebody else's do is not known.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "fdp"):
        return False
    return torch.Tag.inplace_view not in node.target.tags or operator_name(node) in RESHAPES_IN_PLACE


RESHAPES_IN_PLACE = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_"})
"""Operators that only change under which shape a tensor looks at its memory."""


def _place_results(
    graph: fx.Graph,
    same: Mapping[fx.Node, fx.Node],
    placement: Placement,
    places: Places,
    kept: set[int],
    home: dict[int, tuple[Any, int]],
    root_of: Callable[[int], int],
) -> dict[int, fx.Node]:
    """Give results memory of their own; returns which node makes what."""
    makers: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node in same or node in placement.replaced or node in places.constants:
            continue
        own = [root_of(storage) for storage in storages_of(node)]
        if not own or len(set(own)) != len(own) or kept.intersection(own) or any(number in home for number in own):
            continue
        form = form_of(node)
        if form is None:
            continue
        places.forms[node] = form
        values = [node.meta["val"]] if isinstance(node.meta["val"], torch.Tensor) else node.meta["val"]
        for number, value in zip(own, values, strict=True):
            home[number], makers[number] = (number, 0), node
            places.sizes[number] = (value.device, value.untyped_storage().nbytes())
    return makers


def _place_bucket(
    plan: Plan,
    bucket: Bucket,
    markers: list[fx.Node],
    accesses: Accesses,
    late: Mapping[int, float],
    places: Places,
    home: dict[int, tuple[Any, int]],
    root_of: Callable[[int], int],
    makers: Mapping[int, fx.Node],
) -> None:
    """Put the results of a bucket into it, and the arguments as well where they can be computed there."""
    key, size, itemsize = ("bucket", bucket.index), plan.trace.world_size, bucket.dtype.itemsize
    own_bytes = bucket.numel * itemsize
    gathers = bucket.op == "all_gather"
    places.sizes[key] = (bucket.device, gathered_at_bytes(bucket) + size * own_bytes if gathers else own_bytes)
    if is_scaled(bucket, size):
        places.scaled.add(bucket.index)
    start = accesses.starts[bucket.index]
    for at, (marker, offset) in enumerate(zip(markers, bucket.offsets, strict=True)):
        source: Any = marker.args[0]
        value = source.meta["val"]
        (result,) = storages_of(marker)
        home[result] = (key, gathered_at_bytes(bucket) if gathers else offset * itemsize)
        contiguous = tuple(torch.empty(value.shape, device="meta").stride())
        slot = slot_name(bucket.index, at)
        places.named[slot] = Place(key, offset * itemsize, tuple(value.shape), contiguous, 0, bucket.dtype)
        places.memory[slot] = key
        number = storages_of(source)[0]
        if (
            root_of(number) == number
            and home.get(number) == (number, 0)
            and value.is_contiguous()
            and value.storage_offset() == 0
            and value.untyped_storage().nbytes() == value.numel() * itemsize
            and accesses.last_read(number, except_by=marker) < start
            and accesses.last_write(number) < start
            and late.get(number, -1) < start
        ):
            home[number] = (key, offset * itemsize)
            del places.sizes[number]
            places.direct.add(marker)
            untouched = accesses.first_write(number) == math.inf and number not in late
            if bucket.index in places.scaled and untouched and accesses.last_read(number, except_by=marker) < 0:
                places.divided[makers[number]] = marker


def gathered_at_bytes(bucket: Bucket) -> int:
    """Where, in the memory of an all-gather's bucket, the pieces of all ranks begin: behind this rank's own."""
    return -(-bucket.numel * bucket.dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slot_name(bucket: int, member: int) -> str:
    """The name, in a program, of the place of a member in its bucket."""
    return f"slot{bucket}_{member}"


def _late_reads(placement: Placement, root_of: Callable[[int], int]) -> dict[int, float]:
    """When memory is read for the sake of outputs: copied back into an input, or out of the step."""
    late: dict[int, float] = {}
    for at, pairs in placement.copies.items():
        for _, node in pairs:
            for storage in storages_of(node):
                late[root_of(storage)] = max(at, late.get(root_of(storage), -1))
    for position in placement.cloned:
        for storage in storages_of(placement.returned[position]):
            late[root_of(storage)] = float("inf")
    return late


def _last_writes(graph: fx.Graph) -> tuple[dict[fx.Node, int], dict[int, int]]:
    """The position of each node in the user's program, and that of the last write to each piece of memory."""
    index: dict[fx.Node, int] = {}
    last: dict[int, int] = {}
    count = len(graph.nodes)
    for at, node in enumerate(graph.nodes):
        index[node] = at
        if node.op in ("placeholder", "get_attr"):
            # It may be written at any time after: by its owner, or when the new state is copied into it.
            last.update(dict.fromkeys(storages_of(node), count))
        for target in effects_of(node).writes:
            for storage in storages_of(target):
                last[storage] = max(at, last.get(storage, -1))
    return index, last


def _may_alias(node: fx.Node, written_at: tuple[dict[fx.Node, int], dict[int, int]]) -> bool:
    """Whether the result of a reduction over one rank may be its argument itself: nobody changes either later."""
    index, last = written_at
    source: Any = node.args[0]
    return (
        source.meta["val"].numel() > 0
        and source.meta["val"].is_contiguous()
        and not any(storage in last for storage in storages_of(node))
        and not any(last.get(storage, -1) > index[node] for storage in storages_of(source))
    )
