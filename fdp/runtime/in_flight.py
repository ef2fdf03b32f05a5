"""The messages of one run of a step that are under way, in the order in which they started."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fdp.distributed.group import Group
from fdp.distributed.sending import Arrived
from fdp.runtime.buffers import Buffer
from fdp.runtime.order import Order
from fdp.runtime.wide_mean import WideMean


class InFlight:
    """Starts buckets and waits for them.

    A mean that is added up in a wider dtype takes two messages, and a rank has to add up between them. It does so when
    the next mean of the kind starts, so that the wire is not idle meanwhile, or is waited for. That depends on nothing
    but the order of starts and waits, which ranks compare: all of them send all messages in one order.

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
        self._means: dict[int, WideMean] = {}

    def start(self, index: int, into: torch.Tensor | None = None, arrived: Arrived | None = None) -> None:
        """Start a bucket. If it takes two messages, also start the second message of the bucket before it.

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
        before = list(self._means.values())
        self._means[index] = buffer.start_wide(self._group, arrived)
        for mean in before:
            mean.turn()

    def wait(self, index: int) -> None:
        """Wait for a bucket. If it takes two messages, also start the second message of the bucket after it.

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
        if index not in self._means:
            self._waits.pop(index)()
            return
        # What started later is on the wire already, before the second message of this one or right behind it.
        started = list(self._means)
        for other in started[: started.index(index) + 2]:
            self._means[other].turn()
        self._means.pop(index).finish()
