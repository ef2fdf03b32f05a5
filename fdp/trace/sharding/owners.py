"""Values that must be whole have owners: of N matrices of one shape each rank gathers one, and computes for all ranks.

Otherwise every rank would gather all of them, and compute the same. Ranks exchange parts (an all-to-all), so that each
has the whole of another value; they run the same operators; and they exchange the results. All ranks still run one
program.

References:
    Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024).
    Liu et al., Muon is Scalable for LLM Training (2025), section 2.3: Muon on sharded state gathers every matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fdp.state.shards import Part
from fdp.trace.graph.precedence import Precedence
from fdp.trace.operators.effects import effects_of, storages_of
from fdp.trace.sharding.computations import Computation, computation_of
from fdp.trace.sharding.gathers import Gather, Taken, joined_parts
from fdp.trace.sharding.inserted import Link
from fdp.trace.sharding.scatters import in_rows

_Together = list[Computation]
"""Like computations, at most one for each rank."""


@dataclass(frozen=True)
class Owned:
    """What is left to gather on every rank.

    Attributes:
        gathers: of the other values, which every rank computes with.
        links: what the messages that were put in stand for.
        messages: those that bring whole values to their owners, each with the node of such a value.
    """

    gathers: list[Gather]
    links: list[Link]
    messages: list[tuple[fx.Node, fx.Node]]


def compute_once(
    graph: fx.Graph,
    axis: str,
    gathers: Sequence[Gather],
    taken: Sequence[Taken],
    here: Mapping[fx.Node, fx.Node],
    varying: Container[int],
    new: Callable[..., fx.Node],
) -> Owned:
    """Let like computations on gathered values run on one rank each.

    Args:
        graph: of a step on one rank; it is changed.
        axis: of the ranks, as markers name it.
        gathers: what is gathered in it.
        taken: the parts that are taken of whole values in it.
        here: for nodes of the graph on whole values, theirs in `graph`.
        varying: the memory of those that may differ from rank to rank at any moment: with that each rank has to compute
            by itself.
        new: puts a call into the graph.

    Returns:
        The gathers that remain, and the new messages.
    """
    of_value: defaultdict[fx.Node, list[Taken]] = defaultdict(list)
    for one in taken:
        of_value[one.whole].append(one)
    order = {node: index for index, node in enumerate(graph.nodes)}
    found = [each for gather in gathers if (each := computation_of(gather, of_value, order)) is not None]
    if len(found) < 2:
        return Owned(list(gathers), [], [])
    precedence, exchange = Precedence(graph), _Exchange(axis, here, varying, new)
    movable = [each for each in found if precedence.covers(each.all_nodes) and exchange.may_own(each)]
    groups = _in_order(precedence, _groups(movable))
    links = [link for group in groups for link in exchange.put_in(group)]
    gone = {each.gather for group in groups for each in group}
    left = [replace(gather, own=_sent_by(gather)) for gather in gathers if gather not in gone]
    return Owned(left, links, exchange.messages)


def _sent_by(gather: Gather) -> fx.Node:
    """The part that a rank sends, as the graph is now: it may be what an owner has returned."""
    (own,) = gather.rows.all_input_nodes
    return own


def _groups(found: Sequence[Computation]) -> list[_Together]:
    """Like computations together, as many as there are ranks; a last group of two or more may have fewer."""
    alike: defaultdict[Hashable, _Together] = defaultdict(list)
    for each in found:
        alike[each.likeness].append(each)
    groups = []
    for listed in alike.values():
        ranks = listed[0].gather.link.part.ranks
        groups += [listed[start : start + ranks] for start in range(0, len(listed), ranks)]
    return [group for group in groups if len(group) > 1]


def _in_order(precedence: Precedence, groups: Sequence[_Together]) -> list[_Together]:
    """Let each group run at once; without groups of which one member needs what depends on another one."""
    nodes = [{node for each in group for node in each.all_nodes} for group in groups]
    order, chosen = precedence.together(nodes), list(range(len(groups)))
    if order is None:
        chosen = []
        for number in range(len(groups)):
            tried = precedence.together([nodes[each] for each in (*chosen, number)])
            if tried is not None:
                order, chosen = tried, [*chosen, number]
    if order is not None and chosen:
        precedence.apply(order)
    return [groups[number] for number in chosen]


class _Exchange:
    """Puts messages in the place of computations.

    Attributes:
        messages: see `Owned.messages`.
    """

    def __init__(
        self, axis: str, here: Mapping[fx.Node, fx.Node], varying: Container[int], new: Callable[..., fx.Node]
    ) -> None:
        self._axis, self._varying, self._new = axis, varying, new
        self.messages: list[tuple[fx.Node, fx.Node]] = []
        self._origin = {node: whole for whole, node in reversed(list(here.items()))}
        self._order = {node: index for index, node in enumerate(next(iter(here)).graph.nodes)}

    def may_own(self, computation: Computation) -> bool:
        """Whether one rank can compute for all: what takes part is of the step on whole values, and never varies."""
        return all(
            node in self._origin and not any(number in self._varying for number in storages_of(self._origin[node]))
            for node in (*computation.nodes, *computation.outside)
        )

    def put_in(self, group: _Together) -> list[Link]:
        """Run the first of some like computations, on a value that is another one on each rank."""
        aten: Any = torch.ops.aten
        graph, first = group[0].gather.rows.graph, group[0]
        gone = {node for each in group for node in each.all_nodes}
        owned = _owners(len(group), first.gather.link.part.ranks)
        label = f"{first.gather.link.label} and {len(group) - 1} more, one for each rank"
        self._now = first.gather.rows
        start = next(node for node in graph.nodes if node in gone)
        links: list[Link] = []
        with graph.inserting_before(start):
            cast, of_first = first.cast, first.gather
            parts = [self._given(group[number]) for number in _numbers(owned)]
            rows = self._put(torch.ops.fdp.all_to_all.default, self._put(aten.stack.default, parts), *self._of(label))
            whole = joined_parts(rows, of_first.link.part, of_first.whole.meta["val"].shape, self._put)
            self.messages.append((rows, whole))
            for each, owners in zip(group, owned, strict=True):
                link = replace(each.gather.link, node=rows.name, made=whole.name, kind="given", owners=owners)
                if each.cast is not None:
                    of_whole = self._origin[each.cast].name
                    link = replace(link, whole=of_whole, after=of_whole, entry=None)
                links.append(link)
            result = self._run(first, {of_first.whole if cast is None else cast: whole})
            for at, node in enumerate(first.nodes):
                if node in first.taken:
                    links += self._parts(group, at, result[node], owned, label)
                if node in first.returned:
                    links += self._wholes(group, at, result[node], owned, label)
        for node in [node for node in reversed(graph.nodes) if node in gone]:
            graph.erase_node(node)
        return links

    def _put(self, target: object, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._new(target, *args, **kwargs)
        node.meta |= {key: self._now.meta[key] for key in ("source", "backward")}
        return node

    def _of(self, label: str) -> tuple[str, str, str]:
        return self._axis, "value", label

    def _given(self, computation: Computation) -> fx.Node:
        """What a rank sends of a value: its part, in a narrower dtype if the owner would cast it to that."""
        own, cast = _sent_by(computation.gather), computation.cast
        return own if cast is None else self._put(cast.target, own, *cast.args[1:], **cast.kwargs)

    def _run(self, first: Computation, made: dict[fx.Node, fx.Node]) -> Mapping[fx.Node, fx.Node]:
        """The same operators, on a value of which each rank has another one; `made` has the value."""
        for node in first.nodes:
            if node in made:
                continue
            args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda x: made.get(x, x))
            made[node] = self._new(node.target, *args, **kwargs)
            kept = {key: value for key, value in node.meta.items() if key not in ("effects", "val")}
            made[node].meta |= kept
        return made

    def _parts(
        self, group: _Together, at: int, value: fx.Node, owned: Sequence[tuple[int, ...]], label: str
    ) -> list[Link]:
        """Each rank gets its part of the result of every other."""
        links = []
        for number, taken in enumerate(group[0].taken[group[0].nodes[at]]):
            rows = in_rows(value, taken.part, self._put)
            back = self._put(torch.ops.fdp.all_to_all.default, rows, *self._of(label))
            for each, owners in zip(group, owned, strict=True):
                one = each.taken[each.nodes[at]][number]
                made = self._apart(back, owners[0], one.nodes[-1])
                links.append(self._link("returned", back, made, one.node, [one.changed], taken.part, label, owners))
        return links

    def _wholes(
        self, group: _Together, at: int, value: fx.Node, owned: Sequence[tuple[int, ...]], label: str
    ) -> list[Link]:
        """Each rank gets the whole result of every other."""
        ranks = group[0].gather.link.part.ranks
        back = self._put(torch.ops.fdp.all_gather.default, value, ranks, self._axis, label)
        links = []
        for each, owners in zip(group, owned, strict=True):
            node = each.nodes[at]
            writers = [x for x in each.nodes if not set(storages_of(node)).isdisjoint(_written_by(x))]
            changed = [self._origin[x] for x in writers]
            made = self._apart(back, owners[0], node, {*each.all_nodes})
            part = each.gather.link.part
            links.append(self._link("shared", back, made, self._origin[node], changed, part, label, owners))
        return links

    def _apart(self, rows: fx.Node, owner: int, instead_of: fx.Node, but: Container[fx.Node] = ()) -> fx.Node:
        """What an owner has sent, in memory of its own and in the place of what was computed here, `but` for some."""
        aten: Any = torch.ops.aten
        row = self._put(aten.select.int, rows, 0, owner)
        made = self._put(aten.clone.default, row, memory_format=torch.contiguous_format)
        made.meta["val"] = instead_of.meta["val"]  # views of it lie in this memory
        instead_of.replace_all_uses_with(made, lambda user: user not in but)
        for user in made.users:
            user.meta.pop("effects", None)
        return made

    def _link(
        self, kind: str, back: fx.Node, made: fx.Node, whole: fx.Node, changed: Sequence[fx.Node], part: Part,
        label: str, owners: tuple[int, ...],
    ) -> Link:  # fmt: skip
        after = max([whole, *changed], key=self._order.__getitem__)
        return Link(back.name, whole.name, kind, made.name, after.name, part, label, owners=owners)


def _written_by(node: fx.Node) -> set[int]:
    return {number for written in effects_of(node).writes for number in storages_of(written)}


def _owners(count: int, ranks: int) -> list[tuple[int, ...]]:
    """The ranks that compute each of some values; where there are fewer than ranks, some are computed twice."""
    return [tuple(range(number, ranks, count)) for number in range(count)]


def _numbers(owned: Sequence[tuple[int, ...]]) -> list[int]:
    """For each rank the number of the value that it computes."""
    found = {rank: number for number, owners in enumerate(owned) for rank in owners}
    return [found[rank] for rank in range(len(found))]
