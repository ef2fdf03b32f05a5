"""Results of compiled programs in memory of their own, with the strides of the trace.

A compiled program may return memory that it was given, if nothing else in the graph reads it: that of a bucket, or of
donated state, which the next call writes. The graph does not say whose memory that is. So the first results are
inspected, and those that share such memory are copied at every call. So are results whose strides are not those of the
trace: a compiler may choose others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp.emit.memory.elements import with_strides


class UnaliasedResults:
    """A compiled program, with copies of results that share memory which a later call writes.

    Args:
        function: takes one list of tensors, empties it, and returns the results.
        strides: those that each result is to have.
        free: positions of the inputs that no call writes; results may be views of them.
        alone: whether results must not share memory with each other either, since any of them may be donated next.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        strides: Sequence[Sequence[int]],
        free: frozenset[int],
        alone: bool,
    ) -> None:
        self._function, self._strides, self._free, self._alone = function, strides, free, alone
        self._copied: tuple[int, ...] | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if self._copied == ():
            return self._function(inputs)
        given = [] if self._copied is not None else list(inputs)
        made = list(self._function(inputs))
        if self._copied is None:
            self._copied = self._shared(given, made)
        for at in self._copied:
            made[at] = with_strides(made[at], self._strides[at], anew=True)
        return made

    def _shared(self, given: Sequence[Any], made: Sequence[Any]) -> tuple[int, ...]:
        taken = {
            memory
            for at, tensor in enumerate(given)
            if at not in self._free and (memory := _memory(tensor)) is not None
        }
        found = []
        for at, tensor in enumerate(made):
            memory = _memory(tensor)
            if memory is None:
                continue
            if memory in taken or with_strides(tensor, self._strides[at]) is not tensor:
                found.append(at)
            elif self._alone:
                taken.add(memory)
        return tuple(found)


def _memory(tensor: Any) -> tuple[torch.device, int] | None:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()
