"""Steps compiled by inductor's public entry: what stands in for the private one where torch is another."""

from __future__ import annotations

import os
from typing import Any

import models
import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from fake_ranks import fake_group
from samples import exhaustive

import fdp
from fdp.emit.compiled import inductor, public
from fdp.emit.compiled.barriers import FUSED
from fdp.emit.compiled.updates import UPDATES
from fdp.emit.memory import planning
from fdp.runtime import emit_plan

WORLD = 2
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True}),
}


@pytest.fixture(autouse=True)
def _warns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "_warned", False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(public.VARIABLE, "1")


def copied(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree)


def close(one: Any, two: Any, tolerance: float = 1e-5) -> bool:
    leaves = zip(optree.tree_leaves(one), optree.tree_leaves(two), strict=True)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in leaves)


def train(name: str, optimizer: str, compile: Any, donate: bool) -> tuple[Any, list[float], str]:
    """State and losses after three steps, and the program."""
    torch.manual_seed(3)
    model = models.MODELS[name]()
    apply, params, buffers = fdp.from_module(model)
    cls, hyperparameters = OPTIMIZERS[optimizer]
    rule = fdp.optim.from_torch(cls, **hyperparameters)
    step = fdp.data_parallel(models.fdp_step(apply, rule), donate_argnums=0 if donate else (), compile=compile)
    state = copied({"params": params, "buffers": buffers, "opt": rule.init(params)})
    before, held = copied(state), state
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for batch in models.batches(name, 3, 8):
        state, metrics = step(state, models.shard(batch, world, rank))
        losses.append(float(metrics["loss"]))
    leaves = optree.tree_leaves(held)
    if donate:
        assert all(a is b for a, b in zip(leaves, optree.tree_leaves(state), strict=True))
    else:
        assert all(map(torch.equal, leaves, optree.tree_leaves(before)))
    return state, losses, next(iter(step._known.values())).emitted.source


def trains_alike(name: str, optimizer: str, donations: tuple[bool, ...]) -> None:
    """In a rank: what the public entry makes against operator by operator."""
    expected, losses, _ = train(name, optimizer, False, True)
    os.environ[public.VARIABLE] = "1"
    try:
        for donate in donations:
            found, again, source = train(name, optimizer, True, donate)
            assert close(found, expected) and close(torch.tensor(again), torch.tensor(losses))
            assert models.same_bits_on_all_ranks(found)
            assert "fdp" not in source.split("def forward")[1]
            assert ("aten.copy_.default" in source) is donate
            started, awaited = (source.count(f"_c10d_functional.{name}.") for name in ("all_reduce", "wait_tensor"))
            assert started == awaited > 0
    finally:
        del os.environ[public.VARIABLE]


@pytest.mark.parametrize(
    ("name", "optimizer", "donations"),
    [("mlp", "adamw", (True,)), pytest.param("cnn", "sgd", (False,), marks=exhaustive)],
)
def test_two_ranks_train_as_operator_by_operator(name: str, optimizer: str, donations: tuple[bool, ...]) -> None:
    ranks.run(WORLD, trains_alike, name, optimizer, donations)


def every_kind(state: dict[str, Any], batch: torch.Tensor) -> Any:
    """Each collective, of dtypes that backends know and do not; a sum and a mean as long as each other."""
    rows = batch.double()
    return {
        "mean": fdp.pmean(rows * state["w"]),
        "sum": fdp.psum(rows),
        "mean16": fdp.pmean(rows.half()),
        "complex": fdp.psum(torch.complex(rows, -rows)),
        "count": fdp.psum(rows.long()),
        "max": fdp.pmax(rows),
        "min": fdp.pmin(batch[0]),
        "root": fdp.broadcast([rows > 0, rows.bool()], root=1)[0],
        "short": fdp.broadcast(rows.short(), root=1),
        "all": fdp.all_gather(rows > 0),
        "after": fdp.pmean(fdp.psum(batch).sum() * batch),
        "empty": fdp.pmean(batch[:0]),
        "rank": fdp.per_rank(fdp.axis_index() + 0),
    }


