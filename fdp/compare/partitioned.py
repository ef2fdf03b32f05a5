"""Does a step with sharded state compute, on one rank, its part of what the step on whole values computes?

Both graphs run side by side on this rank alone, on whole values that stand for those of all ranks. Where the graph for
one rank sends a message, what would arrive is taken from the run on whole values: then what this rank has sent has to
be its part of that. Every rank does so for its own part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fdp import pytree
from fdp.compare.copies import copy_of
from fdp.compare.leaves import same_bits
from fdp.compare.refusals import wrong_partition
from fdp.compare.replay import Lookup, Replay, call_node
from fdp.compare.restored import undisturbed
from fdp.distributed.other_ranks import OtherRanks
from fdp.runtime.emitted import Emitted
from fdp.state.shards import Part
from fdp.trace import Flat, Roles, Trace
from fdp.trace.graph.variance import ever_varying, varying_nodes
from fdp.trace.operators.effects import operator_name, storages_of
from fdp.trace.sharding.inserted import Link

_SHARE = 1e-3
"""Of the largest value in a tensor, by so much elements may differ: kernels round by where elements lie in memory."""


def _whole_of_parts(own: torch.Tensor, part: Part, others: OtherRanks) -> torch.Tensor:
    """A whole tensor made of this rank's part and the assumed parts of the other ranks."""
    rows = torch.empty((part.ranks, *own.shape), dtype=own.dtype, device=own.device)
    others.all_gather_(rows, own)
    return part.joined(rows)


def check_partition(emitted: Emitted, parts: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]) -> None:
    """Compare the graph for one rank with the graph on whole values.

    Args:
        emitted: a step with sharded state.
        parts: the inputs of a call on this rank; they are not changed.
        whole: those of `on_whole_values`; likewise.

    Raises:
        TraceError: names each value that differs.
    """
    trace, others = emitted.plan.trace, emitted.group.others()
    varying = _gathered_though_varying(trace)
    if varying:
        raise wrong_partition(trace, varying)
    seen = _OnWholeValues(trace, others)
    with undisturbed(emitted):
        expected = seen.run([copy_of(x) for x in whole])
    one = _OnOneRank(trace, [copy_of(x) for x in parts], others, seen.values, seen.operands)
    with undisturbed(emitted):
        found = one.run()
    wrong = one.wrong
    outputs = [output for output in trace.outputs if output.node is not None]
    for output, mine, due in zip(outputs, found, expected, strict=True):
        if output.part is not None:
            due = output.part.taken(due, others.along(trace.sharded_along).rank)
        old = None if output.slot is None else parts[output.slot]
        if not _close(mine, due) or (old is not None and same_bits(mine, old) and _is_moved(due, old)):
            wrong.append(f"{output.name}: {_difference(mine, due)}")
    if wrong:
        raise wrong_partition(trace, wrong)


def _gathered_though_varying(trace: Trace) -> list[str]:
    """Values that differ from rank to rank although their parts are put together.

    The comparison cannot see it: on whole values this rank has its own.
    """
    assert trace.whole is not None
    graph, nodes = trace.whole.graph.graph, trace.whole.nodes
    items = zip(graph.find_nodes(op="placeholder"), trace.whole.inputs, strict=True)
    differ = [node for node, item in items if not item.replicated]
    ever = ever_varying(graph, differ, trace.dimensions)
    suspects = [
        link for link in trace.links if link.kind != "scattered" and not ever.isdisjoint(storages_of(nodes[link.whole]))
    ]
    # What its memory holds before or afterwards does not count.
    then = {name: varying_nodes(graph, differ, trace.dimensions, nodes[name]) for name in {x.after for x in suspects}}
    return [
        f"{link.whole}: {link.kind}, and differs from rank to rank"
        for link in suspects
        if nodes[link.whole] in then[link.after]
    ]


