"""Programs are proved before they run: right ones are let through, wrong ones are not run."""

from __future__ import annotations

import ast
import dataclasses
import gc
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from fake_ranks import fake_group
from samples import exhaustive
from torch import fx

import fdp
from fdp.emit.codegen import calls, packing, program
from fdp.emit.codegen.program import Program, write_program
from fdp.emit.memory import allocation, analysis, donation, instructions, planning
from fdp.emit.memory.decisions import plan_memory
from fdp.emit.memory.layout import Layout, Lifetime
from fdp.emit.memory.savings import ALL, NONE, Savings
from fdp.trace.operators.effects import storages_of
from fdp.verify import VerificationError, verify_program
from fdp.verify.execution import Execution
from fdp.verify.reference import Reference
from fdp.verify.terms import Terms

ROOT = pathlib.Path(__file__).resolve().parents[2]


def prove(step: Callable[..., Any], *args: Any, world: int = 1, donate: Any = (), savings: Savings = ALL) -> str:
    """Write a step's program and prove it; returns its text."""
    group = fake_group(world) if world > 1 else None
    transformed = fdp.data_parallel(step, donate_argnums=donate, group=group, bucket_cap_mb=1)
    plan = transformed.plan(*args)
    made = write_program(plan_memory(plan, world > 1, savings), 0)
    verify_program(plan, made, 0, world > 1)
    return made.source


# The validator knows nothing of what it checks.


def test_the_validator_shares_no_code_with_what_it_checks() -> None:
    # Values of the trace and the plan, what the trace says of control flow, how PyTorch's operators and tensors are
    # seen, how it takes a graph apart for a compiler. And how Python's search for garbage is switched off.
    allowed = {
        "fdp.context.garbage", "fdp.errors", "fdp.plan.plan", "fdp.trace.trace",
        "fdp.pytorch.dispatch", "fdp.pytorch.overloads", "fdp.pytorch.tensors",
        "fdp.trace.capture.capture", "fdp.trace.capture.functional", "fdp.trace.operators.control",
    }  # fmt: skip
    found = set()
    for path in (ROOT / "fdp" / "verify").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {name for name in names if name.startswith("fdp") and not name.startswith("fdp.verify")}
    assert found <= allowed


# Right programs.


def train(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((batch @ params["a"]).relu() @ params["b"]).square().mean()

    params = {name: state[name] for name in ("a", "b")}
    value, grads = fdp.value_and_grad(loss)(params)
    mean = fdp.pmean(value)
    momentum = {name: state[f"m{name}"] * 0.9 + grads[name] for name in params}
    new = {name: params[name] - 0.1 * momentum[name] for name in params}
    return {**new, **{f"m{name}": momentum[name] for name in momentum}}, mean


def start() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(4, 6), "b": torch.randn(6, 3), "ma": torch.zeros(4, 6), "mb": torch.zeros(6, 3)}


def mixed(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    noise = torch.nn.functional.dropout(batch, 0.5)
    grid = torch.arange(6.0).view(2, 3)
    total = torch.zeros(5, 6)
    total[:, ::2] = noise[:, :3] @ grid.t() @ torch.ones(2, 3)
    total[:, 1::2] = 2.0
    total[1:3].add_(1)
    picked = torch.cond(batch.sum() > 0, lambda x: x.sin(), lambda x: x * 2, (total,))
    return {"a": state["a"] + 1, "count": state["count"] + 1}, fdp.pmean(picked.sum()), fdp.psum(total.t())


def looped(w: torch.Tensor, batch: torch.Tensor) -> Any:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh().square().mean()

    value, grad = fdp.accumulate(fdp.value_and_grad(loss), 3)(w, batch)
    return w - 0.1 * fdp.pmean(grad), fdp.pmean(value)


RIGHT: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "training": (train, lambda: (start(), torch.randn(5, 4))),
    "in a loop": (looped, lambda: (torch.randn(4, 4), torch.randn(6, 4))),
    "mixed": (mixed, lambda: ({"a": torch.ones(3), "count": torch.zeros(())}, torch.randn(5, 4))),
}


@pytest.mark.parametrize("savings", [ALL, NONE], ids=["fast", "plain"])
@pytest.mark.parametrize("donate", [pytest.param((), marks=exhaustive), 0], ids=["kept", "donated"])
@pytest.mark.parametrize("world", [pytest.param(1, marks=exhaustive), 2, pytest.param(3, marks=exhaustive)])
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_let_through(name: str, world: int, donate: Any, savings: Savings) -> None:
    step, arguments = RIGHT[name]
    prove(step, *arguments(), world=world, donate=donate, savings=savings)


