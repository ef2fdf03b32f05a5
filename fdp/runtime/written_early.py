"""Inputs that a call may have written to before it checks the header of its first message."""

from __future__ import annotations

from typing import Any

from fdp.plan import Plan, Run, Wait
from fdp.trace.operators.effects import effects_of, operator_name, storages_of


def written_early(plan: Plan) -> frozenset[int]:
    """The donated inputs that a call may have written to before it checks the header of its first message.

    They may hold anything between their old value and their new one, so they cannot be compared then.

    Args:
        plan: the plan.

    Returns:
        Their indices in `Trace.inputs`.
    """
    trace, early = plan.trace, set[int]()
    for item in plan.schedule:
        if isinstance(item, Wait):
            break
        if isinstance(item, Run):
            node = trace.nodes[trace.operations[item.operations[0]].node]
            effects = effects_of(node)
            early.update(storage for argument in effects.writes for storage in storages_of(argument))
            # A copy of the old value may be the old value itself, and is as good.
            if not effects.view and operator_name(node) != "clone":
                early.update(storages_of(node))
    made: Any = trace.graph.graph.output_node().args[0]
    outputs = [output for output in trace.outputs if output.node is not None]
    return frozenset(
        output.slot
        for output, node in zip(outputs, made, strict=True)
        if output.slot is not None and not early.isdisjoint(storages_of(node))
    )
