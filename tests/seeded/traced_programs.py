"""The steps of `faulty_programs`, traced, and what they have to compute: all that no seeded fault has a part in."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import optree
from faulty_program import Program, copied
from faulty_programs import PROGRAMS
from simulated_ranks import Plain, Turns

import fdp
from fdp.distributed.group import Group
from fdp.distributed.mesh import MeshDimension

SEED = 17


@dataclass(frozen=True)
class Prepared:
    """A step, ready to be planned.

    Attributes:
        program: the step.
        trace: an `fdp.Trace` of it.
        expected: the results of plain PyTorch: for each rank, those of each call.
    """

    program: Program
    trace: Any
    expected: list[list[Any]]


def prepare(name: str) -> Prepared:
    """Trace a step, and run it in plain PyTorch."""
    program = PROGRAMS[name]
    return Prepared(program, _trace_of(program), _expected_of(program))


def _trace_of(program: Program) -> Any:
    """Trace a step, without any rank."""
    step = fdp.data_parallel(
        functools.partial(program.step, fdp),
        group=Group(None, program.world, 0, tuple(MeshDimension(name, size, 0) for name, size in program.mesh)),
        donate_argnums=0 if program.donate else (),
        check_replication=False,
        **program.options,
    )
    return step.trace(program.state(), program.batch(0, 0))


def _expected_of(program: Program) -> list[list[Any]]:
    """The results of plain PyTorch: for each rank, those of each call."""
    turns = Turns(program.world, SEED)

    def rank_does(rank: int) -> list[Any]:
        c, state, found = Plain(turns, rank, program.mesh), program.state(), []
        for call in range(program.calls):
            state, results = program.step(c, state, program.batch(rank, call))
            state, results = optree.tree_map(lambda x: copied(x.detach()), (state, results))
            found.append((state, results))
            state = optree.tree_map(copied, state)
        return found

    return turns.run(rank_does)
