"""Compare a newly compiled program with the step itself, once, on the same inputs and random numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp import pytree
from fdp.emit.check import (
    Difference,
    NotRunnable,
    accelerators,
    check_emitted,
    copy_of,
    different,
    give_back_memory,
    undisturbed,
    wrong_trace,
)
from fdp.emit.emitted import Emitted
from fdp.errors import CompileError, FdpError, build_message, first_line
from fdp.trace import Flat, Roles
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


def check_compiled(compiled: Emitted, emitted: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles) -> None:
    """Run what was compiled beside the step itself, on this rank alone.

    Where both draw the same random numbers that is all, mostly: what compiles a trace that is wrong is wrong, too.
    But fused arithmetic rounds in other places, and a step may make much of that: where a gradient is zero but for
    rounding, Adam takes a whole step to one side or the other. So where results differ, the plan runs operator by
    operator as well. It has to compute what the step does; and if that is not enough, it runs on inputs that differ by
    rounding, to see how much that can do. Random numbers that the compiler draws in its own way leave values that
    cannot be compared; then only shapes, dtypes and the run are.

    Args:
        compiled: what the compiler made.
        emitted: the same plan, operator by operator.
        step: the user's function.
        flat: the arguments of the first call; they are not changed.
        roles: what each argument is.

    Raises:
        CompileError: names each output that differs, and by how much.
        TraceError: likewise; it is the trace that is wrong.
    """
    assert compiled.options is not None
    draws = any(effects_of(node).random for node in emitted.plan.trace.graph.graph.nodes)
    if draws and not compiled.options.draws_alike:
        check_emitted(emitted, step, flat, roles)
        _check_shapes(compiled, emitted, flat)
        return

    def excuse(differences: list[Difference]) -> None:
        _excuse_rounding(differences, emitted, step, flat, roles)

    try:
        check_emitted(compiled, step, flat, roles, excuse)
    except NotRunnable as error:
        check_emitted(emitted, step, flat, roles)  # or it is the trace that cannot be run
        assert isinstance(error.__cause__, Exception)
        raise _not_runnable(emitted.plan.trace.name, error.__cause__) from error.__cause__


def _excuse_rounding(
    offenders: list[Difference], emitted: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles
) -> None:
    """Raise an error unless what was compiled differs from the step by rounding alone."""
    originals = flat.tensors
    # Kernels of a device need not repeat themselves, and what is rounded for the wire turns on a last digit: the check
    # knows how to deal with that.
    noisy = bool(accelerators(emitted)) or emitted.plan.trace.wire is not None
    if noisy:
        check_emitted(emitted, step, flat, roles)
    with undisturbed(emitted):
        leaves, spec = pytree.flatten(emitted.rehearse([copy_of(tensor) for tensor in originals]))
    names = pytree.names_in(spec, "output")
    trusted = {offender.index: leaves[offender.index] for offender in offenders}
    if not noisy:
        named = [names[offender.index] for offender in offenders]
        wrong = different(named, trusted.values(), [offender.expected for offender in offenders])
        if wrong:
            raise wrong_trace(emitted.plan.trace.name, [difference.text for difference in wrong])
    del leaves

    def left(shaken: Sequence[Sequence[Any]]) -> list[Difference]:
        return [
            o
            for o in offenders
            if isinstance(o.expected, torch.Tensor)
            and not _is_rounding(
                o.found,
                trusted[o.index],
                [values[o.index] for values in shaken],
                _before(names[o.index], trusted[o.index], emitted, originals),
            )
        ]

    offenders = left([])
    if offenders:
        shaken = []
        for seed in range(_SHAKES):
            inputs = [_shaken(copy_of(tensor), seed) for tensor in originals]
            with undisturbed(emitted):
                shaken.append(pytree.leaves_of(emitted.rehearse(inputs)))
        offenders = left(shaken)
    if offenders:
        texts = [
            f"{names[o.index]}: {list(two.shape)} {two.dtype} differs by {_largest(o.found, two):.3g}"
            for o in offenders
            for two in [trusted[o.index]]
        ]
        raise _not_the_same(emitted.plan.trace.name, texts)


def _check_shapes(compiled: Emitted, emitted: Emitted, flat: Flat) -> None:
    """Run what was compiled, and look at the shapes and dtypes of what it returns."""
    give_back_memory()
    with undisturbed(emitted):
        try:
            found = pytree.leaves_of(compiled.rehearse([copy_of(tensor) for tensor in flat.tensors]))
        except FdpError:
            raise
        except Exception as error:
            raise _not_runnable(emitted.plan.trace.name, error) from error
    offenders = [
        f"{due.name}: {list(one.shape)} {one.dtype} where {list(due.shape)} {due.dtype} is due"
        for due, one in zip(emitted.plan.trace.outputs, found, strict=True)
        if due.shape is not None and (tuple(one.shape), one.dtype) != (due.shape, due.dtype)
    ]
    give_back_memory()
    if offenders:
        raise _not_the_same(emitted.plan.trace.name, offenders)


def _not_runnable(name: str, error: Exception) -> CompileError:
    return CompileError(
        build_message(
            f"what was compiled for step {name!r} does not run.",
            [f"{type(error).__name__}: {first_line(error)}"],
            remedy="compile=False runs it operator by operator.",
        )
    )


def _not_the_same(name: str, offenders: Sequence[str]) -> CompileError:
    return CompileError(
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
        shaken: what it makes of inputs that differ by rounding; none if the change alone is to excuse the result.
        before: the old value.
    """
    if not different([""], [found], [expected]):
        return True
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if expected.is_complex():
        parts = [torch.view_as_real(each.resolve_conj()) for each in (found, expected, *shaken)]
        return _is_rounding(parts[0], parts[1], parts[2:], before if before is None else torch.view_as_real(before))
    if not expected.is_floating_point():
        return False
    finite = expected.isfinite()
    if not finite.all():
        if not torch.equal(finite, found.isfinite()) or not torch.equal(
            found[~finite].nan_to_num(), expected[~finite].nan_to_num()
        ):
            return False
        found, expected, *shaken = (each[finite] for each in (found, expected, *shaken))
        before = None if before is None else before[finite]
    elif not found.isfinite().all():
        return False
    change = expected.detach() if before is None else _wide(expected) - _wide(before)
    size, count = _norm(change), change.numel()
    if not count:
        return True
    share = _SHARE
    if float(change.abs().max()) <= 2 * size / math.sqrt(count):
        # All elements change by about as much, as by Adam at first: of a gradient it leaves the sign. Of one in fifty,
        # or of one at least, rounding may turn it.
        share = max(_SHARE_OF_SIGNS, 2 * math.sqrt(math.ceil(count / 50) / count))
    noise = max((_norm((_wide(other) - _wide(expected)).nan_to_num(math.inf)) for other in shaken), default=0.0)
    excused = _MUCH * noise if noise > size / 10 else 3 * noise
    return _norm(_wide(found) - _wide(expected)) <= max(share * size, excused)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In a type in which differences of such values are exact enough."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _shaken(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The same values but for their last digits."""
    if not tensor.is_floating_point():
        return tensor
    size = _ROUNDING * torch.finfo(tensor.dtype).eps
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    generator = torch.Generator(tensor.device).manual_seed(seed)
    away = torch.rand(flat.shape, dtype=flat.dtype, device=flat.device, generator=generator)
    return flat.mul_(1 + size * (2 * away - 1)).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
