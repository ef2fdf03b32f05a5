"""Emitted steps against the function that they were made from: random programs, donated and not, three calls each.

In a world of one a step runs as it does for a user. For a world of two nothing is sent: `Emitted.dry_run` takes the
other rank to hold what this one holds, and the plain function does likewise under the axis "equal ranks".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import models
import optree
import pytest
import torch
from bits import copied, memory, same_bits
from drawn_steps import Program, new_batch, new_state, programs
from drawn_traces import caps
from fake_ranks import fake_group
from hypothesis import given
from hypothesis import strategies as st
from samples import examples

import fdp
from fdp.context.axis import step_axis
from fdp.emit.codegen import program
from fdp.emit.memory import planning
from fdp.emit.memory.memory_plan import ALL
from fdp.runtime import Emitted, arena

CALLS = 3


@pytest.fixture(scope="module", params=["as users have it", "everything early, on poisoned memory"], autouse=True)
def _executor(request: pytest.FixtureRequest) -> Any:
    """Every test runs once more with what the emitter does for large tensors done for all, in memory full of NaN."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "as users have it":
            patch.setattr(planning, "_SCALED_WHEN_FILLED_BYTES", 0)
            patch.setattr(program, "ALL", dataclasses.replace(ALL, pack_from_bytes=0))
            patch.setattr(arena.Arena, "fit", poisoning(arena.Arena.fit))
        yield


def poisoning(fit: Any) -> Any:
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
        # What earlier calls returned is the caller's: unless he gave it away again, nobody changes it.
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


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_computes_what_its_function_computes(world: int, donate: bool) -> None:
    @examples(60)
    @given(programs(), caps())
    def check(program: Program, cap: Any) -> None:
        three_calls(program, world, cap, donate)

    check()


@examples(60)
@given(programs(writes_inputs=True), caps(), st.sampled_from([1, 2]))
def test_a_step_that_writes_into_a_donated_state_computes_the_same(program: Program, cap: Any, world: int) -> None:
    three_calls(program, world, cap, donate=True, share=False)


def inputs_written(program: Program) -> set[str]:
    """The leaves of the state that a program changes in place, as their version counters tell."""
    state = new_state()
    before = dict(state)
    with step_axis("equal ranks", fake_group(1)):
        program.step(state, new_batch(0))
    return {f"state['{key}']" for key, leaf in before.items() if leaf._version}


@examples(80)
@given(programs(writes_inputs=True), caps())
def test_a_step_that_writes_into_a_state_that_is_not_donated_is_refused(program: Program, cap: Any) -> None:
    """Exactly those that change an input are refused, and exactly the changed inputs are named."""
    written = inputs_written(program)
    if not written:
        three_calls(program, 1, cap, donate=False)
        return
    state, batch = new_state(), new_batch(0)
    before = copied((state, batch))
    with pytest.raises(fdp.PurityError) as caught:
        Runner(program, 1, cap, donate=False)(state, batch, 0)
    named = {line.strip().split(":")[0] for line in str(caught.value).splitlines()[1:-1]}
    assert named == written
    assert same_bits((state, batch), before)


@examples(40)
@given(programs(), st.sampled_from([1, 2]))
def test_the_check_of_a_new_trace_finds_nothing_wrong_and_changes_nothing(program: Program, world: int) -> None:
    """What `check_trace=True` does at the first call: no false alarm, no effect on arguments or random numbers."""
    state, batch = new_state(), new_batch(0)
    before = copied((state, batch))
    step = fdp.data_parallel(program.step, check_replication=False)
    torch.manual_seed(0)
    found = step(state, batch)
    after = torch.get_rng_state()
    assert same_bits((state, batch), before)
    assert same_bits(found, plainly(program, state, batch, 0, 1))
    assert torch.equal(torch.get_rng_state(), after)