# Wrong programs: what was found in the wild, and what the writers of programs could get wrong.


def average_and_add(w: torch.Tensor, x: torch.Tensor) -> Any:
    """The product of a gradient is added after the gradient was averaged."""
    g = x.t() @ x
    p = g @ w
    h = (x @ w).tanh().sum(0)
    gm, hm = fdp.pmean((g, h))
    t = gm * 1.0
    t.add_(p)
    return fdp.pmean(t), hm


def squared_and_added(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    state["s"].add_(state["s"] @ state["a"])
    return state, fdp.pmean(batch.sum())


def looked_at(state: torch.Tensor, batch: torch.Tensor) -> Any:
    h = batch.cumprod(0)
    return state + 1, fdp.pmean(h + 1), fdp.pmean(h * 3)


def naively_added(graph: fx.Graph, same: Mapping[fx.Node, fx.Node], *_: Any) -> dict[fx.Node, fx.Node]:
    """Products that are computed where they are added, whatever comes between."""
    found = {}
    for node in graph.nodes:
        product = same.get(node.args[1], node.args[1]) if node.target is torch.ops.aten.add_.Tensor else None
        if product is not None and product.target is torch.ops.aten.mm.default:
            found[node] = product
    return found


def test_a_product_is_not_put_off_past_the_message_that_its_argument_travels_in(monkeypatch: Any) -> None:
    monkeypatch.setattr(analysis, "find_added", naively_added)
    with pytest.raises(VerificationError, match="addmm_"):
        prove(average_and_add, torch.randn(4, 4), torch.randn(5, 4), world=2)


def test_an_operator_does_not_read_what_it_writes(monkeypatch: Any) -> None:
    monkeypatch.setattr(analysis, "find_added", naively_added)
    with pytest.raises(VerificationError, match="addmm_"):
        prove(squared_and_added, {"s": torch.eye(4), "a": torch.ones(4, 4)}, torch.randn(5, 4), donate=0)


def rewritten(made: Program, old: str, new: str) -> Program:
    """A program with other text."""
    assert old in made.source
    source = made.source.replace(old, new)
    namespace = dict(made.function.__kwdefaults__)
    exec(compile(source, "<fdp step rewritten>", "exec"), namespace)
    return Program(source, namespace["step"], made.places, made.layouts, made.scaled, loops=made.loops)


REWRITTEN: dict[str, tuple[str, str]] = {
    # What stands for a view is the tensor itself, whose shape is then changed in place.
    "a view turns with its base": ("    aten_add_out(", "    cumprod.t_()\n    aten_add_out("),
    "a batch is turned": ("    inputs.clear()\n", "    inputs.clear()\n    arg1_1.t_()\n"),
    "a place is turned": ("    inputs.clear()\n", "    inputs.clear()\n    slot0_0.t_()\n"),
    "a batch is written": ("    inputs.clear()\n", "    inputs.clear()\n    arg1_1.zero_()\n"),
    "a bucket is read under way": ("    start(0)\n", "    start(0)\n    slot0_0.add_(0)\n"),
    "a bucket is not waited for": ("    wait(0)\n", ""),
    "a bucket is sent twice": ("    start(0)\n", "    start(0)\n    start(0)\n"),
    "memory is read that was never written": (
        "    inputs.clear()\n",
        "    inputs.clear()\n    arg0_1 = arg0_1 + slot0_0[0]\n",
    ),
    "a random number is drawn": ("    inputs.clear()\n", "    inputs.clear()\n    arg0_1.clone().normal_()\n"),
    "a place is returned": ("    return [add", "    return [slot0_0[0]"),
}


@pytest.mark.parametrize("fault", REWRITTEN)
def test_a_program_that_says_something_else_is_found_out(fault: str) -> None:
    plan = fdp.data_parallel(looked_at, group=fake_group(2)).plan(torch.ones(4), torch.randn(4, 4))
    made = write_program(plan_memory(plan, True), 0)
    verify_program(plan, made, 0, True)
    old, new = REWRITTEN[fault]
    made = rewritten(made, old, new)
    with pytest.raises(VerificationError, match="does not compute what its trace says") as error:
        verify_program(plan, made, 0, True)
    assert "Error:" not in str(error.value), "the program does not even run"


def all_in_one_place(pieces: Sequence[Lifetime]) -> Layout:
    size = sum(piece.size_bytes + 64 for piece in pieces)
    return Layout(dict.fromkeys((piece.key for piece in pieces), 0), size, size)


def sent_first(*args: Any) -> Any:
    *packed, send = SEND(*args)
    return [send, *packed]


SEND = instructions._send


def nothing(*_: Any, **__: Any) -> None:
    return None


def yes(*_: Any, **__: Any) -> bool:
    return True


def fits_whatever_reads_it(builder: Any, bucket: Any, marker: fx.Node) -> bool:
    source: Any = marker.args[0]
    number, value = storages_of(source)[0], source.meta["val"]
    whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.itemsize
    return bool(builder.home.get(number) == (number, 0) and whole)


def any_argument(memory: Any, instruction: Any, piece: Any) -> tuple[Any, ...]:
    if not isinstance(instruction, instructions.Compute):
        return ()
    return tuple(map(memory.piece_of, instruction.node.all_input_nodes))


def forgetful(source: Any, function: Any, places: Any, layouts: Any, scaled: Any, **others: Any) -> Program:
    return Program(source, function, places, layouts, frozenset(), **others)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "all values lie in one place": (allocation, "lay_out", all_in_one_place),
    "buckets are sent before they are packed": (instructions, "_send", sent_first),
    "gradients are not divided": (calls, "write_division", nothing),
    "gradients are not copied": (packing, "_write_copy", nothing),
    "any output is written into the state": (donation, "_can_write", yes),
    "shares of a mean are averaged": (program, "Program", forgetful),
    "any gradient is computed in its bucket": (planning._PlacesBuilder, "_fits_bucket", fits_whatever_reads_it),
    "results take the place of any argument": (allocation, "_replaceable", any_argument),
}


