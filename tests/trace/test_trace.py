"""What a trace says about a step: names, roles, what varies across ranks, production order, lines of the user."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_ranks import fake_group
from printed import table_rows
from torch import nn

import fdp
from fdp.plan import Run, Start, Wait
from fdp.trace import Trace

Tree = Any


def trace_of(step: Callable[..., Any], *args: Any, size: int = 2, **options: Any) -> Trace:
    """The trace of a step for ranks that are not there."""
    return fdp.data_parallel(step, group=fake_group(size), **options).trace(*args)


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the first line of a function that has a text in it."""
    lines, start = inspect.getsourcelines(function)
    return start + next(k for k, line in enumerate(lines) if text in line)


# --- gradients in production order -------------------------------------------------------------------


def mlp_step(state: Tree, batch: Tree) -> Tree:
    def loss_fn(params: Tree) -> torch.Tensor:
        hidden = torch.tanh(batch["x"] @ params["first"])  # first layer
        hidden = torch.tanh(hidden @ params["second"])  # second layer
        return ((hidden @ params["third"]) ** 2).mean()  # third layer

    loss, grads = fdp.value_and_grad(loss_fn)(state)
    return {k: state[k] - grads[k] for k in state}, fdp.pmean(loss)


def mlp_arguments() -> tuple[Tree, Tree]:
    state = {"third": torch.ones(5, 2), "first": torch.ones(3, 4), "second": torch.ones(4, 5)}
    return state, {"x": torch.ones(6, 3)}


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


# --- inputs and outputs ------------------------------------------------------------------------------


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
    assert trace.source == f"test_trace.py:{line_of(step, 'def step')}"


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


# --- replicated or varying ---------------------------------------------------------------------------

TABLE = torch.arange(4.0)
Case = Callable[[torch.Tensor, torch.Tensor], Any]


