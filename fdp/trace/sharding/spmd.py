"""A traced step on whole values, rewritten for one rank that holds parts of some of them.

This is SPMD partitioning: the step is traced as if there were one device, and then each operator is rewritten for the
part that a rank computes. The collectives that are inserted are those that users can call, too, so that plan, program
and proofs know them.

References:
    Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs (2021), section 3.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.distributed.mesh import Dimensions, sharded_along, text_along
from fdp.pytorch.fake_modes import fake_mode_at_work
from fdp.state.shards import Part
from fdp.trace.graph.loops import regions_of
from fdp.trace.operators.effects import (
    bound_arguments,
    effects_of,
    list_arguments,
    nodes_in,
    operator_name,
    storages_of,
)
from fdp.trace.sharding.gathers import (
    Gather,
    RankNumber,
    Taken,
    entry_of,
    joined_parts,
    origin_of,
    part_taken,
    phases_of,
    take_parts_late,
)
from fdp.trace.sharding.inserted import History, Link
from fdp.trace.sharding.owners import compute_once
from fdp.trace.sharding.reductions_of_parts import combined
from fdp.trace.sharding.scatters import is_scattered, scattered
from fdp.trace.sharding.shared_gathers import share_messages
from fdp.trace.sharding.units import (
    Unit,
    is_elementwise,
    is_own_memory,
    is_reduction,
    is_same_view,
    kept_along,
    units_of,
)


@dataclass(frozen=True)
class Partitioned:
    """A graph for one rank.

    Attributes:
        module: the graph.
        links: the collectives that were put in.
        gathered: the positions of the results that are gathered because they are returned whole.
    """

    module: fx.GraphModule
    links: list[Link]
    gathered: list[int]


def for_rank(
    module: fx.GraphModule,
    parts: Mapping[int, Part],
    sharded: Mapping[fx.Node, Part],
    names: Mapping[fx.Node, str],
    returned: Sequence[Part | None],
    again: frozenset[str],
    dimensions: Dimensions,
    varying: Container[int],
) -> Partitioned:
    """Rewrite a graph on whole values for one rank.

    Args:
        module: the graph; it is not changed.
        parts: which memory lies in parts.
        sharded: the placeholders of which a rank is given its part.
        names: of arguments and results, for the names of messages.
        returned: for each result how it is divided; None where it is returned whole.
        again: the names of the nodes whose values are gathered again in each forward and backward pass. If there are
            any, each value is gathered no earlier than it has to be, so that few are whole at once.
        dimensions: of the mesh.
        varying: the memory that may differ from rank to rank at any moment.

    Returns:
        The graph for one rank: of local shapes, with collectives where a whole is needed.
    """
    return _Rewriting(module, parts, sharded, names, again, dimensions, varying).write(returned)


class _Rewriting:
    """One graph that is being rewritten."""

    def __init__(
        self,
        module: fx.GraphModule,
        parts: Mapping[int, Part],
        sharded: Mapping[fx.Node, Part],
        names: Mapping[fx.Node, str],
        again: frozenset[str],
        dimensions: Dimensions,
        varying: Container[int],
    ) -> None:
        self._module, self._parts, self._sharded, self._names = module, parts, sharded, names
        self._graph, self._dimensions, self._varying = fx.Graph(), dimensions, varying
        self._axis = text_along("traced", sharded_along(dimensions))
        self._here: dict[fx.Node, fx.Node] = {}
        self._gathered: dict[tuple[int, int], fx.Node] = {}
        self._links: list[Link] = []
        self._now: fx.Node | None = None
        self._history = History()
        self._ahead = {begin: region for begin, region, _ in regions_of(module.graph)}
        self._in_loops = {node for region in self._ahead.values() for node in region}
        self._again, self._phases = again, phases_of(module.graph, self._in_loops, bool(again))
        self._views: dict[tuple[fx.Node, int], fx.Node] = {}
        self._gathers: list[Gather] = []
        self._taken: list[Taken] = []
        mode = fake_mode_at_work([node.meta.get("val") for node in module.graph.nodes])
        assert mode is not None  # example values are its tensors
        self._mode = mode

    def write(self, returned: Sequence[Part | None]) -> Partitioned:
        """See `for_rank`."""
        for node in self._module.graph.find_nodes(op="placeholder"):
            self._here[node] = self._placeholder(node)
            self._history.begin(node)
        self._number = RankNumber(self._here[next(iter(self._sharded))], self._axis, self._new)
        for node, part in self._sharded.items():
            if storages_of(node)[0] not in self._parts:  # it is changed as a whole, so it has to be one
                self._now = node
                self._here[node] = self._gather(node, self._here[node], part)
        for node in self._module.graph.nodes:
            self._now = node
            if node.op == "get_attr":
                self._here[node] = self._copied(node, node.args, node.kwargs, node.meta.get("val"))
            elif node.op == "call_function":
                for inner in self._ahead.get(node, ()):
                    self._gather_ahead(inner, node)
                self._call(node)
                for number in self._history.call(node):
                    for phase in range(self._phases[node] + 1):
                        self._gathered.pop((number, phase), None)
        values: list[fx.Node] = []
        gathered: list[int] = []
        for at, (node, wanted) in enumerate(zip(self._results(), returned, strict=True)):
            self._now = self._module.graph.output_node()
            if wanted is None and self._lies_in_parts(node):
                gathered.append(at)
            values.append(self._whole(node) if wanted is None else self._part(node, wanted))
        self._graph.output(values)
        self._graph.output_node().meta.update(self._module.graph.output_node().meta)
        owned = compute_once(self._graph, self._axis, self._gathers, self._taken, self._here, self._varying, self._new)
        self._links += owned.links
        self._links += share_messages(self._graph, owned.gathers, self._new, bool(self._again), owned.messages)
        stays = [t.nodes for t in self._taken if t.is_of_input and not self._history.is_changed(t.node)]
        take_parts_late(self._graph, stays)
        made = fx.GraphModule(self._module, self._graph)
        return Partitioned(made, self._links, gathered)

    def _results(self) -> Sequence[fx.Node]:
        results: Any = self._module.graph.output_node().args[0]
        return list(results) if results else []

    # --- nodes ----------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        if node in self._sharded:
            shape = self._sharded[node].of(value.shape)
            with self._mode:
                value = torch.empty(shape, dtype=value.dtype, device=value.device)
        return self._copied(node, node.args, node.kwargs, value)

    def _copied(self, node: fx.Node, args: Any, kwargs: Any, value: object) -> fx.Node:
        made = self._graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        made.meta = {key: what for key, what in node.meta.items() if key not in ("effects", "val")}
        made.meta["val"] = value
        return made

    def _new(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call, on behalf of the node that is being rewritten."""
        node = self._graph.call_function(target, args, kwargs)
        assert self._now is not None
        node.meta = {"source": self._now.meta.get("source"), "backward": self._now.meta.get("backward", False)}
        node.meta["val"] = self._value(target, args, kwargs)
        return node

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The example value of a call's result."""
        values, options = fx.map_arg((tuple(args), dict(kwargs)), lambda node: node.meta["val"])
        with self._mode, torch.no_grad():
            return target(*values, **options)

    # --- whole values and parts -----------------------------------------------------------------------------------

    def _lies_in_parts(self, node: fx.Node) -> bool:
        """Whether the new graph has only this rank's part of a node: it has a divided piece of memory to itself."""
        return (
            isinstance(node.meta.get("val"), torch.Tensor)
            and is_own_memory(node)
            and all(number in self._parts for number in storages_of(node))
        )

    def _part_of(self, node: fx.Node) -> Part:
        return self._parts[storages_of(node)[0]]

    def _whole(self, node: fx.Node) -> fx.Node:
        """The whole value of a node, gathered if it lies in parts."""
        assert self._now is not None
        here, phase = self._here[node], self._phases[self._now]
        if not self._lies_in_parts(node):
            if self._phases[node] != phase and self._is_whole_view(node):
                return self._viewed_again(node, phase)
            return here
        (number,) = storages_of(node)
        key = number, phase if self._history.value_in(node).name in self._again else 0
        if key not in self._gathered:
            self._gathered[key] = self._gather(node, here, self._part_of(node))
        return self._gathered[key]

    def _is_whole_view(self, node: fx.Node) -> bool:
        """Whether a node is a view of a gathered value that may be taken again from another gather."""
        numbers = storages_of(node)
        return (
            node.op == "call_function"
            and effects_of(node).view
            and not {node, self._now} & self._in_loops
            and bool(numbers)
            and all(number in self._parts for number in numbers)
            and not self._history.is_changed(node)
        )

    def _viewed_again(self, node: fx.Node, phase: int) -> fx.Node:
        """A view from an earlier pass, taken again from what is gathered in this one."""
        if (node, phase) not in self._views:
            self._views[node, phase] = self._made(node, self._whole)
        return self._views[node, phase]

    def _gather(self, node: fx.Node, own: fx.Node, part: Part) -> fx.Node:
        shape = node.meta["val"].shape
        name = self._names.get(origin_of(node)) or f"value at {node.meta.get('source')}"
        rows = self._new(torch.ops.fdp.all_gather.default, own, part.ranks, self._axis, name)
        whole = joined_parts(rows, part, shape, self._new)
        assert self._now is not None
        when = self._phases[self._now], bool(self._now.meta.get("backward"))
        value, after = self._history.value_in(node), self._history.changed_by(node)
        link = Link(rows.name, value.name, "gathered", whole.name, after.name, part, name, entry_of(value, node))
        self._gathers.append(Gather(own, rows, whole, link, when))
        return whole

    def _part(self, node: fx.Node, part: Part) -> fx.Node:
        """This rank's part of the value of a node."""
        if self._lies_in_parts(node) and self._part_of(node) == part:
            return self._here[node]
        whole = self._whole(node)
        nodes = part_taken(whole, part, self._number, self._new)
        self._taken.append(Taken(node, whole, nodes, part, self._history.changed_by(node)))
        return nodes[-1]

    def _gather_ahead(self, inner: fx.Node, begin: fx.Node) -> None:
        """Gather before a loop what the loop reads: inside, each round would gather it anew."""
        self._now = begin
        for node in inner.all_input_nodes:
            if node in self._here and self._lies_in_parts(node):
                self._whole(node)

    # --- calls ----------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        if is_scattered(node, self._dimensions) and storages_of(node)[0] in self._parts:
            self._here[node] = self._scattered(node)
            return
        if is_same_view(node) and node.target is not operator.getitem and self._lies_in_parts(node):
            # Not the view itself: what it is told of sizes is told of the whole.
            self._here[node] = self._here[node.all_input_nodes[0]]
            return
        if node.target is operator.getitem and not effects_of(node.all_input_nodes[0]).view:
            if node not in self._here:  # or it is a number that ranks have put together
                self._here[node] = self._made(node, lambda x: self._here[x])
            return
        units = list(units_of(node))
        in_parts = [self._computes_parts(unit) for unit in units]
        reducing = [self._reduces_parts(unit) for unit in units]
        if not any(in_parts) and not any(reducing):
            self._here[node] = self._made(node, self._whole)
            return
        if units[0].entry is None:
            chosen = self._reduced if reducing[0] else self._elementwise
            self._here[node] = chosen(node, units[0])
            return
        self._here[node] = self._entry_by_entry(node, units, in_parts, reducing)

    def _reduces_parts(self, unit: Unit) -> bool:
        """Whether a unit reduces a divided value to a small one; in a loop it would send in each round."""
        return unit.node not in self._in_loops and is_reduction(unit) and self._lies_in_parts(unit.reads[0])

    def _computes_parts(self, unit: Unit) -> bool:
        results = unit.results
        return bool(results) and all(number in self._parts for number in results) and is_elementwise(unit)

    def _made(self, node: fx.Node, take: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """The same call on nodes of the new graph."""
        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), take)
        return self._like(node, args, kwargs)

    def _like(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        before, now = nodes_in([*node.args, *node.kwargs.values()]), nodes_in([*args, *kwargs.values()])
        same = [one.meta.get("val") is two.meta.get("val") for one, two in zip(before, now, strict=True)]
        value = node.meta.get("val")
        # A new value of the same shape is as good as the one of the other graph; what lies in other memory is not.
        effects = effects_of(node)
        if not all(same) and (effects.view or effects.writes or not self._parts.keys().isdisjoint(storages_of(node))):
            value = self._value(node.target, args, kwargs)
        return self._copied(node, args, kwargs, value)

    def _elementwise(self, node: fx.Node, unit: Unit) -> fx.Node:
        part = self._part_of_results(unit)
        if operator_name(node) == "clone" and not self._lies_in_parts(unit.reads[0]):
            return self._part(unit.reads[0], part)  # it is a copy already
        return self._made(node, lambda x: self._operand(x, unit, part))

    def _part_of_results(self, unit: Unit) -> Part:
        return self._parts[unit.results[0]]

    def _operand(self, node: fx.Node, unit: Unit, part: Part) -> fx.Node:
        """The operand of an operator on parts: the part of a value of full size, the whole of one that is broadcast."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or unit.shape is None:
            return self._here[node]
        dim = part.dim - (len(unit.shape) - value.dim())
        if dim < 0 or value.shape[dim] == 1 != unit.shape[part.dim]:
            return self._whole(node)
        return self._part(node, Part(dim, part.ranks))

    def _entry_by_entry(
        self, node: fx.Node, units: Sequence[Unit], in_parts: Sequence[bool], reducing: Sequence[bool]
    ) -> fx.Node:
        lists = {id(value) for _, value in list_arguments(node)}

        def taken(value: Any) -> Any:
            if id(value) not in lists or not value:
                return fx.map_arg(value, self._whole)
            return [
                self._taken_by(unit, x, parts, reduces)
                for x, unit, parts, reduces in zip(value, units, in_parts, reducing, strict=True)
            ]

        args = tuple(taken(value) for value in node.args)
        kwargs = {key: taken(value) for key, value in node.kwargs.items()}
        made = self._like_lists(node, args, kwargs)
        for unit, reduces in zip(units, reducing, strict=True):
            if reduces:
                assert unit.entry is not None
                own = self._new(operator.getitem, made, unit.entry)
                whole = self._combine(node, own, unit)
                for user in node.users:
                    if user.target is operator.getitem and user.args[1] == unit.entry:
                        self._here[user] = whole
        return made

    def _like_lists(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            value = self._value(node.target, args, kwargs)
        return self._copied(node, args, kwargs, value)

    def _taken_by(self, unit: Unit, value: object, in_parts: bool, reduces: bool) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if reduces:
            return self._here[value]
        return self._operand(value, unit, self._part_of_results(unit)) if in_parts else self._whole(value)

    # --- collectives ----------------------------------------------------------------------------------------------

    def _scattered(self, node: fx.Node) -> fx.Node:
        """A sum or mean over ranks as a reduce-scatter: this rank keeps its part."""
        given = {argument.name: value for argument, value in bound_arguments(node)}
        part, whole = self._parts[storages_of(node)[0]], self._whole(given["x"])
        made = scattered(given, whole, part, self._dimensions, self._new)
        self._links.append(Link(made.name, node.name, "scattered", made.name, node.name, part, given["label"]))
        return made

    def _reduced(self, node: fx.Node, unit: Unit) -> fx.Node:
        """The reduction of a divided tensor: of its parts, put together."""
        own = self._made(node, lambda x: self._here[x])
        own.meta["val"] = self._value(node.target, own.args, own.kwargs)
        part = self._part_of(unit.reads[0])
        kept = kept_along(unit, part.dim)
        return self._combine(node, own, unit) if kept is None else self._gather(node, own, Part(kept, part.ranks))

    def _combine(self, node: fx.Node, own: fx.Node, unit: Unit) -> fx.Node:
        made, links = combined(node, own, self._part_of(unit.reads[0]), unit.entry, self._axis, self._new)
        self._links += links
        return made
