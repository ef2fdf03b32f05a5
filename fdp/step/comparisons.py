"""When a program of a step is compared with the function, and on which inputs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from fdp.compare import (
    Again,
    check_again,
    check_emitted,
    check_partition,
    check_program,
    check_strides,
    if_memory_allows,
    on_whole_values,
)
from fdp.distributed.desynchronised import mark_desynchronised
from fdp.emit.backend import Backend
from fdp.errors import CompileError, TraceError, first_line
from fdp.plan import plan_trace
from fdp.runtime import Emitted
from fdp.step.one_at_a_time import one_at_a_time
from fdp.step.progress import Progress
from fdp.trace import Flat, Roles


class Comparisons:
    """The comparisons of the programs of one step.

    Args:
        step: the user's function.
        name: what to call it in messages.
        check_trace: whether programs are compared at all.
        backend: what makes the program that runs.
    """

    def __init__(self, step: Callable[..., Any], name: str, check_trace: bool, backend: Backend) -> None:
        self._step, self._name, self._check_trace, self._backend = step, name, check_trace, backend
        self._again: weakref.WeakKeyDictionary[Emitted, Again] = weakref.WeakKeyDictionary()
        # Of those that are still to be compared on perturbed inputs: which results were finite on those of a call.
        self._finite: weakref.WeakKeyDictionary[Emitted, list[bool]] = weakref.WeakKeyDictionary()

    def at_first(self, emitted: Emitted, flat: Flat, roles: Roles) -> None:
        """Compare the first program of a signature, which runs operator by operator."""
        if self._check_trace and emitted.plan.trace.whole is not None:
            self._compare_on_whole_values(emitted, flat, roles)
        if not self._check_trace:
            self._check_strides(emitted, flat)
        elif not self._backend.compiles:
            self._compare(emitted, flat, lambda: self._compare_on_call(emitted, flat, roles))

    def of_compiled(self, made: Emitted, emitted: Emitted, flat: Flat, roles: Roles) -> None:
        """Compare a compiled program on both kinds of inputs: the first call waits for the compiler anyway.

        Args:
            made: the program.
            emitted: the one that runs operator by operator.
            flat: the arguments of the call.
            roles: what each argument is.
        """

        def compare() -> None:
            check_program(made, self._step, flat, roles, emitted=emitted)

        self._compare(made, flat, compare)

    def compare_again(self, emitted: Emitted, flat: Flat, roles: Roles) -> bool:
        """Compare a program that has been running; returns whether to repeat that later."""
        emitted.closed_over.check(flat.tensors)  # which says more than a comparison would
        try:
            with Progress(self._name) as progress, progress.stage("comparing again"), one_at_a_time:
                comes_again = check_again(emitted, self._step, flat, roles, self._finite.get(emitted))
            self._finite.pop(emitted, None)
            return comes_again
        except BaseException as error:
            # The other ranks have sent messages by now, or will, and this one will not.
            mark_desynchronised(
                emitted.group, f"step {self._name!r} was left by {type(error).__name__}: {first_line(error)}"
            )
            raise

    def when_again(self, emitted: Emitted) -> Again | None:
        """When to compare a program again; None for never."""
        return self._again.get(emitted)

    def _compare(self, emitted: Emitted, flat: Flat, compare: Callable[[], None]) -> None:
        def compare_or_say_why() -> None:
            try:
                compare()
            except (TraceError, CompileError):
                check_strides(emitted, flat.tensors)  # which names the operator, if that is why
                raise

        begun = time.perf_counter()
        with one_at_a_time:
            compared = if_memory_allows(emitted, "the comparison at the first call", compare_or_say_why)
        if compared:
            self._again[emitted] = Again(time.perf_counter() - begun, owed=emitted in self._finite)

    def _compare_on_call(self, emitted: Emitted, flat: Flat, roles: Roles) -> None:
        """Compare on the inputs of the first call. Perturbed inputs, as later calls may have them, are compared before
        the second call: a step that is called once need not wait for that, and what it returns has been compared."""
        self._finite[emitted] = check_program(emitted, self._step, flat, roles, on="call")

    def _compare_on_whole_values(self, emitted: Emitted, flat: Flat, roles: Roles) -> None:
        """Compare a step with sharded state with the step on whole values, and that with the function."""
        assert emitted.plan.trace.whole is not None
        whole = Emitted(plan_trace(emitted.plan.trace.whole), emitted.group)

        def compare() -> None:
            others = emitted.group.others()
            found = on_whole_values(emitted.plan.trace, flat, roles, others)
            check_partition(emitted, flat.tensors, found.tensors)
            check_emitted(whole, self._step, found, roles)

        with one_at_a_time:
            if_memory_allows(whole, "the comparison on whole values", compare)
            whole.residence.release()

    def _check_strides(self, emitted: Emitted, flat: Flat) -> None:
        """Check the strides of values that are drawn for, in a step that is not compared."""
        if self._backend.settled(emitted.plan).draws_alike:
            with one_at_a_time:
                what = "a run that shows how its values lie in memory"
                if_memory_allows(emitted, what, lambda: check_strides(emitted, flat.tensors))
