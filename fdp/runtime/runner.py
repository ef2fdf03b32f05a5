"""Runs the program of a step on input tensors, in the memory of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fdp.context.ambient import plain_context
from fdp.distributed.other_ranks import OtherRanks
from fdp.emit.codegen.program import Program
from fdp.plan import Plan
from fdp.pytree import Tree
from fdp.runtime.residence import Residence


class Runner:
    """Runs one program.

    Args:
        plan: that it carries out.
        program: the program.
        residence: where it lives.

    Attributes:
        function: of the program.
    """

    def __init__(self, plan: Plan, program: Program, residence: Residence) -> None:
        self.function, self._residence = program.function, residence
        self._out_spec = plan.trace.out_spec
        self._constants = [o.constant if o.node is None else _TENSOR for o in plan.trace.outputs]
        self._all_tensors = all(constant is _TENSOR for constant in self._constants)

    def run(
        self, tensors: list[torch.Tensor], start: Callable[..., None], wait: Callable[[int], None]
    ) -> Sequence[torch.Tensor]:
        """Run the program on its input tensors; the list is emptied.

        Args:
            tensors: the inputs, in the order of `Trace.inputs`.
            start: starts a bucket.
            wait: waits for one.

        Returns:
            The tensors among the results of the step.
        """
        # In this order: to leave inference mode switches gradients on.
        with plain_context(), torch.no_grad():
            return self._residence.call(self.function, tensors, start, wait)

    def run_alone(
        self, tensors: list[torch.Tensor], others: OtherRanks, look: Callable[[], None]
    ) -> Sequence[torch.Tensor]:
        """As `run`, on this rank alone; nothing is sent.

        Args:
            tensors: the inputs.
            others: what other ranks are taken to hold.
            look: is called at each start and wait: such a run may take long, and another rank may be gone meanwhile.
        """

        def start(index: int, into: torch.Tensor | None = None) -> None:
            look()
            self._residence.buffers[index].pretend(others, into)

        return self.run(tensors, start, lambda index: look())

    def put_together(self, outputs: Sequence[object]) -> Tree:
        """The result of the step, built from its tensors."""
        if not self._all_tensors:
            it = iter(outputs)
            outputs = [next(it) if constant is _TENSOR else constant for constant in self._constants]
        return self._out_spec.unflatten(outputs)


_TENSOR = object()
