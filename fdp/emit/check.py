"""Compare a newly emitted step with the step itself, once, on the same inputs and random numbers.

Both run on this rank alone: each collective takes the other ranks to hold what this one holds. So no other rank is
needed, and whatever the trace got wrong (a constant that should not be one, an operator that does not do what its
schema says, a view that was taken for a copy) shows as a difference instead of as a wrong number.

It is the moment of a training run that takes the most memory, so it holds on to little. Beside the arguments there are
at most, at one time: the results of the step, and what one run of the emitted program takes on copies of the arguments
(the results of a donated argument lie in its copy). That is three states where the state is donated, and four where it
is not, beside the intermediate values of one run.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fdp import pytree
from fdp.emit.emitted import Emitted
from fdp.errors import FdpError, TraceError, build_message, first_line
from fdp.labels import unlabelled
from fdp.trace import Flat, Input, Roles, recording, run_untraced
from fdp.wire import Wire

_RELATIVE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-4, torch.complex64: 1e-4}
_RELATIVE_NARROW = 2e-2
_PIECE = 2**20
_NOBODYS_SEED = 0x6E6F626F6479
_UNITS = 4.0
"""So many units in the last place of what travels a gradient may be off, where it travels in a narrow dtype."""


@dataclass(frozen=True)
class Difference:
    """A result that is not what it should be.

    Attributes:
        index: which leaf of the results it is.
        text: its key path, and how it differs.
        found: the result.
        expected: what the step itself returns.
    """

    index: int
    text: str
    found: Any
    expected: Any


class NotRunnable(Exception):
    """What was emitted raised an error of its own, which is the cause of this one."""


Excuse = Callable[[list[Difference]], None]
"""Looks at the results that differ; returns if all of them are for reasons that are known, and raises otherwise."""


def check_emitted(
    emitted: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles, excuse: Excuse | None = None
) -> None:
    """Run a step and what was emitted for it side by side.

    Args:
        emitted: the emitted step.
        step: the user's function.
        flat: the arguments of the first call; they are not changed.
        roles: what each argument is.
        excuse: asked, if there is one, before results that differ are an error.

    Raises:
        TraceError: names each output that differs, and by how much; or each input that was changed.
        NotRunnable: where there is an `excuse`: what was emitted cannot be run.
    """
    give_back_memory()
    with recording():
        _compare(emitted, step, flat, roles, excuse)
    give_back_memory()


def give_back_memory() -> None:
    """Return to the system what is free: glibc keeps freed memory to itself, here more than the steps will ever use.

    (This relies on `malloc_trim`, which glibc alone has; elsewhere nothing happens.)
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _compare(emitted: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles, excuse: Excuse | None) -> None:
    name = emitted.plan.trace.name
    originals = flat.tensors
    inputs = emitted.plan.trace.inputs
    on_accelerator = bool(accelerators(emitted))

    def copies(donated: bool) -> list[Any]:
        return [
            copy_of(tensor) if item.donated is donated else None for item, tensor in zip(inputs, originals, strict=True)
        ]

    # What was not donated is copied once for all runs, and compared after them.
    kept = copies(donated=False)

    def untraced(wire: Wire | None = emitted.plan.trace.wire) -> Any:
        fresh = copies(donated=True)
        values = [(a if b is None else b).requires_grad_(False) for a, b in zip(kept, fresh, strict=True)]
        return _detached(run_untraced(step, flat, roles, emitted.group, values, wire))

    with undisturbed(emitted):
        _set_apart(emitted)
        before = _other_random_state()
        expected, expected_spec = pytree.flatten(unlabelled(untraced()))
        drawn = _other_random_state() != before
        left = _generator_states(emitted)
    with undisturbed(emitted):
        _set_apart(emitted)
        values = [a if b is None else b for a, b in zip(kept, copies(donated=True), strict=True)]
        try:
            found, found_spec = pytree.flatten(unlabelled(emitted.rehearse(values)))
        except FdpError:
            raise
        except Exception as error:
            if excuse is not None:
                raise NotRunnable from error
            raise _unrunnable(name, error) from error
        if left != _generator_states(emitted):
            raise _own_generator(name, emitted)
    _check_untouched(name, inputs, originals, kept)
    if expected_spec != found_spec:
        raise TraceError(
            build_message(
                f"step {name!r} returned another structure when it ran by itself than when it was traced.",
                [f"traced: {found_spec}", f"by itself: {expected_spec}"],
                remedy="make what the step returns a function of its arguments alone.",
            )
        )
    names = pytree.names_in(expected_spec, "output")
    if not drawn and not on_accelerator and emitted.plan.trace.wire is None:
        # No further run will be compared with these: each leaf is let go of as soon as it has been.
        kept.clear()
        offenders = different(names, _taken(found), _taken(expected))
    else:
        offenders = different(names, found, expected)
    if offenders and emitted.plan.trace.wire is not None:
        # The last digit of a gradient decides to which side it is rounded for the wire, and its division may round it
        # again. What that can do to each output shows where every gradient is moved by one unit in its last place.
        shaken = replace(emitted.plan.trace.wire, shaken=True)
        with undisturbed(emitted):
            again = pytree.leaves_of(untraced(shaken))
            offenders = different(names, found, expected, again, excused=_UNITS, most=math.inf)
    if offenders and excuse is not None:
        excuse(offenders)
        offenders = []
    if drawn and not offenders:
        # Random numbers that torch does not know of are drawn. They are frozen; does anything depend on them?
        with undisturbed(emitted):
            # Two runs of the same code: on a CPU they agree to the bit, so the smallest difference tells.
            again = pytree.leaves_of(untraced())
            offenders = different(names, again, expected, share=1.0 if on_accelerator else 1e-3)
    elif offenders and on_accelerator:
        # Kernels on the device may be nondeterministic; then the step differs from itself by as much.
        with undisturbed(emitted):
            offenders = different(names, found, expected, pytree.leaves_of(untraced()))
    if offenders:
        raise wrong_trace(name, [offender.text for offender in offenders])


