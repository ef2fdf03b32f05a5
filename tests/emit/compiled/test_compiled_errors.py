"""A step that cannot be compiled, or that the compiler gets wrong: an error says so, and arguments are as they were."""

from __future__ import annotations

import functools
from typing import Any

import models
import pytest
import torch
from missing_parts import take_away
from samples import exhaustive

import fdp
from fdp.emit.compiled import compiler, inductor
from fdp.pytorch import parts

Tree = dict[str, torch.Tensor]


def new_state() -> Tree:
    return {"w": torch.linspace(-1, 1, 6).reshape(3, 2), "n": torch.zeros(())}


def check_refused(step: Any, *texts: str) -> None:
    """The step is refused, its donated state is as it was, and compile=False runs it."""
    state, batch = new_state(), torch.ones(4, 3)
    before = models.digest(state)
    with pytest.raises(fdp.CompileError) as caught:
        fdp.data_parallel(step, donate_argnums=0, compile=True)(state, batch)
    message = str(caught.value)
    for text in ("'step'", *texts):
        assert text in message, message
    assert message.splitlines()[-1].startswith("Remedy: ") and "compile=False" in message.splitlines()[-1]
    assert models.digest(state) == before
    new = fdp.data_parallel(step, donate_argnums=0)(state, batch)
    assert new["w"] is state["w"] and models.digest(state) != before


@pytest.mark.parametrize("missing", ["compile_fx_inner", "select_decomp_table", "arguments", "convention", "setting"])
def test_another_inductor_is_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, decomposition

    if missing == "compile_fx_inner":
        monkeypatch.delattr(compile_fx, missing)
    elif missing == "select_decomp_table":
        monkeypatch.setattr(decomposition, missing, lambda settings: {})
    elif missing == "arguments":
        monkeypatch.setattr(compile_fx, "compile_fx_inner", lambda graph, examples: graph)
    elif missing == "convention":
        monkeypatch.setattr(compile_fx, "compile_fx_inner", lambda graph, examples, is_inference: graph.forward)
    else:
        monkeypatch.setattr(inductor, "KEPT", {**inductor.KEPT, "no_such_setting": False})
    step = fdp.data_parallel(lambda w, x: fdp.pmean((w * x).sum()) * w, compile=True)
    with pytest.raises(fdp.CompileError, match="does not have the entry to inductor that fdp knows") as caught:
        step(torch.ones(4), torch.ones(4))
    assert "compile=False" in str(caught.value).splitlines()[-1]


ENTRY = parts.KNOWN_OTHERWISE["inductor's own entry"]


# (Not what torch itself cannot do without, what an operator alone is lowered with, or what results have.)
ELSEWHERE = {"TracingContext", "TensorBox", "lowerings", "make_fallback", "_boxed_call", "require_exact_strides"}
if parts.release(torch.__version__) >= (2, 14):
    ELSEWHERE.add("SchedulerNode")
if parts.release(torch.__version__) >= (2, 15):
    ELSEWHERE.add("fusable_weak_dep")


@pytest.mark.parametrize("path", [path for path in ENTRY if path.rpartition(".")[2] not in ELSEWHERE])
def test_inductor_without_a_part_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = fdp.data_parallel(lambda w, x: fdp.pmean((w * x).sum()) * w, compile=True)
    take_away(path, monkeypatch)
    with pytest.raises(fdp.CompileError, match="does not have the entry to inductor that fdp knows"):
        step(torch.ones(4), torch.ones(4))


def test_an_operator_that_cannot_be_lowered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    def fail(*args: Any) -> Any:
        raise NotImplementedError("no loop for this")

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.lgamma.default, fail)

    def step(state: Tree, batch: torch.Tensor) -> Tree:
        return {"w": state["w"] + torch.lgamma(state["w"] + 3), "n": state["n"] + 1}

    check_refused(step, "aten.lgamma.default", "NotImplementedError: no loop for this")