@examples(40)
@given(programs())
def test_an_output_that_is_called_replicated_does_not_depend_on_the_batch(program: Program) -> None:
    """In steps without collectives it must not change with the batch or the seed."""
    step = fdp.data_parallel(program.step, group=fake_group(2), check_replication=False)
    trace = step.trace(new_state(), new_batch(0))
    if trace.reductions:
        return  # what ranks combine depends on the batches of all
    one = plainly(program, new_state(), new_batch(0), 0, 2)
    two = plainly(program, new_state(), new_batch(1), 1, 2)
    for output, x, y in zip(trace.outputs, optree.tree_leaves(one), optree.tree_leaves(two), strict=True):
        assert output.varying or same_bits(x, y), output.name


# --- where new values live ---------------------------------------------------------------------------

TABLE = torch.arange(12.0).view(4, 3)


def cloned(x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
    """A clone that is changed in place, as optimizers do."""
    return x.clone().add_(by)


def read_after_its_clone_changed(s: Any, x: Any) -> Any:
    new = cloned(s["a"])
    return {"a": new}, [s["a"] * 2]


def read_by_a_collective_after_its_clone_changed(s: Any, x: Any) -> Any:
    new = cloned(s["a"])
    return {"a": new}, [fdp.pmean(s["a"]), fdp.all_gather(s["a"])]


def read_through_a_view_after_its_clone_changed(s: Any, x: Any) -> Any:
    view, new = s["a"].t()[1:], cloned(s["a"])
    return {"a": new}, [view + 0, new.t()[0]]


def averaged_beside_its_update(s: Any, x: Any) -> Any:
    return {"a": s["a"] + 1, "c": s["c"] * 2}, [fdp.pmean(s["a"]), fdp.psum(s["c"])]


def two_updates_of_one_leaf(s: Any, x: Any) -> Any:
    return {"a": cloned(s["a"]), "b": cloned(s["a"], by=2.0)}, []


def one_value_for_two_leaves(s: Any, x: Any) -> Any:
    new = s["a"] + x
    return {"a": new, "b": new}, [new]


def one_clone_for_two_leaves(s: Any, x: Any) -> Any:
    new = cloned(s["a"])
    return {"a": new, "b": new}, [new[1:]]


def swapped(s: Any, x: Any) -> Any:
    return {"a": s["b"], "b": s["a"]}, []


def swapped_and_changed(s: Any, x: Any) -> Any:
    return {"a": s["b"] + x, "b": cloned(s["a"])}, [s["b"]]


def one_leaf_for_both(s: Any, x: Any) -> Any:
    return {"a": s["b"], "b": s["b"]}, [s["a"]]


def a_view_of_another_leaf(s: Any, x: Any) -> Any:
    return {"a": s["c"].view(4, 3), "c": s["c"] + 1}, [s["c"][2:]]


def its_own_transpose(s: Any, x: Any) -> Any:
    return {"s": s["s"].t()}, []


def the_clone_of_its_transpose(s: Any, x: Any) -> Any:
    return {"s": s["s"].t().clone().add_(1)}, [s["s"].t()]


def transposed_in_between(s: Any, x: Any) -> Any:
    turned = s["s"].t()
    return {"s": cloned(turned.t())}, [turned @ s["s"], turned.t() @ s["s"]]


def an_average(s: Any, x: Any) -> Any:
    return {"a": fdp.pmean(x), "b": fdp.pmean(s["b"]), "c": fdp.pmean(s["c"]) + 1}, [s["a"] * 1]


def an_average_changed_in_place(s: Any, x: Any) -> Any:
    mean = fdp.pmean(x)
    before = mean * 1
    mean.add_(1)
    return {"a": mean, "b": fdp.pmean(x)}, [before, x * 1]


def averaged_and_then_changed(s: Any, x: Any) -> Any:
    local = x * 2
    mean = fdp.pmean(local)
    local.zero_()
    return {"a": mean, "b": local}, [mean, local]


def a_constant(s: Any, x: Any) -> Any:
    return {"a": TABLE, "d": torch.tensor(3.0)}, [TABLE, TABLE[1]]


def the_batch(s: Any, x: Any) -> Any:
    return {"a": x, "b": x[:]}, [x, x[1]]


def repeated_elements(s: Any, x: Any) -> Any:
    return {"a": s["d"].expand(4, 3), "b": x[:1].expand(4, 3)}, [s["a"]]


def returned_three_times(s: Any, x: Any) -> Any:
    new = cloned(s["a"])
    return {"a": new}, [new, new.view(12), s["a"]]


def late_update(s: Any, x: Any) -> Any:
    new = s["a"].clone()
    new.sub_(fdp.pmean(x))
    return {"a": new}, [s["a"] * fdp.pmean(x.sum()), fdp.psum(new)]


def list_update(s: Any, x: Any) -> Any:
    new, mean = [s["a"].clone(), s["b"].clone(), s["d"].clone()], fdp.pmean([x, x * 2, x.sum()])
    torch._foreach_add_(new, mean)
    torch._foreach_mul_(new, 0.5)
    return {"a": new[0], "b": new[1], "d": new[2]}, [s["b"] - new[1]]


HAZARDS = [
    read_after_its_clone_changed, read_by_a_collective_after_its_clone_changed, averaged_beside_its_update,
    read_through_a_view_after_its_clone_changed, two_updates_of_one_leaf, one_value_for_two_leaves,
    one_clone_for_two_leaves, swapped, swapped_and_changed, one_leaf_for_both, a_view_of_another_leaf,
    its_own_transpose, the_clone_of_its_transpose, transposed_in_between, an_average, an_average_changed_in_place,
    averaged_and_then_changed, a_constant, the_batch, repeated_elements, returned_three_times, late_update, list_update,
]  # fmt: skip


@pytest.mark.parametrize("case", HAZARDS, ids=lambda case: case.__name__)
def test_new_values_do_not_overwrite_what_is_still_needed(case: Any) -> None:
    def step(state: Any, batch: Any) -> Any:
        changed, extras = case(state, batch["x"])
        return {**state, **changed}, extras

    for world in (1, 2):
        for donate in (False, True):
            for cap in ("auto", 1e-9):
                three_calls(Program(case.__name__, step), world, cap, donate)
    assert torch.equal(TABLE, torch.arange(12.0).view(4, 3))


# --- whole training steps ----------------------------------------------------------------------------


OPTIMIZERS = {
    "fused AdamW": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "foreach SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "foreach": True}),
}


def trained(name: str, optimizer: str, cap: Any, donate: bool, calls: int = 3) -> tuple[Any, Any]:
    """What a training step gives after some calls, for a world of two: dry-run, and plain."""
    apply, params, buffers = fdp.from_module(models.MODELS[name]())
    kind, options = OPTIMIZERS[optimizer]
    rule = fdp.optim.from_torch(kind, **options)
    step_fn = models.fdp_step(apply, rule)
    group = fake_group(2)
    step = fdp.data_parallel(step_fn, group=group, bucket_cap_mb=cap, donate_argnums=0 if donate else ())
    state = {"params": params, "buffers": buffers, "opt": rule.init(params)}
    plain, emitted, outputs = copied(state), None, []
    for call, batch in enumerate(models.batches(name, calls, 4)):
        emitted = emitted or Emitted(step.plan(state, batch), group)
        torch.manual_seed(call)
        state, metrics = emitted.dry_run(optree.tree_leaves((state, batch)))
        torch.manual_seed(call)
        with step_axis("equal ranks", group):
            plain, expected = step_fn(plain, batch)
        outputs.append((metrics, expected))
    return (state, [x for x, _ in outputs]), (plain, [y for _, y in outputs])


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("mlp", "fused AdamW"), ("mlp", "foreach SGD"), ("cnn", "fused AdamW"), ("gpt_dropout", "fused AdamW")],
)
def test_a_training_step_computes_the_same_under_every_plan(name: str, optimizer: str) -> None:
    """From a bucket a gradient, where the optimizer runs in as many pieces, to one bucket for all."""
    for cap, donate in [(1e-9, True), ([2**-9, 2**-8], False), ("auto", True)]:
        found, expected = trained(name, optimizer, cap, donate)
        assert same_bits(found, expected), (cap, donate)