def accelerators(emitted: Emitted) -> list[int]:
    """The accelerators that the inputs of a step lie on."""
    return sorted({item.device.index or 0 for item in emitted.plan.trace.inputs if item.device.type == "cuda"})


def _held_generators(emitted: Emitted) -> list[torch.Generator]:
    """The generators of random numbers that a step closes over."""
    graph = emitted.plan.trace.graph
    held = [getattr(graph, str(node.target), None) for node in graph.graph.find_nodes(op="get_attr")]
    return list({id(value): value for value in held if isinstance(value, torch.Generator)}.values())


@contextmanager
def undisturbed(emitted: Emitted) -> Iterator[None]:
    """Draw random numbers as a step does, and then go on as if none had been drawn."""
    generators = _held_generators(emitted)
    states = [generator.get_state() for generator in generators]
    with torch.random.fork_rng(devices=accelerators(emitted)):
        yield
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _set_apart(emitted: Emitted) -> None:
    """Put the generators that a step holds into a state in which nobody else leaves one."""
    for generator in _held_generators(emitted):
        generator.manual_seed(_NOBODYS_SEED)


def _generator_states(emitted: Emitted) -> list[bytes]:
    return [bytes(generator.get_state().tolist()) for generator in _held_generators(emitted)]


def _own_generator(name: str, emitted: Emitted) -> TraceError:
    """The refusal for a generator that a step makes or seeds: the trace holds it, and would go on with it."""
    held = emitted.plan.trace.graph.graph.find_nodes(op="get_attr")
    generators = [node for node in held if isinstance(getattr(node.graph.owning_module, node.target), torch.Generator)]
    offenders = [f"{user.target} at {user.meta.get('source')}" for node in generators for user in node.users]
    return TraceError(
        build_message(
            f"step {name!r} makes a torch.Generator or seeds one: each call of the step starts it anew, and the traced "
            "step would go on with it.",
            offenders,
            remedy="make the generator outside of the step, where it goes on from call to call; or pass the random "
            "numbers.",
        )
    )


