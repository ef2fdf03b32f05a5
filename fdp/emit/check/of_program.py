"""The check of a program that runs operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fdp.emit.check.copies import give_back_memory
from fdp.emit.check.held import closed_over_unchanged, undisturbed
from fdp.emit.check.leaves import Difference, same_bits
from fdp.emit.check.lockstep import unlike_graph
from fdp.emit.check.refusals import wrong_program, wrong_trace
from fdp.emit.check.rounding import Excuses, replay
from fdp.emit.check.side_by_side import Case, SideBySide, positions_of
from fdp.emit.emitted import Emitted
from fdp.trace import Flat, Roles, recording


def check_emitted(emitted: Emitted, step: Callable[..., Any], flat: Flat, roles: Roles, perturbed: bool = True) -> None:
    """Run a step and what was emitted for it side by side.

    Where results differ by more than they may, the reason is looked for: the trace may be wrong, the program may be
    wrong, or rounding was amplified, which is no mistake.

    Args:
        emitted: the emitted step.
        step: the user's function.
        flat: the arguments of a call; they are not changed.
        roles: what each argument is.
        perturbed: whether they are compared on perturbed inputs as well.

    Raises:
        TraceError: names each output that differs, and by how much; or each operator; or each input that was changed.
        PurityError: the step changes tensors that it closes over.
    """

    def explain(offenders: list[Difference], case: Case) -> None:
        check_graph(emitted, offenders, case)
        with undisturbed(emitted):
            operators = unlike_graph(emitted, case.inputs(), case.others)
        if operators:
            raise wrong_program(emitted.plan.trace.name, operators)

    give_back_memory()
    with closed_over_unchanged(emitted), recording():
        SideBySide(emitted, step, flat, roles, explain).run(perturbed)
    give_back_memory()


def check_graph(emitted: Emitted, offenders: Sequence[Difference], case: Case) -> None:
    """Judge the trace by results that differ: does its graph compute them as the step does?

    The same operators on the same values, one after the other, make the same bits. Only kernels that do not repeat
    themselves may differ, as those of an accelerator: by as much as rounding can do.

    Raises:
        TraceError: it does not.
    """
    positions = positions_of(emitted, offenders)
    exact = replay(emitted, case.inputs(), case.others)
    unlike = [(o, at) for o, at in zip(offenders, positions, strict=True) if not same_bits(exact[at], o.expected)]
    del exact
    if unlike:
        excuses = Excuses(emitted, case.inputs, case.others, [at for _, at in unlike])
        wrong = [offender.text for offender, at in unlike if not excuses.excused(at, offender.expected)]
        if wrong:
            raise wrong_trace(emitted.plan.trace.name, wrong)