def on_whole_values(trace: Trace, flat: Flat, roles: Roles, others: OtherRanks) -> Flat:
    """The arguments of a call with whole tensors in place of parts, made with the assumed parts of the other ranks."""
    assert trace.whole is not None
    wholes = iter(
        [
            x if item.part is None else _whole_of_parts(x.detach(), item.part, others.along(trace.sharded_along))
            for item, x in zip(trace.inputs, flat.tensors, strict=True)
        ]
    )
    leaves = [next(wholes) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    spec = trace.whole.in_spec
    moving, fixed = iter(pytree.unflatten(spec, leaves)), iter(flat.static)
    args = tuple(next(fixed) if at in roles.static else next(moving) for at in range(len(roles.names)))
    return replace(flat, leaves=leaves, spec=spec, args=args)


class _OnWholeValues:
    """A run on whole values, which keeps the values that the other run needs.

    Attributes:
        values: for each collective that was put in, the value that it stands for.
        operands: for those that make one number, the tensor that it is of.
    """

    def __init__(self, trace: Trace, others: OtherRanks) -> None:
        assert trace.whole is not None
        self._module, self._others, self._nodes = trace.whole.graph, others, trace.whole.nodes
        self.values: dict[Link, torch.Tensor] = {}
        self.operands: dict[Link, torch.Tensor] = {}
        self._after: defaultdict[str, list[Link]] = defaultdict(list)
        for link in trace.links:
            self._after[link.after].append(link)

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run it; returns the results."""
        replay = Replay(self._module, inputs, self._others, self._keep)
        for node in self._module.graph.find_nodes(op="placeholder"):
            self._keep_of(node, replay.value_of)
        return [output.clone() for output in replay.run()]

    def _keep(self, node: fx.Node, value_of: Lookup, result: object) -> None:
        self._keep_of(node, lambda other: result if other is node else value_of(other))

    def _keep_of(self, node: fx.Node, value_of: Lookup) -> None:
        for link in self._after.get(node.name, ()):
            value = value_of(self._nodes[link.whole])
            self.values[link] = (value if link.entry is None else value[link.entry]).clone()
            if link.kind == "combined":
                operand = node.all_input_nodes[0] if link.entry is None else node.args[0][link.entry]  # type: ignore[index]
                self.operands[link] = value_of(operand).clone()  # type: ignore[arg-type]


class _OnOneRank:
    """A run of the graph for one rank, which receives values from the run on whole values.

    Attributes:
        wrong: what this rank would have sent, and is not its part.
    """

    def __init__(
        self,
        trace: Trace,
        inputs: list[torch.Tensor],
        others: OtherRanks,
        values: dict[Link, torch.Tensor],
        operands: dict[Link, torch.Tensor],
    ) -> None:
        self._module, self._others, self._values, self._operands = trace.graph, others, values, operands
        self._place = others.along(trace.sharded_along).rank
        assert trace.whole is not None
        self._whole_nodes = trace.whole.nodes
        self._links: defaultdict[str, list[Link]] = defaultdict(list)
        for link in trace.links:
            self._links[link.node].append(link)
        self._made = {link.made: link for link in trace.links if self._is_here(link)}
        self._here: dict[fx.Node, Any] = dict(zip(self._module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        self._lookup = Replay(self._module, inputs, others).value_of
        self.wrong: list[str] = []

    def run(self) -> list[torch.Tensor]:
        """Run it; returns the results."""
        with torch.no_grad():
            for node in self._module.graph.nodes:
                if node.op == "call_function":
                    links = self._links.get(node.name)
                    self._here[node] = self._call(node) if links is None else self._answer(node, links)
                    if node.name in self._made:
                        self._here[node] = self._checked(node, self._made[node.name])
            (outputs,) = self._module.graph.output_node().args
            return [self._value_of(node) for node in outputs] if outputs else []  # type: ignore[union-attr,arg-type]

    def _is_here(self, link: Link) -> bool:
        """Whether the value that a collective was put in for is on this rank, as a node of its own."""
        return link.kind != "scattered" and (link.kind != "given" or self._place in link.owners)

    def _value_of(self, node: fx.Node) -> Any:
        return self._here[node] if node in self._here else self._lookup(node)

    def _call(self, node: fx.Node) -> Any:
        return call_node(node, self._value_of, self._others)

    def _answer(self, node: fx.Node, links: Sequence[Link]) -> torch.Tensor:
        """The result of a collective on this rank, from the run on whole values."""
        own = self._value_of(node.args[0])  # type: ignore[arg-type]
        if links[0].kind == "gathered":
            return self._gathered(own, links)
        if links[0].owners:
            return self._exchanged(own, links)
        (link,) = links
        if link.kind == "scattered":
            due = link.part.taken(self._values[link], self._place)
            self._compare(link, self._call(node), due)
            return due.contiguous()
        numbers = [self._from(node, link, rank) for rank in range(link.part.ranks)]
        self._compare(link, own, numbers[self._place])
        return _put_together(torch.stack(numbers), str(node.args[1]))

    def _gathered(self, own: torch.Tensor, links: Sequence[Link]) -> torch.Tensor:
        """The parts of all ranks: of one value, or of several, of which each rank sends its own behind each other."""
        ranks = [
            [link.part.taken(self._values[link], rank) for link in sorted(links, key=lambda link: link.start)]
            for rank in range(links[0].part.ranks)
        ]
        if len(links) == 1:
            rows = torch.stack([part for (part,) in ranks])
        else:
            rows = torch.stack([torch.cat([part.reshape(-1) for part in parts]) for parts in ranks])
        due = rows[self._place]
        if own.shape != due.shape or len(links) == 1:
            self._compare(links[0], own, due)
            return rows
        for link in links:
            place = slice(link.start, link.start + self._values[link].numel() // link.part.ranks)
            self._compare(link, own[place], due[place])
        return rows

    def _exchanged(self, own: torch.Tensor, links: Sequence[Link]) -> torch.Tensor:
        """What the owners of several values get to compute with, or what ranks get of their results."""
        owners = {rank: link for link in links for rank in link.owners}
        of_ranks = [owners[rank] for rank in sorted(owners)]
        mine = of_ranks[self._place]
        if mine.kind == "shared":
            self._compare(mine, own, self._values[mine])
            return torch.stack([self._values[link] for link in of_ranks])
        of_others = torch.stack([link.part.taken(self._values[link], self._place) for link in of_ranks])
        of_mine = torch.stack([mine.part.taken(self._values[mine], rank) for rank in sorted(owners)])
        sent, received = (of_others, of_mine) if mine.kind == "given" else (of_mine, of_others)
        self._compare(mine, own, sent)
        return received

    def _from(self, node: fx.Node, link: Link, rank: int) -> torch.Tensor:
        """What a rank would send of its part: one number by the operator on whole values, and what is made of it."""
        number = self._reduced(link, link.part.taken(self._operands[link], rank).contiguous())

        def value(at: object) -> Any:
            if not isinstance(at, fx.Node):
                return at
            if at.name == link.number:
                return number
            chained: Any = at.target
            return chained(*map(value, at.args), **at.kwargs)

        result: torch.Tensor = value(node.args[0])
        return result

    def _reduced(self, link: Link, x: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """What the operator on whole values makes of a tensor; exactly, in the dtype of that and no other."""
        whole = self._whole_nodes[link.whole]
        target: Any = whole.target
        kwargs = {key: value for key, value in whole.kwargs.items() if key != "dtype" or not exact}
        found: Any = target(x if link.entry is None else [x], *whole.args[1:], **kwargs)
        result: torch.Tensor = found if link.entry is None else found[0]
        return result

    def _checked(self, node: fx.Node, link: Link) -> Any:
        """What a collective was put in for; if that is a number, from here on that of the run on whole values."""
        due = self._values[link]
        if link.kind == "returned":
            due = link.part.taken(due, self._place)
        if link.kind != "combined":
            self._compare(link, self._here[node], due)
            return self._here[node]
        operand = self._operands[link]
        # What is added up may cancel: then rounding is large beside the sum, and small beside what was added.
        adds = operator_name(self._whole_nodes[link.whole]) in ("sum", "mean") and due.is_floating_point()
        slack = 1e-5 * self._reduced(link, operand.double().abs(), exact=True) if adds else 0.0
        self._compare(link, self._here[node], due, slack)
        return due.clone()

    def _compare(self, link: Link, mine: torch.Tensor, due: torch.Tensor, slack: float | torch.Tensor = 0.0) -> None:
        if not _close(mine, due, slack):
            self.wrong.append(f"{link.label}, {link.kind}: {_difference(mine, due)}")


def _put_together(numbers: torch.Tensor, op: str) -> torch.Tensor:
    if op == "sum":
        return numbers.sum(0, dtype=numbers.dtype)
    return numbers.amax(0) if op == "max" else numbers.amin(0)


def _close(mine: torch.Tensor, due: torch.Tensor, slack: float | torch.Tensor = 0.0) -> bool:
    if (mine.shape, mine.dtype) != (due.shape, due.dtype):
        return False
    if same_bits(mine, due):
        return True
    if not (mine.is_floating_point() or mine.is_complex()):
        return False
    one, two = mine.to(torch.float64), due.to(torch.float64)
    if not torch.equal(one.isfinite(), two.isfinite()):
        return False
    one, two = one.nan_to_num(0.0, 0.0, 0.0), two.nan_to_num(0.0, 0.0, 0.0)
    slack = slack.nan_to_num(0.0, 0.0, 0.0) if isinstance(slack, torch.Tensor) else slack
    allowed = slack + (max(_SHARE, 4 * torch.finfo(mine.dtype).eps) * float(two.abs().max()) if two.numel() else 0.0)
    return bool(((one - two).abs() <= allowed).all())


def _is_moved(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether two values differ by more than rounding."""
    if same_bits(new, old) or not new.is_floating_point():
        return not same_bits(new, old)
    change = (new.double() - old.double()).abs().max()
    return bool(change > 16 * torch.finfo(new.dtype).eps * new.double().abs().max())


def _difference(mine: torch.Tensor, due: torch.Tensor) -> str:
    if (mine.shape, mine.dtype) != (due.shape, due.dtype):
        return f"{list(mine.shape)} {mine.dtype}, where {list(due.shape)} {due.dtype} is due"
    largest = float((mine.double() - due.double()).abs().max()) if mine.numel() else 0.0
    size = float(due.double().abs().max()) if due.numel() else 0.0
    return f"differs by {largest:.3g} from this rank's part of the whole, which is up to {size:.3g}"
