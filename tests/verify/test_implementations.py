"""fdp's own operators for compilers do what the proof of graphs takes them for, and are found out where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_ranks import fake_group

import fdp
from fdp.emit.backend import resolve_backend
from fdp.emit.codegen.loop_bodies import compiled_loop
from fdp.emit.compiled import compiler
from fdp.emit.compiled.barriers import IMPLEMENTED, running
from fdp.trace import Trace
from fdp.trace.graph.loops import changed_operands
from fdp.trace.operators.control import Repeated
from fdp.verify import VerificationError
from fdp.verify.implementations import verify_implementations, verify_loops


def test_they_do_what_their_names_say() -> None:
    verify_implementations(IMPLEMENTED, running)


def beta_left_out(target: torch.Tensor, one: torch.Tensor, two: torch.Tensor, factor: float) -> None:
    out = target.view(one.shape[0], two.shape[1])
    torch.addmm(out, one, two, alpha=factor, out=out)


def factor_left_out(target: torch.Tensor, one: torch.Tensor, two: torch.Tensor, factor: float) -> None:
    torch.mm(one, two, out=target.view(one.shape[0], two.shape[1]))


def added(target: torch.Tensor, one: torch.Tensor, two: torch.Tensor, factor: float) -> None:
    target.view(one.shape[0], two.shape[1]).add_(one @ two * factor)


def without_the_last(name: str) -> Callable[..., None]:
    def run(params: Any, grads: Any, *others: Any, **kwargs: Any) -> None:
        IMPLEMENTED[name](params[:-1], grads[:-1], *others, **kwargs)

    return run


def other_numbers(name: str) -> Callable[..., None]:
    def run(*args: Any, lr: Any, **kwargs: Any) -> None:
        IMPLEMENTED[name](*args, lr=lr, **{**kwargs, "weight_decay": 0.0})

    return run


def twice(call: str) -> list[torch.Tensor]:
    made: list[torch.Tensor] = IMPLEMENTED["draw_without_inputs"](call)
    made[0].new_empty(1).normal_()
    return made


WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a product is added to what was there": ("multiply_into", beta_left_out, "multiply_into computes"),
    "the factor of a product": ("multiply_into", factor_left_out, "multiply_into computes"),
    "a product that reads its place": ("multiply_into", added, "multiply_into computes"),
    "a copy that is none": ("snapshot", lambda value, stride=None: value, "returns what it was given"),
    "a copy of nothing": ("copy_into", lambda target, value: None, "copy_into computes what was there"),
    "numbers from elsewhere": ("draw", lambda read, call: [torch.rand_like(read[0])], "draw of aten.bernoulli.default"),
    "unused numbers": ("draw_without_inputs", twice, "draws something else as well"),
    "a draw in place": ("draw", lambda read, call: [read[0].bernoulli_(0.25)], "changes what it is given"),
    "a parameter is left out": ("fused_adam_", without_the_last("fused_adam_"), "fused_adam_ does not hand"),
    "a setting is left out": ("fused_sgd", other_numbers("fused_sgd"), "fused_sgd does not hand"),
    "another optimizer": ("fused_adamw_", IMPLEMENTED["fused_adam_"], "fused_adamw_ does not hand"),
    "another bucket": ("start_", lambda slots, index: IMPLEMENTED["start_"](slots, index + 1), "start_ of bucket 3"),
    "a wait that starts": ("wait_", IMPLEMENTED["start_"], "wait_ of bucket 3 calls"),
    "the first loop": ("loop_", lambda one, two, number: IMPLEMENTED["loop_"](one, two, 0), "loop_ does not run"),
}


@pytest.mark.parametrize("what", WRONG)
def test_one_that_does_something_else_is_found_out(what: str) -> None:
    name, wrong, message = WRONG[what]
    with pytest.raises(VerificationError, match=message):
        verify_implementations({**IMPLEMENTED, name: wrong}, running)


def looped(w: torch.Tensor, batch: torch.Tensor) -> Any:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh().square().mean()

    value, grad = fdp.accumulate(fdp.value_and_grad(loss), 3)(w, batch)
    return w - grad, fdp.pmean(value)


def traced() -> Trace:
    return fdp.data_parallel(looped, group=fake_group(2)).trace(torch.eye(4), torch.randn(6, 4))


def test_what_runs_a_loop_is_found_out() -> None:
    trace = traced()
    nodes = {node.name: node for node in trace.graph.graph.nodes}

    def right(body: Any, loop: Any) -> Any:
        return compiled_loop(body, loop.count, nodes[loop.node])

    def once_less(body: Any, loop: Any) -> Any:
        return compiled_loop(body, loop.count - 1, nodes[loop.node])

    def turned(body: Any, loop: Any) -> Any:
        run = right(body, loop)
        return lambda changed, others: run(changed[::-1], others)

    def as_they_come(body: Any, loop: Any) -> Any:
        run = Repeated(body.function, tuple(torch.arange(loop.count).split(1)))
        return lambda changed, others: run([*changed, *others])

    def however_they_lie(body: Any, loop: Any) -> Any:
        node = nodes[loop.node]
        order = [at for group in changed_operands(node) for at in group]
        run = Repeated(body.function, tuple(torch.arange(loop.count).split(1)))
        return lambda changed, others: run([[*changed, *others][order.index(at)] for at in range(len(order))])

    verify_loops(trace, right)
    for wrong in (once_less, turned, as_they_come, however_they_lie):
        with pytest.raises(VerificationError, match="runs its body on wrong tensors"):
            verify_loops(trace, wrong)


def test_a_step_runs_operator_by_operator_where_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def reached(*args: Any) -> None:
        raise Reached

    def compile_it() -> Any:
        group = fake_group(2)
        plan = fdp.data_parallel(looped, group=group).plan(torch.eye(4), torch.randn(6, 4))
        return resolve_backend(True).settled(plan).program(plan, group, True)

    monkeypatch.setattr(compiler, "lower", reached)
    compiler._prove_own_operators.cache_clear()
    with pytest.raises(Reached):
        compile_it()
    compiler._prove_own_operators.cache_clear()
    monkeypatch.setattr(compiler, "IMPLEMENTED", {**IMPLEMENTED, "multiply_into": beta_left_out})
    with pytest.warns(UserWarning, match="found to be wrong before it ran"):
        assert "aten" in compile_it().source
