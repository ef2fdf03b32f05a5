"""What a trace says of its operations: lines of the user, what is a view or a write, what needs what."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from traced import mlp_arguments, mlp_step, place_of, trace_of

import fdp
from fdp.plan import Run, Wait

Tree = Any


def test_operations_have_the_line_that_called_them() -> None:
    trace = trace_of(mlp_step, *mlp_arguments())
    places = {name: place_of(mlp_step, f"# {name}") for name in ("first layer", "second layer", "third layer")}
    forward = [(o.source, o.target) for o in trace.operations if not o.backward and o.target == "aten.mm.default"]
    backward = [(o.source, o.target) for o in trace.operations if o.backward and o.target == "aten.mm.default"]

    def source(name: str) -> str:
        return f"{places[name]} in loss_fn"

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
    model_line = f"{place_of(step, '# model')} in loss_fn"
    assert by_target["aten.addmm.default"] == {model_line}
    assert by_target["aten.tanh_backward.default"] == {model_line}
    assert by_target["aten.mm.default"] == {model_line}
    assert by_target["aten._fused_adamw_.tensor_lr"] == {f"{place_of(step, '# update')} in step"}
    assert by_target["fdp.all_reduce.default"] == {f"{place_of(step, '# gradient')} in step"}
    assert {g.source for g in trace.gradients} == {model_line}


def test_backward_operations_are_marked() -> None:
    trace = trace_of(mlp_step, *mlp_arguments())
    backward = [o.backward for o in trace.operations]
    first, last = backward.index(True), len(backward) - backward[::-1].index(True)
    assert not any(backward[:first]) and not any(backward[last:])
    targets = {o.target for o in trace.operations if o.backward}
    assert "aten.tanh_backward.default" in targets and "aten.tanh.default" not in targets


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
