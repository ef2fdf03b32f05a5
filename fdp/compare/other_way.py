"""Whether results differ because a library takes another way where it hears of a compiler, as while it is traced.

Mamba's layers have a scan in place of a loop then, for example: the same numbers, rounded otherwise. Three things have
to hold. The step computes the trace's bits when it hears of a compiler, each time that it is asked, with an ordinary
run between. No element differs by more than rounding can make of it. And neither do all elements together: a gradient
that is a tenth too large may be within the rounding of each element, but then all of them err in one direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fdp.compare.copies import is_lack_of_memory
from fdp.compare.leaves import Difference, old_values, pieces_of, same_bits
from fdp.compare.rounding import Excuses, replay
from fdp.compare.side_by_side import Case
from fdp.runtime.emitted import Emitted
from fdp.trace import compiling

_RUNS, _TIMES, _SLACK = 8, 1.0, 0.01
"""Runs with several times the rounding of kernels; how far a result may lean in the direction of its change, in
multiples of what they do; and by which share its change may be larger or smaller, if theirs are not."""


def rounded_otherwise(
    emitted: Emitted, unlike: Sequence[Difference], positions: Sequence[int], case: Case, excuses: Excuses
) -> list[bool]:
    """Which results differ from the graph's because the step took another way to the same numbers.

    Args:
        emitted: what was made for the step.
        unlike: results of the step that have other bits than the graph's.
        positions: where these are among the tensors of the results.
        case: what was compared.
        excuses: how much rounding can change each element.
    """
    expected = [each.expected for each in unlike]
    asked = _as_while_tracing(emitted, unlike, positions, case)
    if any(asked):  # a step that takes turns may do by chance what the trace does, once
        ordinary = [case.by_itself()[each.index] for each in unlike]
        again = _as_while_tracing(emitted, unlike, positions, case)
        repeats = [same_bits(*pair) for pair in zip(ordinary, expected, strict=True)]
        asked = [all(each) for each in zip(asked, again, repeats, strict=True)]
    asked = [same and excuses.excused(at, value) for same, at, value in zip(asked, positions, expected, strict=True)]
    if not any(asked):
        return asked
    wrong = _errs_as_a_whole(emitted, unlike, positions, case)
    return [same and not errs for same, errs in zip(asked, wrong, strict=True)]


def _as_while_tracing(
    emitted: Emitted, unlike: Sequence[Difference], positions: Sequence[int], case: Case
) -> list[bool]:
    """Which results the step computes as the graph does when it hears of a compiler."""
    try:
        with compiling():
            leaves = case.by_itself()
            told = [leaves[each.index] for each in unlike]
            del leaves
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        return [False] * len(unlike)  # it takes tensors without values alone
    exact = replay(emitted, case.inputs(), case.others)
    return [same_bits(exact[at], value) for at, value in zip(positions, told, strict=True)]


def _errs_as_a_whole(
    emitted: Emitted, unlike: Sequence[Difference], positions: Sequence[int], case: Case
) -> list[bool]:
    """Which results differ from the graph's in a common direction, or in size, by more than rounding makes of it."""
    whole, inputs = replay(emitted, case.inputs(), case.others), case.inputs()
    exact = [whole[at] for at in positions]
    del whole
    before = old_values(emitted.plan.trace, inputs.__getitem__)
    old = [before(each.index, value) for each, value in zip(unlike, exact, strict=True)]
    leaning, growing = [0.0] * len(unlike), [0.0] * len(unlike)
    for seed in range(_RUNS):
        run = replay(emitted, case.inputs(), case.others, seed)
        for number, at in enumerate(positions):
            leans, grows = _change(run[at], exact[number], old[number])
            leaning[number], growing[number] = max(leaning[number], leans), max(growing[number], grows)
    found = [_change(each.expected, *pair) for each, pair in zip(unlike, zip(exact, old, strict=True), strict=True)]
    return [
        leans > _TIMES * most_leaning or grows > max(_TIMES * most_growing, _SLACK)
        for (leans, grows), most_leaning, most_growing in zip(found, leaning, growing, strict=True)
    ]


def _change(found: torch.Tensor, exact: torch.Tensor, old: torch.Tensor | None) -> tuple[float, float]:
    """How the change from an old value to a new one differs from another one, as shares of that: in its direction, and
    in size."""
    product = size = own = 0.0
    for other, value, *past in pieces_of(found, exact, *([] if old is None else [old])):
        wide = torch.complex128 if value.is_complex() else torch.float64
        start = past[0].to(wide) if past else torch.zeros_like(value, dtype=wide)
        to, change = ((each.to(wide) - start).nan_to_num(0, 0, 0) for each in (other, value))
        product += float(((to - change) * change.conj()).real.sum())
        size, own = size + float(to.abs().square().sum()), own + float(change.abs().square().sum())
    return (abs(product / own), abs(math.sqrt(size / own) - 1)) if own else (0.0, 0.0 if not size else math.inf)
