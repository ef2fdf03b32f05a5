"""Which outputs of a step may differ from rank to rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from traced import trace_of

import fdp

Tree = Any

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
    "ones like what varies": changed("s", lambda t, s, b: t.add_(b), lambda t, s, b: t.copy_(torch.ones_like(t))),
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
    "ones in the shape of a batch": lambda s, b: torch.ones_like(b),
    "zeros in the shape of what a batch was added to": lambda s, b: torch.zeros_like(s + b),
    "ones in a shape of the length of a batch": lambda s, b: torch.ones_like(b.sum().expand(len(b))),
    "filled with a value of the batch, in a shape of the state": lambda s, b: torch.full_like(s, 2.0) * b[0],
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
