"""Compare a newly compiled program with the one that runs operator by operator, once, on the same inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import optree
import torch

from fdp.emit.check import copy_of, differences, forked, give_back_memory, held_generators
from fdp.emit.emitted import Emitted
from fdp.errors import CompileError, FdpError, build_message
from fdp.pytree import leaf_names
from fdp.trace.effects import effects_of

_ROUNDING = 4
"""Inputs are shaken by so many units in the last place, to see how much rounding can do to each result."""

_SHAKES = 2
_SHARE = 0.02
"""So much of its change a result may miss: rounding turns a comparison here and there, and what depends on it."""

_SHARE_OF_SIGNS = 0.3
"""Likewise where nothing but signs is left of gradients."""

_MUCH = 1e3
"""Where rounding alone changes a result by a tenth, fused arithmetic may by so much more: nothing in it is more than
rounding, as in the moments of a gradient that is zero; long sums round by more, and second moments square it."""

_PREFIX = re.compile(r"^output(\[\d+\])?")


def check_compiled(compiled: Emitted, emitted: Emitted, originals: Sequence[torch.Tensor]) -> None:
    """Run both programs of a plan side by side, on this rank alone.

    Fused arithmetic rounds in other places, and a step may make much of that: where a gradient is zero but for
    rounding, Adam takes a whole step to one side or the other. So where results differ the program that is trusted runs
    on inputs that differ by rounding, to see which elements that changes and by how much. Random numbers that the
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
            f"{key}: {list(one.shape)} {one.dtype} where {list(two.shape)} {two.dtype} is due"
            for key, one, two in zip(names, found, expected, strict=True)
            if isinstance(two, torch.Tensor) and (one.shape, one.dtype) != (two.shape, two.dtype)
        ]
    else:
        offenders = differences(names, found, expected)
        if offenders:
            shaken = []
            for seed in range(_SHAKES):
                inputs = [_shaken(copy_of(tensor), seed) for tensor in originals]
                with forked(devices, generators):
                    shaken.append(optree.tree_leaves(emitted.rehearse(inputs)))
            offenders = [
                f"{key}: {list(two.shape)} {two.dtype} differs by {_largest(one, two):.3g}"
                for key, one, two, *others in zip(names, found, expected, *shaken, strict=True)
                if isinstance(two, torch.Tensor)
                and not _is_rounding(one, two, others, _before(key, two, emitted, originals))
            ]
    give_back_memory()
    if offenders:
        raise CompileError(
            build_message(
                f"the compiled step {name!r} does not compute what its operators compute on the same inputs.",
                offenders,
                remedy="compile=False runs it operator by operator; please report the step.",
            )
        )


def _largest(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest difference of two tensors, infinite if they are not of one shape."""
    return float((one.double() - two.double()).abs().max()) if one.shape == two.shape else math.inf


def _before(name: str, value: torch.Tensor, emitted: Emitted, originals: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What a leaf of the new state was in the old one: the input of the same key path behind the argument's name."""
    path = _PREFIX.sub("", name)
    for item, tensor in zip(emitted.plan.trace.inputs, originals, strict=True):
        if path and item.name.endswith(path) and (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
            return tensor
    return None


def _is_rounding(
    found: torch.Tensor, expected: torch.Tensor, shaken: Sequence[torch.Tensor], before: torch.Tensor | None
) -> bool:
    """Whether a result differs from what is expected by no more than rounding can make of it.

    What counts is the change from the old value, where there is one: a step changes little, and an update that is lost
    is all of it. Its size is the sum of squares, so that it does not matter if rounding turns a few signs.

    Args:
        found: the result.
        expected: what the trusted program makes of the same inputs.
        shaken: what it makes of inputs that differ by rounding.
        before: the old value.
    """
    if not differences([""], [found], [expected]):
        return True
    if not expected.is_floating_point() or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return False
    two = expected[finite].double()
    change = two if before is None else two - before.detach()[finite].double()
    size, count = float(change.norm()), change.numel()
    if not count:
        return True
    share = _SHARE
    if float(change.abs().max()) <= 2 * size / math.sqrt(count):
        # All elements change by about as much, as by Adam at first: of a gradient it leaves the sign. Of one in fifty,
        # or of one at least, rounding may turn it.
        share = max(_SHARE_OF_SIGNS, 2 * math.sqrt(math.ceil(count / 50) / count))
    noise = max(float((other[finite].double() - two).nan_to_num(math.inf).norm()) for other in shaken)
    excused = _MUCH * noise if noise > size / 10 else 3 * noise
    return float((found[finite].double() - two).norm()) <= max(share * size, excused)


def _shaken(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The same values but for their last digits."""
    if not tensor.is_floating_point():
        return tensor
    size = _ROUNDING * torch.finfo(tensor.dtype).eps
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    generator = torch.Generator(tensor.device).manual_seed(seed)
    away = torch.rand(flat.shape, dtype=flat.dtype, device=flat.device, generator=generator)
    return flat.mul_(1 + size * (2 * away - 1)).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