def changed(start: str, *writes: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Case:
    """A step that clones the state ("s") or the batch ("b"), changes it in place, and returns it."""

    def step(s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        t = (s if start == "s" else b).clone()
        for write in writes:
            write(t, s, b)
        return t

    return step


def looked_at(start: str, view: Case, write: Callable[..., Any], give: str) -> Case:
    """A step that writes to a tensor or to a view of it, and returns the other one."""

    def step(s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        t = (s if start == "s" else b).clone()
        v = view(t, b)
        write(t if give == "view" else v, s, b)
        return v if give == "view" else t

    return step


def setitem(where: Any, value: Case) -> Callable[..., Any]:
    return lambda t, s, b: t.__setitem__(where, value(s, b))


def index_of(b: torch.Tensor) -> torch.Tensor:
    return b.abs().long().clamp(0, 3)


REPLICATED: dict[str, Case] = {
    "the state itself": lambda s, b: s,
    "of the state alone": lambda s, b: (s * 2).sum(),
    "a closed-over tensor": lambda s, b: TABLE + 1,
    "a literal": lambda s, b: torch.tensor([1.0, 2.0]),
    "a new tensor": lambda s, b: torch.arange(3) + torch.zeros(3) + torch.eye(3)[0],
    "pmean": lambda s, b: fdp.pmean(b),
    "psum": lambda s, b: fdp.psum(b) * s,
    "pmax": lambda s, b: fdp.pmax(b),
    "pmin": lambda s, b: fdp.pmin(b),
    "all_gather": lambda s, b: fdp.all_gather(b),
    "broadcast": lambda s, b: fdp.broadcast(b, root=1),
    "a weighted mean": lambda s, b: fdp.pmean(b, weight=len(b)),
    "a mean weighted by a tensor": lambda s, b: fdp.pmean(b, weight=b.sum()),
    "a sum of this rank's numbers": lambda s, b: fdp.psum(len(b)),
    "an average of noise": lambda s, b: fdp.pmean(torch.rand_like(s)),
    "an average of what was declared": lambda s, b: fdp.pmean(fdp.per_rank(b)),
    "a sum of rank numbers": lambda s, b: fdp.psum(fdp.axis_index()),
    "the number of ranks": lambda s, b: s * fdp.axis_size(),
    "an averaged gradient": lambda s, b: fdp.grad(lambda p: (p * b).sum())(s),
    "an averaged plain gradient": lambda s, b: fdp.pmean(torch.func.grad(lambda p: (p * b).sum())(s)),
    "a plain gradient of replicated values": lambda s, b: torch.func.grad(lambda p: (p * p).sum())(s),
    "overwritten by copy_": changed("b", lambda t, s, b: t.copy_(s)),
    "overwritten by zero_": changed("b", lambda t, s, b: t.zero_()),
    "overwritten by fill_": changed("b", lambda t, s, b: t.fill_(2.0)),
    "overwritten by a whole slice": changed("b", setitem(slice(None), lambda s, b: s)),
    "overwritten by an average": changed("b", lambda t, s, b: t.copy_(fdp.pmean(b))),
    "overwritten through a view": changed("b", lambda t, s, b: t.view(2, 2).zero_()),
    "varied, then overwritten": changed("s", lambda t, s, b: t.add_(b), lambda t, s, b: t.copy_(s)),
    "a view of what is then overwritten": looked_at("b", lambda t, b: t[:2], lambda t, s, b: t.zero_(), "view"),
    "a scatter by replicated indices": lambda s, b: s.scatter(0, index_of(s), s),
    "sorted": lambda s, b: torch.sort(s),
    "torch.cond on an average": lambda s, b: torch.cond(fdp.pmean(b).sum() > 0, lambda x: x + 1, lambda x: x - 1, (s,)),
    "attention without dropout": lambda s, b: F.scaled_dot_product_attention(*[s.view(1, 1, 2, 2)] * 3),
    "dropout of probability zero": lambda s, b: F.dropout(s, 0.0),
    "dropout in evaluation": lambda s, b: F.dropout(s, 0.5, training=False),
}

VARYING: dict[str, Case] = {
    "the batch itself": lambda s, b: b,
    "of the batch": lambda s, b: s * b,
    "a view of the batch": lambda s, b: b.view(2, 2).t()[0],
    "after an average": lambda s, b: fdp.pmean(b) + b,
    "noise like the state": lambda s, b: torch.rand_like(s),
    "noise of its own": lambda s, b: torch.randn(3),
    "a permutation": lambda s, b: s[torch.randperm(4)],
    "drawn by probability": lambda s, b: torch.bernoulli(s.sigmoid()),
    "a multinomial draw": lambda s, b: torch.multinomial(s.sigmoid(), 1),
    "dropout": lambda s, b: F.dropout(s, 0.5),
    "attention with dropout": lambda s, b: F.scaled_dot_product_attention(*[s.view(1, 1, 2, 2)] * 3, dropout_p=0.5),
    "noise in place": changed("s", lambda t, s, b: t.normal_()),
    "added in place": changed("s", lambda t, s, b: t.add_(b)),
    "added to one element": changed("s", lambda t, s, b: t[0].add_(b[0])),
    "assigned to one element": changed("s", setitem(0, lambda s, b: b[0])),
    "assigned by index": changed("s", setitem(torch.tensor([0, 1]), lambda s, b: b[:2])),
    "copied into": changed("s", lambda t, s, b: t.copy_(b)),
    "filled with a value of the batch": changed("s", lambda t, s, b: t.fill_(b[0])),
    "overwritten in part": changed("b", lambda t, s, b: t[:2].zero_()),
    "multiplied by zero": changed("b", lambda t, s, b: t.mul_(0)),
    "overwritten, then varied": changed("b", lambda t, s, b: t.zero_(), lambda t, s, b: t.add_(b)),
    "written through a view": looked_at("s", lambda t, b: t[:2], lambda v, s, b: v.add_(b[:2]), "base"),
    "a view of what is then written": looked_at("s", lambda t, b: t[2:], lambda t, s, b: t.add_(b), "view"),
    "written by out=": changed("s", lambda t, s, b: torch.add(s, b, out=t)),
    "written by a list operator": changed("s", lambda t, s, b: torch._foreach_add_([t], [b])),
    "where by the batch": lambda s, b: torch.where(b > 0, s, -s),
    "gathered by indices of the batch": lambda s, b: s.gather(0, index_of(b)),
    "indexed by the batch": lambda s, b: s[index_of(b)],
    "scattered by indices of the batch": lambda s, b: s.scatter(0, index_of(b), s),
    "scattered in place": changed("s", lambda t, s, b: t.scatter_(0, index_of(b), s)),
    "added by index in place": changed("s", lambda t, s, b: t.index_add_(0, index_of(s), b)),
    "both results of a maximum": lambda s, b: tuple(torch.max(b, 0)),
    "both results of a sort": lambda s, b: tuple(torch.sort(s * b)),
    "each part of a split": lambda s, b: torch.split(b, [1, 3]),
    "each result of unbind": lambda s, b: b.unbind(),
    "each result of var_mean": lambda s, b: torch.var_mean(b),
    "the rank": lambda s, b: fdp.axis_index(),
    "computed with the rank": lambda s, b: s * fdp.axis_index(),
    "declared": lambda s, b: fdp.per_rank(s),
    "computed from what was declared": lambda s, b: fdp.per_rank(s) + 1,
    "a value beside its gradient": lambda s, b: fdp.value_and_grad(lambda p: (p * b).sum())(s)[0],
    "a plain gradient": lambda s, b: torch.func.grad(lambda p: (p * b).sum())(s),
    "an auxiliary output": lambda s, b: fdp.grad(lambda p: ((p * b).sum(), b * 2), has_aux=True)(s)[1],
    "torch.cond on the batch": lambda s, b: torch.cond(b.sum() > 0, lambda x: x + 1, lambda x: x - 1, (s,)),
    "torch.cond with a branch that draws": lambda s, b: torch.cond(
        s.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x - 1, (s,)
    ),
    "vmap over the batch": lambda s, b: torch.vmap(lambda x: x * s.sum())(b),
    "noise under vmap": lambda s, b: torch.vmap(lambda x: x + torch.rand(()), randomness="different")(s),
}


def outputs_of(case: Case) -> list[bool]:
    trace = trace_of(case, torch.ones(4), torch.ones(4), check_replication=False)
    assert trace.outputs
    return [output.varying for output in trace.outputs]


@functools.lru_cache
def varying_in_one_step() -> dict[str, list[bool]]:
    """All cases as one step, since a trace takes a tenth of a second: for each case, which of its outputs vary."""
    cases = REPLICATED | VARYING
    assert len(cases) == len(REPLICATED) + len(VARYING)

    def step(s: torch.Tensor, b: torch.Tensor) -> Tree:
        return [case(s, b) for case in cases.values()]

    trace = trace_of(step, torch.ones(4), torch.ones(4), check_replication=False)
    found: dict[str, list[bool]] = {name: [] for name in cases}
    names = list(cases)
    for output in trace.outputs:
        index = int(output.name.removeprefix("output[").split("]")[0])
        found[names[index]].append(output.varying)
    return found


@pytest.mark.parametrize("name", list(REPLICATED))
def test_replicated(name: str) -> None:
    assert set(varying_in_one_step()[name]) == {False}


@pytest.mark.parametrize("name", list(VARYING))
def test_varying(name: str) -> None:
    assert set(varying_in_one_step()[name]) == {True}


def test_a_value_read_before_its_memory_is_overwritten_still_varies() -> None:
    def step(s: torch.Tensor, b: torch.Tensor) -> Tree:
        t = s.clone().add_(b)
        before = t + 0
        t.zero_()
        return before, t

    assert outputs_of(step) == [True, False]


def test_a_reduction_takes_the_value_that_it_was_given() -> None:
    """What is written afterwards, into the argument or the result, is not what the ranks combined."""

    def step(s: torch.Tensor, b: torch.Tensor) -> Tree:
        t = b.clone()
        mean = fdp.pmean(t)
        t.zero_()
        other = fdp.pmean(b)
        other.add_(b)
        return mean, t, other

    assert outputs_of(step) == [False, False, True]


def test_statistics_of_batch_norm_vary_in_training_and_not_in_evaluation() -> None:
    module = nn.BatchNorm1d(3)
    apply, params, buffers = fdp.from_module(module)

    def step(state: Tree, batch: Tree) -> Tree:
        return apply(*state, batch)[1]

    for training in (True, False):
        module.train(training)
        trace = trace_of(step, (params, buffers), torch.ones(4, 3), check_replication=False)
        varying = {output.name: output.varying for output in trace.outputs}
        assert varying == {
            "output['num_batches_tracked']": False,
            "output['running_mean']": training,
            "output['running_var']": training,
        }


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [(-1, [False, False, True]), (0, [True, False, False]), ((0, 1), [True, True, False]), ((), [False] * 3),
     ((1, -1), [False, True, True])],
)  # fmt: skip
def test_batch_argnums_say_what_varies(argnums: Any, expected: list[bool]) -> None:
    args = [torch.ones(2)] * 3
    trace = trace_of(lambda *xs: [x * 1 for x in xs], *args, batch_argnums=argnums, check_replication=False)
    assert [output.varying for output in trace.outputs] == expected


# --- lines of the user's code ------------------------------------------------------------------------


def test_operations_have_the_line_that_called_them() -> None:
    trace = trace_of(mlp_step, *mlp_arguments())
    lines = {name: line_of(mlp_step, f"# {name}") for name in ("first layer", "second layer", "third layer")}
    forward = [(o.source, o.target) for o in trace.operations if not o.backward and o.target == "aten.mm.default"]
    backward = [(o.source, o.target) for o in trace.operations if o.backward and o.target == "aten.mm.default"]

    def source(name: str) -> str:
        return f"test_trace.py:{lines[name]} in loss_fn"

    order = ["first layer", "second layer", "third layer"]
    assert [s for s, _ in forward] == [source(name) for name in order]
    # Two products a layer (of the input and of the weight), one for the first; in backward order.
    assert [s for s, _ in backward] == [source(name) for name in [order[2]] * 2 + [order[1]] * 2 + [order[0]]]
    assert [g.source for g in trace.gradients] == [source(name) for name in reversed(order)]


def test_operations_of_a_library_have_the_line_that_called_the_library() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    apply, params, _ = fdp.from_module(model)
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True)

    def step(state: Tree, batch: Tree) -> Tree:
        def loss_fn(params: Tree) -> torch.Tensor:
            out, _ = apply(params, {}, batch)  # model
            return out.square().mean()  # loss

        grads = fdp.grad(loss_fn)(state["params"])  # gradient
        new, opt = optimizer.update(grads, state["opt"], state["params"])  # update
        return {"params": new, "opt": opt}

    trace = trace_of(step, {"params": params, "opt": optimizer.init(params)}, torch.ones(2, 3))
    by_target: dict[str, set[str]] = {}
    for operation in trace.operations:
        by_target.setdefault(operation.target, set()).add(operation.source)
    model_line = f"test_trace.py:{line_of(step, '# model')} in loss_fn"
    assert by_target["aten.addmm.default"] == {model_line}
    assert by_target["aten.tanh_backward.default"] == {model_line}
    assert by_target["aten.mm.default"] == {model_line}
    assert by_target["aten._fused_adamw_.tensor_lr"] == {f"test_trace.py:{line_of(step, '# update')} in step"}
    assert by_target["fdp.all_reduce.default"] == {f"test_trace.py:{line_of(step, '# gradient')} in step"}
    assert {g.source for g in trace.gradients} == {model_line}


def test_backward_operations_are_marked() -> None:
    trace = trace_of(mlp_step, *mlp_arguments())
    backward = [o.backward for o in trace.operations]
    first, last = backward.index(True), len(backward) - backward[::-1].index(True)
    assert not any(backward[:first]) and not any(backward[last:])
    targets = {o.target for o in trace.operations if o.backward}
    assert "aten.tanh_backward.default" in targets and "aten.tanh.default" not in targets


# --- operators that write in place -------------------------------------------------------------------


def test_a_fused_optimizer_is_one_operation_a_parameter() -> None:
    """Each needs the reduction of its own gradient and of no other, so buckets can be updated one by one."""
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True)

    def step(state: Tree, batch: Tree) -> Tree:
        grads = fdp.grad(lambda p: sum((v * batch.sum()).sin().sum() for v in p.values()))(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}

    params = {name: torch.ones(8, 8, requires_grad=True) for name in "abc"}
    trace = trace_of(step, {"params": params, "opt": optimizer.init(params)}, torch.ones(2), donate_argnums=0)
    updates = [(k, o) for k, o in enumerate(trace.operations) if "_fused_adamw_" in o.target]
    assert [o.entry for _, o in updates] == [0, 1, 2]
    assert len({o.node for _, o in updates}) == 1
    operations = trace.operations

    def reductions_below(index: int) -> set[str]:
        own = operations[index].reduction
        found = set() if own is None else {trace.reductions[own].name}
        return found.union(*(reductions_below(need) for need in operations[index].needs))

    assert [reductions_below(k) for k, _ in updates] == [{"p['a']"}, {"p['b']"}, {"p['c']"}]
    # One bucket a gradient: wait, update, wait, update.
    schedule = trace.plan(1e-9).schedule
    waits = [k for k, item in enumerate(schedule) if isinstance(item, Wait)]
    for wait, following in zip(waits, [*waits[1:], len(schedule)], strict=True):
        ran = [operations[i] for item in schedule[wait:following] if isinstance(item, Run) for i in item.operations]
        assert [o.entry for o in ran if "_fused_adamw_" in o.target] in ([0], [1], [2])


