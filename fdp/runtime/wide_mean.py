"""The mean of narrow values, added up in a wider dtype: an all-to-all, a sum on each rank, an all-gather.

Each rank adds up one piece of the bucket for all ranks, and what it sends back is rounded once; so every rank holds the
same bits, and no more bytes are sent than a ring all-reduce of the narrow values sends.

References: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (IJHPCA 2005),
section 4.5: a reduce-scatter, and then an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fdp.distributed.group import Group
from fdp.distributed.sending import Arrived
from fdp.runtime.frames import Frame, plain_frame


class WideMean:
    """The mean of one bucket under way, in two messages; the second is started by `turn`.

    All ranks have to start, turn and finish their buckets in one order: messages carry no name.

    Args:
        own: what this rank contributes, flat, of as many elements as the ranks can share evenly; then the means.
        received: memory for as many elements, which this needs on the way.
        accumulate: the dtype to add in.
        group: the ranks.
        arrived: what to call when the second message has arrived, if the backend says so.
        frame: in which the second message starts.
    """

    def __init__(
        self,
        own: torch.Tensor,
        received: torch.Tensor,
        accumulate: torch.dtype,
        group: Group,
        arrived: Arrived | None = None,
        frame: Frame = plain_frame,
    ) -> None:
        self._frame = frame
        self._own, self._pieces = own, received.view(group.size, -1)
        self._accumulate, self._group, self._arrived = accumulate, group, arrived
        self._wait = group.all_to_all(received, own)
        self._finish: Callable[[], None] | None = None

    def turn(self) -> None:
        """Wait for all ranks' values of this rank's piece, add them up, and start sending the mean."""
        if self._finish is not None:
            return
        self._wait()
        total = self._pieces[0].to(self._accumulate)
        for piece in self._pieces[1:]:  # in the order of ranks: the result is a function of the values alone
            total += piece
        mean = self._pieces[0].copy_(total.div_(self._group.size))
        self._finish = self._frame(self._group.all_gather, self._own.view_as(self._pieces), mean, self._arrived)

    def finish(self) -> None:
        """Wait until the means of all pieces are there."""
        self.turn()
        assert self._finish is not None
        self._finish()
