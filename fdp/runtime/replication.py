"""Refuses rank-local results of a step as replicated state of a later call, unless they are labelled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdp.errors import ReplicationError, build_message
from fdp.pytorch.tensors import storage_id
from fdp.state import rank_local
from fdp.trace import Output, Trace
from fdp.trace.operators.effects import storages_of


class Replication:
    """Checks the inputs of a step, and notes which of its results are rank-local.

    Args:
        trace: of the step.
        refuses: whether inputs are looked at.
    """

    def __init__(self, trace: Trace, refuses: bool) -> None:
        self._name = trace.name
        self._state = [at for at, item in enumerate(trace.inputs) if item.replicated]
        held = [(getattr(trace.graph, target), f"closed-over tensor {name}") for target, name in trace.closed_over]
        held = [(tensor, name) for tensor, name in held if tensor.layout == torch.strided]
        self._held = [tensor for tensor, _ in held]
        self._names = [*(trace.inputs[at].name for at in self._state), *(name for _, name in held)]
        self.refuses = refuses and bool(self._state or self._held)
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
        own = [
            output.part is not None or (output.varying and (output.per_rank or output.labelled)) for output in outputs
        ]
        self._own = [
            (at, f"{_kind_of(output)}{output.name} of step {trace.name!r}")
            for at, output in enumerate(outputs)
            if own[at] and kept.isdisjoint(storages_of(made[at]))  # type: ignore[index,arg-type]
        ]
        self._looked = False
        # New values in memory that may have been noted: where inputs are looked at, that of state is not.
        self._others = [
            at
            for at, output in enumerate(outputs)
            if not own[at] and output.slot is not None and not (refuses and trace.inputs[output.slot].replicated)
        ]

    def refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse inputs of a call that may differ between ranks.

        Raises:
            ReplicationError: names each, and which result of which step it was.
        """
        looked_at = [*(tensors[at] for at in self._state), *self._held]
        found = rank_local.find(looked_at)
        if not found:
            return
        offenders = [
            f"{self._names[at]}: {list(looked_at[at].shape)} {looked_at[at].dtype}, was {what}" for at, what in found
        ]
        raise ReplicationError(
            build_message(
                f"step {self._name!r} was called with each rank's own tensors in the place of replicated state.",
                offenders,
                remedy="label what is each rank's own and carries on, outside of the step and before its first call: "
                "state[...] = fdp.per_rank(state[...]). Average what is to be replicated (fdp.pmean), or take one "
                "rank's values (fdp.replicate). Data of one call belong in batch_argnums.",
            )
        )

    def note(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note which results are rank-local, and which memory no longer holds one."""
        if self._own and not self._looked:
            # A compiler may lay a replicated result into memory of another one: then that is not noted.
            own = {at for at, _ in self._own}
            others = {_memory(tensor) for at, tensor in enumerate(outputs) if at not in own}
            self._own = [(at, what) for at, what in self._own if _memory(outputs[at]) not in others]
            self._looked = True
        if self._own:
            rank_local.note([(outputs[at], what) for at, what in self._own])
        if self._others and rank_local.notes:
            rank_local.forget([outputs[at] for at in self._others])


def _kind_of(output: Output) -> str:
    """The kind of a result, as text before its name."""
    if output.part is not None:
        return "this rank's part of "
    return f"the value of the {output.container.adjective} " if output.labelled else ""


def _memory(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())
