"""Recognise a call that is like the last one without working out its signature in full.

In a training loop the state that goes in is what came out of the last call, tensor by tensor the same objects if it
was donated. Looking at each object once is far cheaper than asking each for its shape, strides and memory.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import optree
import torch

from fdp.trace.arguments import Flat, describe_leaf


class LastCall:
    """The last call of a step, as far as it can be recognised again.

    Tensors are held by weak references: a step keeps no state alive.
    """

    def __init__(self, flat: Flat, kept: frozenset[int], compares_memory: bool) -> None:
        """Remember a call.

        Args:
            flat: its arguments.
            kept: indices of leaves that the step returns as the same objects.
            compares_memory: whether it matters which leaves share memory.
        """
        self._spec, self._static = flat.spec, flat.static
        self._described = [describe_leaf(leaf) for leaf in flat.leaves]
        self._compares_memory = compares_memory
        self._known: list[tuple[weakref.ref[torch.Tensor], int, Any, Any] | None] = [
            (weakref.ref(leaf), leaf.data_ptr(), leaf.shape, leaf.stride()) if index in kept else None
            for index, leaf in enumerate(flat.leaves)
        ]
        self._memory = {
            leaf.untyped_storage()._cdata
            for index, leaf in enumerate(flat.leaves)
            if index in kept and isinstance(leaf, torch.Tensor)
        }
        tensors = sum(isinstance(leaf, torch.Tensor) for leaf in flat.leaves)
        storages = {leaf.untyped_storage()._cdata for leaf in flat.leaves if isinstance(leaf, torch.Tensor)}
        self._usable = not compares_memory or len(storages) == tensors

    def is_like(self, leaves: list[Any], spec: optree.PyTreeSpec, static: tuple[Any, ...]) -> bool:
        """Whether a call certainly has the signature of the last one; False if that takes a closer look."""
        if not self._usable or len(leaves) != len(self._known):
            return False
        if any(one is not two for one, two in itertools.zip_longest(static, self._static)):
            return False
        new: set[int] = set()
        count = 0
        for leaf, known, described in zip(leaves, self._known, self._described, strict=True):
            # The same object may have been given other memory, or another shape, since: x.data = y, x.t_().
            tensor = None if known is None else known[0]()
            if (
                known is not None
                and tensor is not None
                and tensor is leaf
                and tensor.data_ptr() == known[1]
                and tensor.shape == known[2]
                and tensor.stride() == known[3]
            ):
                continue
            if describe_leaf(leaf) != described:
                return False
            if self._compares_memory and isinstance(leaf, torch.Tensor):
                new.add(leaf.untyped_storage()._cdata)
                count += 1
        if self._compares_memory and (len(new) != count or new & self._memory):
            return False
        return bool(spec == self._spec)
