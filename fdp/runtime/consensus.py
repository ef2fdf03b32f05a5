"""What the ranks of a step agree on: its schedule before they send anything, and at each call which call it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fdp.distributed.comparable import comparable
from fdp.distributed.group import Group
from fdp.emit.codegen.program import Program
from fdp.emit.compiled import Options
from fdp.errors import FdpError
from fdp.plan import Plan
from fdp.runtime.agreement import agree, digest
from fdp.runtime.diagnostics import lost_contact
from fdp.runtime.order import Agreed, Agreements, Order


class Consensus:
    """The agreements of one program with those of other ranks.

    Args:
        plan: the plan.
        program: its program.
        group: the ranks.
        agreed: what they have agreed on before; it is added to.
        options: how the program was compiled, settled; None if it runs operator by operator.
        compare_state: whether replicated inputs and closed-over tensors are compared bit for bit.
        communicates: False if nothing is ever sent.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        group: Group,
        agreed: Agreements,
        options: Options | None,
        compare_state: bool,
        communicates: bool,
    ) -> None:
        self._plan, self._program, self._group = plan, program, group
        self._agreed, self._compare_state, self._communicates = agreed, compare_state, communicates
        self._how = options_text(options)
        self._key = digest(plan, self._how), group
        self._order: Order | None = None

    @property
    def digest(self) -> str:
        """A short name for the schedule: the same on ranks whose messages fit together."""
        return self._key[0]

    def agree(self, tensors: list[torch.Tensor], options: Options | None = None) -> bool:
        """Compare the schedule, and the state that it starts from, with those of the other ranks.

        Args:
            tensors: the inputs of the call.
            options: how it is about to be compiled, if it is.

        Returns:
            Whether there was something to compare: the schedule had not been agreed on before.
        """
        if not self._communicates:
            return False
        how = self._how if options is None else options_text(options.settled(devices_of(self._plan)))
        if (key := self._key_of(how)) in self._agreed:
            return False
        number, compares = agree(self._plan, self._group, tensors, self._compare_state, how)
        self._agreed[key] = Agreed(number, key[0], compares)
        return True

    def forget(self, options: Options | None = None) -> None:
        """Forget that ranks agreed, so that they do it again: something came between."""
        how = self._how if options is None else options_text(options.settled(devices_of(self._plan)))
        self._agreed.pop(self._key_of(how), None)
        self._order = None

    def begin(self, tensors: Sequence[torch.Tensor]) -> Order | None:
        """Say which call begins, of these inputs; None if nothing is sent."""
        if self._order is None:
            if not self._communicates or not self._plan.buckets:
                return None
            self._order = Order(self._plan, self._program, self._group, self._agreed[self._key], self._agreed.attempts)
        try:
            self._order.begin(tensors)
        except (RuntimeError, dist.DistError) as error:
            raise self.peer_error(None, error) from error
        return self._order

    def peer_error(self, index: int | None, error: Exception) -> FdpError:
        """What became of a message that failed: another rank is at another call, or it is gone.

        Args:
            index: of the bucket; None if that is not known.
            error: what the backend raised.
        """
        elsewhere = None if self._order is None else self._order.explain()
        return lost_contact(self._plan, self._group, index, error) if elsewhere is None else elsewhere

    def _key_of(self, how: str) -> tuple[str, Group]:
        return self._key if how == self._how else (digest(self._plan, how), self._group)


def devices_of(plan: Plan) -> set[torch.device]:
    """The devices that a plan computes on."""
    values = (node.meta.get("val") for node in plan.trace.graph.graph.nodes)
    return {value.device for value in values if isinstance(value, torch.Tensor)}


def options_text(options: Options | None) -> str:
    """How a program is compiled, as ranks compare it; empty if it is not."""
    return "" if options is None else comparable(options)
