"""The messages of one call of a step, as its program starts them and waits for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from fdp.distributed.group import Group
from fdp.distributed.liveness.watched import Watched
from fdp.plan import Plan
from fdp.runtime.consensus import Consensus
from fdp.runtime.diagnostics import bucket_text, profiler_range
from fdp.runtime.in_flight import InFlight
from fdp.runtime.order import Order
from fdp.runtime.residence import Residence


class Observer(Protocol):
    """An observer of the messages of a run."""

    def around_start(self, start: Callable[[int], None]) -> Callable[[int], None]:
        """Wrap `start`, which takes the index of a bucket."""

    def around_wait(self, wait: Callable[[int], None]) -> Callable[[int], None]:
        """Wrap `wait`, which takes the index of a bucket."""

    def arrived(self, index: int) -> None:
        """Called when the message of a bucket has arrived, by any thread; never, if the backend does not report it."""


class MessagesOfCall:
    """Sends the messages of one call, reports what is awaited to the monitor, and explains failures.

    Args:
        plan: of the step.
        group: the ranks.
        residence: has the buckets in memory, once the program runs.
        consensus: knows why a message may fail.
        order: says of the call which it is; None where nothing is sent.
        watched: what is known of the other ranks; None where none is watched.
        observer: notes when messages arrive; None for no notes.
    """

    def __init__(
        self,
        plan: Plan,
        group: Group,
        residence: Residence,
        consensus: Consensus,
        order: Order | None,
        watched: Watched | None,
        observer: Observer | None,
    ) -> None:
        self._plan, self._group, self._residence, self._consensus = plan, group, residence, consensus
        self._order, self._watched, self._observer = order, watched, observer
        self._flying: InFlight | None = None

    def start(self, index: int, into: torch.Tensor | None = None) -> None:
        """Start a bucket; a gathered value may go right into the memory of an input.

        Raises:
            PeerError: another rank is gone.
            AgreementError: another rank is at another call.
        """
        if self._watched is not None:
            self._watched.awaited = functools.partial(bucket_text, self._plan, index)
        try:
            with profiler_range(self._plan, index, "starts"):
                if self._flying is None:
                    self._flying = InFlight(self._residence.buffers, self._group, self._order)
                arrived = None if self._observer is None else functools.partial(self._observer.arrived, index)
                self._flying.start(index, into, arrived)
        except (RuntimeError, dist.DistError) as error:
            raise self._consensus.peer_error(index, error) from error

    def wait(self, index: int) -> None:
        """Wait for a bucket.

        Raises:
            PeerError: another rank is gone.
            AgreementError: another rank is at another call.
        """
        if self._watched is not None:
            self._watched.awaited = functools.partial(bucket_text, self._plan, index)
        try:
            with profiler_range(self._plan, index, "is waited for"):
                assert self._flying is not None
                self._flying.wait(index)
        except (RuntimeError, dist.DistError) as error:
            raise self._consensus.peer_error(index, error) from error
