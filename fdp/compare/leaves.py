"""Compare results leaf by leaf: structure, dtypes and constants exactly, numbers to a tolerance."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fdp.trace import Trace

_RELATIVE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-4, torch.complex64: 1e-4}
_RELATIVE_NARROW = 2e-2
_OF_CHANGE = 1e-3
_LAST_PLACES = 8
"""Where a result is the new value of something, it may miss so much of its change, or so many units in the last place.
A step changes its state by little: a whole update is less than the usual tolerance."""

_PIECE = 2**20
_FEW = 8
_WITHOUT_FLOAT64 = {"mps"}
_PREFIX = re.compile(r"^output(\[\d+\])?")


@dataclass(frozen=True)
class Difference:
    """A result that differs.

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


Before = Callable[[int, torch.Tensor], "torch.Tensor | None"]
"""The old value of a leaf of the results, given its index and its new value; None if it has none."""


def no_old_value(index: int, new: torch.Tensor) -> torch.Tensor | None:
    """For results that are compared by themselves."""
    return None


def old_values(trace: Trace, inputs: Callable[[int], torch.Tensor]) -> Before:
    """Find the old value of each result among the inputs of a step.

    Args:
        trace: of the step.
        inputs: makes an input, by its index.

    Returns:
        What finds it: the donated input whose place the result takes; else the state of the same key path (behind the
        name of the argument); else the nearest one of a few that have its shape and dtype, as for a bare tensor.
    """

    def before(index: int, new: torch.Tensor) -> torch.Tensor | None:
        output = trace.outputs[index]
        if output.slot is not None:
            return inputs(output.slot)
        alike = [
            at
            for at, item in enumerate(trace.inputs)
            if item.role != "batch" and (item.shape, item.dtype) == (tuple(new.shape), new.dtype)
        ]
        path = _PREFIX.sub("", output.name)
        named = [at for at in alike if path and trace.inputs[at].name.endswith(path)]
        candidates = named[:1] or alike
        if not candidates or len(candidates) > _FEW or not new.is_floating_point():
            return None
        return min((inputs(at) for at in candidates), key=lambda old: _largest_change(new, old))

    return before


def different(
    names: Sequence[str],
    found: Iterable[Any],
    expected: Iterable[Any],
    before: Before = no_old_value,
    share: float = 1.0,
) -> list[Difference]:
    """The results that differ by more than the tolerance, or by more than a share of it."""
    offenders = []
    for index, (name, one, two) in enumerate(zip(names, found, expected, strict=False)):
        text = None
        if not isinstance(two, torch.Tensor):
            if not _equal_constants(one, two):
                text = f"{one!r} in the trace, {two!r} by itself"
        elif not isinstance(one, torch.Tensor) or (one.shape, one.dtype) != (two.shape, two.dtype):
            text = f"{result_text(one)} in the trace, {result_text(two)} by itself"
        else:
            gap, scale = gap_of(one, two)
            if not gap <= 0 and not (math.isfinite(gap) and _within_tolerance(one, two, gap, share, index, before)):
                text = f"{result_text(two)} differs by {gap:.3g}, where the largest value is {scale:.3g}"
        if text is not None:
            offenders.append(Difference(index, f"{name}: {text}", one, two))
    return offenders


def _within_tolerance(
    found: torch.Tensor, expected: torch.Tensor, gap: float, share: float, index: int, before: Before
) -> bool:
    """Whether each element is within the tolerance, relative to its own size or to the usual size. A large one hides no
    other."""
    relative = relative_tolerance(expected.dtype)
    if not relative:
        return False
    last_places, usual = _LAST_PLACES * torch.finfo(expected.dtype).eps, usual_size(expected)
    if gap <= share * last_places * usual:
        return True
    old = before(index, expected)
    tensors = (found, expected) if old is None else (found, expected, old)
    usual_change = 0.0 if old is None else usual_size(expected, old)
    for one, two, *past in zip(*(_pieces(tensor) for tensor in tensors), strict=True):
        size = two.abs()
        allowed = relative * (size + usual)
        if past:
            change = _OF_CHANGE * ((two - past[0]).abs() + usual_change)
            allowed = torch.minimum(allowed, torch.maximum(last_places * (size + usual), change))
        if ((one - two).abs() > share * allowed).any():
            return False
    return True


