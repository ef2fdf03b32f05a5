"""Prepare a step for a new signature: trace, plan, emit, check, and compile if that was asked for.

The first call of a signature does all of this, and later calls do nothing of it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fdp.context.ambient import ambient_context, warn_if_alone_by_mistake
from fdp.context.garbage import without_collections
from fdp.distributed.exchange import announce_failure
from fdp.distributed.group import Group
from fdp.distributed.liveness.watch import watched_ranks
from fdp.distributed.wire import Wire
from fdp.emit.backend import OPERATOR_BY_OPERATOR, Backend
from fdp.errors import PurityError
from fdp.plan import Network, Plan, plan_trace
from fdp.plan.buckets import Caps
from fdp.runtime import Emitted
from fdp.runtime.order import Agreements, Attempts
from fdp.step.automatic_buckets import Automatic
from fdp.step.comparisons import Comparisons
from fdp.step.compile_together import compile_together
from fdp.step.memory_limit import MemoryLimit
from fdp.step.one_at_a_time import one_at_a_time
from fdp.step.progress import Progress
from fdp.trace import (
    Choice,
    Flat,
    ReturnsFiniteFlags,
    Roles,
    Summary,
    Trace,
    describe_change,
    describe_inputs,
    refuse_unhashable,
    same_program,
    summarise,
    trace_step,
)

_RETRACE_WARNING = 8
"""After so many traces a step warns once that it keeps retracing."""


@dataclass(frozen=True)
class Settings:
    """The options that decide how a signature is prepared.

    Attributes:
        bucket_cap_mb: as for `data_parallel`.
        backend: what makes the program that runs.
        check_replication: as for `data_parallel`.
        check_trace: as for `data_parallel`.
        wire: in which dtype gradients are sent, None for their own.
        network: between the ranks, if the user gave it.
        memory_limit_bytes: the most that a rank may hold; None for no limit.
    """

    bucket_cap_mb: Caps
    backend: Backend
    check_replication: bool
    check_trace: bool
    wire: Wire | None
    network: Network | None
    memory_limit_bytes: int | None


class Preparation:
    """Prepares one step, signature by signature.

    Args:
        step: the user's function.
        name: what to call it in messages.
        settings: how.

    Attributes:
        comparisons: of its programs with the function.
        traces: how many times the step has been traced.
    """

    def __init__(self, step: Callable[..., Any], name: str, settings: Settings) -> None:
        self._step, self._name, self._settings = step, name, settings
        self._agreed = Agreements()
        self._automatic = Automatic(settings.network, keeps=settings.backend.compiles)
        # Not a method of this: the two would refer to each other, and stay until the garbage collector comes.
        self._by_caps = partial(plan_trace, bucket_cap_mb=settings.bucket_cap_mb, network=settings.network)
        self._limit = MemoryLimit(settings.memory_limit_bytes, None if self._chooses else self._by_caps)
        self.comparisons = Comparisons(step, name, settings.check_trace, settings.backend)
        self._previous: Summary | None = None
        self._prepared = 0
        self.traces = 0

    @property
    def outdates(self) -> bool:
        """Whether programs that were prepared before the last one have to be prepared again."""
        return self._limit.outdates

    @property
    def attempts(self) -> Attempts:
        """The calls that were refused."""
        return self._agreed.attempts

    def trace(self, flat: Flat, roles: Roles, group: Group) -> Trace:
        """Trace the step, without running it."""
        with Progress(self._name) as progress, progress.stage("tracing"):
            return self._trace_alone(flat, roles, group)

    def _trace_alone(self, flat: Flat, roles: Roles, group: Group) -> Trace:
        """Trace the step without the other ranks."""
        return self._limit.traced(lambda choose: self._trace(flat, roles, group, choose), group)

    def _trace(self, flat: Flat, roles: Roles, group: Group, choose: Choice) -> Trace:
        self.traces += 1
        devices = sorted({x.device.index for x in flat.tensors if x.is_cuda})
        settings = self._settings
        # Nothing is drawn while tracing; but a step that seeds a generator does it to the real one.
        with one_at_a_time, torch.random.fork_rng(devices=devices), without_collections():
            try:
                return trace_step(self._step, flat, roles, group, settings.check_replication, settings.wire, choose)
            except PurityError as error:
                if isinstance(self._step, ReturnsFiniteFlags):
                    hint = "check_finite=True keeps every argument as it is: donated ones cannot be changed in place."
                    raise PurityError(f"{error}\n{hint}") from error
                raise

    def plan(self, flat: Flat, roles: Roles, group: Group) -> Plan:
        """Trace and plan the step, without running it and without the other ranks."""
        with Progress(self._name) as progress:
            with progress.stage("tracing"):
                trace = self._trace_alone(flat, roles, group)
            with progress.stage("planning"):
                return self._limit.within(
                    self._automatic.plan_ahead(trace, group) if self._chooses else self._by_caps(trace)
                )

    def prepare(
        self, flat: Flat, roles: Roles, group: Group, progress: Progress, others: Sequence[tuple[Emitted, str]] = ()
    ) -> Emitted:
        """Prepare the program for the signature of some arguments; all ranks take part if they have to agree.

        Args:
            flat: the arguments.
            roles: what each argument is.
            group: the ranks.
            progress: shows what is done.
            others: programs for the same arguments and other values from outside, and what has changed since.

        Returns:
            The program: one of the others, if the trace is still the same.
        """
        with progress:
            return self._prepare(flat, roles, group, progress, others)

    def _prepare(
        self, flat: Flat, roles: Roles, group: Group, progress: Progress, others: Sequence[tuple[Emitted, str]]
    ) -> Emitted:
        warn_if_alone_by_mistake(group)
        if torch.is_anomaly_enabled():
            warnings.warn(
                f"fdp: torch.autograd.detect_anomaly() does not look into step {self._name!r}: it runs as a program. "
                "data_parallel(check_finite=True) says which gradients are not finite.",
                stacklevel=7,
            )
        watched = watched_ranks(group.process_group)
        if watched is not None:
            watched.prepares(True)
        self._limit.outdates = False
        try:
            refuse_unhashable(self._name, flat, roles)
            with progress.stage("tracing"):
                trace = self._limit.traced_on_all(
                    lambda choose: self._trace(flat, roles, group, choose), group, _waiting(progress, group)
                )
            same = next((other for other, _ in others if same_program(other.plan.trace, trace)), None)
            summary = summarise(flat, group, ambient_context())
            changed, remedy = self._what_changed(summary, flat, roles, others)
            emitted = self._emit(trace, flat, roles, group, progress, changed) if same is None else same
        except Exception as error:
            if group.size > 1 and not self._prepared:
                announce_failure(group, error)
            raise
        if self._settings.backend.compiles and same is None:
            # From here on ranks hear of each other's failures.
            emitted = self._compile(emitted, flat, roles, progress)
        self._prepared += 1
        if self._prepared == _RETRACE_WARNING and changed:
            warnings.warn(
                f"fdp: step {self._name!r} was traced for the {_RETRACE_WARNING}th time. What changed last: {changed}. "
                f"Each trace takes as long as several steps: {remedy}.",
                stacklevel=7,
            )
        self._previous = summary
        if watched is not None:
            watched.prepares(False)
        return emitted

    def _what_changed(
        self, summary: Summary, flat: Flat, roles: Roles, others: Sequence[tuple[Emitted, str]]
    ) -> tuple[str, str]:
        """What differs from the call that was traced last, and what to do about it; empty for the first."""
        if self._previous is None:
            return "", ""
        names, _ = describe_inputs(self._name, flat, roles)
        return describe_change(self._previous, summary, names, others[0][1] if others else "")

    def _emit(self, trace: Trace, flat: Flat, roles: Roles, group: Group, progress: Progress, changed: str) -> Emitted:
        """Make the program that ranks agree on, and compare it with the step if it is the one that runs."""
        settings = self._settings
        plan = self._planned(trace, flat, group, progress)
        with progress.stage("writing and proving"), without_collections():
            emitted = Emitted(plan, group, self._agreed, settings.check_replication, self._first_backend)
            emitted.consensus.because = f"{changed:.300}"
        with progress.stage("comparing"):
            self.comparisons.at_first(emitted, flat, roles)
        return emitted

    @property
    def _first_backend(self) -> Backend:
        """What makes the programs that ranks agree on and measure: no compiler, which comes afterwards."""
        return OPERATOR_BY_OPERATOR if self._settings.backend.compiles else self._settings.backend

    @property
    def _chooses(self) -> bool:
        return isinstance(self._settings.bucket_cap_mb, str)

    def _planned(self, trace: Trace, flat: Flat, group: Group, progress: Progress) -> Plan:
        with progress.stage("planning"), without_collections():
            plan = self._automatic.remembered(trace, group) if self._chooses else self._by_caps(trace)
            if plan is not None:
                return self._within(plan, group)
            first = self._limit.smallest(trace) if self._limit.is_set else plan_trace(trace)
        with progress.stage("writing and proving"), without_collections():
            emitted = Emitted(first, group, self._agreed, self._settings.check_replication, self._first_backend)
        plan = self._automatic.choose(emitted, flat.tensors, progress)
        emitted.residence.release()
        # Ranks have to hear once more whether all could prepare the step, also if these buckets are the chosen ones.
        emitted.consensus.forget()
        with progress.stage("planning"), without_collections():
            return self._automatic.remember(self._limit.within_on_all(plan, group), group)

    def _within(self, plan: Plan, group: Group) -> Plan:
        """A plan within the limit, of buckets that are known. Those of small messages are taken from then on."""
        within = self._limit.within(plan)
        if within is plan:
            return plan
        self._limit.outdates = True
        return self._automatic.remember(within, group)

    def _compile(self, emitted: Emitted, flat: Flat, roles: Roles, progress: Progress) -> Emitted:
        """Compile the emitted program, on all ranks at once if all of them have to."""
        settings = self._settings

        def compiled() -> Emitted:
            with one_at_a_time:
                with progress.stage("compiling"):
                    made = Emitted(
                        emitted.plan, emitted.group, self._agreed, settings.check_replication, settings.backend
                    )
                if settings.check_trace:
                    with progress.stage("comparing"):
                        self.comparisons.of_compiled(made, emitted, flat, roles)
                    # Its memory was sized for the program that is not compiled; the compiled one needs less.
                    emitted.residence.release()
                    made.residence.release()
            made.allow_recording()
            return made

        with _waiting(progress, emitted.group):
            together = emitted.consensus.agree(flat.tensors, settings.backend)
        try:
            with _waiting(progress, emitted.group):
                return compile_together(self._name, emitted.group, together, compiled)
        except Exception:
            emitted.consensus.forget(settings.backend)  # a rank that tries again does so with all others
            raise


def _waiting(progress: Progress, group: Group) -> contextlib.AbstractContextManager[None]:
    """The stage of what is not done by this rank, if there are others."""
    return progress.stage("waiting for other ranks") if group.size > 1 else contextlib.nullcontext()
