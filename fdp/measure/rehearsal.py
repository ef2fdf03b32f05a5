"""Runs that are there to be measured: on copies of what a step would change, and without a trace in random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fdp.emit import Emitted
from fdp.emit.check import copy_of, forked, held_generators
from fdp.plan import Plan


def fresh(plan: Plan, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs of a step for one run of it: copies of what it is allowed to change, all else as it is."""
    return [
        copy_of(tensor) if item.donated else tensor for item, tensor in zip(plan.trace.inputs, tensors, strict=True)
    ]


@contextmanager
def undisturbed(emitted: Emitted) -> Iterator[None]:
    """Draw random numbers as a step does, and then go on as if none had been drawn."""
    inputs = emitted.plan.trace.inputs
    devices = sorted({item.device.index or 0 for item in inputs if item.device.type == "cuda"})
    with forked(devices, held_generators(emitted)):
        yield
