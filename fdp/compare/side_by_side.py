"""Run a step by itself and a program that was made for it side by side: same inputs, same random numbers.

Both run on this rank alone, and assume that the other ranks hold other values (see `OtherRanks`). So no
other rank is needed, and whatever the trace got wrong (a constant that should not be one, an operator that does not do
what its schema says, a view that was taken for a copy) shows as a difference instead of as a wrong number. The inputs
are those of the call; or the same ones perturbed, since zeros, equal copies and a learning rate of zero, which first
calls have, hide mistakes.

It is the moment of a training run that takes the most memory, so it holds on to little. Beside the arguments there are
at most, at one time: the results of the step, and what one run of the program takes on copies of the arguments (the
results of a donated argument lie in its copy), and a copy of what the step closes over. That is three states where the
state is donated, and four where it is not, beside the intermediate values of one run. Where results differ, so that the
reason has to be found, there may be two more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fdp import pytree
from fdp.compare.copies import MOVES, copy_of, is_lack_of_memory, perturb_
from fdp.compare.leaves import Difference, different, finite, old_values, same_bits
from fdp.compare.refusals import changes_inputs, unrunnable, wrong_structure, wrong_trace
from fdp.compare.replay import Replay
from fdp.compare.restored import (
    held_generator_states,
    other_random_state,
    own_generator,
    seed_held_generators,
    undisturbed,
)
from fdp.distributed.other_ranks import OtherRanks, OthersHold
from fdp.errors import FdpError
from fdp.runtime.emitted import Emitted
from fdp.state.containers import in_containers_of, looked_into
from fdp.trace import Flat, Roles, run_untraced


class NotRunnable(Exception):
    """The emitted program raised an error, which is the cause of this one."""


@dataclass(frozen=True)
class Case:
    """The inputs on which a step and a program are compared.

    Attributes:
        inputs: makes copies of all inputs.
        others: what this rank takes the other ranks to hold.
        by_itself: runs the step by itself once more; returns the leaves of its results.
    """

    inputs: Callable[[], list[torch.Tensor]]
    others: OtherRanks
    by_itself: Callable[[], list[Any]]

    def once_more(self, offenders: Sequence[Difference]) -> list[Any]:
        """Those results of one more run of the step by itself."""
        leaves = self.by_itself()
        return [leaves[offender.index] for offender in offenders]

    def repeats(self, offenders: Sequence[Difference]) -> list[bool]:
        """Which results one more run of the step by itself returns again."""
        again = self.once_more(offenders)
        return [same_bits(value, offender.expected) for offender, value in zip(offenders, again, strict=True)]


On = Literal["call", "perturbed", "both"]
"""The inputs of a call, the same ones perturbed, or first those and then these."""

Explain = Callable[[list[Difference], Case], None]
"""Looks at the results that differ; returns if all of them do so by rounding, and raises otherwise."""


class SideBySide:
    """The comparison of a step with a program.

    Args:
        program: what was made for the step.
        step: the user's function.
        flat: the arguments of a call; they are not changed.
        roles: what each argument is.
        explain: is asked about results that differ.
        wants_cause: whether an error of the program's own is raised as `NotRunnable`.
    """

    def __init__(
        self,
        program: Emitted,
        step: Callable[..., Any],
        flat: Flat,
        roles: Roles,
        explain: Explain,
        wants_cause: bool = False,
    ) -> None:
        self._program, self._step, self._flat, self._roles = program, step, flat, roles
        self._tensors = flat.tensors  # once: each access goes through all leaves
        self._explain, self._wants_cause = explain, wants_cause
        self._trace = program.plan.trace
        self._finite: list[bool] = []
        self._kept: list[torch.Tensor | None] = []
        self._given: dict[int, torch.Tensor] = {}

    def run(self, on: On, finite: Sequence[bool] = ()) -> list[bool]:
        """Compare.

        Args:
            on: which inputs; perturbed ones are left out if the step cannot take them.
            finite: what an earlier comparison returned, if this one is on perturbed inputs alone.

        Returns:
            For each leaf of the results, whether it was finite on the inputs of a call.
        """
        self._finite = list(finite)
        if on != "perturbed":
            self._compare(0.0)
        if on != "call" and any(tensor.is_floating_point() or tensor.is_complex() for tensor in self._tensors):
            any(self._compare(move) for move in MOVES)
        self._kept, self._given = [], {}
        return self._finite

    def _copy(self, at: int, move: float, memory: torch.Tensor | None = None) -> torch.Tensor:
        return perturb_(copy_of(self._tensors[at], memory), move, at)

    def _value(self, at: int, move: float) -> torch.Tensor:
        """An input, to be read only."""
        return self._copy(at, move) if move else self._tensors[at].detach()

    def _fresh(self, move: float, alive: Sequence[Any] = ()) -> list[torch.Tensor]:
        """The inputs of a run: copied for it if it may change them, otherwise copied once for all runs.

        Copies take the memory of the last run's, unless a result lies in it that is still needed: to touch new memory
        for the first time takes as long as much of a step.
        """
        taken = {_address(leaf) for leaf in alive if isinstance(leaf, torch.Tensor)}
        values = []
        for at, kept in enumerate(self._kept):
            if kept is None:
                memory = self._given.pop(at, None)
                if memory is not None and _address(memory) in taken:
                    memory = None
                kept = self._given[at] = self._copy(at, move, memory)
            values.append(kept)
        return values

    def _untraced(self, move: float, kind: OthersHold, alive: Sequence[Any] = ()) -> Any:
        values = [value.requires_grad_(False) for value in self._fresh(move, alive)]
        if self._trace.whole is not None:
            return self._graph_by_itself(values, kind)
        wire, group = self._trace.wire, self._program.group
        found = _detached(run_untraced(self._step, self._flat, self._roles, group, values, wire, kind))
        return in_containers_of(found, self._trace.out_spec)

    def _graph_by_itself(self, values: list[torch.Tensor], kind: OthersHold) -> Any:
        """Run the graph for one rank, for a step with sharded state."""
        others = self._program.group.others(kind)
        outputs = iter(Replay(self._trace.graph, values, others).run())
        return self._trace.out_spec.unflatten(
            [output.constant if output.node is None else next(outputs) for output in self._trace.outputs]
        )

    def _warn_of_frozen_draws(self) -> None:
        """Two runs agreed; but a branch that is seldom taken may depend on what was drawn."""
        warnings.warn(
            f"fdp: step {self._trace.name!r} draws random numbers from Python's or NumPy's generators. A trace freezes "
            "them: every call takes the branches that the first one took. Draw with torch (torch.rand, fdp.random) and "
            "choose by torch.where or torch.cond, or draw outside of the step.",
            stacklevel=2,
        )

    def _compare(self, move: float) -> bool:
        """Compare on one kind of inputs; returns whether the step runs on them."""
        self._kept = []
        self._kept = [None if x.donated else self._copy(at, move) for at, x in enumerate(self._trace.inputs)]
        with undisturbed(self._program):
            seed_held_generators(self._program)
            before = other_random_state()
            taken = self._by_itself(move)
            if taken is None:
                return False
            expected, expected_spec, left, kind = taken
            drawn = other_random_state() != before
        with undisturbed(self._program):
            seed_held_generators(self._program)
            found, found_spec = self._by_program(move, kind, expected)
            if left != held_generator_states(self._program):
                raise own_generator(self._trace.name, self._program)
        self._check_untouched(move)
        if expected_spec != found_spec:
            raise wrong_structure(self._trace.name, found_spec, expected_spec)
        names = pytree.names_in(expected_spec, "output")
        before_of = old_values(self._trace, lambda at: self._value(at, move))
        if drawn and not move:
            # Random numbers that torch does not know of are drawn. They are frozen; does anything depend on them?
            offenders = different(names, found, expected, before_of)
            if not offenders:
                with undisturbed(self._program):
                    again, _ = looked_into(self._untraced(move, kind, expected))
                # Two runs of the same code: on a CPU they agree to the bit, so the smallest difference tells.
                offenders = different(names, again, expected, before_of, share=1.0 if self._on_accelerator else 1e-3)
            if not offenders:
                self._warn_of_frozen_draws()
        else:
            # Each leaf is let go of as soon as it has been compared.
            offenders = different(names, taken_from(found), taken_from(expected), before_of)
        if offenders:
            others = self._program.group.others(kind)
            count = range(len(self._trace.inputs))

            def by_itself() -> list[Any]:
                self._kept, self._given = [None] * len(count), {}
                with undisturbed(self._program):
                    seed_held_generators(self._program)
                    return looked_into(self._untraced(move, kind))[0]

            self._explain(offenders, Case(lambda: [self._copy(at, move) for at in count], others, by_itself))
        return True

    @property
    def _on_accelerator(self) -> bool:
        return any(item.device.type != "cpu" for item in self._trace.inputs)

    def _by_itself(self, move: float) -> tuple[list[Any], Any, list[bytes], OthersHold] | None:
        """What the step returns by itself (leaves and structure), the states in which it leaves the generators that it
        holds, and with which other ranks; None if it cannot take perturbed inputs.

        Other ranks that hold something else may be too much for it, too: then they hold the same.
        """
        kinds: tuple[OthersHold, ...] = ("different", "equal") if self._program.group.size > 1 else ("different",)
        result: tuple[list[Any], Any, list[bytes], OthersHold] | None = None
        finite_leaves: list[bool] = []
        for kind in kinds:
            try:
                with undisturbed(self._program):
                    alive = () if result is None else result[0]
                    leaves, spec = looked_into(self._untraced(move, kind, alive))
                    left = held_generator_states(self._program)
            except FdpError:
                if not move:
                    raise
                return None
            except Exception:
                if result is not None:
                    break
                if kind == kinds[-1]:
                    if not move:
                        raise
                    return None
                continue
            known = [finite(leaf) for leaf in leaves]
            if result is None or all(known):
                result, finite_leaves = (leaves, spec, left, kind), known
            if all(known):
                break
        assert result is not None
        if not move:
            self._finite = finite_leaves
        elif any(was and not now for was, now in zip(self._finite, finite_leaves, strict=False)):
            return None
        return result

    def _by_program(self, move: float, kind: OthersHold, alive: Sequence[Any]) -> tuple[list[Any], Any]:
        try:
            return looked_into(self._program.dry_run(self._fresh(move, alive), kind))
        except FdpError:
            raise
        except Exception as error:
            if is_lack_of_memory(error):
                raise
            if self._wants_cause:
                raise NotRunnable from error
            raise unrunnable(self._trace.name, error) from error

    def _check_untouched(self, move: float) -> None:
        changed = [
            item.name
            for at, (item, kept) in enumerate(zip(self._trace.inputs, self._kept, strict=True))
            if kept is not None and not same_bits(self._value(at, move), kept)
        ]
        if changed:
            raise changes_inputs(self._trace.name, changed)


def taken_from(leaves: list[Any]) -> Any:
    """Each leaf in turn; the list no longer holds it."""
    leaves.reverse()
    while leaves:
        yield leaves.pop()


def positions_of(program: Emitted, offenders: Sequence[Difference]) -> list[int]:
    """Where results are among the tensors of the results.

    Raises:
        TraceError: one is no tensor, or has another shape or dtype: that is no rounding.
    """
    wrong = [
        offender.text
        for offender in offenders
        if not isinstance(offender.expected, torch.Tensor)
        or not isinstance(offender.found, torch.Tensor)
        or (offender.found.shape, offender.found.dtype) != (offender.expected.shape, offender.expected.dtype)
    ]
    if wrong:
        raise wrong_trace(program.plan.trace.name, wrong)
    outputs = program.plan.trace.outputs
    before = [sum(output.node is not None for output in outputs[:at]) for at in range(len(outputs))]
    return [before[offender.index] for offender in offenders]


def _address(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's memory; None for autograd's zeros without memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def _detached(tree: object) -> Any:
    """A tensor without the graph of a backward pass that will not run."""
    return pytree.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)
