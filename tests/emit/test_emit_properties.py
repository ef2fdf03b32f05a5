"""Emitted steps against the function that they were made from: random programs, and whole training steps."""

from __future__ import annotations

from typing import Any

import models
import optree
import pytest
import torch
from bits import copied, same_bits
from drawn_steps import Program, new_batch, new_state, programs
from drawn_traces import caps
from emitted_calls import Runner, executor, plainly, three_calls  # noqa: F401 (`executor` is a fixture)
from fake_ranks import fake_group
from hypothesis import given
from hypothesis import strategies as st
from samples import examples, exhaustive, some

import fdp
from fdp.context.axis import step_axis
from fdp.runtime import Emitted


@pytest.mark.parametrize("donate", [pytest.param(False, marks=exhaustive), True], ids=["kept", "donated"])
@pytest.mark.parametrize("world", some([2, 1]))
def test_a_step_computes_what_its_function_computes(world: int, donate: bool) -> None:
    @examples(60, by_default=7)
    @given(programs(), caps())
    def check(program: Program, cap: Any) -> None:
        three_calls(program, world, cap, donate)

    check()


@examples(60, by_default=7)
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


@examples(80, by_default=7)
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


@examples(40, by_default=7)
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


@examples(40, by_default=7)
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
    [
        ("mlp", "fused AdamW"),
        pytest.param("mlp", "foreach SGD", marks=exhaustive),
        pytest.param("cnn", "fused AdamW", marks=exhaustive),
        pytest.param("gpt_dropout", "fused AdamW", marks=exhaustive),
    ],
)
def test_a_training_step_computes_the_same_under_every_plan(name: str, optimizer: str) -> None:
    """From a bucket a gradient, where the optimizer runs in as many pieces, to one bucket for all."""
    for cap, donate in [(1e-9, True), ([2**-9, 2**-8], False), ("auto", True)]:
        found, expected = trained(name, optimizer, cap, donate)
        assert same_bits(found, expected), (cap, donate)
