"""Checks that values which numbers are drawn for have the strides of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import fx

from fdp.compare.copies import copy_of, give_back_memory
from fdp.compare.replay import Lookup, Replay
from fdp.compare.restored import closed_over_unchanged, undisturbed
from fdp.context.ambient import plain_context
from fdp.errors import TraceError, build_message
from fdp.runtime.emitted import Emitted
from fdp.trace import uncertain_for_draws
from fdp.trace.operators.effects import tensors_in
from fdp.trace.operators.source import located


class _AllSeen(Exception):
    """Nothing that runs later matters."""


def check_strides(emitted: Emitted, tensors: Sequence[torch.Tensor]) -> None:
    """Check the strides of values that numbers are drawn for, where the trace is uncertain.

    The comparison with the step sees it as well: other numbers are drawn. This is for steps that are not compared. The
    graph of the trace runs once, on copies, as far as needed.

    Args:
        emitted: the emitted step.
        tensors: those of a call; they are not changed.

    Raises:
        TraceError: names each value whose strides differ, and the line.
    """
    left = uncertain_for_draws(emitted.plan.trace)
    if not left:
        return
    otherwise: dict[fx.Node, str] = {}
    offenders: list[str] = []

    def look(node: fx.Node, value_of: Lookup, result: object) -> None:
        for found, said in zip(tensors_in(result), tensors_in(node.meta.get("val")), strict=False):
            if _order(found) != _order(said):
                otherwise[node] = f"{located(node)}: strides {list(found.stride())}, not {list(said.stride())}"
        if node in left:
            left.discard(node)
            if node in otherwise:
                first = next(each for each in otherwise if each is node or _leads_to(each, node))
                offenders.append(otherwise[first])
        if not left:
            raise _AllSeen

    give_back_memory()
    others = emitted.group.others("equal")
    with closed_over_unchanged(emitted), undisturbed(emitted), plain_context(), suppress(_AllSeen):
        Replay(emitted.plan.trace.graph, [copy_of(x) for x in tensors], others, look, looks_inside=True).run()
    give_back_memory()
    if offenders:
        raise TraceError(
            build_message(
                f"step {emitted.plan.trace.name!r} draws random numbers for values whose memory order differs from "
                "what torch predicts: elements would get other numbers than in the step itself.",
                list(dict.fromkeys(offenders)),
                remedy="call .contiguous() on the argument of dropout, or of another operator that draws.",
            )
        )


def _leads_to(one: fx.Node, two: fx.Node) -> bool:
    """Whether a value is computed from another one."""
    seen: set[fx.Node] = set()
    reached = [two]
    while reached:
        node = reached.pop()
        if node is one:
            return True
        reached += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)
    return False


def _order(tensor: torch.Tensor) -> list[int]:
    return [step for number, step in zip(tensor.shape, tensor.stride(), strict=True) if number != 1 and tensor.numel()]
