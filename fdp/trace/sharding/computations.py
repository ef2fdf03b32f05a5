"""What a step computes of one gathered value and nothing else: such a computation may run on one rank.

An optimizer that needs whole matrices is an example. Muon orthogonalises the momentum of each parameter by a chain of
matrix products.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload
from fdp.trace.operators.effects import effects_of, operator_name, storages_of
from fdp.trace.sharding.gathers import Gather, Taken
from fdp.trace.sharding.units import is_outer_product

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm")
_LINEAR_ALGEBRA = ("linalg_", "_linalg_")
_NORMS = ("linalg_vector_norm",)


@dataclass(frozen=True, eq=False)
class Computation:
    """What is computed of a gathered value.

    Attributes:
        gather: of the value.
        nodes: the operators, in the order of the graph. They read the value, each other's results, and what is in
            `outside`; they write to nothing but their own results.
        outside: the numbers that they read besides; whether these are equal on all ranks is not looked at here.
        returned: those whose whole value other operators read.
        taken: for each of which ranks need their parts: how these are taken.
    """

    gather: Gather
    nodes: tuple[fx.Node, ...]
    outside: frozenset[fx.Node]
    returned: tuple[fx.Node, ...]
    taken: Mapping[fx.Node, Sequence[Taken]]

    @property
    def likeness(self) -> Hashable:
        """Equal for two computations that run the same operators, on values of the same form."""
        gather = self.gather
        at: dict[fx.Node, Any] = {node: index for index, node in enumerate(self.nodes)}
        at |= {gather.whole: "whole"} | {node: node.name for node in self.outside}
        calls = tuple(
            (node.target, _text((node.args, node.kwargs), at), _form(node.meta["val"]), bool(node.meta.get("backward")))
            for node in self.nodes
        )
        results = tuple(at[node] for node in self.returned)
        parts = tuple((at[node], tuple(each.part for each in taken)) for node, taken in self.taken.items())
        return _form(gather.own.meta["val"]), gather.link.part, gather.when, calls, results, parts

    @property
    def cast(self) -> fx.Node | None:
        """The operator that casts the value to a narrower dtype, if nothing else reads it: then less is sent."""
        first, value = self.nodes[0], self.gather.whole.meta["val"]
        is_cast = first.target is torch.ops.aten._to_copy.default and list(self.gather.whole.users) == [first]
        if not is_cast or first in self.returned or first in self.taken:
            return None
        made: torch.Tensor = first.meta["val"]
        is_same = made.stride() == value.stride() and made.device == value.device
        return first if is_same and made.element_size() < value.element_size() else None

    @property
    def all_nodes(self) -> Iterator[fx.Node]:
        """All that is left out where it does not run: the operators, what puts the value together, and the parts."""
        pending = [self.gather.rows]
        while pending:
            node = pending.pop()
            yield node
            pending += [] if node is self.gather.whole else list(dict.fromkeys(node.users))
        yield from self.nodes
        for taken in self.taken.values():
            for each in taken:
                yield from each.nodes


def computation_of(
    gather: Gather, taken: Mapping[fx.Node, Sequence[Taken]], order: Mapping[fx.Node, int]
) -> Computation | None:
    """Find what is computed of a gathered value.

    Args:
        gather: of the value.
        taken: for each value of which parts are taken, how.
        order: the place of each node of the graph.

    Returns:
        The computation; None if there is none that is worth a message: without a product of matrices, or with larger
        results than the value itself. And none where the value, or what is computed, is used in another way as well.
    """
    if gather.whole in taken:
        return None
    views = {each.nodes[0] for listed in taken.values() for each in listed}
    inside = _closure(gather.whole, views, order)
    while (view := _view_that_is_returned(inside, views)) is not None:
        if any(user in inside for user in view.users) or view in taken:
            return None
        inside.remove(view)
    members = set(inside)
    if not any(map(_is_product, inside)) or any(user not in members for user in gather.whole.users):
        return None
    returned = [node for node in inside if any(user not in members and user not in views for user in node.users)]
    if not all(isinstance(node.meta.get("val"), torch.Tensor) and _is_plain(node, members) for node in returned):
        return None
    if len({number for node in returned for number in storages_of(node)}) != len(returned):
        return None
    if sum(node.meta["val"].nbytes for node in returned) > gather.size_bytes:
        return None
    outside = frozenset(x for node in inside for x in node.all_input_nodes if x not in members) - {gather.whole}
    parts = {node: taken[node] for node in inside if node in taken}
    found = Computation(gather, tuple(inside), outside, tuple(returned), parts)
    return found if _ends_before_use(found, order) else None


def _closure(whole: fx.Node, views: Container[fx.Node], order: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The operators that read a value, and each other's results, and otherwise numbers, in their order."""
    inside: dict[fx.Node, None] = {}
    own: set[int] = set()
    pending = [(order[user], user) for user in whole.users if user in order]
    seen = set(whole.users)
    heapq.heapify(pending)
    while pending:
        _, node = heapq.heappop(pending)
        others = [x for x in node.all_input_nodes if x is not whole and x not in inside]
        if node in views or not _may_run_alone(node):
            continue
        if not all(_is_number(x) and not _depends_on(x, whole, order) for x in others):
            continue
        effects = effects_of(node)
        if not own.issuperset(number for written in effects.writes for number in storages_of(written)):
            continue
        if not effects.view:
            own.update(storages_of(node))
        inside[node] = None
        for user in node.users:
            if user not in seen and user.op == "call_function":
                seen.add(user)
                heapq.heappush(pending, (order[user], user))
    return list(inside)


