"""Emitted steps against the function that they were made from: random programs, donated and not, three calls each.

In a world of one a step runs as it does for a user. For a world of two nothing is sent: `Emitted.rehearse` takes the
other rank to hold what this one holds, and the plain function does likewise under the axis "identity".
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from graphs import (
    STATE,
    Program,
    caps,
    copied,
    examples,
    fake_group,
    memory,
    new_batch,
    new_state,
    programs,
    same_bits,
)
from hypothesis import given
from hypothesis import strategies as st

import fdp
from fdp.axis import step_axis
from fdp.emit import Emitted

CALLS = 3


def plainly(program: Program, state: Any, batch: Any, call: int, world: int) -> Any:
    """What the function itself returns, on copies of its arguments."""
    torch.manual_seed(call)
    if world == 1:
        return program.step(copied(state), copied(batch))
    with step_axis("identity", fake_group(world)):
        return program.step(copied(state), copied(batch))


class Runner:
    """Runs a program under fdp, in a world of one as users do, in a larger one as a rehearsal."""

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
        return self.emitted[key].rehearse(optree.tree_leaves((state, batch)))


def three_calls(program: Program, world: int, cap: Any, donate: bool) -> None:
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
        # What earlier calls returned is the caller's: unless he gave it away again, nobody changes it.
        kept = [(x, copy) for x, copy in kept if memory(x) not in donated]
        assert all(same_bits(x, copy) for x, copy in kept), "an earlier output was changed"
        kept += [(x, copied(x)) for x in optree.tree_leaves(found)]
        state = found[0]


def same_objects(program: Program, arguments: Any, world: int) -> list[str]:
    """The leaves of a donated state that must come back as the tensors they went in.

    All whose own memory no other output is made of, that are not changed in place, and whose memory is theirs alone.
    """
    state, batch = copied(arguments)
    originals = dict(state)
    with step_axis("identity", fake_group(world)):
        new, metrics = program.step(state, batch)
    names = []
    for name, leaf in originals.items():
        others = [value for key, value in new.items() if key != name] + metrics
        mine = new[name].untyped_storage().data_ptr() == memory(leaf)
        if leaf._version == 0 and memory(leaf) not in map(memory, others) and (not mine or new[name] is leaf):
            names.append(name)
    return names


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_computes_what_its_function_computes(world: int, donate: bool) -> None:
    @examples(60)
    @given(programs(), caps())
    def check(program: Program, cap: Any) -> None:
        three_calls(program, world, cap, donate)

    check()