def test_statistics_of_batch_norm_are_ordered_by_what_writes_them() -> None:
    """native_batch_norm writes its statistics without saying so; what reads them later needs it all the same."""
    apply, params, buffers = fdp.from_module(nn.BatchNorm1d(3))

    def step(state: Tree, batch: Tree) -> Tree:
        out, new = apply(*state, batch)
        return fdp.pmean(new["running_mean"]), fdp.pmean(out.sum())

    trace = trace_of(step, (params, buffers), torch.ones(4, 3))
    by_name = {r.shape: r for r in trace.reductions}
    assert by_name[(3,)].produced_by == "aten.native_batch_norm.default"
    norm = next(k for k, o in enumerate(trace.operations) if o.target == "aten.native_batch_norm.default")
    assert norm in trace.operations[by_name[(3,)].operation].needs


def test_what_reads_before_a_write_comes_before_it_and_what_reads_after_after() -> None:
    def step(s: torch.Tensor, b: torch.Tensor) -> Tree:
        t = s.clone()
        before = t.sin()
        t.add_(1)
        after = t.cos()
        return before, after, fdp.pmean(b)

    trace = trace_of(step, torch.ones(3), torch.ones(3))
    at = {o.target.split(".")[1]: k for k, o in enumerate(trace.operations)}
    assert at["sin"] in trace.operations[at["add_"]].needs
    assert at["add_"] in trace.operations[at["cos"]].needs
    assert at["clone"] in trace.operations[at["add_"]].needs
    assert at["add_"] not in trace.operations[at["sin"]].needs


