"""The check of a program that runs operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp.compare.copies import give_back_memory
from fdp.compare.leaves import Difference, same_bits
from fdp.compare.lockstep import in_order_of_plan, unlike_graph
from fdp.compare.other_way import rounded_otherwise
from fdp.compare.refusals import wrong_program, wrong_trace
from fdp.compare.restored import closed_over_unchanged, undisturbed
from fdp.compare.rounding import Excuses, replay
from fdp.compare.side_by_side import Case, On, SideBySide, positions_of
from fdp.runtime.emitted import Emitted
from fdp.trace import Flat, Roles, recording, without_fused_lstm


def check_emitted(
    emitted: Emitted,
    step: Callable[..., Any],
    flat: Flat,
    roles: Roles,
    on: On = "both",
    finite: Sequence[bool] = (),
) -> list[bool]:
    """Run a step and its emitted program side by side.

    Where results differ by more than they may, the reason is looked for: the trace may be wrong, the program may be
    wrong, or rounding was amplified, which is no mistake.

    Args:
        emitted: the emitted step.
        step: the user's function.
        flat: the arguments of a call; they are not changed.
        roles: what each argument is.
        on: which inputs.
        finite: what an earlier comparison returned, if this one is on perturbed inputs alone.

    Returns:
        For each leaf of the results, whether it was finite on the inputs of a call.

    Raises:
        TraceError: names each output that differs, and by how much; or each operator; or each input that was changed.
        PurityError: the step changes tensors that it closes over.
    """

    def explain(offenders: list[Difference], case: Case) -> None:
        excuses = check_graph(emitted, offenders, case)
        _check_order(emitted, offenders, case, excuses)
        _check_operators(emitted, offenders, case, excuses)

    give_back_memory()
    with closed_over_unchanged(emitted), recording():
        known = SideBySide(emitted, step, flat, roles, explain).run(on, finite)
    give_back_memory()
    return known


def check_graph(emitted: Emitted, offenders: Sequence[Difference], case: Case) -> Excuses:
    """Find out whether the trace is wrong: does its graph compute the differing results as the step does?

    The same operators on the same values, one after the other, make the same bits. Only kernels that do not repeat
    themselves may differ, as those of an accelerator: by as much as rounding can do.

    Returns:
        How much that is, for each result that differs.

    Raises:
        TraceError: it does not.
    """
    if not all(isinstance(each, torch.Tensor) for o in offenders for each in (o.found, o.expected)):
        # A Python value that is another one: no rounding makes it so.
        raise wrong_trace(emitted.plan.trace.name, [offender.text for offender in offenders])
    positions = dict(zip((offender.index for offender in offenders), positions_of(emitted, offenders), strict=True))
    excuses = Excuses(emitted, case.inputs, case.others, list(positions.values()))
    exact = replay(emitted, case.inputs(), case.others)
    unlike = [offender for offender in offenders if not same_bits(exact[positions[offender.index]], offender.expected)]
    del exact
    if not unlike:
        return excuses
    once = case.repeats(unlike)
    # A trace has no kernels of oneDNN that are for several operators at once: of an LSTM.
    with without_fused_lstm() as lstms:
        apart = case.once_more(unlike)
        exact = replay(emitted, case.inputs(), case.others)
        alike = [same_bits(exact[positions[o.index]], by_itself) for o, by_itself in zip(unlike, apart, strict=True)]
        del apart, exact
    # Asked twice, with another run between: a step that takes turns would seem to lack no more than those kernels.
    repeats = [one and two for one, two in zip(once, case.repeats(unlike), strict=True)]
    explained = [bool(lstms) and same and still for same, still in zip(alike, repeats, strict=True)]
    if not all(explained):
        otherwise = rounded_otherwise(emitted, unlike, [positions[each.index] for each in unlike], case, excuses)
        explained = [one or two for one, two in zip(explained, otherwise, strict=True)]
    left = [offender for offender, is_explained in zip(unlike, explained, strict=True) if not is_explained]
    # Where all results repeat themselves, rounding is no reason. As long as kernels do not, it may be.
    wrong = [o for o in left if all(repeats) or not excuses.excused(positions[o.index], o.expected, alike=True)]
    if wrong:
        raise wrong_trace(emitted.plan.trace.name, [offender.text for offender in wrong])
    return excuses


def _check_operators(emitted: Emitted, offenders: Sequence[Difference], case: Case, excuses: Excuses) -> None:
    """Find out whether the program is wrong: compare its operators, each on the inputs that it had.

    Raises:
        TraceError: one computes something else; or the results are others when the program runs again.
    """
    with undisturbed(emitted):
        operators, found = unlike_graph(emitted, case.inputs(), case.others)
    if operators:
        raise wrong_program(emitted.plan.trace.name, operators)
    pairs = list(zip(offenders, positions_of(emitted, offenders), strict=True))
    unlike = [(offender, at) for offender, at in pairs if not same_bits(offender.found, found[at])]
    wrong = [offender.text for offender, at in unlike if not excuses.excused(at, offender.found, alike=True)]
    if wrong:
        raise wrong_program(emitted.plan.trace.name, wrong)


def _check_order(emitted: Emitted, offenders: Sequence[Difference], case: Case, excuses: Excuses) -> None:
    """Find out whether the order of the plan is wrong: does it compute the same bits as the order of the graph?

    Raises:
        TraceError: it does not.
    """
    positions = positions_of(emitted, offenders)
    in_order = in_order_of_plan(emitted, case.inputs(), case.others)
    planned = [in_order[at] for at in positions]
    del in_order
    runs = []
    for _ in range(2):
        exact = replay(emitted, case.inputs(), case.others)
        runs.append([exact[at] for at in positions])
        del exact
        if all(same_bits(*pair) for pair in zip(planned, runs[0], strict=True)):
            return
    unlike = [at for at, one, two in zip(positions, planned, runs[0], strict=True) if not same_bits(one, two)]
    if not all(same_bits(*pair) for pair in zip(*runs, strict=True)):
        unlike = [at for at in unlike if not excuses.excused(at, planned[positions.index(at)], alike=True)]
    if unlike:
        wrong = [
            f"{o.text}, in the order of the plan" for o, at in zip(offenders, positions, strict=True) if at in unlike
        ]
        raise wrong_program(emitted.plan.trace.name, wrong)
