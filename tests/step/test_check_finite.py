"""A call whose gradients are not finite on every rank is an error on all of them, and changes nothing."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import some
from torch import Tensor

import fdp


def initial() -> dict[str, Any]:
    return {
        "layers": [{"w": torch.linspace(-1, 1, 6).view(3, 2)}, {"w": torch.linspace(1, 2, 2)}],
        "scale": torch.tensor(2.0, dtype=torch.float64),
        "turned": torch.ones(2, 3).t(),
        "complex": torch.ones(2, dtype=torch.complex64),
        "none": torch.zeros(0),
    }


def loss_of(params: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    hidden = (batch["x"] @ (params["layers"][0]["w"] + params["turned"])).tanh() @ params["layers"][1]["w"]
    extra = params["complex"].abs().square().sum() * batch["weight"] + params["none"].sum()
    return (hidden * params["scale"]).mean().float() + extra


def make_step(**options: Any) -> Any:
    @fdp.data_parallel(donate_argnums=0, **options)
    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = fdp.value_and_grad(loss_of)(state["params"], batch)
        params = torch.utils._pytree.tree_map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "count": state["count"] + 1}, fdp.pmean(loss)

    return train_step


def batch_of(rank: int, call: int) -> dict[str, Tensor]:
    x = torch.arange(12.0).view(4, 3).sin() + rank + call
    return {"x": x, "weight": torch.tensor(0.5)}


def leaves(state: Any) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(state))


def train(bad: dict[int, dict[int, str]], compile: bool) -> list[Any]:
    """Train; at some calls ranks have something in their batch. What went wrong: call, ranks and names."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    checked, plain = make_step(check_finite=True, compile=compile), make_step()
    state, due = ({"params": initial(), "count": torch.tensor(0)} for _ in range(2))
    told: list[Any] = []
    for call in range(6):
        batch = batch_of(rank, call)
        if what := bad.get(call, {}).get(rank):
            place, value = what.split()
            batch[place].view(-1)[0] = float(value)
        if call in bad:
            before = [leaf.clone() for leaf in leaves(state)]
            with pytest.raises(fdp.NonFiniteError) as caught:
                checked(state, batch)
            again = pickle.loads(pickle.dumps(caught.value))
            assert (str(again), again.ranks, again.names, again.call) == (
                str(caught.value), caught.value.ranks, caught.value.names, caught.value.call
            )  # fmt: skip
            told.append((caught.value.call, caught.value.ranks, caught.value.names))
            assert all(torch.equal(one, two) for one, two in zip(leaves(state), before, strict=True))
            continue
        state, loss = checked(state, batch)
        due, wanted = plain(due, batch)
        for one, two in zip([loss, *leaves(state)], [wanted, *leaves(due)], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6 if compile else 0, atol=1e-7 if compile else 0)
            assert one.stride() == two.stride()
    return told


ALL = ("params['layers'][0]['w']", "params['layers'][1]['w']", "params['scale']", "params['turned']")


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators:UserWarning")
@pytest.mark.parametrize("compile", some([False, True]))
def test_the_gradients_and_ranks_are_named_and_the_run_goes_on(compile: bool) -> None:
    bad = {0: {1: "x nan"}, 2: {0: "weight inf", 1: "x -inf"}, 4: {0: "weight nan"}}
    found = ranks.run(2, train, bad, compile)
    for told in found:
        assert [(call, there) for call, there, _ in told] == [(1, (1,)), (3, (0, 1)), (5, (0,))]
        first, second, third = (set(names) for _, _, names in told)
        assert first == set(ALL)
        assert third == {"params['complex']"}
        assert "params['complex']" in second
    assert train({1: {0: "x nan"}}, compile) == [(2, (0,), told[0][2])]


def grow(wire: Any) -> str:
    """Large on each rank, finite there, and more than a mean can be."""
    step = fdp.data_parallel(
        lambda w, b: (w - fdp.grad(lambda w: (w * b).sum())(w), fdp.pmean(b.sum())), check_finite=True, wire_dtype=wire
    )
    with pytest.raises(fdp.NonFiniteError) as caught:
        step(torch.zeros(3), torch.full((3,), 3.3999e38 if wire else 3e38))
    return f"{caught.value.ranks} {caught.value.names} {caught.value}"


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_a_mean_that_is_not_finite_where_its_parts_are(wire: Any) -> None:
    for told in ranks.run(2, grow, wire):
        assert told.startswith("() ('w',) gradients of step '<lambda>' are not finite, at its call 1.")
        assert "w: finite on every rank, but their mean is not" in told