def sends_every_kind(scaled: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if scaled:
            patch.setattr(planning, "_SCALED_WHEN_FILLED_BYTES", 0)
        batch = (torch.arange(12.0).view(3, 4) - 5) * (1 + dist.get_rank())
        state = {"w": torch.tensor(2.0)}
        expected = fdp.data_parallel(every_kind)(state, batch)
        patch.setenv(public.VARIABLE, "1")
        step = fdp.data_parallel(every_kind, compile=True)
        for _ in range(2):
            found = step(state, batch)
            assert [x.dtype for x in optree.tree_leaves(found)] == [x.dtype for x in optree.tree_leaves(expected)]
            assert close(found, expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_every_collective_sends_what_it_does_operator_by_operator(scaled: bool) -> None:
    ranks.run(WORLD, sends_every_kind, scaled)


def loses_its_peer() -> str:
    os.environ[public.VARIABLE] = "1"
    step = fdp.data_parallel(lambda w, x: fdp.psum(w * x), compile=True)
    step(torch.ones(3), torch.ones(3))
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(fdp.PeerError, match="step '<lambda>' on rank 0 lost contact") as error:
        step(torch.ones(3), torch.ones(3))
    return str(error.value)


def test_an_error_of_a_message_is_a_peer_error() -> None:
    outcomes = ranks.run_fresh(WORLD, loses_its_peer)
    assert outcomes[0].ok, outcomes[0].describe()
    assert outcomes[0].value.splitlines()[-1].startswith("Remedy: ")
    assert outcomes[1].exitcode == 3


def doubled(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return fdp.pmean((w * x).sum()) * w


@pytest.mark.parametrize("missing", ["compile_fx_inner", "select_decomp_table", "arguments", "convention", "setting"])
def test_another_inductor_is_taken_by_its_public_entry(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    w, x = torch.randn(4), torch.randn(4)
    step = fdp.data_parallel(doubled, compile=True)
    with pytest.warns(UserWarning, match="compiler orders messages as it likes"):
        found = step(w, x)
    assert close(found, (w * x).sum() * w)
    assert close(fdp.data_parallel(doubled, compile=True)(w, x), found)  # and warns no second time


def test_an_operator_that_cannot_be_lowered_is_refused_by_either_entry(
    monkeypatch: pytest.MonkeyPatch, asked: None
) -> None:
    from torch._inductor import compile_fx

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", fail)
    for wanted in ("1", "0"):
        monkeypatch.setenv(public.VARIABLE, wanted)
        with pytest.raises(fdp.CompileError, match="cannot be compiled: inductor failed"):
            fdp.data_parallel(doubled, compile=True)(torch.ones(5), torch.ones(5))


def test_ranks_that_are_no_registered_group_are_refused(asked: None) -> None:
    plan = fdp.data_parallel(doubled, group=fake_group(2)).plan(torch.ones(3), torch.ones(3))
    with pytest.raises(fdp.CompileError, match="its ranks are no process group"):
        emit_plan(plan, fake_group(2), compile=True)


def test_readers_behind_an_update_see_the_new_value(asked: None) -> None:
    rule = fdp.optim.from_torch(torch.optim.SGD, lr=0.5, fused=True)

    def step(state: Any, batch: torch.Tensor) -> Any:
        view = state["w"].view(2, 2)
        grads = fdp.pmean({"w": (view.sum() * batch).view(4)})
        new, opt = rule.update(grads, state["opt"], {"w": state["w"]})
        return {"w": new["w"], "opt": opt}, fdp.pmean(new["w"].view(2, 2) @ batch), view + 0

    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    state = {"w": w, "opt": rule.init({"w": w})}
    expected = fdp.data_parallel(step)(copied(state), torch.eye(2))
    for donate in (0, ()):
        found = fdp.data_parallel(step, compile=True, donate_argnums=donate)(copied(state), torch.eye(2))
        assert close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("operator", sorted(UPDATES))
def test_the_arithmetic_of_an_update_is_that_of_the_fused_one(
    operator: str, decay: float, maximize: bool, found_inf: float | None, dtype: torch.dtype
) -> None:
    choices: list[dict[str, Any]] = [{"amsgrad": False}, {"amsgrad": True}]
    if operator == "_fused_sgd_":
        choices = [
            {"momentum": m, "dampening": 0.0 if n else 0.2, "nesterov": n, "is_first_step": first}
            for m, n, first in [(0.0, False, True), (0.9, False, True), (0.9, False, False), (0.9, True, False)]
        ]
    elif operator == "_fused_adagrad_":
        choices = [{"lr_decay": 0.1}]
    for choice in choices:
        named: dict[str, Any] = {"lr": 0.1, "weight_decay": decay, "maximize": maximize, **choice}
        if found_inf is not None:
            named["found_inf"] = torch.tensor(found_inf)
        if "adam" in operator:
            named |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
        if operator != "_fused_sgd_":
            named["eps"] = 1e-8
        lists = [[torch.rand(5).to(dtype) for _ in range(2)] for _ in range(5)]
        steps = [torch.tensor(3.0), torch.tensor(4.0)]
        if "adam" in operator:
            args = [*lists[:4], lists[4] if choice["amsgrad"] else [], steps]
        elif operator == "_fused_sgd_":
            args = [*lists[:2], lists[2] if choice["momentum"] else []]
        else:
            args = [*lists[:3], steps]
        for lr in (0.1, torch.tensor(0.1)):
            one, two = copied(args), copied(args)
            getattr(torch.ops.aten, operator)(*one, **{**named, "lr": lr})
            UPDATES[operator](*two, **{**named, "lr": lr})
            assert close(two, one, 1e-6 if dtype == torch.float32 else 1e-2)


def test_every_fused_optimizer_has_its_arithmetic() -> None:
    assert {operator._schema.name.split("::")[-1] for operator in FUSED} == set(UPDATES)