def test_random_numbers_stay_in_the_order_of_the_program() -> None:
    """Whatever waits for a bucket: a draw behind it must not be overtaken by one that needs none."""

    def step(s: torch.Tensor, b: torch.Tensor) -> Tree:
        first = F.dropout(fdp.pmean(b), 0.5)
        second = torch.rand_like(s)
        return fdp.per_rank([first, second])

    trace = trace_of(step, torch.ones(3), torch.ones(3))
    drawing = ("dropout", "bernoulli", "rand")
    random = [k for k, o in enumerate(trace.operations) if any(part in o.target for part in drawing)]
    ran = [i for item in trace.plan().schedule if isinstance(item, Run) for i in item.operations]
    assert [i for i in ran if i in random] == random
    assert len(random) == 2


def test_views_are_known_as_views() -> None:
    def step(s: torch.Tensor, b: torch.Tensor) -> Tree:
        return (s.t().view(-1)[1:].detach() * 2).clone() + fdp.pmean(b)

    trace = trace_of(step, torch.ones(4, 1), torch.ones(3))
    views = {o.target for o in trace.operations if o.view}
    assert {"aten.t.default", "aten.slice.Tensor"} <= views
    assert views & {"aten.detach.default", "aten.alias.default"}  # as torch 2.13 and 2.14 trace `detach`
    assert not views & {"aten.clone.default", "aten.mul.Tensor", "fdp.all_reduce.default"}


