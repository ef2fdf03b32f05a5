"""Whether arguments are those that a step was traced for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdp import pytree
from fdp.distributed.comparable import comparable
from fdp.errors import ArgumentError, build_message
from fdp.trace import Trace, sharing


def check_signature(trace: Trace, leaves: Sequence[Any], spec: pytree.Spec) -> None:
    """Refuse arguments that a step was not traced for.

    Args:
        trace: of the step.
        leaves: of the arguments.
        spec: their structure.

    Raises:
        ArgumentError: names each argument that is another one.
    """
    if spec != trace.in_spec:
        raise ArgumentError(
            build_message(
                f"the plan of step {trace.name!r} is for arguments of another structure.",
                [f"planned: {trace.in_spec}", f"given: {spec}"],
                remedy="call the Step itself, which traces again, or pass arguments of the planned structure.",
            )
        )
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    offenders = [
        f"{item.name}: planned {list(item.shape)} {item.dtype} {item.device} strides {list(item.stride)} offset "
        f"{item.offset}, given {list(tensor.shape)} {tensor.dtype} {tensor.device} strides {list(tensor.stride())} "
        f"offset {tensor.storage_offset()}"
        for item, tensor in zip(trace.inputs, tensors, strict=False)
        if (item.shape, item.dtype, item.device, item.stride, False, False)
        != (*_geometry(tensor), tensor.is_conj(), tensor.is_neg())
        or (trace.depends_on_storage_offsets and item.offset != tensor.storage_offset())
    ]
    if any(item.donated for item in trace.inputs):
        offenders += [
            f"{item.name}: shares memory with another argument or with itself, which was not planned"
            for item, shared in zip(trace.inputs, sharing(tensors), strict=False)
            if shared and not item.shares_memory
        ]
    plain = [comparable(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    planned = [value for _, value in trace.replicated_constants][: len(plain)]
    if plain != planned or len(tensors) != len(trace.inputs):
        offenders.append(f"constants: planned {planned}, given {plain}")
    if offenders:
        raise ArgumentError(
            build_message(
                f"the plan of step {trace.name!r} is for other arguments.",
                offenders,
                remedy="call the Step itself, which traces again, or pass arguments of the planned signature.",
            )
        )


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride()
