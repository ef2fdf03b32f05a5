"""Compare a newly emitted step with the step itself, once, on the same inputs and random numbers.

Both run on this rank alone: each collective takes the other ranks to hold what this one holds. So no other rank is
needed, and whatever the trace got wrong (a constant that should not be one, an operator that does not do what its
schema says, a view that was taken for a copy) shows as a difference instead of as a wrong number.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch

from fdp.emit.emitted import Emitted
from fdp.errors import FdpError, TraceError, build_message
from fdp.pytree import leaf_names
from fdp.trace import Flat, Input, Roles, recording, run_untraced

_RELATIVE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-4, torch.complex64: 1e-4}
_RELATIVE_NARROW = 2e-2


def check_emitted(emitted: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles) -> None:
    """Run a step and what was emitted for it side by side.

    Args:
        emitted: the emitted step.
        step: the user's function.
        flat: the arguments of the first call; they are not changed.
        roles: what each argument is.

    Raises:
        TraceError: names each output that differs, and by how much; or each input that was changed.
    """
    with recording():
        _compare(emitted, step, flat, roles)


def _compare(emitted: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles) -> None:
    name = emitted.plan.trace.name
    originals = [leaf for leaf in flat.leaves if isinstance(leaf, torch.Tensor)]
    inputs = emitted.plan.trace.inputs
    devices = sorted({t.device.index or 0 for t in originals if t.device.type == "cuda"})

    graph = emitted.plan.trace.graph
    held = [getattr(graph, str(node.target), None) for node in graph.graph.find_nodes(op="get_attr")]
    generators = list({id(value): value for value in held if isinstance(value, torch.Generator)}.values())

    def untraced() -> Any:
        return run_untraced(
            step, flat, roles, emitted.group, [_copy(tensor).requires_grad_(False) for tensor in originals]
        )

    with _forked(devices, generators):
        copies = [_copy(tensor) for tensor in originals]
        try:
            found = emitted.rehearse(list(copies))
        except FdpError:
            raise
        except Exception as error:
            raise _unrunnable(name, error) from error
    _check_untouched(name, inputs, originals, copies)
    with _forked(devices, generators):
        before = _other_random_state()
        expected = untraced()
        drawn = _other_random_state() != before
    if optree.tree_structure(expected) != optree.tree_structure(found):
        raise TraceError(
            build_message(
                f"step {name!r} returned another structure when it ran by itself than when it was traced.",
                [f"traced: {optree.tree_structure(found)}", f"by itself: {optree.tree_structure(expected)}"],
                remedy="make what the step returns a function of its arguments alone.",
            )
        )
    offenders = _differences(found, expected, None)
    if drawn and not offenders:
        # Random numbers that torch does not know of are drawn. They are frozen; does anything depend on them?
        with _forked(devices, generators):
            # Two runs of the same code: on a CPU they agree to the bit, so the smallest difference tells.
            offenders = _differences(untraced(), expected, None, share=1.0 if devices else 1e-3)
    elif offenders and devices:
        # Kernels on the device may be nondeterministic; then the step differs from itself by as much.
        with _forked(devices, generators):
            offenders = _differences(found, expected, untraced())
    if offenders:
        raise TraceError(
            build_message(
                f"the trace of step {name!r} does not compute what the step computes on the same inputs.",
                offenders,
                remedy="look for values that are frozen when the step is traced: Python or NumPy random numbers, "
                "torch.manual_seed inside the step, tensors made from Python numbers that change, operators that read "
                "memory behind the dispatcher's back. check_trace=False accepts the trace as it is.",
            )
        )


@contextmanager
def _forked(devices: Sequence[int], generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Draw random numbers, and then go on as if none had been drawn."""
    states = [generator.get_state() for generator in generators]
    with torch.random.fork_rng(devices=devices):
        yield
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _other_random_state() -> tuple[Any, ...]:
    """The state of Python's random numbers, and of NumPy's if it is in use."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else str(numpy.random.get_state())


def _unrunnable(name: str, error: Exception) -> TraceError:
    first = (str(error).strip().splitlines() or [""])[0]
    return TraceError(
        build_message(
            f"what was emitted for step {name!r} does not run.",
            [f"{type(error).__name__}: {first}"],
            remedy="run the step itself on these arguments; if it runs, an operator in it cannot be traced: replace it "
            "by others.",
        )
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same geometry, also of a tensor that overlaps itself, has gaps, or begins late in its memory."""
    tensor = tensor.detach()
    offset = tensor.storage_offset()
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    memory = torch.empty(offset + size, dtype=tensor.dtype, device=tensor.device)
    memory[offset:].copy_(tensor.as_strided((size,), (1,), offset))
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def _check_untouched(
    name: str, inputs: Sequence[Input], originals: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
) -> None:
    changed = [
        item.name
        for item, before, after in zip(inputs, originals, copies, strict=True)
        if not item.donated and not _same_bits(before.detach(), after)
    ]
    if changed:
        raise TraceError(
            build_message(
                f"step {name!r} changes inputs that were not donated, through an operator that does not say so.",
                changed,
                remedy="give the operator a clone, or donate the argument.",
            )
        )


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    if torch.equal(one, two):
        return True
    return bool(((one == two) | ((one != one) & (two != two))).all())


def _differences(found: Any, expected: Any, again: Any, share: float = 1.0) -> list[str]:
    """Name the outputs that differ by more than a share of the usual tolerance, or than the step from itself."""
    names = leaf_names(expected, "output")
    repeated = optree.tree_leaves(again) if again is not None else [None] * len(names)
    offenders = []
    for name, one, two, three in zip(
        names, optree.tree_leaves(found), optree.tree_leaves(expected), repeated, strict=True
    ):
        if not isinstance(two, torch.Tensor):
            if not _equal_constants(one, two):
                offenders.append(f"{name}: {one!r} in the trace, {two!r} by itself")
            continue
        two = two.detach()
        if not isinstance(one, torch.Tensor) or (one.shape, one.dtype) != (two.shape, two.dtype):
            offenders.append(f"{name}: {_kind(one)} in the trace, {_kind(two)} by itself")
            continue
        gap, scale = _gap(one, two)
        noise = 0.0 if three is None else min(10 * _gap(two, three.detach())[0], 1e-2 * scale)
        tolerance = _RELATIVE.get(two.dtype, _RELATIVE_NARROW if two.is_floating_point() else 0.0) * scale
        if not gap <= max(share * tolerance, noise):
            offenders.append(f"{name}: {_kind(two)} differs by {gap:.3g}, where the largest value is {scale:.3g}")
    return offenders


def _gap(one: torch.Tensor, two: torch.Tensor) -> tuple[float, float]:
    """The largest difference (infinite if one is finite where the other is not), and the largest finite value."""
    if not two.numel() or _same_bits(one, two):
        return 0.0, 1.0
    if not (two.is_floating_point() or two.is_complex()):
        return float((one != two).any()), 1.0
    finite = two.isfinite()
    if not torch.equal(finite, one.isfinite()) or not _same_bits(one[~finite], two[~finite]):
        return math.inf, 0.0
    if not finite.any():
        return 0.0, 1.0
    wide = torch.complex128 if two.is_complex() else torch.float64
    one, two = one[finite].to(wide), two[finite].to(wide)
    return float((one - two).abs().max()), float(two.abs().max())


def _equal_constants(one: Any, two: Any) -> bool:
    try:
        return bool(one == two) or (one != one and two != two) or (type(one) is type(two) and " at 0x" in repr(one))
    except Exception:  # values that cannot be compared were made anew each time
        return type(one) is type(two)


def _kind(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
