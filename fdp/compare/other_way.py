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
from fdp.compare.rounding import RUNS, Excuses
from fdp.compare.side_by_side import Case
from fdp.runtime.emitted import Emitted
from fdp.trace import compiling

_SLACK = 0.01
"""By this share a change may be larger or smaller than that of the graph, if rounding makes it neither."""


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
    exact = [excuses.exact[at] for at in positions]
    asked = _as_while_tracing(unlike, exact, case)
    if any(asked):  # a step that takes turns may do by chance what the trace does, once
        repeats = case.repeats(unlike)
        again = _as_while_tracing(unlike, exact, case)
        asked = [all(each) for each in zip(asked, repeats, again, strict=True)]
    asked = [
        same and excuses.excused(at, each.expected) for same, at, each in zip(asked, positions, unlike, strict=True)
    ]
    if not any(asked):
        return asked
    wrong = _err_as_a_whole(emitted, unlike, positions, case, excuses)
    return [same and not errs for same, errs in zip(asked, wrong, strict=True)]


def _as_while_tracing(unlike: Sequence[Difference], exact: Sequence[torch.Tensor], case: Case) -> list[bool]:
    """Which results the step computes as the graph does when it hears of a compiler."""
    try:
        with compiling():
            told = case.once_more(unlike)
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        return [False] * len(unlike)  # it takes tensors without values alone
    return [same_bits(*pair) for pair in zip(exact, told, strict=True)]


def _err_as_a_whole(
    emitted: Emitted, unlike: Sequence[Difference], positions: Sequence[int], case: Case, excuses: Excuses
) -> list[bool]:
    """Which results differ from the graph's in a common direction, or in size, by more than rounding makes of it.

    Rounding is measured by runs that have several times as much of it as kernels do.
    """
    before = old_values(emitted.plan.trace, case.inputs().__getitem__)
    old = [before(each.index, excuses.exact[at]) for each, at in zip(unlike, positions, strict=True)]
    leaning, growing = [0.0] * len(unlike), [0.0] * len(unlike)
    for seed in range(RUNS):
        run = excuses.rounded(seed)
        for number, at in enumerate(positions):
            leans, grows = _compared_changes(run[at], excuses.exact[at], old[number])
            leaning[number], growing[number] = max(leaning[number], leans), max(growing[number], grows)
    found = [
        _compared_changes(each.expected, excuses.exact[at], start)
        for each, at, start in zip(unlike, positions, old, strict=True)
    ]
    return [
        leans > most_leaning or grows > max(most_growing, _SLACK)
        for (leans, grows), most_leaning, most_growing in zip(found, leaning, growing, strict=True)
    ]


def _compared_changes(found: torch.Tensor, exact: torch.Tensor, old: torch.Tensor | None) -> tuple[float, float]:
    """Compare how far two results have come from an old value.

    Args:
        found: one result.
        exact: the other.
        old: where both began; None for zeros.

    Returns:
        The difference in the direction of the change of `exact`, and the difference in length, as shares of its length.
    """
    product = size = own = 0.0
    for other, value, *past in pieces_of(found, exact, *([] if old is None else [old])):
        wide = torch.complex128 if value.is_complex() else torch.float64
        start = past[0].to(wide) if past else torch.zeros_like(value, dtype=wide)
        to, change = ((each.to(wide) - start).nan_to_num(0, 0, 0) for each in (other, value))
        product += float(((to - change) * change.conj()).real.sum())
        size, own = size + float(to.abs().square().sum()), own + float(change.abs().square().sum())
    return (abs(product / own), abs(math.sqrt(size / own) - 1)) if own else (0.0, 0.0 if not size else math.inf)
