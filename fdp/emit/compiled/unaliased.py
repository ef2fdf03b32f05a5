"""Results of compiled programs in memory of their own.

What a compiler makes of a graph may return memory that it was given, where it sees that nothing else reads it: that of
a bucket, or of donated state, which the next call writes. The graph does not say whose memory that is, so the first
results are looked at, and those that do not lie in memory of their own are copied at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Apart:
    """A compiled program whose results share memory with nothing that a later call writes.

    Args:
        function: takes one list of tensors, empties it, and returns the results.
        free: positions of the inputs that no call writes; results may be views of them.
        alone: whether results must not share memory with each other either, since any of them may be donated next.
    """

    def __init__(self, function: Callable[[list[Any]], Sequence[Any]], free: frozenset[int], alone: bool) -> None:
        self._function, self._free, self._alone = function, free, alone
        self._copied: tuple[int, ...] | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if self._copied == ():
            return self._function(inputs)
        given = [] if self._copied is not None else list(inputs)
        made = list(self._function(inputs))
        if self._copied is None:
            self._copied = self._shared(given, made)
        for at in self._copied:
            made[at] = made[at].clone()
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
            if memory in taken:
                found.append(at)
            elif self._alone:
                taken.add(memory)
        return tuple(found)


def _memory(tensor: Any) -> tuple[torch.device, int] | None:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()
