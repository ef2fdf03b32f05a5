"""What a step returned as each rank's own does not go in again as replicated state, unless it is labelled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdp import rank_local
from fdp.errors import ReplicationError, build_message
from fdp.trace import Trace
from fdp.trace.effects import storages_of


class Replication:
    """Looks at the inputs of a step, and notes which of its results are each rank's own.

    Args:
        trace: of the step.
        refuses: whether inputs are looked at.
    """

    def __init__(self, trace: Trace, refuses: bool) -> None:
        self._name = trace.name
        self._inputs = trace.inputs
        self._state = [at for at, item in enumerate(trace.inputs) if item.role == "state"]
        self.refuses = refuses and bool(self._state)
        placeholders = trace.graph.graph.find_nodes(op="placeholder")
        # A result that is an argument itself lies in memory of which only the caller knows what else lies there.
        kept = {
            storage
            for node, item in zip(placeholders, trace.inputs, strict=True)
            if not item.donated
            for storage in storages_of(node)
        }
        made = trace.graph.graph.output_node().args[0]
        outputs = [output for output in trace.outputs if output.node is not None]
        own = [output.varying and (output.per_rank or output.labelled) for output in outputs]
        self._own = [
            (at, f"{'the value of the labelled ' if output.labelled else ''}{output.name} of step {trace.name!r}")
            for at, output in enumerate(outputs)
            if own[at] and kept.isdisjoint(storages_of(made[at]))  # type: ignore[index,arg-type]
        ]
        # New values in memory that may have been noted: where inputs are looked at, that of state is not.
        self._others = [
            at
            for at, output in enumerate(outputs)
            if not own[at] and output.slot is not None and not (refuses and trace.inputs[output.slot].role == "state")
        ]

    def refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse inputs of a call that other ranks may hold otherwise.

        Raises:
            ReplicationError: names each, and which result of which step it was.
        """
        found = rank_local.find([tensors[at] for at in self._state])
        if not found:
            return
        items = [(self._inputs[self._state[at]], what) for at, what in found]
        first = items[0][0].name
        raise ReplicationError(
            build_message(
                f"step {self._name!r} was called with each rank's own tensors in the place of replicated state.",
                [f"{item.name}: {list(item.shape)} {item.dtype}, was {what}" for item, what in items],
                remedy=f"label what is each rank's own and carries on, outside of the step and before its first call: "
                f"{first} = fdp.per_rank({first}). Average what is to be replicated (fdp.pmean), or take one rank's "
                "values (fdp.replicate). Data of one call belong into batch_argnums.",
            )
        )

    def note(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note which results are each rank's own, and which are no longer."""
        if self._own:
            rank_local.note([(outputs[at], what) for at, what in self._own])
        if self._others and rank_local.notes:
            rank_local.forget([outputs[at] for at in self._others])
