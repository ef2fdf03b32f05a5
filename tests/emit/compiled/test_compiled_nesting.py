"""fdp and `torch.compile` in every order: a step inside of what is compiled, and what is compiled inside of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from samples import exhaustive, some
from torch import nn

import fdp
from fdp.emit.compiled import compiler

Tree = Any


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    """How many graphs Dynamo has made."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def regression(w: torch.Tensor, batch: torch.Tensor) -> Any:
    loss, grad = fdp.value_and_grad(lambda w: (batch @ w).tanh().square().mean())(w)
    return w - 0.1 * grad, fdp.pmean(loss)


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 6).reshape(3, 2), torch.arange(12.0).reshape(4, 3) / 12


# --- a step under torch.compile --------------------------------------------------------------------------


def around(step: Any) -> Any:
    def outer(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        new, loss = step(w, batch * 2)
        return new.sum() + loss * 3

    return outer


def test_a_graph_breaks_once_around_a_step() -> None:
    w, batch = arguments()
    outer = around(fdp.data_parallel(regression))
    explained = torch._dynamo.explain(outer)(w, batch)
    assert explained.graph_break_count == 1
    assert "an fdp step is one program already" in str(explained.break_reasons[0].reason)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(outer, backend="aot_eager")(w, batch), around(regression)(w, batch))


def test_a_step_itself_under_torch_compile_is_the_step() -> None:
    step = fdp.data_parallel(regression)
    torch.testing.assert_close(torch.compile(step)(*arguments()), step(*arguments()), rtol=0, atol=0)
    assert step.traces == 1 and graphs() == 0


@pytest.mark.parametrize("wrap", [lambda step: step, around], ids=["itself", "inside"])
def test_one_whole_graph_is_refused_with_the_reason(wrap: Any) -> None:
    step = fdp.data_parallel(regression)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(wrap(step), fullgraph=True)(*arguments())
    for text in ("an fdp step is one program already", "Leave fullgraph=True away", "fdp.data_parallel(compile=True)"):
        assert text in str(caught.value)


def test_an_emitted_plan_breaks_the_graph_likewise() -> None:
    w, batch = arguments()
    emitted = fdp.data_parallel(regression).plan(w, batch * 2).emit()
    assert torch._dynamo.explain(around(emitted))(w, batch).graph_break_count == 1


# Dynamo makes an instance of a function of autograd to look at it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_undecorated_step_may_be_compiled() -> None:
    torch.testing.assert_close(torch.compile(regression, backend="aot_eager")(*arguments()), regression(*arguments()))


# --- data_parallel(torch.compile(step)) ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "compile", "settings"),
    [
        ({}, False, {}),
        ({"options": {"max_fusion_size": 32}}, False, {"max_fusion_size": 32}),
        ({"mode": "max-autotune-no-cudagraphs"}, False, {"max_autotune": True, "coordinate_descent_tuning": True}),
        ({"fullgraph": True, "options": {"max_fusion_size": 32}}, False, {"max_fusion_size": 32}),
        ({"fullgraph": True}, False, {}),
        # The options of data_parallel count.
        ({"options": {"max_fusion_size": 32}}, {"max_fusion_size": 8}, {"max_fusion_size": 8}),
    ],
)
def test_a_compiled_step_is_unwrapped_and_its_options_hold(
    asked: Any, compile: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    seen = []

    def lower(*args: Any) -> Any:
        seen.append(args[2])
        raise fdp.CompileError("far enough")

    monkeypatch.setattr(compiler, "lower", lower)
    step = fdp.data_parallel(torch.compile(regression, **asked), compile=compile)
    assert step.__name__ == "regression"
    with pytest.raises(fdp.CompileError, match="far enough"):
        step(*arguments())
    # On a CPU random numbers are drawn, and pictures laid out, as without a compiler.
    assert seen == [{"fallback_random": True, "layout_optimization": False, **settings}]
    assert graphs() == 0
    assert config.max_fusion_size not in settings.values()


@exhaustive
def test_a_compiled_step_computes_the_same() -> None:
    step = fdp.data_parallel(torch.compile(regression))
    torch.testing.assert_close(step(*arguments()), regression(*arguments()))


# --- torch.compile inside of a step ----------------------------------------------------------------------


def compiled_function(fullgraph: bool) -> Any:
    def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, y)

    return torch.compile(loss_of, fullgraph=fullgraph)


def compiled_module() -> nn.Module:
    return torch.compile(models.mlp())  # type: ignore[return-value]


def compiled_layer() -> nn.Module:
    model: Any = models.mlp()
    model[0] = torch.compile(model[0])
    return model


def module_compiled_in_place() -> nn.Module:
    model = models.mlp()
    model.compile()
    return model


def layer_compiled_in_place() -> nn.Module:
    model: Any = models.mlp()
    model[2].compile()
    return model


def train(
    make: Any = models.mlp, loss_of: Any = nn.functional.cross_entropy, cls: Any = None, update: bool = False
) -> Any:
    apply, params, buffers = fdp.from_module(make())
    optimizer = fdp.optim.from_torch(cls or torch.optim.AdamW, lr=1e-2)
    change = torch.compile(optimizer.update) if update else optimizer.update

    @fdp.data_parallel
    def step(state: Tree, batch: Tree) -> Any:
        def loss_fn(p: Tree) -> torch.Tensor:
            return loss_of(apply(p, buffers, batch["x"])[0], batch["y"])

        loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
        new, opt = change(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}, fdp.pmean(loss)

    state = {"params": params, "opt": optimizer.init(params)}
    losses = []
    for batch in models.batches("mlp", 2, 8):
        state, loss = step(state, batch)
        losses.append(loss)
    return list(state["params"].values()), losses


INSIDE: dict[str, dict[str, Any]] = {
    "a function": {"loss_of": compiled_function(fullgraph=False)},
    "a function as one graph": {"loss_of": compiled_function(fullgraph=True)},
    "a module": {"make": compiled_module},
    "a layer": {"make": compiled_layer},
    "a module in place": {"make": module_compiled_in_place},
    "a layer in place": {"make": layer_compiled_in_place},
    "the update": {"update": True},
    "the optimizer's class": {"cls": torch.compile(torch.optim.AdamW)},
}


@pytest.mark.parametrize("inside", some(INSIDE))
def test_what_is_compiled_inside_is_part_of_the_step(inside: str) -> None:
    expected = train()
    found = train(**INSIDE[inside])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert graphs() == 0, "something was compiled on its own"


def test_the_count_of_graphs_tells_of_a_function_that_is_compiled() -> None:
    """Otherwise the test above could not fail."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert graphs() == 1


@exhaustive
@pytest.mark.parametrize("flag", [True, False])
def test_a_condition_in_a_compiled_step(flag: bool) -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        total = fdp.pmean(batch.sum())
        return torch.cond(total > 0, lambda w: w * 2, lambda w: w - 1, (w,))

    compiled = fdp.data_parallel(step, compile=True)
    w = torch.ones(3)
    for sign in (1.0, -1.0) if flag else (-1.0, 1.0):
        torch.testing.assert_close(compiled(w, torch.full((2,), sign)), w * 2 if sign > 0 else w - 1)
    assert compiled.traces == 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_front_end_through_dynamo_is_refused_with_the_reason(fullgraph: bool) -> None:
    front = torch.compile(lambda w, x: w * x, backend="fdp", fullgraph=fullgraph)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        front(torch.ones(2), torch.ones(2))
    assert "fdp has no front end through Dynamo. A captured graph does not say which inputs differ" in str(caught.value)
    assert "fdp.data_parallel(step, compile=True)" in str(caught.value)
