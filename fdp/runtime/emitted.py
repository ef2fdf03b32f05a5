"""The callable that carries a plan out on a process group."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fdp.context.ambient import plain_context
from fdp.distributed.desynchronised import alone_on, mark_desynchronised, refuse_desynchronised
from fdp.distributed.group import Group, Ranks, resolve_group
from fdp.distributed.liveness.watch import watched_ranks
from fdp.distributed.other_ranks import Kind, OtherRanks
from fdp.emit.codegen.lines import Part
from fdp.emit.codegen.program import Program
from fdp.emit.compiled import Options, compile_program, resolve_options, why_not_recorded
from fdp.emit.proved import verified_program
from fdp.errors import ArgumentError, build_message, first_line
from fdp.plan import Plan
from fdp.pytorch.dynamo import breaks_graph
from fdp.runtime.closed_over import ClosedOver
from fdp.runtime.consensus import Consensus, as_text
from fdp.runtime.diagnostics import bucket_text, profiler_range, refuse_missing_backends
from fdp.runtime.in_flight import InFlight
from fdp.runtime.memory_map import MemoryMap, memory_map
from fdp.runtime.order import Agreements
from fdp.runtime.proofs import prove_sent
from fdp.runtime.replication import Replication
from fdp.runtime.residence import Busy, Residence
from fdp.runtime.signature import check_signature
from fdp.state import rank_local
from fdp.state.shards import taken_apart

BREAK_REASON = (
    "an fdp step is one program already, with messages in it that a second compiler must not move. Leave "
    "fullgraph=True away, and the graph breaks once, around the step; to compile the step itself, say "
    "fdp.data_parallel(compile=True)."
)
"""What Dynamo says where a step is inside of a function under `torch.compile`."""


class Observer(Protocol):
    """Who is told about the messages of a run."""

    def around_start(self, start: Callable[[int], None]) -> Callable[[int], None]:
        """What is called in place of `start`, with the index of a bucket."""

    def around_wait(self, wait: Callable[[int], None]) -> Callable[[int], None]:
        """What is called in place of `wait`, with the index of a bucket."""

    def arrived(self, index: int) -> None:
        """The message of a bucket is there. Called by any thread; never, if the backend does not tell."""


class Emitted:
    """A planned step, ready to run: call it with the arguments of the step.

    Attributes:
        plan: what it carries out.
        group: the ranks that it runs on.
        options: how it was compiled; None if it runs operator by operator.
        source: the text of the program that it runs.
        residence: where it lives.
    """

    def __init__(
        self,
        plan: Plan,
        group: Group,
        agreed: Agreements | None = None,
        compare_state: bool = True,
        options: Options | None = None,
        tick: Callable[[], None] | None = None,
        apart: bool = False,
    ) -> None:
        if group.size != plan.trace.world_size:
            raise ArgumentError(
                build_message(
                    f"the plan of step {plan.trace.name!r} is for {plan.trace.world_size} ranks, the group has "
                    f"{group.size}.",
                    remedy="trace the step with the group that it is to run on.",
                )
            )
        self.plan, self.group = plan, group
        self._agreed = Agreements() if agreed is None else agreed
        self._compare_state = compare_state
        self._numbers = itertools.count(1)
        self._communicates = group.size > 1 or apart
        self.options = None if options is None else options.settled(_devices(plan))
        if self.options is None:
            self._program = verified_program(plan, group.rank, self._communicates, tick)
        else:
            self._program = compile_program(plan, group, self._communicates, self.options, self._may_record())
        prove_sent(plan, self._program, group.rank)
        self.source, self._function = self._program.source, self._program.function
        self._consensus = Consensus(
            plan, self._program, group, self._agreed, self.options, compare_state, self._communicates
        )
        self.residence = Residence(plan, self._program)
        self._constants = [o.constant if o.node is None else _TENSOR for o in plan.trace.outputs]
        self._all_tensors = all(constant is _TENSOR for constant in self._constants)
        self._closed_over = ClosedOver(plan.trace)
        self._replication = Replication(plan.trace, compare_state)
        refuse_missing_backends(plan, group)

    @breaks_graph(BREAK_REASON)
    def __call__(self, *args: Any) -> Any:
        """Run the step.

        Args:
            *args: as for the step that was traced, of the same structure, shapes, dtypes and devices; static
                arguments are part of the plan and left out.

        Returns:
            What the step returns.

        Raises:
            ArgumentError: the arguments do not have the signature of the plan.
            AgreementError: the ranks' schedules differ, or ranks are at different calls.
            ReplicationError: ranks do not hold the same bits of replicated state.
            PeerError: another rank died or stopped answering.
        """
        self._agreed.attempts.begun = False
        try:
            leaves, spec = taken_apart(args)
            check_signature(self.plan.trace, leaves, spec)
            with alone_on(self.group, self.plan.trace.name, next(self._numbers)):
                return self.run([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        except BaseException:
            self._agreed.attempts.ends_by_error()
            raise

    def timed(self, tick: Callable[[], None], apart: bool = False) -> Emitted:
        """The same step operator by operator, in a program that can be timed.

        Args:
            tick: called at the beginning of the program and at the end of each of its `parts`.
            apart: whether buckets are packed in a world of one, too, where nothing is sent. What is made then is for
                `dry_run` alone.

        Returns:
            Another step, of the same plan and group.
        """
        return Emitted(self.plan, self.group, self._agreed, self._compare_state, tick=tick, apart=apart)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What lies between one tick and the next, of a step that is timed."""
        return self._program.parts

    @property
    def digest(self) -> str:
        """A short name for its schedule: the same on ranks whose messages fit together."""
        return self._consensus.digest

    @property
    def memory(self) -> MemoryMap:
        """What lies where in its memory, and from when to when: `print()` it, or `draw()` it."""
        return memory_map(self.plan, self._program)

    @property
    def program(self) -> Program:
        """The program that it runs."""
        return self._program

    @property
    def hides_messages(self) -> bool:
        """Whether its messages start and are waited for out of fdp's sight: a recording does it."""
        recording = self._program.recording
        return recording is not None and recording.armed

    def run(self, tensors: list[torch.Tensor], observer: Observer | None = None) -> Any:
        """Run the step on its input tensors, in the order of `Trace.inputs`; the list is emptied.

        Args:
            tensors: the inputs.
            observer: who is told when messages start, arrive and are waited for, if anybody is.
        """
        self.check_closed_over(tensors)
        if rank_local.notes and self._replication.refuses:
            self._replication.refuse(tensors)
        self.agree(tensors)
        if self._communicates:
            refuse_desynchronised(self.group, f"step {self.plan.trace.name!r}")
        flying: list[InFlight] = []
        watched = watched_ranks(self.group.process_group)

        def start(index: int, into: torch.Tensor | None = None) -> None:
            if watched is not None:
                watched.awaited = functools.partial(bucket_text, self.plan, index)
            try:
                with profiler_range(self.plan, index, "starts"):
                    if not flying:
                        flying.append(InFlight(self.residence.buffers, self.group, order))
                    arrived = None if observer is None else functools.partial(observer.arrived, index)
                    flying[0].start(index, into, arrived)
            except (RuntimeError, dist.DistError) as error:
                raise self._consensus.peer_error(index, error) from error

        def wait(index: int) -> None:
            if watched is not None:
                watched.awaited = functools.partial(bucket_text, self.plan, index)
            try:
                with profiler_range(self.plan, index, "is waited for"):
                    flying[0].wait(index)
            except (RuntimeError, dist.DistError) as error:
                raise self._consensus.peer_error(index, error) from error

        seen = (start, wait) if observer is None else (observer.around_start(start), observer.around_wait(wait))
        try:
            order = self._consensus.begin(tensors)
            outputs = self._execute(tensors, *seen)
        except BaseException as error:
            if self._communicates and not isinstance(error, Busy):
                text = f"{type(error).__name__}: {first_line(error)}"
                mark_desynchronised(self.group, f"step {self.plan.trace.name!r} was left in the middle by {text}")
            raise
        if watched is not None and self.plan.buckets:
            watched.messages_are_there()
        self._replication.note(outputs)
        return self._put_together(outputs)

    def check_closed_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a call for which the trace does not hold any longer; see `ClosedOver.check`."""
        self._closed_over.check(tensors)

    def _may_record(self) -> bool:
        """Whether the step can be recorded as one CUDA graph, if that was asked for."""
        if self.options is None or not self.options.records:
            return False
        if (why := why_not_recorded(self.plan, self.group)) is not None:
            warnings.warn(
                f"fdp: step {self.plan.trace.name!r} is compiled, and not recorded as a CUDA graph: {why}.",
                stacklevel=2,
            )
        return why is None

    def arm(self) -> None:
        """From now on calls are in earnest: a step that can be recorded as a CUDA graph is, after a few of them."""
        if self._program.recording is not None:
            self._program.recording.armed = True

    def agree(self, tensors: list[torch.Tensor], options: Options | None = None) -> bool:
        """Compare the schedule, and the state that it starts from, with those of the other ranks.

        Args:
            tensors: the inputs of the call.
            options: how it is about to be compiled, if it is.

        Returns:
            Whether there was something to compare: the schedule had not been agreed on before.
        """
        return self._consensus.agree(tensors, self._how(options))

    def disagree(self, options: Options | None = None) -> None:
        """Forget that ranks agreed, so that they do it again: something came between."""
        self._consensus.forget(self._how(options))

    def _how(self, options: Options | None) -> str | None:
        return None if options is None else as_text(options.settled(_devices(self.plan)))

    def dry_run(self, tensors: list[torch.Tensor], kind: Kind = "equal") -> Any:
        """Run the step on this rank alone; nothing is sent.

        Args:
            tensors: as for `run`.
            kind: whether this rank takes the others to hold something else ("different"), or the same ("equal").
        """
        others = OtherRanks(self.group.size, self.group.rank, kind)

        def start(index: int, into: torch.Tensor | None = None) -> None:
            self.residence.buffers[index].pretend(others, into)

        return self._put_together(self._execute(tensors, start, lambda index: None))

    def _execute(self, tensors: list[torch.Tensor], start: Callable[[int], None], wait: Callable[[int], None]) -> Any:
        # In this order: to leave inference mode switches gradients on.
        with plain_context(), torch.no_grad():
            return self.residence.call(self._function, tensors, start, wait)

    def leave_memory(self) -> None:
        """Leave the memory of the last call; the next call takes what it needs."""
        self.residence.leave(self.residence.arena)

    def _put_together(self, outputs: Sequence[Any]) -> Any:
        """What the step returns, of its tensors."""
        if not self._all_tensors:
            it = iter(outputs)
            outputs = [next(it) if constant is _TENSOR else constant for constant in self._constants]
        return self.plan.trace.out_spec.unflatten(outputs)


def _devices(plan: Plan) -> set[torch.device]:
    """The devices that a plan computes on."""
    values = (node.meta.get("val") for node in plan.trace.graph.graph.nodes)
    return {value.device for value in values if isinstance(value, torch.Tensor)}


_TENSOR = object()


def emit_plan(plan: Plan, group: Ranks = None, compile: bool | Mapping[str, object] = False) -> Emitted:
    """Make the function that carries a plan out on a group (a `ProcessGroup`, a `DeviceMesh`, or None)."""
    emitted = Emitted(plan, resolve_group(group), options=resolve_options(compile))
    emitted.arm()
    return emitted