def usual_size(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    """How large elements usually are, or their differences from another tensor's: a few large ones count for little."""
    roots, count = 0.0, 0
    others: Iterable[Any] = itertools.repeat(0) if other is None else _pieces(other)
    for one, two in zip(_pieces(tensor), others, strict=False):
        sizes = (one - two).abs()
        sizes = sizes[sizes.isfinite()]
        roots, count = roots + float(sizes.sqrt().sum()), count + sizes.numel()
    return (roots / count) ** 2 if count else 0.0


def distances(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """The difference of each element; infinite where only one is finite, or only one is NaN.

    Taken where the tensors are: a device takes moments for what takes a processor minutes. It needs several times
    their memory, so large tensors are to be given in pieces.
    """
    place = torch.device("cpu") if one.device.type in _WITHOUT_FLOAT64 else one.device
    a, b = (tensor.detach().resolve_conj().to(place) for tensor in (one, two))
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | ((a != a) & (b != b))
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(torch.inf, torch.inf))


def pieces_of(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The flat pieces of tensors of one shape, so that what is computed of them need not fit into memory at once."""
    return zip(*(tensor.reshape(-1).split(_PIECE) for tensor in tensors), strict=True)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The pieces of a tensor in the widest type."""
    for (piece,) in pieces_of(_comparable(tensor)):
        yield piece.to(torch.complex128 if piece.is_complex() else torch.float64)


def _largest_change(new: torch.Tensor, old: torch.Tensor) -> float:
    gap = gap_of(old, new)[0]
    return gap if math.isfinite(gap) else 0.0


def relative_tolerance(dtype: torch.dtype) -> float:
    """The share of its largest value by which a result may differ."""
    return _RELATIVE.get(dtype, _RELATIVE_NARROW if dtype.is_floating_point else 0.0)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors hold the same values; NaN is the same as NaN."""
    one, two = _comparable(one), _comparable(two)
    if torch.equal(one, two):
        return True
    return one.shape == two.shape and bool(((one == two) | ((one != one) & (two != two))).all())


def finite(value: object) -> bool:
    """Whether a leaf has neither infinite values nor NaN."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    value = _comparable(value)
    # The sum of a finite tensor is finite, but for an overflow; it takes no memory.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def gap_of(one: torch.Tensor, two: torch.Tensor) -> tuple[float, float]:
    """The largest difference (infinite if one is finite where the other is not), and the largest finite value."""
    one, two = _comparable(one), _comparable(two)
    if torch.equal(one, two):
        return 0.0, 1.0
    same, gaps, scales = True, [0.0], list[float]()
    # In pieces: at the width in which differences are taken, the whole would be several times as large.
    for a, b in pieces_of(one, two):
        if b.dtype in (torch.float32, torch.float64):
            # Nearly always both are finite; then two passes tell all. What is not finite would show in them.
            gap, scale = float((a - b).abs().max()), float(b.abs().max())
            if math.isfinite(gap) and math.isfinite(scale):
                same = same and gap == 0
                gaps.append(gap)
                scales.append(scale)
                continue
        same = same and same_bits(a, b)
        if not (b.is_floating_point() or b.is_complex()):
            if not same:
                return 1.0, 1.0
            continue
        known = b.isfinite()
        if not known.all():
            if not torch.equal(known, a.isfinite()) or not same_bits(a[~known], b[~known]):
                return math.inf, 0.0
            a, b = a[known], b[known]
        elif not a.isfinite().all():
            return math.inf, 0.0
        if b.numel():
            wide = torch.complex128 if b.is_complex() else torch.float64
            a, b = a.to(wide), b.to(wide)
            gaps.append(float((a - b).abs().max()))
            scales.append(float(b.abs().max()))
    return (0.0, 1.0) if same or not scales else (max(gaps), max(scales))


def _comparable(x: torch.Tensor) -> torch.Tensor:
    """The same values in a type that can be compared: complex numbers of twice sixteen bits, and eight bits, cannot."""
    if x.dtype == torch.complex32:
        return x.to(torch.complex64)
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def _equal_constants(one: object, two: object) -> bool:
    try:
        return bool(one == two) or (one != one and two != two) or (type(one) is type(two) and " at 0x" in repr(one))
    except Exception:  # values that cannot be compared were made anew each time
        return type(one) is type(two)


def result_text(value: object) -> str:
    """A result in words: shape and dtype of a tensor."""
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
