"""The inputs of runs that are there to be measured: copies of what a step would change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdp.compare import copy_of
from fdp.plan import Plan


def fresh(plan: Plan, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs of a step for one run of it: copies of what it is allowed to change, all else as it is."""
    return [
        copy_of(tensor) if item.donated else tensor for item, tensor in zip(plan.trace.inputs, tensors, strict=True)
    ]
