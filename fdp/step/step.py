"""`Step`: what a call of a data-parallel step does.

step_fn --trace--> Trace --plan--> Plan --emit--> callable
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist

from fdp.context.axis import inside_step, refuse_other_group
from fdp.distributed.desynchronised import alone_on
from fdp.distributed.group import Group, Ranks, resolve_group
from fdp.distributed.wire import Wire
from fdp.emit.backend import function_and_backend
from fdp.errors import ArgumentError, FdpError, build_message
from fdp.measure import profile_step
from fdp.plan import Network, Plan
from fdp.plan.buckets import MIB, Caps, resolve_caps
from fdp.pytorch.dynamo import breaks_graph
from fdp.pytorch.tensors import under_transform
from fdp.runtime import BREAK_REASON
from fdp.step.cache import CallPlace, Known, Signatures, call_numbers
from fdp.step.finite import result_if_finite
from fdp.step.first_call import Preparation, Settings
from fdp.step.memory_limit import resolve_limit
from fdp.step.progress import Progress
from fdp.tables import count, short_name
from fdp.timeline import Timeline
from fdp.trace import (
    Flat,
    ReturnsFiniteFlags,
    Roles,
    Trace,
    by_position,
    flatten_call,
    resolve_roles,
    signature_of,
    split_static,
)
from fdp.tracebacks import hiding_frames

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
First = TypeVar("First")
Rest = ParamSpec("Rest")


class Step(Generic[Arguments, Result]):
    """A data-parallel step: call it like the function that it was made from.

    For type checkers it takes what that takes, and returns what that returns.
    """

    def __init__(
        self,
        step_fn: Callable[Arguments, Result],
        *,
        batch_argnums: int | Iterable[int] = -1,
        static_argnums: int | Iterable[int] = (),
        donate_argnums: int | Iterable[int] = (),
        group: Ranks = None,
        bucket_cap_mb: Caps = "auto",
        compile: object = False,
        check_replication: bool = True,
        check_trace: bool = True,
        check_finite: bool = False,
        wire: Wire | None = None,
        network: Network | None = None,
        memory_limit_mb: float | None = None,
    ) -> None:
        step_fn, backend = function_and_backend(step_fn, compile)
        resolve_caps(bucket_cap_mb)
        if network is not None and not isinstance(network, Network):
            raise ArgumentError(
                build_message(
                    f"network={network!r}.",
                    remedy="pass fdp.Network(latency_s=..., bandwidth_bytes_per_s=...), or None to have it measured.",
                )
            )
        functools.update_wrapper(self, step_fn)
        self._step = step_fn
        self._argnums = (batch_argnums, static_argnums, donate_argnums)
        # As a Group, which does not keep a process group alive.
        self._group = resolve_group(group) if isinstance(group, dist.ProcessGroup) else group
        self._settings = Settings(
            bucket_cap_mb, backend, check_replication, check_trace, wire, network, resolve_limit(memory_limit_mb)
        )
        self._preparation = Preparation(
            ReturnsFiniteFlags(step_fn) if check_finite else step_fn, self._name, self._settings
        )
        self._attempts = self._preparation.attempts
        self._check_finite, self._numbers = check_finite, itertools.count(1)
        self._known = Signatures(self._name, step_fn)
        self._roles: dict[int, Roles] = {}
        self._preparing = threading.RLock()
        self._signature = signature_of(step_fn)

    @property
    def traces(self) -> int:
        """How many times it has been traced so far."""
        return self._preparation.traces

    def __repr__(self) -> str:
        return f"<fdp.Step {short_name(self._name)}, traced {count(self.traces, 'time')}>"

    def __reduce__(self) -> Any:
        """Copying and unpickling make a new step with the same function and settings, and without traces."""
        batch, static, donate = self._argnums
        settings = self._settings
        return functools.partial(
            type(self), self._step, batch_argnums=batch, static_argnums=static, donate_argnums=donate,
            group=self._group, bucket_cap_mb=settings.bucket_cap_mb, compile=settings.backend,
            check_replication=settings.check_replication, check_trace=settings.check_trace,
            check_finite=self._check_finite, wire=settings.wire, network=settings.network,
            memory_limit_mb=None if settings.memory_limit_bytes is None else settings.memory_limit_bytes / MIB,
        ), ()  # fmt: skip

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Step[Arguments, Result]: ...

    @overload
    def __get__(
        self: Step[Concatenate[First, Rest], Result], instance: First, owner: type | None = None
    ) -> Callable[Rest, Result]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @breaks_graph(BREAK_REASON)
    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Run the step; the first call of a signature traces, plans, emits, checks, and agrees with other ranks.

        Args:
            *args: the step's arguments.
            **kwargs: likewise, by name.

        Returns:
            What the step returns. A tensor of a donated argument comes back as the same object, with its new value,
            where that has the same shape, dtype and strides.

        Raises:
            TraceError: the step cannot be traced, or its trace does not compute what it computes.
            PurityError: it changes an argument in place, or uses parameters that are not among its arguments.
            ReplicationError: it returns values that may differ between ranks; or ranks hold different state.
            AgreementError: ranks' schedules differ, or ranks are at different calls.
            CompileError: the compiler cannot take the step, or its program computes something else.
            PeerError: another rank died or stopped answering.
            NonFiniteError: a gradient is not finite, and `check_finite` was set; no argument was changed.
        """
        if inside_step():
            # As part of a larger step, it is the plain function: its collectives are planned with the others.
            if self._group is not None:
                refuse_other_group(self._name, self._group)
            return self._step(*args, **kwargs)
        self._attempts.begun = False
        try:
            if under_transform():
                raise FdpError(
                    build_message(
                        f"step {self._name!r} was called inside torch.func.grad, vmap or another transform, which "
                        "cannot see into it.",
                        remedy="differentiate inside the step; or transform the function that it was made from: "
                        "step.__wrapped__.",
                    )
                )
            given = by_position(self._name, self._signature, args, kwargs) if kwargs else args
            group = resolve_group(self._group)
            if group.size == 1:
                return self._call(given, group, next(self._numbers))
            with alone_on(group, self._name, number := next(self._numbers)):
                return self._call(given, group, number)
        except BaseException:
            self._attempts.ends_by_error()
            raise

    @hiding_frames
    def trace(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Trace:
        """Trace the step on example arguments, without running it.

        Args:
            *args: the step's arguments; only structure, shapes, dtypes, strides and devices matter.
            **kwargs: likewise, by name.

        Returns:
            The trace; `print()` it.

        Raises:
            TraceError: as for a call.
            PurityError: as for a call.
            ReplicationError: as for a call.
        """
        flat, roles, place = self._resolve(args, kwargs)
        trace = self._preparation.trace(flat, roles, place[1])
        self._known.settle(trace)
        return trace

    @hiding_frames
    def plan(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Plan:
        """Trace and plan the step on example arguments, without running it.

        Args:
            *args: as for `trace`.
            **kwargs: likewise, by name.

        Returns:
            The plan; `print()` it.

        Raises:
            TraceError: as for a call.
            PurityError: as for a call.
            ReplicationError: as for a call.
        """
        flat, roles, place = self._resolve(args, kwargs)
        plan = self._preparation.plan(flat, roles, place[1])
        self._known.settle(plan.trace)
        return plan

    @hiding_frames
    def profile(self, *args: Any, repeats: int = 3, **kwargs: Any) -> Timeline:
        """Run the step for real, including its messages, and measure what happens when; changes nothing.

        Args:
            *args: as for a call; donated arguments are copied, so that they stay as they are.
            repeats: runs that are timed, after one that is not; the one of median length is returned.
            **kwargs: arguments by name.

        Returns:
            The timeline of this rank, in seconds. All ranks call this together, and tell of the same run.

        Raises:
            ArgumentError: `repeats` is not a positive number.
            CompileError: messages are sent out of fdp's sight: by a CUDA graph.
            AgreementError: another rank does something else, or did not come in time.
            PeerError: another rank died or stopped answering.
        """
        flat, roles, place = self._resolve(args, kwargs)
        with alone_on(place[1], self._name):
            known, tensors = self._look_up(flat, roles, place)
            with Progress(self._name) as progress, progress.stage("profiling"):
                return profile_step(known.emitted, tensors, repeats)

    @property
    def _name(self) -> str:
        return getattr(self._step, "__name__", type(self._step).__name__)

    def _call(self, args: tuple[Any, ...], group: Group, number: int) -> Result:
        roles = self._roles_for(len(args))
        place = self._known.place(args, roles, group)
        recognised = self._known.calls.recognise(place, *split_static(args, roles))
        if recognised is None:
            recognised = self._look_up(flatten_call(args, roles), roles, place)
        known, tensors = recognised
        known.last_call = next(call_numbers)
        known.calls += 1
        run = self._run if known.progress is None else self._run_first
        made = run(known, tensors, args, roles)
        result: Result = result_if_finite(self._name, made, number) if self._check_finite else made
        return result

    def _run(self, known: Known, tensors: list[torch.Tensor], args: tuple[Any, ...], roles: Roles) -> Any:
        if known.calls == known.looks_at:
            return self._look_again(known, tensors, args, roles)
        return known.emitted.run(tensors)

    def _run_first(self, known: Known, tensors: list[torch.Tensor], args: tuple[Any, ...], roles: Roles) -> Any:
        progress, known.progress = known.progress or Progress(self._name), None
        with progress, progress.stage("first run"):
            result = self._run(known, tensors, args, roles)
        progress.finish()
        return result

    def _look_again(self, known: Known, tensors: list[torch.Tensor], args: tuple[Any, ...], roles: Roles) -> Any:
        """Make a call, and perhaps compare the step with the function before it."""
        again = known.again
        assert again is not None
        try:
            with self._known.settled():
                return again.look(
                    lambda: self._preparation.comparisons.compare_again(
                        known.emitted, flatten_call(args, roles), roles
                    ),
                    lambda: known.emitted.run(tensors),
                )
        finally:
            known.looks_at = again.at

    def _look_up(self, flat: Flat, roles: Roles, place: CallPlace) -> tuple[Known, list[torch.Tensor]]:
        """Find a call by its signature worked out in full, or prepare that signature."""
        kept = self._known
        known = kept.find(kept.key(flat, place))
        if known is None:
            # Of this step, not of the process: ranks may wait for each other here, each with another step of a thread.
            with self._preparing:
                known = kept.find(kept.key(flat, place))  # another thread may have been faster
                if known is None:
                    progress, others = Progress(self._name), kept.with_other_values(flat, place)
                    programs = [(other.emitted, why) for other, why in others]
                    emitted = self._preparation.prepare(flat, roles, place[1], progress, programs)
                    if self._preparation.outdates:
                        kept.forget_all()
                    known = next((other for other, _ in others if other.emitted is emitted), None)
                    if known is None:
                        again = self._preparation.comparisons.when_again(emitted)
                        known = Known(emitted, again, 0 if again is None else again.at, progress=progress)
                    kept.settle(emitted.plan.trace)
                    kept.keep(flat, place, known)
        trace = known.emitted.plan.trace
        known.remembered = kept.calls.remember(place, flat, trace, known, known.remembered)
        return known, flat.tensors

    def _resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Flat, Roles, CallPlace]:
        """Resolve the arguments of a method that does not have to be fast."""
        if kwargs:
            args = by_position(self._name, self._signature, args, kwargs)
        roles = self._roles_for(len(args))
        return flatten_call(args, roles), roles, self._known.place(args, roles, resolve_group(self._group))

    def _roles_for(self, count: int) -> Roles:
        roles = self._roles.get(count)
        if roles is None:
            roles = resolve_roles(self._step, count, *self._argnums)
            if self._check_finite:  # what is looked at last may have to stay as it was
                roles = replace(roles, donated=frozenset())
            self._roles[count] = roles
        return roles
