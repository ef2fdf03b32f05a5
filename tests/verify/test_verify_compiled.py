"""The graph of a compiled step is proved before the compiler gets it. (No compiler runs here: that takes long.)"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_ranks import fake_group
from samples import exhaustive
from torch import nn
from torch.utils.checkpoint import checkpoint

import fdp
from fdp.emit.backend import resolve_backend
from fdp.emit.compiled import compiler, graph, passes
from fdp.emit.memory import analysis
from fdp.emit.memory.planning import slot_name

TABLE = torch.randn(4)


class Reached(Exception):
    """The compiler was reached: the graph is right."""


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*args: Any) -> None:
        raise Reached

    monkeypatch.setattr(compiler, "lower", reached)


def compile_step(step: Callable[..., Any], *args: Any, world: int = 1, **options: Any) -> Any:
    group = fake_group(world)
    transformed = fdp.data_parallel(step, group=group, check_replication=False, **options)
    plan = transformed.trace(*args).plan(options.get("bucket_cap_mb", 25))
    return resolve_backend(True).settled(plan).program(plan, group, world > 1)


def training(optimizer_class: Any, **settings: Any) -> tuple[Callable[..., Any], Any, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))
    apply, params, buffers = fdp.from_module(model)
    optimizer = fdp.optim.from_torch(optimizer_class, lr=1e-3, **settings)

    def train(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            out, new = apply(params, state["buffers"], batch["x"])
            return F.cross_entropy(out, batch["y"]), new

        (loss, new), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        buffers = {k: (fdp.pmean if v.is_floating_point() else fdp.pmax)(v) for k, v in new.items()}
        return {"params": params, "opt": opt, "buffers": buffers}, fdp.pmean(loss)

    state = {"params": params, "opt": optimizer.init(params), "buffers": buffers}
    return train, state, {"x": torch.randn(6, 8), "y": torch.randint(4, (6,))}


@pytest.mark.parametrize("donated", [pytest.param((), marks=exhaustive), 0])
@pytest.mark.parametrize("world", [pytest.param(1, marks=exhaustive), 2])
@pytest.mark.parametrize(
    "optimizer_class, settings",
    [
        (torch.optim.AdamW, {}),
        pytest.param(torch.optim.SGD, {"momentum": 0.9}, marks=exhaustive),
        pytest.param(torch.optim.RMSprop, {}, marks=exhaustive),
    ],
    ids=["AdamW", "SGD", "RMSprop"],
)
def test_training_steps_are_proved(optimizer_class: Any, settings: Any, world: int, donated: Any) -> None:
    with pytest.raises(Reached):
        compile_step(*training(optimizer_class, **settings), world=world, donate_argnums=donated)


def accumulated(params: Any, batch: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        return (F.dropout(batch @ params["w"], 0.1).tanh() @ params["w"]).square().mean()

    loss, grads = fdp.accumulate(fdp.value_and_grad(loss_fn), microbatches=3)(params, batch)
    return {"w": params["w"] - 0.1 * grads["w"]}, fdp.pmean(loss)


def checkpointed(params: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        hidden = checkpoint(lambda x: F.dropout((x @ params["w"]).tanh(), 0.3), batch, use_reentrant=False)
        return hidden.square().mean()

    loss, grads = fdp.value_and_grad(loss_fn)(params)
    return {"w": params["w"] - grads["w"]}, fdp.pmean(loss)


def in_place(params: Any, batch: Any) -> Any:
    w = params["w"].clone()
    w[0:2].add_(batch[:2].mean())
    w.t().mul_(2)
    view = w[:, 1:]
    view.add_(1)
    w[1:].t().unsqueeze(0)[0, :, 1].add_(1)  # through a view that is its base's base
    chosen = torch.cond(batch.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (batch,))
    number = batch.sum().item()
    return {"w": w}, chosen * number, torch.bernoulli(batch.sigmoid().double()), w[1], TABLE * torch.arange(4.0)


def gathered(params: Any, batch: Any) -> Any:
    everybody = fdp.all_gather(batch.mean(0))
    first = fdp.broadcast(batch.sum(0))
    return {"w": params["w"] * everybody.amax(0)}, fdp.pmax(first), params["w"] + fdp.axis_index()


@pytest.mark.parametrize("world", [pytest.param(1, marks=exhaustive), 2])
@pytest.mark.parametrize("step", [accumulated, checkpointed, in_place, gathered], ids=lambda step: step.__name__)
def test_odd_steps_are_proved(step: Callable[..., Any], world: int) -> None:
    with pytest.raises(Reached):
        compile_step(step, {"w": torch.randn(4, 4)}, torch.randn(6, 4), world=world, donate_argnums=0)


# Wrong graphs: one mistake at a time.


def changed_late(params: Any, batch: Any) -> Any:
    grads = fdp.grad(lambda p: ((batch @ p["w"]) @ p["v"]).tanh().square().mean())(params)
    return {name: params[name] - grads[name] for name in params}, params["w"] * 2


def changed_late_made(world: int) -> Any:
    args = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}, torch.randn(6, 4)
    return compile_step(changed_late, *args, world=world, donate_argnums=0)


@functools.cache  # the right graph is made once for all mistakes
def is_right(made: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(Reached):
        made(*args)


def refused(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, wrong: Any, world: int = 2) -> None:
    is_right(changed_late_made, world)
    monkeypatch.setattr(place, name, wrong)
    with pytest.warns(UserWarning, match="found to be wrong before it ran"):
        made = changed_late_made(world)
    assert "aten" in made.source  # operator by operator


def test_a_bucket_that_is_filled_with_other_members_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch, graph, "slot_name", lambda bucket, at: slot_name(bucket, 1 - at))


def test_a_view_that_is_taken_for_its_base_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(traced: torch.fx.Graph) -> Any:
        views = [node for node in traced.nodes if node.target is torch.ops.aten.t.default]
        return {node: node.args[0] for node in views if node.meta["val"].shape == (4, 4)}

    refused(monkeypatch, analysis, "redundant_views", wrong)


def test_views_that_are_their_base_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(name: str, made: torch.fx.GraphModule, settings: Any) -> None:
        seen.extend(str(node.target) for node in made.graph.nodes if node.op == "call_function")
        raise Reached

    monkeypatch.setattr(compiler, "lower", noted)
    with pytest.raises(Reached):
        compile_step(lambda w, x: w.t().sin().t().t().t().view(4, 4).t(), torch.randn(4, 4), torch.ones(1))
    assert seen == ["aten.permute.default", "aten.sin.default"]


def test_a_division_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compiler.functional_graph

    def wrong(memory: Any, *args: Any) -> Any:
        """The graph divides what goes into every bucket; the program says of none that it does."""
        places = dataclasses.replace(memory.places, scaled=set(memory.markers))
        assert places.scaled and not memory.places.scaled
        return right(dataclasses.replace(memory, places=places), *args)

    refused(monkeypatch, compiler, "functional_graph", wrong)


def test_changes_of_inputs_before_their_last_reader_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: Any) -> None:
        for node in list(module.nodes):
            if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
                for reader in node.args[0].users:
                    if reader.target is torch.ops.aten.mul.Tensor:
                        node.append(reader)

    others = tuple(wrong if each is passes._copy_early else each for each in passes.PASSES_THAT_MULTIPLY)
    assert wrong in others
    refused(monkeypatch, passes, "PASSES_THAT_MULTIPLY", others, world=1)


def test_a_message_that_is_waited_for_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = graph._Lowering.run

    def wrong(self: Any) -> Any:
        waits: list[Any] = []
        monkeypatch.setattr(graph, "wait", lambda *args: waits.append(args))
        made = right(self)
        for args in waits:
            torch.ops.fdp_compiled.wait.default(*args)
        return made

    refused(monkeypatch, graph._Lowering, "run", wrong)


# Draws: of the wrong operator, in the wrong order, of the wrong generator, or for elements in another order.

GENERATORS = torch.Generator(), torch.Generator()


def drawing(params: Any, batch: Any) -> Any:
    first, second = GENERATORS
    w = params["w"].t().clone()
    w[:, ::2].normal_()
    torch.rand(2)
    noise = F.dropout((batch * 2).t(), 0.5) + torch.rand_like(batch.t(), memory_format=torch.contiguous_format)
    likely = torch.bernoulli(batch.sigmoid().t())
    one = torch.cond(batch.sum() > 0, lambda x: F.dropout(x, 0.5), lambda x: x * 1, (batch,))
    two = torch.cond(batch.sum() > 0, lambda x: x.cos(), lambda x: torch.rand_like(x), (batch,))
    own = torch.rand(3, generator=first) - torch.rand(3, generator=second)
    p = batch.sigmoid()
    p.bernoulli_(p)
    return {"w": w}, noise, likely, one, two, own, p, torch.native_dropout(batch, 0.5, True)


def with_text(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], Any]:
    right = graph.describe_draw

    def described(node: Any) -> Any:
        found = right(node)
        said = json.loads(found.text)
        change(said)
        return dataclasses.replace(found, text=json.dumps(said))

    return described


def filled_in_rows(said: dict[str, Any]) -> None:
    for each in (*said["arguments"], *said["results"], *said["written"]):
        if isinstance(each, dict) and "size" in each:
            each["stride"] = list(torch.empty(each["size"], device="meta").stride())


def read_in_rows(said: dict[str, Any]) -> None:
    for each in said["arguments"]:
        if isinstance(each, dict) and "read" in each:
            each["stride"] = sorted(each["stride"], reverse=True)


def another_operator(said: dict[str, Any]) -> None:
    said["operator"] = said["operator"].replace("normal_", "uniform_")


def another_number(said: dict[str, Any]) -> None:
    said["arguments"] = [0.25 if each == 0.5 else each for each in said["arguments"]]


def another_generator(said: dict[str, Any]) -> None:
    if "generator" in said["keywords"]:
        said["keywords"]["generator"]["generator"] ^= 1


def another_dtype(said: dict[str, Any]) -> None:
    for each in (*said["arguments"], *said["results"], *said["written"]):
        if isinstance(each, dict) and "dtype" in each and said["operator"].startswith("aten.bernoulli_.float"):
            each["dtype"] = "float64"


def drawing_made() -> Any:
    return compile_step(drawing, {"w": torch.randn(4, 6)}, torch.randn(6, 4))


def refuses_draws(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, wrong: Any) -> None:
    is_right(drawing_made)
    monkeypatch.setattr(place, name, wrong)
    with pytest.warns(UserWarning, match="found to be wrong before it ran"):
        drawing_made()


@pytest.mark.parametrize(
    "change",
    [filled_in_rows, read_in_rows, another_operator, another_number, another_generator, another_dtype],
    ids=lambda change: change.__name__,
)
def test_other_draws_are_refused(change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    refuses_draws(monkeypatch, graph, "describe_draw", with_text(change))


def test_draws_that_are_left_out_or_change_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compiler.declare
    own = torch.ops.fdp_compiled

    def apart(module: torch.fx.Graph) -> None:
        """Draws that are not handed what the one before returned."""
        for node in module.find_nodes(op="call_function", target=own.draw.default):
            *read, last = node.args[0]
            if last.args[0].target in (own.draw.default, own.draw_without_inputs.default):
                node.args = (read, node.args[1]) if read else (node.args[1],)
                node.target = node.target if read else own.draw_without_inputs.default
        module.eliminate_dead_code()

    def without_the_unused(module: torch.fx.Graph, *options: bool) -> None:
        right(module, *options)
        apart(module)
        for node in module.nodes:
            if node.target is own.draw_without_inputs.default and not node.users:
                module.erase_node(node)
                return
        raise AssertionError("there is none")

    def in_another_order(module: torch.fx.Graph, *options: bool) -> None:
        right(module, *options)
        apart(module)
        drawn = module.find_nodes(op="call_function", target=own.draw_without_inputs.default)
        drawn[0].prepend(drawn[1])

    for wrong in (without_the_unused, in_another_order):
        with monkeypatch.context() as patch:
            refuses_draws(patch, compiler, "declare", wrong)


def test_conditions_that_draw_and_change_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compiler.functions_that_draw
    refuses_draws(monkeypatch, compiler, "functions_that_draw", lambda module: right(module)[::-1])


def test_gaps_may_be_narrower_than_in_the_trace() -> None:
    def step(params: Any, batch: Any) -> Any:
        drawn = batch[:, 3].clone().normal_() + torch.rand_like(batch)[:, 0]
        batch.clone()[:, 1].uniform_()
        return params, drawn, torch.normal(batch[:, 2], 1.0)

    with pytest.raises(Reached):
        compile_step(step, {"w": torch.randn(4)}, torch.randn(50, 40))
