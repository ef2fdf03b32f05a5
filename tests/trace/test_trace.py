"""What a trace says of its reductions, inputs and outputs: names, roles, production order."""

from __future__ import annotations

from typing import Any

import torch
from traced import mlp_arguments, mlp_step, place_of, trace_of

import fdp
from fdp.plan import Start

Tree = Any


def test_gradients_come_last_layer_first() -> None:
    trace = trace_of(mlp_step, *mlp_arguments())
    assert [g.name for g in trace.gradients] == ["params['third']", "params['second']", "params['first']"]
    assert [g.shape for g in trace.gradients] == [(5, 2), (4, 5), (3, 4)]
    assert [g.size_bytes for g in trace.gradients] == [40, 80, 48]
    assert {g.produced_by for g in trace.gradients} == {"aten.mm.default"}
    positions = [r.position for r in trace.reductions]
    assert positions == sorted(positions)
    # Where each is produced: a matrix product of the backward pass.
    for gradient in trace.gradients:
        operation = trace.operations[gradient.position]
        assert (operation.target, operation.backward) == ("aten.mm.default", True)


def test_the_order_is_that_of_production_not_of_the_parameters() -> None:
    """The user's names sort one way, the use of the parameters another."""
    names = ["d", "a", "c", "b"]

    def step(state: Tree, batch: Tree) -> Tree:
        def loss_fn(params: Tree) -> torch.Tensor:
            x = batch
            for name in names:
                x = torch.sin(x * params[name])
            return x.sum()

        return fdp.grad(loss_fn)(state)

    trace = trace_of(step, {name: torch.ones(3) for name in "abcd"}, torch.ones(3))
    assert [g.name for g in trace.gradients] == [f"params['{name}']" for name in reversed(names)]


def test_each_kind_of_reduction_is_listed_with_what_it_is() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        def loss_fn(params: Tree) -> torch.Tensor:
            return (batch["x"] * fdp.psum(params["w"])).mean()

        loss, grads = fdp.value_and_grad(loss_fn)(state)
        metrics = fdp.pmean({"loss": loss, "many": batch["x"].mean(0)})
        return grads, metrics, fdp.broadcast(batch["x"][0], root=1), fdp.all_gather(batch["n"]), fdp.pmax(batch["n"])

    args = {"w": torch.ones(3)}, {"x": torch.ones(4, 3), "n": torch.ones((), dtype=torch.int64)}
    trace = trace_of(step, *args)
    assert {(r.name, r.kind, r.op, r.root, r.shape, r.dtype) for r in trace.reductions} == {
        ("psum", "value", "sum", 0, (3,), torch.float32),
        ("psum", "transpose", "sum", 0, (3,), torch.float32),
        ("params['w']", "gradient", "mean", 0, (3,), torch.float32),
        ("pmean(['loss'])", "value", "mean", 0, (), torch.float32),
        ("pmean(['many'])", "value", "mean", 0, (3,), torch.float32),
        ("broadcast", "value", "broadcast", 1, (3,), torch.float32),
        ("all_gather", "value", "all_gather", 0, (), torch.int64),
        ("pmax", "value", "max", 0, (), torch.int64),
    }


def test_a_gradient_has_the_bytes_of_its_dtype() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        return fdp.grad(lambda p: sum((v.double() * batch).sum() for v in p.values()))(state)

    state = {"half": torch.ones(3, dtype=torch.float16), "double": torch.ones(3, dtype=torch.float64)}
    sizes = {g.name: g.size_bytes for g in trace_of(step, state, torch.ones(3)).gradients}
    assert sizes == {"p['half']": 6, "p['double']": 24}


def test_metrics_ride_in_a_bucket_with_the_gradients() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        loss, grads = fdp.value_and_grad(lambda p: ((batch @ p["w"]) ** 2).mean())(state)
        return grads, fdp.pmean({"loss": loss, "size": batch.norm(), "top": batch.abs().mean()})

    plan = trace_of(step, {"w": torch.ones(3, 2)}, torch.ones(4, 3)).plan()
    assert [len(bucket.members) for bucket in plan.buckets] == [4]
    # A message of its own would be three more.
    assert [item for item in plan.schedule if isinstance(item, Start)] == [Start(0)]


