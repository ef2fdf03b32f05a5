"""The callable that carries a plan out on a process group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from fdp.distributed.desynchronised import alone_on, mark_desynchronised, refuse_desynchronised
from fdp.distributed.group import Group, Ranks, resolve_group
from fdp.distributed.liveness.patience import refuse_gone
from fdp.distributed.liveness.watch import watched_ranks
from fdp.distributed.mesh import mesh_text
from fdp.distributed.other_ranks import OthersHold
from fdp.emit.backend import OPERATOR_BY_OPERATOR, Backend, OperatorByOperator, resolve_backend
from fdp.errors import ArgumentError, build_message, first_line
from fdp.plan import Plan
from fdp.pytorch.dynamo import breaks_graph
from fdp.pytree import Tree
from fdp.runtime.closed_over import ClosedOver
from fdp.runtime.consensus import Consensus
from fdp.runtime.diagnostics import refuse_missing_backends
from fdp.runtime.memory_map import MemoryMap, memory_map
from fdp.runtime.messages_of_call import MessagesOfCall, Observer
from fdp.runtime.order import Agreements
from fdp.runtime.proofs import prove_sent
from fdp.runtime.replication import Replication
from fdp.runtime.residence import Busy, Residence
from fdp.runtime.runner import Runner
from fdp.runtime.signature import check_signature
from fdp.state import rank_local
from fdp.state.containers import flatten_apart
from fdp.tables import count, short_name

BREAK_REASON = (
    "an fdp step is one program already, with messages in it that a second compiler must not move. Leave "
    "fullgraph=True away, and the graph breaks once, around the step; to compile the step itself, say "
    "fdp.data_parallel(compile=True)."
)
"""What Dynamo says where a step is inside of a function under `torch.compile`."""


class Emitted:
    """A planned step, ready to run: call it with the arguments of the step.

    Attributes:
        plan: what it carries out.
        group: the ranks that it runs on.
        backend: what made its program.
        program: the program that it runs.
        source: its text.
        consensus: what it agrees on with other ranks.
        residence: owns its memory.
        runner: runs the program.
        closed_over: the tensors that it uses without being passed them.
    """

    def __init__(
        self,
        plan: Plan,
        group: Group,
        agreed: Agreements | None = None,
        compare_state: bool = True,
        backend: Backend = OPERATOR_BY_OPERATOR,
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
        if group.sizes != plan.trace.dimensions:
            given, due = (mesh_text(sizes) or "ranks without a mesh" for sizes in (group.sizes, plan.trace.dimensions))
            raise ArgumentError(
                build_message(
                    f"the plan of step {plan.trace.name!r} is for {due}, and the group is {given}.",
                    remedy="trace the step with the group that it is to run on.",
                )
            )
        self.plan, self.group = plan, group
        self._agreed = Agreements() if agreed is None else agreed
        self._compare_state = compare_state
        self._numbers = itertools.count(1)
        self._communicates = group.size > 1 or apart
        self.backend = backend.settled(plan)
        self.program = self.backend.program(plan, group, self._communicates)
        prove_sent(plan, self.program, group.rank)
        self.source = self.program.source
        self.consensus = Consensus(
            plan, self.program, group, self._agreed, self.backend, compare_state, self._communicates
        )
        self.residence = Residence(plan, self.program)
        self.runner = Runner(plan, self.program, self.residence)
        self.closed_over = ClosedOver(plan.trace)
        self._replication = Replication(plan.trace, compare_state)
        refuse_missing_backends(plan, group)

    def __repr__(self) -> str:
        buckets, ranks = count(len(self.plan.buckets), "bucket"), count(self.group.size, "rank")
        return f"<Emitted {short_name(self.plan.trace.name)}: {buckets}, {ranks}, {self.backend.how}>"

    @breaks_graph(BREAK_REASON)
    def __call__(self, *args: Tree) -> Tree:
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
            leaves, spec = flatten_apart(args)
            check_signature(self.plan.trace, leaves, spec)
            with alone_on(self.group, self.plan.trace.name, next(self._numbers)):
                return self.run([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        except BaseException:
            self._agreed.attempts.ends_by_error()
            raise

    def timed(self, tick: Callable[[], None], apart: bool = False) -> Emitted:
        """The same step operator by operator, in a program that can be timed.

        Args:
            tick: called at the beginning of the program and at the end of each part of its program.
            apart: whether buckets are packed also in a world of one, where nothing is sent. Such a step is for
                `dry_run` alone.

        Returns:
            Another step, of the same plan and group.
        """
        return Emitted(self.plan, self.group, self._agreed, self._compare_state, OperatorByOperator(tick), apart)

    @property
    def memory(self) -> MemoryMap:
        """What lies where in its memory, and from when to when: `print()` it, or `draw()` it."""
        return memory_map(self.plan, self.program)

    @property
    def hides_messages(self) -> bool:
        """Whether its messages start and are waited for out of fdp's sight: a recording does it."""
        recording = self.program.recording
        return recording is not None and recording.armed

    def run(self, tensors: list[torch.Tensor], observer: Observer | None = None) -> Tree:
        """Run the step on its input tensors, in the order of `Trace.inputs`; the list is emptied.

        Args:
            tensors: the inputs.
            observer: notes when messages start, arrive and are waited for; None for no notes.
        """
        self.closed_over.check(tensors)
        if rank_local.notes and self._replication.refuses:
            self._replication.refuse(tensors)
        self.consensus.agree(tensors)
        if self._communicates:
            refuse_desynchronised(self.group, f"step {self.plan.trace.name!r}")
        watched = watched_ranks(self.group.process_group)
        try:
            order = self.consensus.begin(tensors)
            messages = MessagesOfCall(self.plan, self.group, self.residence, self.consensus, order, watched, observer)
            seen: tuple[Callable[..., None], Callable[[int], None]] = (messages.start, messages.wait)
            if observer is not None:
                seen = (observer.around_start(messages.start), observer.around_wait(messages.wait))
            outputs = self.runner.run(tensors, *seen)
        except BaseException as error:
            if self._communicates and not isinstance(error, Busy):
                text = f"{type(error).__name__}: {first_line(error)}"
                mark_desynchronised(self.group, f"step {self.plan.trace.name!r} was left in the middle by {text}")
            raise
        if watched is not None and self.plan.buckets:
            watched.messages_are_there()
        self._replication.note(outputs)
        return self.runner.put_together(outputs)

    def dry_run(self, tensors: list[torch.Tensor], kind: OthersHold = "equal") -> Tree:
        """Run the step on this rank alone; nothing is sent.

        Args:
            tensors: as for `run`.
            kind: whether this rank takes the others to hold something else ("different"), or the same ("equal").

        Raises:
            PeerError: another rank is gone. A comparison of a large step takes long, and sees it here.
        """
        return self.runner.put_together(self.dry_run_apart(tensors, kind))

    def dry_run_apart(self, tensors: list[torch.Tensor], kind: OthersHold = "equal") -> Sequence[torch.Tensor]:
        """As `dry_run`; returns a flat list of the tensors among the results, as the program makes them."""
        others, reference = self.group.others(kind), self.group.reference
        watched = watched_ranks(None if reference is None else reference())

        def look() -> None:
            if watched is not None:
                refuse_gone(watched)

        return self.runner.run_alone(tensors, others, look)

    def allow_recording(self) -> None:
        """Dry runs are over: a step that can be recorded as a CUDA graph is recorded after a few calls from now on."""
        if self.program.recording is not None:
            self.program.recording.armed = True


def emit_plan(plan: Plan, group: Ranks = None, compile: bool | Mapping[str, object] = False) -> Emitted:
    """Make the function that carries a plan out on a group (a `ProcessGroup`, a `DeviceMesh`, or None)."""
    emitted = Emitted(plan, resolve_group(group), backend=resolve_backend(compile))
    emitted.allow_recording()
    return emitted
