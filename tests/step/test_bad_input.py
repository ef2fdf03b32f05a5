"""What happens on real ranks when the input is not what a step expects: a clear error or the right result.

Ranks that are meant to disagree run in processes of their own (`run_fresh`), since a group that was refused
on one rank only would be out of step for the tests after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from refusal_texts import check_message
from samples import exhaustive, some
from steps import sgd_step

import fdp

Tree = dict[str, Any]

# --- ranks that differ -------------------------------------------------------------------------------


def mismatched(kind: str) -> None:
    rank = dist.get_rank()
    batch = {"x": torch.ones(2)}
    state: Tree = {"a": torch.ones(4, 3), "b": torch.ones(5)}
    step_fn: Callable[[Tree, Tree], Any] = sgd_step
    if rank == 1 and kind == "shape":
        state["a"] = torch.ones(4, 7)
    if rank == 1 and kind == "same size, other shape":
        state["a"] = torch.ones(3, 4)
    if rank == 1 and kind == "dtype":
        state["a"] = state["a"].double()
    if rank == 1 and kind == "names":
        state["c"] = state.pop("a")
    if rank == 1 and kind == "one parameter more":
        state["z"] = torch.ones(2)
    if kind == "parameter order":
        shapes = [(4, 3), (5,)] if rank == 0 else [(5,), (4, 3)]
        state = {str(i): torch.ones(s) for i, s in enumerate(shapes)}
    if kind == "gradient order":
        state = {"a": torch.ones(3), "b": torch.ones(3)}
        first, second = ("a", "b") if rank == 0 else ("b", "a")

        def chained(state: Tree, batch: Tree) -> Tree:
            def loss_fn(params: Tree) -> torch.Tensor:
                return ((batch["x"].sum() * params[first]).tanh() * params[second]).sum()

            return fdp.grad(loss_fn)(state)

        step_fn = chained
    if kind == "reduction":

        def reduced(state: Tree, batch: Tree) -> Tree:
            return {"total": (fdp.psum if rank == 0 else fdp.pmax)(batch["x"])}

        step_fn = reduced
    if kind == "one collective more":

        def talkative(state: Tree, batch: Tree) -> Tree:
            out = {"total": fdp.psum(batch["x"])}
            if rank == 1:
                out["more"] = fdp.pmax(batch["x"])
            return out

        step_fn = talkative
    fdp.data_parallel(step_fn)(state, batch)


MISMATCHES = {
    "shape": ["sgd_step", "['a']", "4, 3", "4, 7"],
    "same size, other shape": ["sgd_step", "['a']", "4, 3", "3, 4"],
    "dtype": ["sgd_step", "['a']", "float32", "float64"],
    "names": ["sgd_step", "['a']", "['c']"],
    "one parameter more": ["sgd_step", "['z']"],
    "parameter order": ["sgd_step", "['0']", "4, 3", "[5]"],
    "gradient order": ["chained", "['a']", "['b']"],
    "reduction": ["reduced"],
    "one collective more": ["talkative"],
}


@pytest.mark.parametrize("kind", some(MISMATCHES, 3))
def test_ranks_that_differ_are_told_how(kind: str) -> None:
    outcomes = ranks.run_fresh(2, mismatched, kind, deadline_s=40)
    for outcome in outcomes:
        assert outcome.error is not None, f"{kind}: rank {outcome.rank} saw nothing wrong"
        assert outcome.error.name == "AgreementError", outcome.describe()
        check_message(outcome.error.message, *MISMATCHES[kind])


def different_values(where: str) -> None:
    table = torch.arange(3.0) + (dist.get_rank() if where == "constant" else 0)
    state = {"a": torch.ones(3) + (dist.get_rank() if where == "state" else 0), "b": torch.ones(2)}

    def closing_step(state: Tree, batch: Tree) -> Tree:
        return {"a": state["a"] + table, "b": state["b"], "total": fdp.psum(batch["x"])}

    fdp.data_parallel(closing_step)(state, {"x": torch.ones(2)})


@pytest.mark.parametrize(("where", "name"), [("state", "state['a']"), ("constant", "table")])
def test_replicated_values_that_differ_are_named(where: str, name: str) -> None:
    """The schedules agree, and the ranks would still go apart: the state was never replicated."""
    for outcome in ranks.run_fresh(2, different_values, where, deadline_s=40):
        assert outcome.error is not None, f"rank {outcome.rank} saw nothing wrong"
        assert outcome.error.name == "ReplicationError", outcome.describe()
        check_message(outcome.error.message, "closing_step", name, "rank 1")


def uneven_batches() -> Tree:
    """Shapes that differ in the batch alone leave the schedule as it is: no error, and the right mean."""
    rank = dist.get_rank()
    step = fdp.data_parallel(sgd_step)
    state = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    out = step(state, {"x": torch.full((3 + rank,), 0.5)})
    # A second signature on one rank only, and not on the other.
    last = step(out, {"x": torch.full((3 if rank == 0 else 1,), 0.25)})
    fdp.assert_replicated((out, last))
    return {"out": out, "last": last}


def test_batches_of_different_length() -> None:
    got = ranks.run(2, uneven_batches)[0]
    state = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    for key, sums in (("out", [1.5, 2.0]), ("last", [0.75, 0.25])):
        for name, p in state.items():
            grads = [2 * (p * s + 1) * s / p.numel() for s in sums]
            state[name] = p - 0.01 * sum(grads) / 2
        torch.testing.assert_close(got[key], state)


# --- arguments that are no tensors -------------------------------------------------------------------


class Thing:
    """No container that optree knows, no tensor, no number."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cuda_tensor_without_a_gpu() -> None:
    """PyTorch's own message, or fdp's: in any case one that names CUDA, and before any step has run."""

    @fdp.data_parallel
    def to_gpu(state: Tree, batch: Tree) -> Tree:
        moved = state["w"].to("cuda") * batch["x"].to("cuda").sum()
        return {"w": fdp.pmean(moved)}

    with pytest.raises((fdp.FdpError, RuntimeError, AssertionError), match=r"(?i)cuda") as caught:
        to_gpu({"w": torch.ones(3)}, {"x": torch.ones(2)})
    if isinstance(caught.value, fdp.FdpError):
        check_message(str(caught.value), "to_gpu")


