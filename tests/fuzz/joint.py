"""Several programs as one step, which is traced, compiled and called as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuzz.program import Program

Define = Callable[[Any, Any], tuple[Any, ...]]


def defined(programs: Sequence[Program]) -> Define:
    """The `define` of one program; of several, in lists: the state, the results, the batch, what is closed over."""
    singles = [_executed(program) for program in programs]

    def define(fdp: Any, kit: Any) -> tuple[Any, ...]:
        made = [single(fdp, kit.like(program.exact)) for single, program in zip(singles, programs, strict=True)]

        def step(states: Any, batches: Any) -> Any:
            outs = [one[2](state, batch) for one, state, batch in zip(made, states, batches, strict=True)]
            return [state for state, _ in outs], [results for _, results in outs]

        def between() -> None:
            for one in made:
                one[3]()

        return (
            lambda rank: [one[0](rank) for one in made],
            lambda rank, call: [one[1](rank, call) for one in made],
            step,
            between,
            [one[4] for one in made],
        )

    return define


def _executed(program: Program) -> Define:
    names: dict[str, Any] = {"torch": torch}
    exec(compile(program.text, f"<program {program.seed}>", "exec"), names)
    define: Define = names["define"]
    return define