@pytest.mark.parametrize("first", [True, False])
def test_a_missing_compiler_is_an_error(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is the first step to be compiled: only then is the compiler tried with vector instructions."""
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.cpp_builder import get_cpp_compiler

    tried: list[str] = []

    class Instructions:
        """Stands for vector instructions that were not tried yet, as those of the processor may have been."""

        def __str__(self) -> str:
            return "some"

        def __bool__(self) -> bool:
            tried.append(get_cpp_compiler())
            return False

    def step(state: Tree, batch: torch.Tensor) -> Tree:
        return {"w": state["w"] * (1.25 if first else 1.5) - 3, "n": state["n"] + 1}

    untried = functools.cache(inductor._try_best_vector_isa_only.__wrapped__)
    with monkeypatch.context() as patch, config.patch({"cpp.cxx": ("no-such-compiler",)}):
        if first:
            patch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Instructions()])
            patch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["some"])
            patch.setattr(inductor, "_try_best_vector_isa_only", untried)
        else:
            patch.setattr(inductor, "_try_best_vector_isa_only", lambda: None)
        check_refused(step, "InvalidCxxCompiler", "found no C++ compiler", "install a C++ compiler")
    assert tried == []
    if first:  # a compiler that is there by the next time is tried, and found
        monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Instructions()])
        monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["some"])
        untried()
        assert len(tried) == 1


def corrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the compiler takes a cosine for a sine; the proof of the graph, which comes first, is left out."""
    monkeypatch.setattr(compiler, "verify_lowered", lambda *args: None)
    declare = compiler.declare

    def corrupt(graph: torch.fx.Graph, *options: bool) -> None:
        declare(graph, *options)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default):
            node.target = torch.ops.aten.sin.default

    monkeypatch.setattr(compiler, "declare", corrupt)


def wavy(state: Tree, batch: torch.Tensor) -> Tree:
    return {"w": state["w"].cos(), "n": state["n"] + 1}


def test_a_program_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupted(monkeypatch)

    def step(state: Tree, batch: torch.Tensor) -> Tree:
        return wavy(state, batch)

    check_refused(step, "output['w']: [3, 2] torch.float32 differs by", "does not compute")
    with pytest.raises(fdp.CompileError) as caught:
        fdp.data_parallel(step, compile=True)(new_state(), torch.ones(1))
    assert "output['n']" not in str(caught.value)


def without_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the compiler loses every fused optimizer; the proof of the graph, which comes first, is left out."""
    monkeypatch.setattr(compiler, "verify_lowered", lambda *args: None)
    declare = compiler.declare

    def corrupt(graph: torch.fx.Graph, *options: bool) -> None:
        declare(graph, *options)
        for node in list(graph.nodes):
            if "fused_adamw" in str(node.target):
                graph.erase_node(node)

    monkeypatch.setattr(compiler, "declare", corrupt)


@exhaustive
def test_a_lost_update_is_found_where_rounding_decides_on_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    # The bias before a normalisation has a gradient of rounding alone, of which Adam makes a step to either side.
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3, track_running_stats=False), torch.nn.Flatten()]
    apply, params, buffers = fdp.from_module(torch.nn.Sequential(*layers))
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.01, fused=True)

    def step(state: Any, batch: torch.Tensor) -> Any:
        grads = fdp.grad(lambda p: apply(p, buffers, batch)[0].sin().square().mean())(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}

    state, batch = {"params": params, "opt": optimizer.init(params)}, torch.randn(4, 1, 6, 6)
    fdp.data_parallel(step, compile=True)(state, batch)
    without_updates(monkeypatch)
    with pytest.raises(fdp.CompileError, match="does not compute what its operators compute") as caught:
        fdp.data_parallel(step, compile=True)(state, batch)
    assert "output['params']['0.weight']" in str(caught.value)


@exhaustive
def test_a_wrong_program_is_found_behind_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupted(monkeypatch)

    def step(state: Tree, batch: torch.Tensor) -> Any:
        return fdp.per_rank({"w": torch.nn.functional.dropout(state["w"], 0.5).cos()})

    with pytest.raises(fdp.CompileError, match=r"output\['w'\]: \[3, 2\] torch.float32 differs by"):
        fdp.data_parallel(step, compile=True)(new_state(), torch.ones(1))


def test_check_trace_is_what_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupted(monkeypatch)
    state = new_state()
    new = fdp.data_parallel(wavy, compile=True, check_trace=False)(state, torch.ones(1))
    torch.testing.assert_close(new["w"], state["w"].sin())


def test_a_program_that_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = compiler.lower

    def broken(*args: Any) -> Any:
        def function(inputs: list[Any]) -> Any:
            raise ZeroDivisionError("by nothing")

        return type(lower(*args))(function, "")

    monkeypatch.setattr(compiler, "lower", broken)

    def step(state: Tree, batch: torch.Tensor) -> Tree:
        return wavy(state, batch)

    check_refused(step, "does not run", "ZeroDivisionError: by nothing")