@pytest.mark.parametrize(
    "bad",
    [np.ones(3, dtype=np.float32), Thing(), {1, 2}, (x for x in range(3)), "add", 0.5],
    ids=["numpy", "object", "set", "generator", "string", "number"],
)
def test_a_batch_that_is_no_tensor_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(fdp.FdpError) as caught:
        fdp.data_parallel(sgd_step)({"a": torch.ones(3)}, {"x": bad})
    check_message(str(caught.value), "sgd_step", "batch['x']", type(bad).__name__)


@pytest.mark.parametrize("bad", [np.ones(3, dtype=np.float32), Thing()], ids=["numpy", "object"])
def test_a_state_with_an_object_that_is_no_leaf_is_refused_by_name(bad: Any) -> None:
    def step_fn(state: Tree, batch: Tree) -> Tree:
        return {"w": state["w"] + fdp.pmean(batch["x"])}

    with pytest.raises(fdp.FdpError) as caught:
        fdp.data_parallel(step_fn)({"w": torch.ones(3), "thing": bad}, {"x": torch.ones(3)})
    check_message(str(caught.value), "step_fn", "state['thing']", type(bad).__name__)


def test_numbers_and_strings_in_the_state_retrace_with_the_right_result() -> None:
    """They are part of the signature: a new value is a new trace, never an old constant."""

    def step_fn(state: Tree, batch: Tree) -> Tree:
        sign = 1 if state["mode"] == "add" else -1
        total = state["w"] + sign * state["lr"] * fdp.pmean(batch["x"])
        return {"w": total if batch["extra"] is None else total + fdp.pmean(batch["extra"])}

    step = fdp.data_parallel(step_fn)
    x = torch.full((3,), 2.0)
    for lr, mode, extra, expected in [
        (0.5, "add", None, 2.0),
        (0.25, "add", None, 1.5),
        (0.5, "subtract", None, 0.0),
        (0.5, "add", torch.ones(3), 3.0),
        (0.5, "add", None, 2.0),
    ]:
        out = step({"w": torch.ones(3), "lr": lr, "mode": mode}, {"x": x, "extra": extra})
        torch.testing.assert_close(out["w"], torch.full((3,), expected))


