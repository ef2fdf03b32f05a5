"""What fdp.accumulate refuses: functions that microbatches would change, and batches that cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from microbatches import Tree, batch_of, loss_fn, params_of, plain

import fdp

GRAD = fdp.value_and_grad(loss_fn)


def uses_gradient(params: Tree, batch: Tree) -> Any:
    value, grads = GRAD(params, batch)
    return value, {name: g * 2 for name, g in grads.items()}


def norm_of_gradient(params: Tree, batch: Tree) -> Any:
    value, grads = GRAD(params, batch)
    return value, grads, torch.linalg.vector_norm(grads["w1"])


def drops_gradient(params: Tree, batch: Tree) -> Any:
    return GRAD(params, batch)[0]


def averages_inside(params: Tree, batch: Tree) -> Any:
    value, grads = GRAD(params, batch)
    return fdp.pmean(value), grads


def differentiates_inside(params: Tree, batch: Tree) -> Any:
    return fdp.value_and_grad(lambda p: fdp.grad(loss_fn)(p, batch)["w1"].square().sum())(params)


def normalises_over_ranks(params: Tree, batch: Tree) -> Any:
    def loss(params: Tree) -> torch.Tensor:
        return fdp.sync_batch_norm(batch["x"] @ params["w1"], None, None)[0].square().mean()

    return fdp.value_and_grad(loss)(params)


def sends_behind_its_back(params: Tree, batch: Tree) -> Any:
    value, grads = GRAD(params, batch)
    return torch.ops.fdp.all_reduce.default(value, "sum", "traced", "value", "mine"), grads


REFUSED = {
    "normalises": (normalises_over_ranks, "fdp.sync_batch_norm was called inside the function of fdp.accumulate"),
    "uses": (uses_gradient, "the gradient of params['w1'] is used while fdp.accumulate adds it up"),
    "norm": (norm_of_gradient, "the gradient of params['w1'] is used while fdp.accumulate adds it up"),
    "drops": (drops_gradient, "'drops_gradient', which fdp.accumulate called, does not return the gradients"),
    "averages": (averages_inside, "fdp.pmean was called inside the function of fdp.accumulate"),
    "nested": (differentiates_inside, "fdp.value_and_grad, inside of another one, was called inside the function"),
    "nothing": (lambda params, batch: batch["x"].sum(), "has no gradients to add up"),
    "itself": (fdp.accumulate(GRAD, microbatches=2), "fdp.accumulate was called inside the function of fdp.accumulate"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("traced", [False, True], ids=["outside", "in a step"])
def test_what_grad_fn_must_not_do(name: str, traced: bool) -> None:
    function, text = REFUSED[name]

    def step(params: Tree, batch: Tree) -> Any:
        return fdp.accumulate(function, microbatches=2)(params, batch)

    with pytest.raises(fdp.ArgumentError) as caught:
        (fdp.data_parallel(step, check_replication=False) if traced else step)(params_of(), batch_of(8))
    assert text in str(caught.value) and "Remedy: " in str(caught.value)
    assert (name == "normalises") == ("with nn.BatchNorm" in str(caught.value))
    # Nothing is left behind: the next call works.
    torch.testing.assert_close(
        fdp.accumulate(GRAD, 2)(params_of(), batch_of(8)), plain(loss_fn, params_of(), batch_of(8))
    )


def test_a_message_that_gets_there_by_another_way() -> None:
    step = fdp.data_parallel(lambda params, batch: fdp.accumulate(sends_behind_its_back, 2)(params, batch))
    with pytest.raises(fdp.TraceError, match="sends messages in the microbatches of") as caught:
        step(params_of(), batch_of(8))
    assert "fdp.all_reduce.default at test_accumulate_refusals.py" in str(caught.value)


def test_batches_that_cannot_be_cut() -> None:
    params, batch = params_of(), batch_of(8)
    four = fdp.accumulate(GRAD, microbatches=4)
    uneven = "cannot cut the batch of 'loss_fn' into 4 microbatches of one length"
    for args, text in [
        ((params, batch_of(10)), f"{uneven}.\n  argument 1['x']: [10, 6]\n  argument 1['y']: [10]\nRemedy: "),
        ((params, {**batch, "y": batch["y"][:4]}), uneven),
        ((params, {**batch, "scale": torch.tensor(1.0)}), "argument 1['scale']: []"),
        ((params, {}), "there is no tensor in it"),
        ((params,), "fdp.accumulate called 'loss_fn' with 1 positional argument: it has no batch."),
    ]:
        with pytest.raises(fdp.ArgumentError) as caught:
            four(*args)
        assert text in str(caught.value)
    with pytest.raises(fdp.ArgumentError, match="batch_argnums=2"):
        fdp.accumulate(GRAD, 4, batch_argnums=2)(params, batch)
    for wrong in (0, True, 1.5, "2"):
        with pytest.raises(fdp.ArgumentError, match="pass the number of microbatches, 1 or more"):
            fdp.accumulate(GRAD, microbatches=wrong)  # type: ignore[arg-type]
    with pytest.raises(fdp.ArgumentError, match="was given int, not a function"):
        fdp.accumulate(3, microbatches=2)  # type: ignore[arg-type]


def test_what_is_kept_of_one_microbatch_is_refused() -> None:
    kept: list[torch.Tensor] = []

    def keeps(params: Tree, batch: Tree) -> torch.Tensor:
        kept.append(batch["x"].sum())
        return loss_fn(params, batch)

    @fdp.data_parallel(check_replication=False)
    def step(params: Tree, batch: Tree) -> Any:
        grads = fdp.accumulate(fdp.grad(keeps), microbatches=2)(params, batch)
        return grads, kept[0]

    with pytest.raises(fdp.TraceError, match="keeps values of one microbatch of") as caught:
        step(params_of(), batch_of(8))
    assert "test_accumulate_refusals.py" in str(caught.value)


def test_a_batch_that_is_changed_in_place_is_refused() -> None:
    """All microbatches but the last are copies: what came after would see a third of the batch changed."""

    def doubles(params: Tree, batch: Tree) -> torch.Tensor:
        batch["x"].mul_(2)
        return loss_fn(params, batch)

    def step(params: Tree, batch: Tree) -> Any:
        own = {**batch, "x": batch["x"] + 1}
        return fdp.accumulate(fdp.grad(doubles), microbatches=3)(params, own), fdp.per_rank(own["x"].sum())

    for run in (step, fdp.data_parallel(step)):
        with pytest.raises(fdp.ArgumentError, match="changes its batch in place") as caught:
            run(params_of(), batch_of(12))
        assert "argument 1['x']\nRemedy" in str(caught.value)


def test_what_differs_between_microbatches_is_refused() -> None:
    calls = [0]

    def counts(params: Tree, batch: Tree) -> Any:
        calls[0] += 1
        return loss_fn(params, batch), {"call": calls[0]}

    with pytest.raises(fdp.ArgumentError, match="returned something else for one microbatch than for another"):
        fdp.accumulate(fdp.value_and_grad(counts, has_aux=True), 2)(params_of(), batch_of(8))


def test_inside_of_another_differentiation() -> None:
    def outer(params: Tree, batch: Tree) -> torch.Tensor:
        return fdp.accumulate(fdp.grad(loss_fn), microbatches=2)(params, batch)["w1"].square().sum()

    step = fdp.data_parallel(lambda params, batch: fdp.grad(outer)(params, batch))
    with pytest.raises(fdp.ArgumentError, match="was called inside of another differentiation"):
        step(params_of(), batch_of(8))
    with pytest.raises(fdp.ArgumentError, match=r"inside of a transform of torch\.func"):
        torch.func.grad(outer)(params_of(), batch_of(8))
