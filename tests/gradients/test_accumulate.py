"""fdp.accumulate: against one process on the whole batch; its graph, its messages, its memory."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from microbatches import Tree, batch_of, loss_fn, params_of, plain
from samples import ALL_SAMPLES, exhaustive
from torch import nn

import fdp


def loss_and_aux(params: Tree, batch: Tree) -> Any:
    logits = torch.tanh(batch["x"] @ params["w1"] + params["b1"]) @ params["w2"]
    return F.cross_entropy(logits, batch["y"]), {
        "logits": logits,
        "right": (logits.argmax(1) == batch["y"]).sum(),
        "n": 3,
    }


# --- against one process on the whole batch -----------------------------------------------------------


def job_whole_batch(rows: int, microbatches: int, compiled: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    @fdp.data_parallel(compile=compiled, bucket_cap_mb=0.0002)
    def step(params: Tree, batch: Tree) -> Any:
        grad_fn = fdp.value_and_grad(loss_and_aux, has_aux=True)
        (loss, aux), grads = fdp.accumulate(grad_fn, microbatches=microbatches)(params, batch)
        return fdp.pmean(loss), grads, fdp.per_rank(aux["logits"]), fdp.psum(aux["right"].sum())

    params, own, whole = params_of(), batch_of(rows, rank, world), batch_of(rows)
    loss, grads = plain(loss_fn, params, whole)
    _, aux = loss_and_aux(params, own)
    _, all_aux = loss_and_aux(params, whole)
    expected = loss, grads, aux["logits"].reshape(microbatches, -1, 3), all_aux["right"]
    for _ in range(2):  # memory of the first call is used again in the second
        torch.testing.assert_close(step(params, own), expected, rtol=1e-9, atol=1e-12)
    # Outside of a step it talks to the other ranks at once.
    loss_outside, grads_outside = fdp.accumulate(fdp.value_and_grad(loss_fn), microbatches)(params, own)
    torch.testing.assert_close((fdp.pmean(loss_outside), grads_outside), (loss, grads), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=exhaustive)], ids=["operators", "compiled"])
def test_two_ranks_are_one_process_on_the_whole_batch(compiled: bool) -> None:
    numbers = [1, 3, 12] if ALL_SAMPLES else [3]
    for microbatches in numbers if not compiled else [4]:
        ranks.run(2, job_whole_batch, 24, microbatches, compiled)


def job_one_message_each() -> list[Any]:
    @fdp.data_parallel(bucket_cap_mb=[0.0001, 0.0001])
    def step(params: Tree, batch: Tree) -> Any:
        return fdp.accumulate(fdp.value_and_grad(loss_fn), microbatches=4)(params, batch)[1]

    plan = step.plan(params_of(), batch_of(16))
    operations = plan.trace.operations
    last_backward = max(i for i, o in enumerate(operations) if o.backward and o.reduction is None)
    started = []
    for item in plan.schedule:
        if hasattr(item, "operations"):
            if last_backward in item.operations:
                break
        elif type(item).__name__ == "Start":
            started.append(item.bucket)
    names = [reduction.name for reduction in plan.trace.reductions]
    places = plan.emit().program.places
    totals = [node.name for node in plan.trace.graph.graph.nodes if str(node.target) == "aten.zeros.default"]
    in_buckets = [places[name].memory[0] == "bucket" for name in totals if name in places and places[name].shape]
    return [sorted(names) == sorted(f"params[{n!r}]" for n in params_of()), started, in_buckets]


def test_each_gradient_travels_once_behind_the_backward_pass_of_the_last_microbatch() -> None:
    for once, started, in_buckets in ranks.run(2, job_one_message_each):
        assert once
        # They are added up right where they are sent from.
        assert in_buckets == [True] * 3  # and the one that is not used is a constant
        # All but the last bucket are on their way while the last microbatch is still computed.
        assert len(started) >= 2


# --- one process ------------------------------------------------------------------------------------


def test_the_graph_does_not_grow() -> None:
    def step(params: Tree, batch: Tree, k: int) -> Any:
        return fdp.accumulate(fdp.value_and_grad(loss_fn), microbatches=k)(params, batch)[1]

    sizes = []
    for k in (2, 3, 30):
        trace = fdp.data_parallel(step, batch_argnums=1, static_argnums=2).trace(params_of(), batch_of(60), k)
        sizes.append((len(trace.operations), [len(loop.body.operations) for loop in trace.loops]))
        assert [loop.count for loop in trace.loops] == [k - 1]
    assert sizes[0] == sizes[1] == sizes[2]
    alone = fdp.data_parallel(step, batch_argnums=1, static_argnums=2).trace(params_of(), batch_of(60), 1)
    assert alone.loops == ()
    (inside,) = sizes[0][1]
    assert f"operations (1 loop: 29 times {inside} operations)" in str(trace)
    assert sizes[0][0] + inside < 2.2 * len(alone.operations)


def test_memory_is_that_of_one_microbatch() -> None:
    def step(params: Tree, batch: Tree, k: int) -> Any:
        return fdp.accumulate(fdp.value_and_grad(loss_fn), microbatches=k)(params, batch)[1]

    def size_bytes(rows: int, k: int) -> int:
        made = fdp.data_parallel(step, batch_argnums=1, static_argnums=2)
        plan = made.plan(params_of(width=64), batch_of(rows), k)
        return sum(layout.size_bytes for layout in plan.emit().program.layouts.values())

    one, eight, whole = size_bytes(32, 1), size_bytes(256, 8), size_bytes(256, 1)
    assert eight <= 1.1 * one + 2048
    assert whole > 5 * eight


def test_dropout_draws_what_it_draws_outside_of_the_step() -> None:
    for compiled in (False, True) if ALL_SAMPLES else (False,):

        def dropped(params: Tree, batch: Tree) -> torch.Tensor:
            hidden = F.dropout(torch.tanh(batch["x"] @ params["w1"] + params["b1"]), 0.5)
            return F.cross_entropy(hidden @ params["w2"], batch["y"])

        def step(params: Tree, batch: Tree) -> Any:
            noise = torch.randn(3)
            loss, grads = fdp.accumulate(fdp.value_and_grad(dropped), microbatches=4)(params, batch)
            return loss, grads, noise, torch.randn(3)

        made = fdp.data_parallel(step, check_replication=False, compile=compiled)
        made(params_of(), batch_of(16))
        torch.manual_seed(5)
        found = made(params_of(), batch_of(16))
        torch.manual_seed(5)
        torch.testing.assert_close(found, step(params_of(), batch_of(16)), rtol=1e-9, atol=1e-12)


def test_a_function_that_closes_over_nothing_else_may_call_value_and_grad_more_than_once() -> None:
    def grad_fn(params: Tree, batch: Tree) -> Any:
        def first(params: Tree) -> torch.Tensor:
            return loss_fn(params, batch)

        def second(params: Tree) -> torch.Tensor:
            return (batch["x"] @ params["w1"]).square().mean()

        a, grads_a = fdp.value_and_grad(first)(params)
        grads_b, aux = fdp.grad(lambda p: (second(p), batch["x"].sum()), has_aux=True)(params)
        return {"a": (a, grads_a), "b": grads_b, "aux": aux, "text": "same", "none": None}

    @fdp.data_parallel
    def step(params: Tree, batch: Tree) -> Any:
        found = fdp.accumulate(grad_fn, microbatches=3)(params, batch)
        return {**found, "aux": fdp.per_rank(found["aux"]), "a": (fdp.pmean(found["a"][0]), found["a"][1])}

    params, batch = params_of(), batch_of(12)
    found = step(params, batch)
    torch.testing.assert_close(found["a"], plain(loss_fn, params, batch))
    torch.testing.assert_close(found["b"], plain(lambda p, b: (b["x"] @ p["w1"]).square().mean(), params, batch)[1])
    torch.testing.assert_close(found["aux"], batch["x"].reshape(3, 4, 6).sum((1, 2)))
    assert (found["text"], found["none"]) == ("same", None)


def test_memory_orders_of_parameters_and_pictures() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    apply, params, buffers = fdp.from_module(model)

    def loss(params: Tree, batch: Any) -> torch.Tensor:
        return apply(params, buffers, batch[0])[0].square().mean()

    @fdp.data_parallel(donate_argnums=0)
    def step(state: Tree, batch: Any) -> Any:
        grads = fdp.accumulate(fdp.grad(loss), microbatches=2)(state, batch)
        return {name: state[name] - 0.1 * grads[name] for name in state}, grads

    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    _, expected = plain(loss, params, (x,))
    new, grads = step({name: p.detach().clone() for name, p in params.items()}, (x,))
    torch.testing.assert_close(grads, expected)
    torch.testing.assert_close(new, {name: params[name].detach() - 0.1 * expected[name] for name in params})


def test_batch_statistics_come_back_for_each_microbatch() -> None:
    torch.manual_seed(0)
    apply, params, buffers = fdp.from_module(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))

    def loss(params: Tree, buffers: Tree, batch: Tree) -> Any:
        logits, new = apply(params, buffers, batch["x"].float())
        return F.cross_entropy(logits, batch["y"]), new

    @fdp.data_parallel
    def step(params: Tree, buffers: Tree, batch: Tree) -> Any:
        grad_fn = fdp.value_and_grad(loss, has_aux=True)
        (_, new), grads = fdp.accumulate(grad_fn, microbatches=2)(params, buffers, batch)
        return grads, fdp.per_rank(new)

    batch = batch_of(8)
    grads, new = step(params, buffers, batch)
    halves = [{name: x[i : i + 4] for name, x in batch.items()} for i in (0, 4)]
    each = [fdp.value_and_grad(loss, has_aux=True)(params, buffers, half) for half in halves]
    torch.testing.assert_close(grads, optree.tree_map(lambda a, b: (a + b) / 2, each[0][1], each[1][1]))
    torch.testing.assert_close(new, optree.tree_map(lambda a, b: torch.stack([a, b]), each[0][0][1], each[1][0][1]))


def test_gradients_that_travel_narrow_are_rounded_once() -> None:
    @fdp.data_parallel(wire_dtype=torch.bfloat16)
    def step(params: Tree, batch: Tree) -> Any:
        return fdp.accumulate(fdp.grad(loss_fn), microbatches=4)(params, batch)

    params, batch = params_of(dtype=torch.float32), batch_of(16, dtype=torch.float32)
    trace = step.trace(params, batch)
    assert len(trace.gradients) == 4
    torch.testing.assert_close(step(params, batch), plain(loss_fn, params, batch)[1])


def job_gradients_that_nothing_is_added_to() -> None:
    """Their totals are made in the loop, and cast for the wire behind it."""

    def value(params: Tree, batch: Tree) -> torch.Tensor:
        return batch["x"].sum()

    @fdp.data_parallel(wire_dtype=torch.bfloat16)
    def step(params: Tree, batch: Tree) -> Any:
        return fdp.accumulate(fdp.grad(value), microbatches=2)(params, batch)

    params = params_of(dtype=torch.float32)
    found = step(params, batch_of(16, dist.get_rank(), 2, dtype=torch.float32))
    torch.testing.assert_close(found, {name: torch.zeros_like(p) for name, p in params.items()}, rtol=0, atol=0)


def test_gradients_that_nothing_is_added_to() -> None:
    ranks.run(2, job_gradients_that_nothing_is_added_to)


def test_a_complex_parameter_and_an_empty_microbatch() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x.to(w.dtype) @ w).abs().square().sum()

    step = fdp.data_parallel(lambda w, x: fdp.accumulate(fdp.grad(loss), microbatches=2)(w, x))
    w = torch.randn(3, dtype=torch.complex64)
    x = torch.randn(4, 3)
    torch.testing.assert_close(step(w, x), fdp.grad(loss)(w, x) / 2)
    assert torch.equal(step(w, x[:0]), torch.zeros_like(w))


def test_an_operand_that_is_called_as_the_number_of_the_microbatch_is() -> None:
    """`aten.index` makes a node of the name "index"."""

    @fdp.data_parallel
    def step(params: torch.Tensor, places: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        chosen = params[places]

        def loss(params: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return (params * chosen).sum() * batch.sum()

        return fdp.accumulate(fdp.grad(loss), microbatches=2)(params, batch)

    params = torch.arange(3.0)
    torch.testing.assert_close(step(params, torch.tensor([2, 0, 1]), torch.ones(4)), 2 * params[[2, 0, 1]])