def number_by_rank(where: str) -> None:
    """A number that each rank bakes into its own trace, in a part of the step that is taken for replicated."""
    rank = dist.get_rank()
    closed_over = 2.0 + rank

    def step_fn(state: Tree, batch: Tree) -> Tree:
        total = fdp.psum(batch["x"].sum(0))
        if where == "length of the batch":  # the right way: fdp.psum(len(batch["x"]))
            return {"w": state["w"] - total / (len(batch["x"]) * fdp.axis_size())}
        scale = state["scale"] if where == "state" else closed_over
        return {"w": state["w"] * scale if where == "no collective" else state["w"] * scale + total}

    state = {"w": torch.ones(3), "scale": 2.0 + (rank if where == "state" else 0)}
    size = 3 + 2 * rank if where == "length of the batch" else 3
    fdp.data_parallel(step_fn)(state, {"x": torch.ones(size, 3)})


@pytest.mark.parametrize("where", some(["state", "closed over", "no collective", "length of the batch"], 3))
def test_a_number_that_differs_between_ranks_is_not_taken_for_replicated(where: str) -> None:
    for outcome in ranks.run_fresh(2, number_by_rank, where, deadline_s=40):
        assert outcome.error is not None, "ranks went apart in silence"
        assert "FdpError" in outcome.error.names, outcome.describe()
        check_message(outcome.error.message, "step_fn")


# --- empty things ------------------------------------------------------------------------------------


def empty_batches(which: str) -> list[Tree]:
    """Two steps with `pmean(weight=)`; the second finds one rank, or both, without a single sample."""
    rank = dist.get_rank()

    def summed_step(state: Tree, batch: Tree) -> Tree:
        def loss_fn(params: Tree) -> torch.Tensor:
            return F.mse_loss(batch["x"] @ params["w"], batch["y"], reduction="sum")

        grads = torch.func.grad(loss_fn)(state)
        return {"w": state["w"] - 0.1 * fdp.psum(grads["w"]) / fdp.psum(len(batch["x"]))}

    step = fdp.data_parallel(summed_step)
    state, out = {"w": torch.tensor([1.0, -1.0])}, []
    for size in (2, 0 if which == "both" or rank == 1 else 2):
        batch = {"x": torch.ones(size, 2) * (rank + 1), "y": torch.ones(size)}
        state = step(state, batch)
        fdp.assert_replicated(state)
        out.append(state)
    return out


def test_an_empty_batch_on_one_rank_weighs_nothing() -> None:
    got = ranks.run(2, empty_batches, "one")[0]
    w = torch.tensor([1.0, -1.0])
    for step, sizes in enumerate([(2, 2), (2, 0)]):
        rows = [(torch.ones(2) * (r + 1), 1.0) for r in range(2) for _ in range(sizes[r])]
        w = w - 0.1 * sum(2 * (x @ w - y) * x for x, y in rows) / len(rows)
        torch.testing.assert_close(got[step]["w"], w)


def test_an_empty_batch_everywhere_is_zero_over_zero() -> None:
    """No samples have no mean: NaN, as in plain PyTorch, and not a crash."""
    for result in ranks.run(2, empty_batches, "both"):
        assert result[0]["w"].isfinite().all()
        assert result[1]["w"].isnan().all()