def microbatches() -> Any:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sum()

    @fdp.data_parallel(check_finite=True)
    def step(w: Tensor, x: Tensor) -> Any:
        value, grad = fdp.accumulate(fdp.value_and_grad(loss), microbatches=2)(w, x)
        return w - grad, fdp.pmean(value)

    w, x = torch.ones(3), torch.ones(4, 3)
    step(w, x)
    if dist.get_rank() == 1:
        x[0, 1] = torch.nan
    with pytest.raises(fdp.NonFiniteError) as caught:
        step(w, x)
    return caught.value.ranks, caught.value.names, caught.value.call


def test_gradients_of_microbatches() -> None:
    assert ranks.run(2, microbatches) == [((1,), ("w",), 2)] * 2


def test_where_there_is_nothing_to_look_at_it_is_refused() -> None:
    with pytest.raises(fdp.ArgumentError, match="made with check_finite=True, and takes no gradient"):
        fdp.data_parallel(lambda w, x: w - fdp.pmean(x), check_finite=True)(torch.ones(2), torch.ones(2))

    def each(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: fdp.grad(lambda w: (w * row).sum())(w))(x).mean(0)

    def in_place(w: Tensor, x: Tensor) -> Tensor:
        return w.sub_(fdp.grad(lambda w: (w * x).sum())(w))

    with pytest.raises(fdp.PurityError, match="check_finite=True keeps every argument as it is"):
        fdp.data_parallel(in_place, donate_argnums=0, check_finite=True)(torch.ones(2), torch.ones(2))
    with pytest.raises(fdp.ArgumentError, match="cannot check the gradient of w, which is taken inside of"):
        fdp.data_parallel(each, check_finite=True)(torch.ones(2), torch.ones(3, 2))


def test_names_of_results_and_what_is_closed_over_stay_what_they_are() -> None:
    table = torch.ones(2)
    inner = {"deep": [[{"of": table}]]}

    def step(w: Tensor, x: Tensor) -> Any:
        return {"w": w - fdp.grad(lambda w: (w * x * inner["deep"][0][0]["of"]).sum())(w), "x": x}

    found = []
    for options in ({}, {"check_finite": True}):
        with pytest.raises(fdp.ReplicationError, match=r"\n  output\['x'\]: ") as caught:
            fdp.data_parallel(step, **options)(torch.ones(2), torch.ones(2))
        assert "finite" not in str(caught.value)
        trace = fdp.data_parallel(step, check_replication=False, **options).trace(torch.ones(2), torch.ones(2))
        found.append(trace)
    plain, looked = found
    names = [output.name for output in plain.outputs]
    assert [output.name for output in looked.outputs] == [*names, "finite(own)", "finite(means)"]
    assert [name for _, name in looked.closed_over] == [name for _, name in plain.closed_over]
    assert {name for _, name in plain.closed_over} == {"inner['deep'][0][0]['of']"}


def keeps_labels() -> Any:
    @fdp.data_parallel(donate_argnums=0, check_finite=True)
    def step(state: Any, x: Tensor) -> Any:
        grad = fdp.grad(lambda w: (w * x).sum())(state["w"])
        return {"w": state["w"] - grad, "own": state["own"] + x.sum()}

    state = {"w": torch.ones(2), "own": fdp.per_rank(torch.zeros(()))}
    for _ in range(3):
        state = step(state, torch.ones(2) + dist.get_rank())
    return type(state["own"]).__name__, float(state["own"].value), state["w"].tolist()


def test_labels_and_places_of_results() -> None:
    assert ranks.run(2, keeps_labels) == [("PerRank", 6.0 * (1 + rank), [-3.5, -3.5]) for rank in range(2)]


def test_a_step_is_copied_with_its_setting() -> None:
    step = pickle.loads(pickle.dumps(make_checked))()
    with pytest.raises(fdp.NonFiniteError, match="at its call 1"):
        step(torch.ones(1), torch.tensor([torch.nan]))


def lost(w: Tensor, x: Tensor) -> Tensor:
    return w - fdp.grad(lambda w: (w * x).sum())(w)


def make_checked() -> Any:
    import copy

    return copy.copy(fdp.data_parallel(lost, check_finite=True))
