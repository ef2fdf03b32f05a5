"""What makes the programs that run, as a value: a backend. Other rooms learn of its programs from it alone.

No other code asks which backend it is. So a further one is a class here, with code of its own in this room.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fdp.distributed.comparable import comparable
from fdp.distributed.group import Group
from fdp.emit.codegen.program import Program
from fdp.emit.compiled import Options, compile_program, resolve_options, unwrap_compiled, why_not_recorded
from fdp.emit.memory.decisions import plan_memory
from fdp.emit.memory.savings import ALL, COMPILER, Savings
from fdp.emit.proved import verified_program
from fdp.plan import Plan


class Backend(abc.ABC):
    """What makes programs of plans: a frozen value, with the settings that it makes them with."""

    @property
    @abc.abstractmethod
    def how(self) -> str:
        """How its programs run, in a word or a few."""

    @property
    @abc.abstractmethod
    def savings(self) -> Savings:
        """Which ways to save memory its programs make use of."""

    @property
    @abc.abstractmethod
    def by_operation(self) -> bool:
        """Whether its programs do in each operation what those of `OperatorByOperator` do.

        Then a step is timed and compared operation by operation, with one of those that has ticks. Otherwise its
        program is timed between messages, and compared as a whole.
        """

    @property
    @abc.abstractmethod
    def compiles(self) -> bool:
        """Whether a compiler makes its programs, which takes long.

        Then ranks agree first, and then make their programs, and compare them with the step, at the same time. And
        buckets are kept for the next start, which finds the compiled program on disk. Otherwise each rank makes and
        compares its program before ranks agree.
        """

    @property
    @abc.abstractmethod
    def draws_alike(self) -> bool:
        """Whether its programs draw the random numbers that the step itself would."""

    @property
    @abc.abstractmethod
    def agreed_text(self) -> str:
        """What has to be equal on all ranks, as a line of the schedule that they compare; empty if nothing has to."""

    @abc.abstractmethod
    def settled(self, plan: Plan) -> Backend:
        """The backend with what follows from a plan."""

    @abc.abstractmethod
    def program(self, plan: Plan, group: Group, communicates: bool) -> Program:
        """Make the program of a plan, and prove it.

        Args:
            plan: that the backend is settled for.
            group: the ranks.
            communicates: False in a world of one, where a mean or sum of one value is that value.

        Returns:
            The program.

        Raises:
            TraceError: no program could be proved right.
            CompileError: the compiler cannot take an operator.
        """


@dataclass(frozen=True)
class OperatorByOperator(Backend):
    """Writes straight-line code that calls one operator after the other.

    Attributes:
        tick: what its programs call at the beginning and at the end of each part, to have them timed; None for nothing.
    """

    tick: Callable[[], None] | None = None

    how = "operator by operator"
    savings = ALL
    by_operation = True
    compiles = False
    draws_alike = True
    agreed_text = ""

    def settled(self, plan: Plan) -> OperatorByOperator:
        return self

    def program(self, plan: Plan, group: Group, communicates: bool) -> Program:
        return verified_program(plan_memory(plan, communicates, self.savings), group.rank, communicates, self.tick)


@dataclass(frozen=True)
class Compiled(Backend):
    """Has inductor compile one graph for the whole step.

    Attributes:
        options: how.
    """

    options: Options

    how = "compiled"
    savings = COMPILER
    by_operation = False
    compiles = True

    @property
    def draws_alike(self) -> bool:
        return self.options.draws_alike

    @property
    def agreed_text(self) -> str:
        return f"compiled with {comparable(self.options)}"

    def settled(self, plan: Plan) -> Compiled:
        return Compiled(self.options.settled(_devices_of(plan)))

    def program(self, plan: Plan, group: Group, communicates: bool) -> Program:
        records = self.options.records and _may_record(plan, group)
        return compile_program(
            plan_memory(plan, communicates, self.savings), group, communicates, self.options, records
        )


OPERATOR_BY_OPERATOR = OperatorByOperator()


def resolve_backend(asked: object) -> Backend:
    """Read the argument `compile` of `data_parallel`.

    Args:
        asked: as for `data_parallel`; or a backend.

    Returns:
        The backend.

    Raises:
        ArgumentError: an option has no meaning.
    """
    if isinstance(asked, Backend):
        return asked
    options = resolve_options(asked)
    return OPERATOR_BY_OPERATOR if options is None else Compiled(options)


def function_and_backend(step_fn: Callable[..., Any], compile: object) -> tuple[Callable[..., Any], Backend]:
    """Find out what is to run, and what makes the programs for it.

    Args:
        step_fn: the user's function, or what `torch.compile` made of it.
        compile: as for `resolve_backend`. False is the default: then the options of `torch.compile` count.

    Returns:
        The function, and the backend.

    Raises:
        ArgumentError: an option has no meaning; or the function was to be compiled by another backend than inductor.
    """
    function, asked = unwrap_compiled(step_fn)
    return function, resolve_backend(asked if compile is False and asked is not None else compile)


def _devices_of(plan: Plan) -> set[torch.device]:
    """The devices that a plan computes on."""
    values = (node.meta.get("val") for node in plan.trace.graph.graph.nodes)
    return {value.device for value in values if isinstance(value, torch.Tensor)}


def _may_record(plan: Plan, group: Group) -> bool:
    """Whether a step can be recorded as one CUDA graph, which was asked for."""
    why = why_not_recorded(plan, group)
    warnings.warn(
        f"fdp: step {plan.trace.name!r} is recorded as a CUDA graph, which is experimental: tests record it with a "
        "stand-in for the device, and no device has."
        if why is None
        else f"fdp: step {plan.trace.name!r} is compiled, and not recorded as a CUDA graph: {why}.",
        stacklevel=2,
    )
    return why is None
