"""An emitted step beside the function that it was made from, for three calls, on poisoned memory or not.

In a world of one a step runs as it does for a user. For a world of two nothing is sent: `Emitted.dry_run` takes the
other rank to hold what this one holds, and the plain function does likewise under the axis "equal ranks".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import optree
import pytest
import torch
from bits import copied, memory, same_bits
from drawn_steps import Program, new_batch, new_state
from fake_ranks import fake_group

import fdp
from fdp.context.axis import step_axis
from fdp.emit.backend import OperatorByOperator
from fdp.emit.memory import planning
from fdp.emit.memory.savings import ALL
from fdp.runtime import Emitted, arena

CALLS = 3


@pytest.fixture(scope="module", params=["as users have it", "everything early, on poisoned memory"], autouse=True)
def executor(request: pytest.FixtureRequest) -> Any:
    """Every test of a file that imports this runs twice: as users have it, and on memory full of NaN.

    What the emitter does for large tensors is then done for all.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "as users have it":
            patch.setattr(planning, "_SCALED_WHEN_PACKED_BYTES", 0)
            patch.setattr(OperatorByOperator, "savings", dataclasses.replace(ALL, pack_from_bytes=0))
            patch.setattr(arena.Arena, "fit", poisoning(arena.Arena.fit))
        yield


def poisoning(fit: Any) -> Any:
    """`Arena.fit` that fills the memory of a step with NaN before each call."""

    def fit_and_fill(self: Any, layouts: Any) -> Any:
        blocks = fit(self, layouts)
        for block in blocks.values():
            block.fill_(255)
        return blocks

    return fit_and_fill


def plainly(program: Program, state: Any, batch: Any, call: int, world: int) -> Any:
    """What the function itself returns, on copies of its arguments."""
    torch.manual_seed(call)
    if world == 1:
        return program.step(copied(state), copied(batch))
    with step_axis("equal ranks", fake_group(world)):
        return program.step(copied(state), copied(batch))


class Runner:
    """Runs a program under fdp, in a world of one as users do, in a larger one as a dry run."""

    def __init__(self, program: Program, world: int, cap: Any, donate: bool):
        self.world, self.cap = world, cap
        self.group = None if world == 1 else fake_group(world)
        # The property tests look at what was emitted, so the check that would find most faults first is off.
        self.step = fdp.data_parallel(
            program.step,
            group=self.group,
            bucket_cap_mb=cap,
            donate_argnums=0 if donate else (),
            check_replication=False,
            check_trace=False,
        )
        self.emitted: dict[str, Emitted] = {}

    def __call__(self, state: Any, batch: Any, call: int) -> Any:
        if self.world == 1:
            torch.manual_seed(call)
            return self.step(state, batch)
        plan = self.step.plan(state, batch)
        # One emitted step for all calls of a signature: its buckets are used again.
        key = str(plan.trace.inputs)
        if key not in self.emitted:
            self.emitted[key] = Emitted(plan, self.group)
        torch.manual_seed(call)
        return self.emitted[key].dry_run(optree.tree_leaves((state, batch)))


def unshared(state: Any) -> Any:
    """The state itself, or a copy if leaves share memory: such a one may be donated, and not be written into."""
    leaves = list(state.values())
    repeated = any(s == 0 and n > 1 for x in leaves for n, s in zip(x.shape, x.stride(), strict=True))
    if len(set(map(memory, leaves))) == len(leaves) and not repeated:
        return state
    return {key: leaf.contiguous().clone() for key, leaf in state.items()}


def three_calls(program: Program, world: int, cap: Any, donate: bool, share: bool = True) -> None:
    """Calls a step with new data each time, and looks at results, arguments, and what earlier calls returned."""
    run = Runner(program, world, cap, donate)
    state, kept = new_state(), list[tuple[Any, Any]]()
    for call in range(CALLS):
        batch = new_batch(call)
        before = copied((state, batch))
        expected = plainly(program, state, batch, call, world)
        found = run(state, batch, call)
        assert same_bits(found, expected), f"call {call}: {found}\n{expected}"
        assert same_bits(batch, before[1]), "the batch was changed"
        if donate:
            for name in same_objects(program, before, world):
                assert found[0][name] is state[name], f"{name} is another tensor"
        else:
            assert same_bits(state, before[0]), "the state was changed"
        donated = {memory(leaf) for leaf in state.values()} if donate else set()
        # What earlier calls returned is the caller's: no later call changes it, unless the caller donates it.
        kept = [(x, copy) for x, copy in kept if memory(x) not in donated]
        assert all(same_bits(x, copy) for x, copy in kept), "an earlier output was changed"
        kept += [(x, copied(x)) for x in optree.tree_leaves(found)]
        state = found[0] if share else unshared(found[0])


def same_objects(program: Program, arguments: Any, world: int) -> list[str]:
    """The leaves of a donated state that must come back as the tensors they went in.

    All whose own memory no other output is made of, that are not changed in place, and whose memory is theirs alone.
    """
    state, batch = copied(arguments)
    originals = dict(state)
    with step_axis("equal ranks", fake_group(world)):
        new, metrics = program.step(state, batch)
    names = []
    for name, leaf in originals.items():
        others = [value for key, value in new.items() if key != name] + metrics
        mine = new[name].untyped_storage().data_ptr() == memory(leaf)
        if leaf._version == 0 and memory(leaf) not in map(memory, others) and (not mine or new[name] is leaf):
            names.append(name)
    return names