def test_dead_code_is_dropped_and_writes_are_not() -> None:
    def step(s: torch.Tensor, b: torch.Tensor) -> Tree:
        s.sin()
        fdp.psum(b)
        t = s.clone()
        t[0] = 1
        return t

    trace = trace_of(step, torch.ones(3), torch.ones(3))
    targets = [o.target for o in trace.operations]
    assert "aten.sin.default" not in targets and trace.reductions == ()
    assert any(target.startswith(("aten.fill_", "aten.copy_")) for target in targets)


# --- traces and plans as values ----------------------------------------------------------------------


def test_two_traces_of_one_step_are_equal() -> None:
    one, two = trace_of(mlp_step, *mlp_arguments()), trace_of(mlp_step, *mlp_arguments())
    assert one is not two and one == two and hash(one) == hash(two)
    assert one.plan() == two.plan() and hash(one.plan()) == hash(two.plan())
    assert str(one) == str(two) and str(one.plan()) == str(two.plan())
    assert one.plan() != one.plan(1e-6)
    assert len({one, two, one.plan(), two.plan()}) == 2


def test_other_arguments_make_another_trace() -> None:
    state, batch = mlp_arguments()
    trace = trace_of(mlp_step, state, batch)
    assert trace != trace_of(mlp_step, state, {"x": torch.ones(7, 3)})
    assert trace != trace_of(mlp_step, state, batch, size=4)
    assert trace != trace_of(mlp_step, state, batch, donate_argnums=0)
    assert trace != trace_of(mlp_step, {k: v.double() for k, v in state.items()}, {"x": batch["x"].double()})


