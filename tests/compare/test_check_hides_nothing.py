"""What a comparison of step and program must not hide: other ranks, inputs of first calls, lost updates, closures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compared import check, made, numbers

import fdp
from fdp.compare import check_emitted, side_by_side
from fdp.compare.copies import copy_of, perturb_
from fdp.compare.restored import closed_over_unchanged
from fdp.distributed.other_ranks import OtherRanks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64])
@pytest.mark.parametrize("op", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize(("size", "rank"), [(2, 1), (3, 0), (7, 4)])
def test_a_bucket_and_its_members_are_reduced_alike(dtype: torch.dtype, op: str, size: int, rank: int) -> None:
    if (op == "mean" and dtype == torch.int64) or (op in ("max", "min") and dtype.is_complex):
        return
    others = OtherRanks(size, rank)
    whole = (numbers(12) * 5).to(dtype)
    parts = [part.clone() for part in whole.split([5, 4, 3])]
    before = whole.clone()
    others.all_reduce_(whole, op)
    for part in parts:
        others.all_reduce_(part, op)
    assert torch.equal(whole, torch.cat(parts))
    if op != "max" or dtype != torch.int64:  # other ranks hold smaller integers
        assert not torch.equal(whole, before), "an identity hides mistakes"


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mesh_is_reduced_along_one_dimension_after_the_other(dtype: torch.dtype, op: str) -> None:
    """Whole state is reduced at once, and sharded state within hosts, and then between them."""
    if op == "mean" and not dtype.is_floating_point:
        return
    for rank in range(12):
        others = OtherRanks(12, rank, "different", (("pods", 2), ("hosts", 3), ("local", 2)))
        at_once = (numbers(12).abs() * 5).to(dtype)
        before, in_turn = at_once.clone(), at_once.clone()
        others.all_reduce_(at_once, op)
        for name in ("local", "hosts", "pods"):
            others.along(name).all_reduce_(in_turn, op)
        torch.testing.assert_close(at_once, in_turn)
        assert op == "max" or not torch.equal(at_once, before)


def test_what_others_hold_stays_sane() -> None:
    others = OtherRanks(3, 1)
    gathered = torch.empty(3, 5)
    others.all_gather_(gathered, torch.tensor([0.0, 1e-30, 0.5, 60000.0, torch.inf]))
    assert (gathered[:, 0] == 0).all() and (gathered[:, 1:] > 0).all() and gathered[:, :4].isfinite().all()
    assert gathered[1].tolist() == [0.0, pytest.approx(1e-30), 0.5, 60000.0, torch.inf], "its own entry is its own"
    places_in_a_table = torch.empty(3, 4, dtype=torch.int64)
    others.all_gather_(places_in_a_table, torch.tensor([-100, 0, 1, 7]))
    assert places_in_a_table[0].tolist() == [-100, 0, 1, 6] and places_in_a_table[2].tolist() == [-100, 0, 1, 4]
    flags = torch.empty(3, 2, dtype=torch.bool)
    others.all_gather_(flags, torch.tensor([True, False]))
    assert flags.tolist() == [[False, True], [True, False], [False, True]]
    root, own = torch.ones(2), torch.ones(2)
    others.broadcast_(root, 0), others.broadcast_(own, 1)
    assert root.tolist() == [0.875, 0.875] and own.tolist() == [1.0, 1.0]


def test_the_axis_says_who_holds_what() -> None:
    for others in (OtherRanks(4, 2), OtherRanks(1, 0, "equal"), OtherRanks(4, 3, "equal", (("a in b", 2), ("", 2)))):
        assert OtherRanks.of_axis(others.axis_name) == others
    assert OtherRanks.of_axis("eager") is None and OtherRanks.of_axis("traced") is None


def test_a_value_that_is_read_after_its_average_took_its_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of the issue: a program that reads `g` where its bucket holds the average already."""

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        g = x.T @ x
        p = g @ w
        mean = fdp.pmean(g)
        return fdp.per_rank(p * 1.0), mean

    emitted, flat, roles = made(step, numbers(4, 4), numbers(5, 4, seed=1))
    check_emitted(emitted, step, flat, roles)
    inner = emitted.runner.function

    def late(tensors: list[torch.Tensor], start: Any, wait: Any) -> Any:
        w, (p, mean) = tensors[0].clone(), inner(tensors, start, wait)
        return [p.copy_(mean @ w), mean]

    monkeypatch.setattr(emitted.runner, "function", late)
    with pytest.raises(fdp.TraceError, match="the emitted program of step 'step' does not compute"):
        check_emitted(emitted, step, flat, roles)


