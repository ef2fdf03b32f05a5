"""Mistakes in what is computed on parts are found before a step runs, each by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from samples import exhaustive
from sharded_steps import STEPS, numbers
from torch import fx

import fdp
from fdp.state.shards import Part
from fdp.trace.sharding import computations, owners, placements, reductions_of_parts, sharded, shared_gathers, spmd

Patch = Callable[[pytest.MonkeyPatch], None]


def own_part_of_rank_0(patch: pytest.MonkeyPatch) -> None:
    def of_rank_0(self: Any, node: fx.Node, part: Part) -> fx.Node:
        if self._lies_in_parts(node):
            return self._here[node]
        whole = self._whole(node)
        size = whole.meta["val"].shape[part.dim] // part.ranks
        view = self._new(torch.ops.aten.slice.Tensor, whole, part.dim, 0, size)
        return self._new(torch.ops.aten.clone.default, view, memory_format=torch.contiguous_format)

    patch.setattr(spmd._Rewriting, "_part", of_rank_0)


def parts_that_change_places(patch: pytest.MonkeyPatch) -> None:
    gather = spmd._Rewriting._gather

    def rolled(self: Any, node: fx.Node, own: fx.Node, part: Part) -> fx.Node:
        return self._new(torch.ops.aten.roll.default, gather(self, node, own, part), [1], [part.dim])

    patch.setattr(spmd._Rewriting, "_gather", rolled)


def sums_for_means(patch: pytest.MonkeyPatch) -> None:
    scattered = spmd._Rewriting._scattered

    def summed(self: Any, node: fx.Node) -> fx.Node:
        made = scattered(self, node)
        made.args = (made.args[0], "sum", *made.args[2:])
        return made

    patch.setattr(spmd._Rewriting, "_scattered", summed)


def norms_that_are_added(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reductions_of_parts, "_norm", lambda own, order, new, over_ranks: over_ranks(own, "sum"))


def numbers_of_one_part(patch: pytest.MonkeyPatch) -> None:
    combine = spmd._Rewriting._combine

    def not_combined(self: Any, node: fx.Node, own: fx.Node, unit: Any) -> fx.Node:
        combine(self, node, own, unit)
        return own

    patch.setattr(spmd._Rewriting, "_combine", not_combined)


def sums_along_a_row_for_elementwise(patch: pytest.MonkeyPatch) -> None:
    elementwise = placements.is_elementwise

    def wrong(unit: Any) -> bool:
        return elementwise(unit) or str(unit.node.target) == "aten.cumsum.default"

    patch.setattr(placements, "is_elementwise", wrong)
    patch.setattr(spmd, "is_elementwise", wrong)


def gathered_once_and_changed_since(patch: pytest.MonkeyPatch) -> None:
    class Kept(dict[int, Any]):
        def pop(self, *_: Any) -> None:
            pass

    begin = spmd._Rewriting.__init__

    def init(self: Any, *args: Any) -> None:
        begin(self, *args)
        self._gathered = Kept()

    patch.setattr(spmd._Rewriting, "__init__", init)


def each_ranks_own_values_in_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placements, "ever_varying", lambda graph, varying, dimensions: frozenset())


def results_that_change_places(patch: pytest.MonkeyPatch) -> None:
    write = spmd.for_rank

    def swapped(*args: Any) -> Any:
        made = write(*args)
        output = made.module.graph.output_node()
        first, second, *rest = output.args[0]
        output.args = ([second, first, *rest],)
        return made

    patch.setattr(sharded, "for_rank", swapped)


def pieces_that_change_places(patch: pytest.MonkeyPatch) -> None:
    together = shared_gathers._together

    def swapped(graph: fx.Graph, group: Any, new: Any) -> Any:
        message, starts = together(graph, group, new)
        first, second, *_ = (user for user in message.users)
        first.args, second.args = second.args, first.args
        return message, starts

    patch.setattr(shared_gathers, "_together", swapped)


def sent_together_in_another_order(patch: pytest.MonkeyPatch) -> None:
    together = shared_gathers._together

    def swapped(graph: fx.Graph, group: Any, new: Any) -> Any:
        message, starts = together(graph, group, new)
        sent = message.args[0]
        first, second, *others = sent.args[0]
        sent.args = ([second, first, *others],)
        return message, starts

    patch.setattr(shared_gathers, "_together", swapped)


def sent_with_others_before_it_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_gathers, "_ready", lambda graph, gathers, order: {g: order[g.own] for g in gathers})


def values_for_another_owner(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(owners, "_numbers", lambda owned: [1, 0])


def results_of_another_owner(patch: pytest.MonkeyPatch) -> None:
    apart = owners._Exchange._apart
    patch.setattr(owners._Exchange, "_apart", lambda self, rows, owner, *rest: apart(self, rows, 1 - owner, *rest))


def all_computations_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(computations.Computation, "likeness", property(lambda self: len(self.nodes)))


def owners_of_each_ranks_own_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sharded, "ever_varying", lambda graph, varying, dimensions: frozenset())


def results_that_are_changed_afterwards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(computations, "_ends_before_use", lambda found, order: True)


def of_matrices(state: Any, x: torch.Tensor, factors: tuple[float, ...] = (2.0, 2.0), changed: bool = False) -> Any:
    """What is computed of each matrix needs all of it."""
    new = {}
    for (key, w), factor in zip(state.items(), factors, strict=True):
        made = (w @ w.t() * factor) @ w
        new[key] = w - made
        if changed:
            made.mul_(2.0)
            new[key] = new[key] + made
    return new


def of_own_numbers(state: Any, x: torch.Tensor) -> Any:
    """Each rank multiplies by a number of its own; at the end what it has made is the same on all ranks."""
    new, own = {}, x.mean()
    for key, w in state.items():
        made = w @ w.t() * own
        new[key] = w - 0.1 * fdp.pmean(made)
        made.copy_(torch.ones(8, 8))
        new[key] = new[key] + made.cumsum(0)
    return new


def written_twice(state: Any, x: torch.Tensor) -> Any:
    """Reads all of what it has changed, before and after."""
    w = state["w"] * 1
    first = w @ state["u"]
    w.mul_(2)
    return {"w": w + 0.1 * (w @ state["u"] + first), "u": state["u"] - 0.1 * fdp.pmean(x)}


def of_own_values(state: Any, x: torch.Tensor) -> Any:
    mixed = state["w"] * x
    return {"w": state["w"] + 0.1 * fdp.pmean(mixed @ state["u"]), "u": state["u"].cumsum(0)}


def in_columns(state: Any, x: torch.Tensor) -> Any:
    return {
        "w": state["w"] + 0.1 * fdp.pmean(x[:7] @ state["u"]) @ state["u"],
        "u": state["u"] + state["w"].t() @ state["w"],
    }


def changed_between(state: Any, x: torch.Tensor) -> Any:
    """One value is gathered, and then another one, which changes between the two."""
    w = state["w"] * 1
    first = state["u"].cumsum(0)
    torch._foreach_mul_([w], 2)
    return {"w": w + 0.1 * (w.cumsum(0) + first), "u": state["u"] - 0.1 * fdp.pmean(x)}


def made(name: str) -> tuple[Any, Any]:
    if name in STEPS:
        return STEPS[name]()
    step = {
        "written twice": written_twice,
        "own values": of_own_values,
        "columns": in_columns,
        "changed between": changed_between,
        "own numbers": of_own_numbers,
        "matrices": of_matrices,
        "unlike matrices": functools.partial(of_matrices, factors=(2.0, 3.0)),
        "changed matrices": functools.partial(of_matrices, changed=True),
    }[name]
    return step, {"w": numbers(7 if name == "columns" else 8, 8, seed=1), "u": numbers(8, 8, seed=2)}


FAULTS: list[tuple[Patch, str, bool]] = [
    (own_part_of_rank_0, "SGD", False),
    (parts_that_change_places, "columns", True),
    (sums_for_means, "SGD", True),
    (norms_that_are_added, "clipped", True),
    (numbers_of_one_part, "by hand", True),
    (sums_along_a_row_for_elementwise, "own values", True),
    (gathered_once_and_changed_since, "written twice", True),
    (each_ranks_own_values_in_parts, "own values", True),
    (results_that_change_places, "written twice", True),
    (pieces_that_change_places, "written twice", True),
    (sent_together_in_another_order, "written twice", True),
    (sent_with_others_before_it_changes, "changed between", True),
    (values_for_another_owner, "matrices", True),
    (results_of_another_owner, "matrices", True),
    (owners_of_each_ranks_own_values, "own numbers", True),
    (all_computations_alike, "unlike matrices", True),
    (results_that_are_changed_afterwards, "changed matrices", True),
]
"""The mistake, the step, and whether its parameters are sharded, too."""

REPEATED = {
    own_part_of_rank_0, sums_for_means, norms_that_are_added, numbers_of_one_part, parts_that_change_places,
    gathered_once_and_changed_since,
}  # fmt: skip
"""Those that take longest, and are like others: wrong places, wrong sums, and what has changed since."""


def is_found(number: int) -> None:
    fault, name, all_of_it = FAULTS[number]
    step, state = made(name)
    x = numbers(8, 8, seed=int(fdp.axis_index()))
    state = {
        key: fdp.shard(value, min_size=2) if all_of_it or key != "params" else value for key, value in state.items()
    }
    fdp.data_parallel(step)(state, x)  # without it all is well
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(fdp.FdpError, match="does not compute on parts"):
            fdp.data_parallel(step)(state, x)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=fault.__name__, marks=exhaustive if fault in REPEATED else ())
        for number, (fault, *_) in enumerate(FAULTS)
    ],
)
def test_a_mistake_about_parts_is_found(number: int) -> None:
    ranks.run(2, is_found, number)
