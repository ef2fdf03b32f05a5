"""Compare a newly compiled program with the one that runs operator by operator, once, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optree
import torch

from fdp.emit.check import copy_of, differences, forked, give_back_memory, held_generators
from fdp.emit.emitted import Emitted
from fdp.errors import CompileError, FdpError, build_message
from fdp.pytree import leaf_names
from fdp.trace.effects import effects_of

_ROUNDING = 4
"""Inputs are shaken by so many units in the last place, to see how much rounding can do to each result."""

_MUCH = 1e3
"""Sums of many numbers round by more than that, and second moments square it."""


def check_compiled(compiled: Emitted, emitted: Emitted, originals: Sequence[torch.Tensor]) -> None:
    """Run both programs of a plan side by side, on this rank alone.

    Fused arithmetic rounds in other places, and a step may make much of that: where a gradient is zero but for
    rounding, Adam takes a whole step to one side or the other. So the program that is trusted runs a second time, on
    inputs that differ by rounding: results may differ by as much as that changes them. Random numbers that the
    compiler draws in its own way leave values that cannot be compared; then only shapes, dtypes and the run are.

    Args:
        compiled: what the compiler made.
        emitted: the same plan, operator by operator.
        originals: the inputs of the first call; they are not changed.

    Raises:
        CompileError: names each output that differs, and by how much.
    """
    name = emitted.plan.trace.name
    assert compiled.options is not None
    devices = sorted({t.device.index or 0 for t in originals if t.device.type == "cuda"})
    generators = held_generators(emitted)
    give_back_memory()
    with forked(devices, generators):
        try:
            found = optree.tree_leaves(compiled.rehearse([copy_of(tensor) for tensor in originals]))
        except FdpError:
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise CompileError(
                build_message(
                    f"what was compiled for step {name!r} does not run.",
                    [f"{type(error).__name__}: {first}"],
                    remedy="compile=False runs it operator by operator.",
                )
            ) from error
    with forked(devices, generators):
        expected, spec = optree.tree_flatten(emitted.rehearse([copy_of(tensor) for tensor in originals]))
    names = leaf_names(optree.tree_unflatten(spec, range(len(expected))), "output")
    draws = any(effects_of(node).random for node in emitted.plan.trace.graph.graph.nodes)
    if draws and not compiled.options.draws_alike:
        offenders = [
            f"{key}: {tuple(one.shape)} {one.dtype} where {tuple(two.shape)} {two.dtype} is due"
            for key, one, two in zip(names, found, expected, strict=True)
            if isinstance(two, torch.Tensor) and (one.shape, one.dtype) != (two.shape, two.dtype)
        ]
    else:
        offenders = differences(names, found, expected)
        if offenders:
            with forked(devices, generators):
                shaken = [_shaken(copy_of(tensor)) for tensor in originals]
                again = optree.tree_leaves(emitted.rehearse(shaken))
            offenders = differences(names, found, expected, again, factor=_MUCH, most=math.inf)
    give_back_memory()
    if offenders:
        raise CompileError(
            build_message(
                f"the compiled step {name!r} does not compute what its operators compute on the same inputs.",
                offenders,
                remedy="compile=False runs it operator by operator; please report the step.",
            )
        )


def _shaken(tensor: torch.Tensor) -> Any:
    """The same values but for their last digits."""
    if not tensor.is_floating_point():
        return tensor
    size = _ROUNDING * torch.finfo(tensor.dtype).eps
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return flat.mul_(1 + size * (2 * torch.rand_like(flat) - 1)).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