def test_ranks_that_hold_something_else_may_be_too_much_for_a_step() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        return (fdp.pmean(x) - x.abs() + 1).sqrt() * w  # not a number, where others hold less

    def refuses(w: torch.Tensor, x: torch.Tensor) -> Any:
        if type(x) is torch.Tensor and not bool(torch.equal(fdp.psum(x) / 2, x)):
            raise ValueError("ranks have to agree")
        return w + 1

    check(step, torch.ones(1), torch.full((3,), 50.0), check_replication=False)
    check(refuses, torch.ones(1), torch.ones(3))


def test_perturbed_copies_differ_everywhere_and_stay_what_they_are() -> None:
    zeros, ones, chance = (perturb_(x.clone(), 0.125, 3) for x in (torch.zeros(9000), torch.ones(9000), torch.ones(3)))
    assert (zeros > 0).all() and zeros.max() < 0.02 and (ones <= 1).all() and (ones > 0.87).all()
    assert len(ones[:8191].unique()) > 8000 and (chance <= 1).all()
    assert not torch.equal(perturb_(torch.ones(4), 0.125, 0), perturb_(torch.ones(4), 0.125, 1))
    for kept in (torch.arange(5), torch.tensor([True, False]), torch.tensor([3], dtype=torch.uint8)):
        assert torch.equal(perturb_(kept.clone(), 0.125, 0), kept)
    tied = torch.zeros(1).expand(4)
    assert perturb_(copy_of(tied), 0.125, 0).unique().numel() == 1
    late = torch.zeros(10)[3:8:2]
    assert (perturb_(copy_of(late), 0.125, 0) > 0).all()


def test_a_mistake_that_a_learning_rate_of_zero_hides_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[float] = []

    def step(state: Any, x: torch.Tensor) -> Any:
        grad = fdp.grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        new = state["w"] - state["lr"] * grad
        if type(x) is torch.Tensor and not lost:  # as a write behind the trace's back: only by itself
            new = new + state["lr"]
        return {"w": new, "lr": state["lr"] * 1.0}

    state = {"w": numbers(4), "lr": torch.zeros(())}
    with pytest.raises(fdp.TraceError, match=r"\['w'\]: \[4\] torch.float32 differs by"):
        check(step, state, numbers(5, 4))
    monkeypatch.setattr(side_by_side, "MOVES", ())
    check(step, state, numbers(5, 4))  # so it is the perturbed inputs that show it


def test_what_cannot_take_perturbed_inputs_is_compared_without() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        if type(x) is torch.Tensor and float(w[0]) != 1.0:
            raise ValueError("only ones")
        return w * 2 + fdp.pmean(x.sum()), (w - 1).sqrt()

    check(step, torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("form", ["bare", "dict", "donated"])
def test_a_lost_update_is_found_however_small_it_is(form: str) -> None:
    def step(state: Any, x: torch.Tensor) -> Any:
        w = state if form == "bare" else state["w"]
        new = w - 1e-6 * fdp.grad(lambda w: ((x @ w) ** 2).mean())(w)
        new = w * 1.0 if type(x) is torch.Tensor else new
        return new if form == "bare" else {"w": new}

    w = numbers(4) + 1
    with pytest.raises(fdp.TraceError, match="differs by"):
        check(step, w if form == "bare" else {"w": w}, numbers(5, 4), donate_argnums=0 if form == "donated" else ())


@pytest.mark.parametrize("way", ["numpy", "data"])
def test_closed_over_tensors_come_out_as_they_were(way: str) -> None:
    count = torch.zeros(3)
    emitted, flat, roles = made(lambda w, x: w * count.sum() + fdp.pmean(x), torch.ones(2), torch.ones(2))

    def behind(w: torch.Tensor, x: torch.Tensor) -> Any:
        if way == "numpy":
            count.numpy()[0] += 1
        else:
            count.data.view(-1).add_(1)
        return w * count.sum() + fdp.pmean(x)

    with pytest.raises(fdp.PurityError, match=r"changes tensors that it closes over(.|\n)*count"):
        check_emitted(emitted, behind, flat, roles)
    assert count.tolist() == [0, 0, 0]


def test_closed_over_tensors_are_put_back_when_the_step_raises() -> None:
    held = torch.tensor([1.0, float("nan")])
    emitted, _, _ = made(lambda w, x: w * held[0] + fdp.pmean(x), torch.ones(2), torch.ones(2))
    with pytest.raises(fdp.PurityError) as caught, closed_over_unchanged(emitted):
        held.zero_()
        raise ValueError("later")
    assert held[0] == 1 and held[1].isnan() and isinstance(caught.value.__cause__, ValueError)