def faulty(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    """A step in which each of the faults shows."""
    h = (batch @ state["a"]).tanh()
    g = batch.t() @ h
    q = (g + 1).tanh()
    turned = (q * q.t()).sum()
    early = fdp.pmean(g)
    large = fdp.pmean((h.sum() * torch.ones(600, 600)).tanh())
    seen = (g * turned).sum()
    return {"a": (state["a"] @ early) * state["b"], "b": state["a"] + large.sum()}, fdp.pmean((seen, h.t(), g.t()))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_program_is_found_out(fault: str, monkeypatch: Any) -> None:
    arguments = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}, torch.randn(5, 4)
    prove(faulty, *arguments, world=2, donate=0)
    target, name, wrong = FAULTS[fault]
    monkeypatch.setattr(target, name, wrong)
    savings = dataclasses.replace(ALL, pack_from_bytes=0) if name == "_write_copy" else ALL
    with pytest.raises(VerificationError, match="does not compute what its trace says"):
        prove(faulty, *arguments, world=2, donate=0, savings=savings)


# What happens then.


def test_a_plain_program_runs_in_place_of_a_wrong_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(allocation, "lay_out", all_in_one_place)
    state, batch = start(), torch.randn(5, 4)
    expected, loss = train({name: value.clone() for name, value in state.items()}, batch)
    step = fdp.data_parallel(train, donate_argnums=0)
    with pytest.warns(UserWarning, match="was found to be wrong before it ran.*report this"):
        found, mean = step(state, batch)
    torch.testing.assert_close((found, mean), (expected, loss))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(found, batch)  # said once


def test_nothing_runs_where_the_plain_program_is_wrong_as_well(monkeypatch: Any) -> None:
    write = program.write_program

    def swapped(*args: Any, **kwargs: Any) -> Any:
        made = write(*args, **kwargs)
        end = made.source[made.source.index("    return [") :]
        return rewritten(made, end, end.replace("[", "[*reversed([").rstrip() + ")]\n")

    monkeypatch.setattr("fdp.emit.proved.write_program", swapped)
    step = fdp.data_parallel(lambda w, x: (w * 2, w * 3))
    with pytest.raises(fdp.TraceError, match=r"no program for step .* could be proved right") as error:
        step(torch.ones(3), torch.ones(3))
    assert "Remedy:" in str(error.value)


def test_a_proof_leaves_nothing_for_the_garbage_collector() -> None:
    # A search for cycles among the terms of a large program takes as long as a third of its proof.
    transformed = fdp.data_parallel(train, donate_argnums=0, group=fake_group(2), bucket_cap_mb=1)
    plan = transformed.plan(start(), torch.ones(5, 4))
    made = write_program(plan_memory(plan, True), 0)

    def alive() -> list[Any]:
        return [thing for thing in gc.get_objects() if type(thing) in (Execution, Reference, Terms)]

    gc.freeze()  # what was there before is no longer looked at
    gc.disable()
    try:
        verify_program(plan, made, 0, True)
        assert alive() == []
    finally:
        gc.enable()
