"""A sum or mean over a mesh in two levels: within hosts each rank reduces a piece, between hosts pieces are reduced.

On two hosts each sends every element once, whatever the number of its ranks. Around a ring of all ranks it would send
up to twice as much.

References: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour (2017), section 4; Thakur,
Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (IJHPCA 2005), section 4.5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fdp.distributed.group import Group
from fdp.distributed.sending import Arrived
from fdp.runtime.frames import Frame, plain_frame


class TwoLevelReduction:
    """The sum or mean of one bucket under way, in three messages or more; the second is started by `turn`.

    Only the first message, which is fast, is waited for while the program goes on. The others start in `finish`.

    All ranks have to start, turn and finish their buckets in one order: messages carry no name.

    Args:
        own: what this rank contributes, flat, of as many elements as the ranks of a host can share evenly; then the
            result.
        received: memory for this rank's piece, which is that share of elements, and behind it for what arrives of it,
            as for `Group.reduce_scatter`.
        op: "sum" or "mean".
        group: all ranks of the mesh.
        arrived: what to call when the last message has arrived, if the backend says so.
        frame: in which messages after the first start.
    """

    def __init__(
        self,
        own: torch.Tensor,
        received: torch.Tensor,
        op: str,
        group: Group,
        arrived: Arrived | None = None,
        frame: Frame = plain_frame,
    ) -> None:
        *between, within = (group.along(name) for name, _ in group.sizes)
        rows = own.view(within.size, -1)
        places = received.view(-1, rows.shape[1])
        piece, arriving = places[0], places[1:]
        self._frame = frame
        self._left: list[Callable[[], Callable[[], None]]] = [
            *(functools.partial(ranks.all_reduce, piece, op) for ranks in between),
            functools.partial(within.all_gather, rows, piece, arrived),
        ]
        self._is_first = True
        self._wait: Callable[[], None] = within.reduce_scatter(piece, arriving, rows, op)

    def turn(self) -> None:
        """Wait for the first message, which stays in the host, and start the second one; later do nothing."""
        if self._is_first:
            self._is_first = False
            self._go_on()

    def finish(self) -> None:
        """Start the other messages, one after the other, and wait until the result is there."""
        while self._left:
            self._go_on()
        self._wait()

    def _go_on(self) -> None:
        self._wait()
        self._wait = self._frame(self._left.pop(0))