def test_inputs_have_names_shapes_and_roles() -> None:
    def step(state: Tree, flags: Tree, batch: Tree, noise: torch.Tensor) -> Tree:
        return {"w": state["w"] + fdp.pmean(batch["x"].sum() + noise.sum())}

    flat = torch.arange(12.0)
    state = {"w": torch.ones(3, 2), "tied": (flat[:6], flat[2:]), "wide": torch.ones(1).expand(4)}
    batch = {"x": torch.ones(2, 3, dtype=torch.float64).t()}
    trace = trace_of(
        step, state, {"on": True, "rate": 0.5}, batch, torch.ones(2), batch_argnums=(2, -1), donate_argnums=(0,)
    )
    rows = [(i.name, i.shape, i.dtype, i.stride, i.role, i.donated, i.shares_memory) for i in trace.inputs]
    f32, f64 = torch.float32, torch.float64
    assert rows == [
        ("state['tied'][0]", (6,), f32, (1,), "state", True, True),
        ("state['tied'][1]", (10,), f32, (1,), "state", True, True),
        ("state['w']", (3, 2), f32, (2, 1), "state", True, False),
        ("state['wide']", (4,), f32, (0,), "state", True, True),
        ("batch['x']", (3, 2), f64, (1, 3), "batch", False, False),
        ("noise", (2,), f32, (1,), "batch", False, False),
    ]
    assert all(i.device == torch.device("cpu") for i in trace.inputs)
    assert trace.replicated_constants == (("flags['on']", "True"), ("flags['rate']", "0.5"))
    assert (trace.name, trace.world_size) == ("step", 2)
    assert trace.source == place_of(step, "def step")


def test_variadic_and_keyword_arguments_are_named_too() -> None:
    def step(first: Tree, *rest: Tree) -> Tree:
        return first + fdp.pmean(rest[-1][0])

    x = torch.ones(2)
    assert [i.name for i in trace_of(step, x, x, [x]).inputs] == ["first", "rest[0]", "rest[1][0]"]
    keyed = fdp.data_parallel(lambda w, batch: w + fdp.pmean(batch))
    assert [i.name for i in keyed.trace(batch=torch.ones(2), w=x).inputs] == ["w", "batch"]


def test_outputs_have_names_and_the_memory_they_go_to() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        new = {"a": state["a"] + 1, "b": state["b"], "count": state["count"] * 1.0}
        return new, (fdp.pmean(batch), None, "done", 3), fdp.per_rank(batch)

    state = {"a": torch.ones(3), "b": torch.ones(2), "count": torch.ones((), dtype=torch.int64)}
    trace = trace_of(step, state, torch.ones(3), donate_argnums=0)
    rows = [(o.name, o.shape, o.dtype, o.varying, o.per_rank, o.constant, o.slot) for o in trace.outputs]
    f32 = torch.float32
    assert rows == [
        ("output[0]['a']", (3,), f32, False, False, None, 0),
        ("output[0]['b']", (2,), f32, False, False, None, 1),
        ("output[0]['count']", (), f32, False, False, None, None),  # of another dtype: it cannot go there
        ("output[1][0]", (3,), f32, False, False, None, None),
        ("output[1][2]", None, None, False, False, "done", None),
        ("output[1][3]", None, None, False, False, 3, None),
        ("output[2]", (3,), f32, True, True, None, None),
    ]
    names = {operation.node for operation in trace.operations}
    assert trace.outputs[0].node in names
    assert all((output.node is None) == (output.shape is None) for output in trace.outputs)


def test_closed_over_tensors_are_named() -> None:
    table, options = torch.arange(3.0), {"scale": torch.ones(3)}

    def step(state: Tree, batch: Tree) -> Tree:
        return state + table + options["scale"] + torch.tensor([1.0, 2.0, 3.0]) + fdp.pmean(batch)

    trace = trace_of(step, torch.ones(3), torch.ones(3))
    assert sorted(name for _, name in trace.closed_over) == ["options['scale']", "table"]