def zero_size_state(donate: bool) -> list[str]:
    step = fdp.data_parallel(zero_size_step, donate_argnums=0 if donate else ())
    state = {"a": torch.ones(3), "none": torch.ones(0), "flat": torch.ones(2, 0), "b": torch.ones(2)}
    out = []
    for i in range(2):
        state = step(state, {"x": torch.full((2,), 1.0 + i + dist.get_rank()), "nil": torch.ones(0, 3)})
        fdp.assert_replicated(state)
        out.append(optree.tree_map(torch.clone, state))
    return out


def zero_size_step(state: Tree, batch: Tree) -> Tree:
    def loss_fn(params: Tree) -> torch.Tensor:
        used = (params["a"] * batch["x"].sum()).sum() + (params["b"] ** 2 * batch["x"]).sum()
        return used + params["none"].sum() + params["flat"].sum() + batch["nil"].sum()

    grads = fdp.grad(loss_fn)(state)
    return {k: state[k] - 0.1 * grads[k] for k in state}


@pytest.mark.parametrize("donate", [pytest.param(False, marks=exhaustive), True])
def test_zero_size_tensors(donate: bool) -> None:
    got = ranks.run(2, zero_size_state, donate)[0]
    a, b = torch.ones(3), torch.ones(2)
    for i in range(2):
        mean = 1.5 + i
        a, b = a - 0.1 * 2 * mean, b - 0.1 * 2 * b * mean
        expected = {"a": a, "none": torch.ones(0), "flat": torch.ones(2, 0), "b": b}
        torch.testing.assert_close(got[i], expected)


def only_zero_size() -> tuple[torch.Size, float]:
    @fdp.data_parallel
    def nothing_to_send(state: Tree, batch: Tree) -> Tree:
        return fdp.grad(lambda p: (p["none"] * batch["x"]).sum())(state)

    out = nothing_to_send({"none": torch.ones(0)}, {"x": torch.ones(0)})
    return out["none"].shape, fdp.psum(torch.ones(())).item()


def test_a_gradient_of_no_elements_alone() -> None:
    assert ranks.run(2, only_zero_size) == [(torch.Size([0]), 2.0)] * 2


# --- structure ---------------------------------------------------------------------------------------


def other_structures() -> None:
    step = fdp.data_parallel(sgd_step)
    rank = dist.get_rank()
    batch = {"x": torch.full((2,), 0.5 * (rank + 1))}
    plain = {"a": torch.ones(3)}
    states = [
        plain,
        {"a": torch.ones(3), "b": torch.ones(2, 2)},
        {"a": torch.ones(4)},
        {"a": torch.ones(3, dtype=torch.float64)},
        plain,
    ]
    for state in states:
        got = step(state, batch)
        for name, p in state.items():
            grads = [2 * (p.double() * s + 1) * s / p.numel() for s in (1.0, 2.0)]
            torch.testing.assert_close(got[name], (p - 0.01 * sum(grads) / 2).to(p.dtype))


def test_a_second_call_with_another_structure_is_traced_anew() -> None:
    ranks.run(2, other_structures)


def returns_nothing() -> None:
    @fdp.data_parallel
    def silent(state: Tree, batch: Tree) -> None:
        fdp.pmean(batch["x"])

    assert silent({"w": torch.ones(2)}, {"x": torch.ones(2)}) is None

    @fdp.data_parallel
    def empty(state: Tree, batch: Tree) -> Tree:
        return {}

    assert empty({"w": torch.ones(2)}, {"x": torch.ones(2)}) == {}
    # The group is in step afterwards.
    assert fdp.psum(torch.ones(())).item() == dist.get_world_size()


def test_a_step_that_returns_nothing_returns_nothing() -> None:
    ranks.run(2, returns_nothing)


def test_no_process_group_is_a_world_of_one() -> None:
    assert not dist.is_initialized()
    out = fdp.data_parallel(sgd_step)({"a": torch.ones(3)}, {"x": torch.ones(2)})
    torch.testing.assert_close(out["a"], torch.ones(3) - 0.01 * 2 * 3.0 * 2.0 / 3)