def _other_random_state() -> tuple[Any, ...]:
    """The state of Python's random numbers, and of NumPy's if it is in use."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else str(numpy.random.get_state())


def wrong_trace(name: str, offenders: Sequence[str]) -> TraceError:
    """The refusal for a trace that computes something else; `offenders` are the results, in words."""
    return TraceError(
        build_message(
            f"the trace of step {name!r} does not compute what the step computes on the same inputs.",
            offenders,
            remedy="look for values that are frozen when the step is traced: Python or NumPy random numbers, "
            "torch.manual_seed inside the step, tensors made from Python numbers that change, operators that read "
            "memory behind the dispatcher's back. check_trace=False accepts the trace as it is.",
        )
    )


def _unrunnable(name: str, error: Exception) -> TraceError:
    return TraceError(
        build_message(
            f"what was emitted for step {name!r} does not run.",
            [f"{type(error).__name__}: {first_line(error)}"],
            remedy="run the step itself on these arguments; if it runs, an operator in it cannot be traced: replace it "
            "by others.",
        )
    )


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
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


def _comparable(x: torch.Tensor) -> torch.Tensor:
    """The same values in a type that can be compared: complex numbers of twice sixteen bits, and eight bits, cannot."""
    if x.dtype == torch.complex32:
        return x.to(torch.complex64)
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    one, two = _comparable(one), _comparable(two)
    if torch.equal(one, two):
        return True
    return bool(((one == two) | ((one != one) & (two != two))).all())


def _detached(tree: Any) -> Any:
    """Without the graph of a backward pass that nobody will run, and all that it holds."""
    return pytree.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _taken(leaves: list[Any]) -> Iterator[Any]:
    """Each leaf in turn; the list no longer holds it."""
    leaves.reverse()
    while leaves:
        yield leaves.pop()


def different(
    names: Sequence[str],
    found: Iterable[Any],
    expected: Iterable[Any],
    again: Iterable[Any] | None = None,
    share: float = 1.0,
    excused: float = 10,
    most: float = 1e-2,
) -> list[Difference]:
    """The outputs that differ by more than a share of the usual tolerance, or than the step from itself.

    The difference from itself excuses one that is some times as large, up to a share of the largest value.
    """
    offenders = []
    repeated = itertools.repeat(None) if again is None else again
    for index, (name, one, two, three) in enumerate(zip(names, found, expected, repeated, strict=False)):
        text = None
        if not isinstance(two, torch.Tensor):
            if not _equal_constants(one, two):
                text = f"{one!r} in the trace, {two!r} by itself"
        elif not isinstance(one, torch.Tensor) or (one.shape, one.dtype) != (two.shape, two.dtype):
            text = f"{_kind(one)} in the trace, {_kind(two)} by itself"
        else:
            gap, scale = _gap(one, two)
            noise = 0.0 if three is None else min(excused * _gap(two, three)[0], most * scale)
            tolerance = relative_tolerance(two.dtype) * scale
            if not gap <= max(share * tolerance, noise):
                text = f"{_kind(two)} differs by {gap:.3g}, where the largest value is {scale:.3g}"
        if text is not None:
            offenders.append(Difference(index, f"{name}: {text}", one, two))
    return offenders


def relative_tolerance(dtype: torch.dtype) -> float:
    """By what share of its largest value a result may differ."""
    return _RELATIVE.get(dtype, _RELATIVE_NARROW if dtype.is_floating_point else 0.0)


def _gap(one: torch.Tensor, two: torch.Tensor) -> tuple[float, float]:
    """The largest difference (infinite if one is finite where the other is not), and the largest finite value."""
    one, two = _comparable(one), _comparable(two)
    if torch.equal(one, two):
        return 0.0, 1.0
    same, gaps, scales = True, [0.0], list[float]()
    # In pieces: at the width in which differences are taken, the whole would be several times as large.
    for a, b in zip(one.reshape(-1).split(_PIECE), two.reshape(-1).split(_PIECE), strict=True):
        if b.dtype in (torch.float32, torch.float64):
            # Nearly always both are finite; then two passes tell all. What is not finite would show in them.
            gap, scale = float((a - b).abs().max()), float(b.abs().max())
            if math.isfinite(gap) and math.isfinite(scale):
                same = same and gap == 0
                gaps.append(gap)
                scales.append(scale)
                continue
        same = same and _same_bits(a, b)
        if not (b.is_floating_point() or b.is_complex()):
            if not same:
                return 1.0, 1.0
            continue
        finite = b.isfinite()
        if not finite.all():
            if not torch.equal(finite, a.isfinite()) or not _same_bits(a[~finite], b[~finite]):
                return math.inf, 0.0
            a, b = a[finite], b[finite]
        elif not a.isfinite().all():
            return math.inf, 0.0
        if b.numel():
            wide = torch.complex128 if b.is_complex() else torch.float64
            a, b = a.to(wide), b.to(wide)
            gaps.append(float((a - b).abs().max()))
            scales.append(float(b.abs().max()))
    return (0.0, 1.0) if same or not scales else (max(gaps), max(scales))


def _equal_constants(one: Any, two: Any) -> bool:
    try:
        return bool(one == two) or (one != one and two != two) or (type(one) is type(two) and " at 0x" in repr(one))
    except Exception:  # values that cannot be compared were made anew each time
        return type(one) is type(two)


def _kind(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
