"""Whether the gradients of a call are finite, and on which ranks they are not."""

from __future__ import annotations

from typing import Any

from fdp.errors import NonFiniteError, build_message
from fdp.trace import WithFiniteFlags


def result_if_finite(name: str, made: WithFiniteFlags, call: int) -> Any:
    """The results of a step, if its gradients are finite on every rank.

    Args:
        name: of the step.
        made: what its program returned.
        call: which call it is, from 1 on.

    Raises:
        NonFiniteError: some are not; names them and the ranks.
    """
    if bool(made.own.all()) and bool(made.means.all()):
        return made.result
    own, means = made.own.bool().tolist(), made.means.bool().tolist()
    lines, names, ranks = [], [], set[int]()
    for at, gradient in enumerate(made.names):
        there = [rank for rank, row in enumerate(own) if not row[at]]
        if not there and means[at]:
            continue
        names.append(gradient)
        ranks.update(there)
        where = f"rank{'s' if len(there) > 1 else ''} {', '.join(map(str, there))} of {len(own)}"
        lines.append(f"{gradient}: {f'on {where}' if there else 'finite on every rank, but their mean is not'}")
    raise NonFiniteError(
        build_message(
            f"gradients of step {name!r} are not finite, at its call {call}. Nothing was updated.",
            lines,
            remedy="look at the batch of these ranks. The arguments are as they were: call the step with another batch "
            "to leave this one out.",
        ),
        tuple(sorted(ranks)),
        tuple(names),
        call,
    )
