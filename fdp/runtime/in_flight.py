"""The messages of one run of a step that are under way, in the order in which they started."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fdp.distributed.group import Group
from fdp.distributed.sending import Arrived
from fdp.runtime.buffers import Buffer, Stages
from fdp.runtime.order import Order


class InFlight:
    """Starts buckets and waits for them.

    Some buckets take several messages, one after the other: a mean that is added up in a wider dtype, or a reduction in
    two levels. The second message of such a bucket starts when the next bucket of the kind does, so that the wire is
    not idle meanwhile, or when it is waited for. That depends on nothing but the order of starts and waits, which ranks
    compare: all of them send all messages in one order.

    Args:
        buffers: the buckets in memory, by index.
        group: the ranks.
        order: says of the call which it is; None where nothing is sent.
    """

    def __init__(self, buffers: Mapping[int, Buffer], group: Group, order: Order | None) -> None:
        self._buffers, self._group, self._order = buffers, group, order
        self._header_due = False  # whether the header of the first bucket is still to be looked at
        self._finished_early = False
        self._waits: dict[int, Callable[[], None]] = {}
        self._stages: dict[int, Stages] = {}

    def start(self, index: int, into: torch.Tensor | None = None, arrived: Arrived | None = None) -> None:
        """Start a bucket. If it takes several messages, also start the second message of those before it.

        Args:
            index: which bucket.
            into: where what is gathered goes, if the program says so.
            arrived: what to call when it has arrived, if the backend says so.

        Raises:
            AgreementError: another rank is at another call.
        """
        buffer = self._buffers[index]
        if index == 0 and self._order is not None:  # the first to start, on all ranks
            self._order.before_start(buffer)
            self._header_due = self._order.awaits_first
        if buffer.received is None:
            self._waits[index] = buffer.start(self._group, arrived, into)
            return
        before = list(self._stages.values())
        self._stages[index] = buffer.start_stages(self._group, arrived)
        for other in before:
            other.turn()

    def wait(self, index: int) -> None:
        """Wait for a bucket. If it takes several messages, also start the second message of the bucket after it.

        Raises:
            AgreementError: another rank is at another call.
        """
        if self._header_due:
            # Before anything that came back is read, though it be of another bucket.
            self._header_due, self._finished_early = False, index != 0
            self._finish(0)
            assert self._order is not None
            self._order.after_wait(self._buffers[0])
            if index == 0:
                return
        elif index == 0 and self._finished_early:
            return
        self._finish(index)

    def _finish(self, index: int) -> None:
        if index not in self._stages:
            self._waits.pop(index)()
            return
        # What started later is on the wire already, before the last message of this one or right behind it.
        started = list(self._stages)
        for other in started[: started.index(index) + 2]:
            self._stages[other].turn()
        self._stages.pop(index).finish()