def _depends_on(node: fx.Node, whole: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether a number is computed from a value."""
    pending, seen = [node], {node}
    while pending:
        each = pending.pop()
        if each is whole:
            return True
        more = [x for x in each.all_input_nodes if x not in seen and order[x] >= order[whole]]
        pending += more
        seen.update(more)
    return False


def _may_run_alone(node: fx.Node) -> bool:
    """Whether an operator computes tensors of tensors, and does nothing else."""
    if node.op != "call_function" or not storages_of(node):
        return False
    is_operator = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    effects = effects_of(node)
    is_entry = effects.view and not is_operator
    return (is_operator or is_entry) and not effects.random and not effects.checks and not effects.uninitialised


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op == "get_attr" and not isinstance(value, torch.Tensor):
        return False  # a graph
    return not isinstance(value, (list, tuple)) and (not isinstance(value, torch.Tensor) or value.numel() == 1)


def _view_that_is_returned(inside: Sequence[fx.Node], views: Container[fx.Node]) -> fx.Node | None:
    """The last view of a result that others read: they can take the view themselves."""
    for node in reversed(inside):
        is_view = effects_of(node).view and isinstance(node.target, OpOverload)
        if is_view and any(user not in inside and user not in views for user in node.users):
            return node
    return None


def _is_plain(node: fx.Node, nodes: Container[fx.Node]) -> bool:
    """Whether a value lies row by row in memory of its own, so that what arrives of another rank can take its place."""
    value = node.meta["val"]
    made = node
    while (effects := effects_of(made)).writes and effects.writes[0] in nodes:
        made = effects.writes[0]
    return bool(value.is_contiguous() and not value.storage_offset() and not effects_of(made).view) and (
        value.untyped_storage().nbytes() == value.nbytes
    )


def _ends_before_use(found: Computation, order: Mapping[fx.Node, int]) -> bool:
    """Whether the operators have written to a result before others read it, and have read it before others write."""
    results = {number for node in (*found.returned, *found.taken) for number in storages_of(node)}
    accesses: dict[int, int] = {}
    writes: dict[int, int] = {}
    for node in found.nodes:
        effects = effects_of(node)
        for touched in (*effects.reads, *effects.writes):
            accesses.update(dict.fromkeys(storages_of(touched), order[node]))
        for touched in effects.writes:
            writes.update(dict.fromkeys(storages_of(touched), order[node]))
    for taken in found.taken.values():
        for each in taken:
            if any(writes.get(number, -1) > order[each.nodes[1]] for number in storages_of(each.whole)):
                return False
    inside = {*found.nodes, *(node for taken in found.taken.values() for each in taken for node in each.nodes)}
    pending, seen = [*found.returned], {*found.returned}
    while pending:
        for node in pending.pop().users:
            if node in inside or node in seen or node.op == "output":
                continue
            seen.add(node)
            effects = effects_of(node)
            if effects.view or effects.writes:
                pending.append(node)
            for touched in node.all_input_nodes:
                last = accesses if touched in effects.writes else writes
                if any(last.get(number, -1) > order[node] for number in results.intersection(storages_of(touched))):
                    return False
    return True


def _is_product(node: fx.Node) -> bool:
    name = operator_name(node)
    if is_outer_product(node):
        return False
    return name in _PRODUCTS or (name.startswith(_LINEAR_ALGEBRA) and name not in _NORMS)


def _form(value: object) -> Hashable:
    """What tells two values apart but for what they hold."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return tuple(map(_form, value)) if isinstance(value, (list, tuple)) else str(type(value))


def _text(value: object, at: Mapping[fx.Node, Any]) -> str:
    """Arguments as text, with the place of each node."""
    if isinstance(value, fx.Node):
        return f"<{at[value]}>"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_text(each, at) for each in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_text(each, at)}' for name, each in value.items())}}}"
    return f"{type(value).__name__} {value!r}"