def test_values_do_not_matter_to_a_trace() -> None:
    state, batch = mlp_arguments()
    assert trace_of(mlp_step, state, batch) == trace_of(mlp_step, {k: v * torch.nan for k, v in state.items()}, batch)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_tracing_takes_no_memory(name: str) -> None:
    # A state that no machine could hold: one number, seen as 2**50 of them. A kernel run on it would run out of memory.
    huge = torch.zeros(1).expand(2**50)
    optimizer = fdp.optim.from_torch(getattr(torch.optim, name), lr=0.1, fused=True)
    first = optimizer.init({"w": torch.zeros(2)})
    first["state"]["w"] = {key: huge if value.dim() else value for key, value in first["state"]["w"].items()}

    @fdp.data_parallel
    def step(state: Any, batch: torch.Tensor) -> Any:
        loss, grads = fdp.value_and_grad(lambda p: (p["w"] * batch).sum())(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    trace = step.trace({"params": {"w": huge}, "opt": first}, torch.ones(1))
    assert [o.target for o in trace.operations if "_fused_" in o.target] == [f"aten._fused_{name.lower()}_.tensor_lr"]
    assert [r.size_bytes for r in trace.gradients] == [2**52]


def test_traces_and_plans_are_frozen() -> None:
    trace = trace_of(mlp_step, *mlp_arguments())
    plan = trace.plan()
    parts = [trace, trace.inputs[0], trace.outputs[0], trace.operations[0], trace.reductions[0]]
    for value in [*parts, plan, plan.buckets[0], *plan.schedule[:1], Start(0), Wait(0)]:
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
    for sequence in (trace.inputs, trace.operations, trace.reductions, plan.buckets, plan.schedule, plan.bucket_cap_mb):
        assert isinstance(sequence, tuple)


def every_field(value: Any) -> list[str]:
    return [repr(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr]


def test_planning_and_emitting_leave_the_trace_as_it_is() -> None:
    trace = trace_of(mlp_step, *mlp_arguments(), size=1)
    before, text = str(trace.graph.graph), every_field(trace)
    plan = trace.plan()
    plan_before = every_field(plan)
    plan.emit()(*mlp_arguments())
    assert str(trace.graph.graph) == before and every_field(trace) == text and every_field(plan) == plan_before


def test_a_trace_prints_as_tables() -> None:
    text = str(trace_of(mlp_step, *mlp_arguments()))
    head, inputs, reductions, outputs = text.split("\n\n")
    line = line_of(mlp_step, "def mlp_step")
    assert head.startswith(f"Trace of mlp_step (test_trace.py:{line}), 2 ranks: 4 inputs, 4 outputs, ")
    assert head.endswith("3 gradients of 168 B")
    rows = table_rows(reductions)
    assert [row[1] for row in rows] == ["pmean", "params['third']", "params['second']", "params['first']"]
    third = line_of(mlp_step, "# third layer")
    assert rows[1] == ["1", "params['third']", "gradient", "mean", "[5, 2]", "float32", "40", "aten.mm.default",
                       f"test_trace.py:{third} in loss_fn"]  # fmt: skip
    assert [row[0] for row in table_rows(inputs)] == [
        "state['first']", "state['second']", "state['third']", "batch['x']"
    ]  # fmt: skip
    assert [row[3] for row in table_rows(outputs)] == ["replicated"] * 4


def test_a_plan_prints_when_each_bucket_starts_and_is_waited_for() -> None:
    text = str(trace_of(mlp_step, *mlp_arguments()).plan([40 / 2**20, 1]))
    line = line_of(mlp_step, "def mlp_step")
    title, heading = text.splitlines()[:2]
    assert title == f"Plan of mlp_step (test_trace.py:{line}), 2 ranks: 2 buckets, 172 B, caps 3.8147e-05, 1 MiB"
    columns = [cell.strip() for cell in heading.split("|")]
    assert columns == ["bucket", "op", "dtype", "gradients", "bytes", "starts after", "waited for before"]
    metric, gradients = table_rows(text)
    third, first = (line_of(mlp_step, f"# {name} layer") for name in ("third", "first"))
    assert metric[:5] == ["0", "mean", "float32", "1 other value: pmean", "4"]
    assert metric[5].endswith(f"mean (test_trace.py:{third} in loss_fn)") and metric[6] == "the end"
    names = "params['third'], params['second'], params['first']"
    assert gradients[:5] == ["1", "mean", "float32", f"3 gradients: {names}", "168"]
    assert gradients[5].endswith(f"mm (test_trace.py:{first} in loss_fn)")
    assert " sub (test_trace.py:" in gradients[6]


def test_numbers_of_things_are_written_as_people_write_them() -> None:
    """One rank, one bucket, no gradients."""
    trace = trace_of(lambda state, batch: state + fdp.pmean(batch), torch.ones(2), torch.ones(2), size=1)
    assert ", 1 rank: 2 inputs, 1 output, " in str(trace) and "0 gradients of 0 B" in str(trace)
    assert ", 1 rank: 1 bucket, 8 B, " in str(trace.plan())
