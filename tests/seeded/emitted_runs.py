"""Run the emitted program of a step on ranks of one process, and compare with plain eager PyTorch.

Nothing here looks at how a program was verified: the numbers are an oracle of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from fault_reports import Outcome
from faulty_program import Program
from simulated_ranks import Messages, SimulatedGroup, Turns, poison
from traced_programs import SEED, Prepared

from fdp.distributed.group import Group
from fdp.emit.compiled import compiler as compiled_program
from fdp.plan import Plan, plan_trace
from fdp.runtime import buffers
from fdp.runtime.in_flight import InFlight
from fdp.runtime.proofs import sending
from fdp.verify import VerificationError, verify_made, verify_program, verify_sent

Prove = Callable[[Plan, Any, Any, Any], None]
"""(plan, program, its memory, its buckets): `fdp.verify.verify_made`."""


_LOOKS = ("verify_lowered", "verify_loops", "_prove_own_operators")
"""By which the validator looks at what a compiler gets."""


class Different(Exception):
    """A number is not what plain PyTorch computes, or what it was."""


def differs(
    program: Program, plan: Plan, emitted: Sequence[Any], expected: list[list[Any]], prove: Prove | None = None
) -> str | None:
    """What is wrong with the numbers of emitted programs, one for each rank; None if nothing is.

    Args:
        program: the step.
        plan: its plan.
        emitted: a program for each rank.
        expected: the results of plain PyTorch: for each rank, those of each call.
        prove: looks at the tensors that are made for a program, before it runs; None for no check.

    Raises:
        Exception: whatever a program raises by itself.
    """
    try:
        for late in (False, True):
            turns = Turns(program.world, SEED)
            messages = Messages(turns, late)
            turns.run(
                lambda rank, messages=messages: _calls(
                    program, plan, emitted[rank], SimulatedGroup(messages, rank, program.mesh), expected[rank], prove
                )
            )
    except Different as error:
        return str(error)
    return None


class _Runnable:
    """An emitted program in memory of its own, as `fdp.emit.Emitted` runs it."""

    def __init__(self, plan: Plan, program: Any, group: SimulatedGroup | None = None) -> None:
        self._plan, self._program, self._group = plan, program, group
        self._blocks = {
            device: torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)
            for device, layout in program.layouts.items()
        }
        for function, values in buffers.all_place_values(program, self._blocks):
            function.__globals__.update(values)
        self._buffers = buffers.make_buffers(plan, program, self._blocks)

    def prove(self, prove: Prove) -> None:
        """Have what was made looked at."""
        prove(self._plan, self._program, self._blocks, self._buffers)

    def __call__(self, leaves: list[torch.Tensor]) -> Any:
        for block in self._blocks.values():
            poison(block)  # steps share memory: between two calls another one may have used it
        flying: Any = InFlight(self._buffers, self._group, _Numbered())  # type: ignore[arg-type]
        with torch.no_grad():
            outputs = iter(self._program.function(leaves, flying.start, flying.wait))
        made = [o.constant if o.node is None else next(outputs) for o in self._plan.trace.outputs]
        return self._plan.trace.out_spec.unflatten(made)


class _Numbered:
    """Says which call it is, as `fdp.runtime.order.Order` does: what lies behind the first message is overwritten."""

    awaits_first = False

    def before_start(self, buffer: Any) -> None:
        if buffer.header is not None:
            buffer.header.fill_(1)


def _calls(
    program: Program, plan: Plan, emitted: Any, group: SimulatedGroup, expected: list[Any], prove: Prove | None
) -> None:
    """Call a program several times; what it returned stays what it was, until the caller writes to it."""
    run, state, rank = _Runnable(plan, emitted, group), program.state(), group.rank
    if prove is not None:
        run.prove(prove)
    closed = {name: getattr(plan.trace.graph, name) for name, _ in plan.trace.graph.named_buffers()}
    held = optree.tree_map(torch.clone, closed)
    kept: list[tuple[Any, Any]] = []
    for call in range(program.calls):
        batch = program.batch(rank, call)
        untouched = [batch] if program.donate else [batch, state]
        before = optree.tree_map(torch.clone, untouched)
        # A list without another reference: the program empties it.
        new, results = run(optree.tree_leaves((state, batch)))
        _compare(f"rank {rank}, call {call}", (new, results), expected[call], program.tolerance, strides=True)
        _compare(f"rank {rank}, call {call}, inputs that are not donated", untouched, before)
        _compare(f"rank {rank}, call {call}, closed-over tensors", closed, held)
        for tree, values in kept:
            _compare(f"rank {rank}, results of a call before call {call}", tree, values)
        for tree, _ in kept:
            for leaf in optree.tree_leaves(tree):
                leaf.fill_(77)  # they are the caller's
        kept = [(results, optree.tree_map(torch.clone, results))]
        if not program.donate:
            kept.append((new, optree.tree_map(torch.clone, new)))
        state = new if program.donate else optree.tree_map(torch.clone, new)


def _compare(where: str, found: Any, wanted: Any, tolerance: float = 0.0, strides: bool = False) -> None:
    paths, ones, _ = optree.tree_flatten_with_path(found)
    twos = optree.tree_leaves(wanted)
    for path, one, two in itertools.zip_longest(paths, ones, twos):
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            raise Different(f"{where}, {path}: {one.dtype} {list(one.shape)} for {two.dtype} {list(two.shape)}")
        if strides and _steps(one) != _steps(two):
            raise Different(f"{where}, {path}: strides {one.stride()}, not {two.stride()}")
        if torch.equal(one, two):
            continue
        if not one.numel() or not tolerance or not one.is_floating_point():
            share = 1.0
        else:
            share = float((one - two).abs().max() / two.abs().max())
        if not share <= tolerance:
            raise Different(f"{where}, {path}: off by {share:.2g}")


def _steps(value: torch.Tensor) -> list[int]:
    return [step for step, size in zip(value.stride(), value.shape, strict=True) if size != 1 and value.numel()]


@dataclasses.dataclass(frozen=True)
class Ways:
    """How programs are made.

    Attributes:
        write: writes the program of a plan for a rank, whether it is right or not.
        given: likewise, what a user gets: verified, and another one in its place if it is refused.
        verify: says what the validator says of what `write` wrote.
        prove: likewise, of the tensors that are made for it.
        tolerance: by what share of its largest value a result may differ, at least.
    """

    write: Callable[[Plan, int, bool], Any]
    given: Callable[[Plan, int, bool], Any]
    verify: Callable[[Plan, Any, int, bool], None]
    prove: Prove
    tolerance: float = 0.0


def ways_of(compiled: bool) -> Ways:
    """How programs are made, compiled or not."""
    from fdp.emit.backend import resolve_backend
    from fdp.emit.codegen.program import write_program
    from fdp.emit.memory.decisions import plan_memory
    from fdp.runtime import Emitted

    backend = resolve_backend(compiled)

    def group_of(plan: Plan, rank: int) -> Group:
        return Group(None, plan.trace.world_size, rank)

    def given(plan: Plan, rank: int, communicates: bool) -> Any:
        return Emitted(plan, group_of(plan, rank), backend=backend).program

    def writing(plan: Plan, rank: int, communicates: bool) -> Any:
        return write_program(plan_memory(plan, communicates), rank)

    if not compiled:
        return Ways(writing, given, verify_program, verify_made)
    refusals: list[tuple[Any, Exception]] = []

    def compiling(plan: Plan, rank: int, communicates: bool) -> Any:
        """Compile a graph whatever the validator, which looks at it before, says of it."""
        found: list[Exception] = []

        def noting(look: Callable[..., None]) -> Callable[..., None]:
            def look_and_note(*args: Any) -> None:
                try:
                    look(*args)
                except VerificationError as error:
                    found.append(error)

            return look_and_note

        looks = {name: getattr(compiled_program, name) for name in _LOOKS}
        try:
            for name, look in looks.items():
                setattr(compiled_program, name, noting(look))
            made = backend.settled(plan).program(plan, group_of(plan, rank), communicates)
        finally:
            for name, look in looks.items():
                setattr(compiled_program, name, look)
        refusals.extend((made, error) for error in found)
        return made

    def verify(plan: Plan, program: Any, rank: int, communicates: bool) -> None:
        for made, error in refusals:
            if made is program:
                raise error

    # The compiler adds up in another order.
    return Ways(compiling, given, verify, verify_made, 1e-6)


def outcomes_of(prepared: Prepared, ways: Ways) -> Iterator[Outcome]:
    """Plan a step, emit it for each rank and verify that; then compare its numbers.

    Returns:
        Two outcomes: that if computing the numbers should end the process, and that if it did not.
    """
    program, expected, communicates = prepared.program, prepared.expected, prepared.program.world > 1
    program = dataclasses.replace(program, tolerance=max(program.tolerance, ways.tolerance))
    user = None
    refusal = numbers = raised = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = plan_trace(prepared.trace, program.cap)
            emitted = [ways.write(plan, rank, communicates) for rank in range(program.world)]
        except Exception as error:
            yield from [Outcome(raised=_in_short(error))] * 2
            return
        try:
            for rank, each in enumerate(emitted):
                ways.verify(plan, each, rank, communicates)
                if (runnable := _runnable(plan, each)) is not None:
                    runnable.prove(ways.prove)
                verify_sent(plan, each, rank, sending(plan, each))
        except VerificationError as error:
            refusal = _in_short(error)
        yield Outcome(refusal=refusal, raised="the process died")
        try:
            numbers = differs(program, plan, emitted, expected)
        except Exception as error:
            raised = _in_short(error)
        if numbers is not None:
            # Whoever runs a step that is refused gets right numbers from another program, or an error.
            with contextlib.suppress(Exception):
                given = [ways.given(plan, rank, communicates) for rank in range(program.world)]
                user = differs(program, plan, given, expected, ways.prove)
    yield Outcome(numbers, raised, refusal, user)


def _runnable(plan: Plan, program: Any) -> _Runnable | None:
    """A program in memory; None where that raises an error, as it will again when its numbers are computed."""
    try:
        return _Runnable(plan, program)
    except Exception:
        return None


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300].replace("\n", " | ")
