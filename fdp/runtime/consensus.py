"""What the ranks of a step agree on: its schedule before they send anything, and at each call which call it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fdp.distributed.group import Group
from fdp.emit.backend import Backend
from fdp.emit.codegen.program import Program
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
        backend: what made the program, settled.
        compare_state: whether replicated inputs and closed-over tensors are compared bit for bit.
        communicates: False if nothing is ever sent.

    Attributes:
        because: why the step was traced again, for messages; empty at first.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        group: Group,
        agreed: Agreements,
        backend: Backend,
        compare_state: bool,
        communicates: bool,
    ) -> None:
        self._plan, self._program, self._group = plan, program, group
        self._agreed, self._compare_state, self._communicates = agreed, compare_state, communicates
        self._backend = backend
        self._key = self._key_of(backend)
        self._order: Order | None = None
        self.because = ""

    @property
    def digest(self) -> str:
        """A short name for the schedule: the same on ranks whose messages fit together."""
        return self._key[0]

    def agree(self, tensors: list[torch.Tensor], backend: Backend | None = None) -> bool:
        """Compare the schedule, and the state that it starts from, with those of the other ranks.

        Args:
            tensors: the inputs of the call.
            backend: what is about to make another program of the plan, if something is.

        Returns:
            Whether there was something to compare: the schedule had not been agreed on before.
        """
        if not self._communicates:
            return False
        made_by = self._backend if backend is None else backend.settled(self._plan)
        key = self._key if backend is None else self._key_of(made_by)
        if key in self._agreed:
            return False
        made = made_by.agreed_text
        number, compares = agree(self._plan, self._group, tensors, self._compare_state, made, self.because)
        self._agreed[key] = Agreed(number, key[0], compares)
        return True

    def forget(self, backend: Backend | None = None) -> None:
        """Forget that ranks agreed, so that they do it again: something came between."""
        self._agreed.pop(self._key if backend is None else self._key_of(backend.settled(self._plan)), None)
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

    def _key_of(self, settled: Backend) -> tuple[str, Group]:
        return digest(self._plan, settled.agreed_text), self._group
