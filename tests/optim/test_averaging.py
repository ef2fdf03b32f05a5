"""Moving averages of parameters against `torch.optim.swa_utils.AveragedModel`, bit for bit."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from bits import same_leaves
from samples import exhaustive
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fdp
from fdp.errors import ArgumentError
from fdp.optim import averaged, ema, from_torch


class Odd(nn.Module):
    """Parameters of several dtypes, and buffers of floats and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))
        self.narrow = nn.Parameter(torch.randn(5).bfloat16())
        self.scalar = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("running", torch.randn(4))
        self.register_buffer("seen", torch.tensor(100))


@pytest.mark.parametrize("decay", [0, pytest.param(0.3, marks=exhaustive), 0.999, 1])
def test_ema_has_the_bits_of_torch_also_for_buffers(decay: float) -> None:
    model = Odd()
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    reference.update_parameters(model)  # the first one copies
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    average = tensors
    for _ in range(3):
        with torch.no_grad():
            for t in (*model.parameters(), model.running):
                t += torch.randn_like(t)
            model.seen += 7
        reference.update_parameters(model)
        before = optree.tree_map(torch.clone, average)
        now = {name: t.clone() for name, t in model.state_dict().items()}
        for run in (ema, fdp.data_parallel(ema, static_argnums=2, batch_argnums=())):
            new = run(average, now, decay)
            assert same_leaves(new, dict(reference.module.state_dict()))
            assert same_leaves(average, before)
        average = new


def step_of(optimizer: Any, donate: bool) -> Any:
    @fdp.data_parallel(donate_argnums=0 if donate else (), batch_argnums=1)
    def step(state: Any, grads: Any) -> Any:
        params, opt = optimizer.update(fdp.pmean(grads), state["opt"], state["params"])
        return {"params": params, "opt": opt}

    return step


@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_keeps_the_average_of_its_parameters(donate: bool) -> None:
    model = Odd()
    optimizer = averaged(from_torch(torch.optim.SGD, lr=0.1, fused=False), decay=0.9)
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    params["frozen"], params["none"] = torch.arange(99), None
    state = {"params": params, "opt": optimizer.init(params)}
    assert same_leaves(state["opt"]["average"], params)
    addresses = [t.data_ptr() for t in optree.tree_leaves(state)]
    assert len(set(addresses)) == len(addresses), "the average shares memory with the parameters"

    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_class = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = step_of(optimizer, donate)
    for k in range(4):
        grads: dict[str, Any] = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        if k == 0:
            grads["w"][0, 0] = float("inf")  # copied, not moved towards: that would be NaN from then on
        if k == 1:
            with torch.no_grad():
                model.w[0, 0] = 1.0
            w = state["params"]["w"].detach().clone()
            w[0, 0] = 1.0
            state["params"] = {**state["params"], "w": w}
        for name, p in model.named_parameters():
            p.grad = grads[name].clone()
        by_class.step()
        reference.update_parameters(model)
        state = step(state, {**grads, "frozen": None, "none": None})
        expected = dict(reference.module.named_parameters())
        got = state["opt"]["average"]
        assert got["frozen"].tolist() == list(range(99)) and got["none"] is None
        assert same_leaves({name: got[name] for name in expected}, expected)
        assert not any(t.requires_grad for t in optree.tree_leaves(got))
        assert state["opt"]["average_count"].item() == k + 1


def test_averages_of_two_decays_nest() -> None:
    inner = from_torch(torch.optim.SGD, lr=1.0)
    both = averaged(averaged(inner, 0.5), 0.9, name="slow")
    fast, slow = averaged(inner, 0.5), averaged(inner, 0.9)
    w = torch.randn(3)
    states = [optimizer.init(w) for optimizer in (both, fast, slow)]
    for _ in range(3):
        grad = torch.randn(3)
        (new, states[0]), (_, states[1]), (_, states[2]) = (
            optimizer.update(grad, state, w) for optimizer, state in zip((both, fast, slow), states, strict=True)
        )
        w = new
    assert sorted(states[0]) == ["average", "average_count", "lr", "slow", "slow_count", "state"]
    assert same_leaves([states[0]["average"], states[0]["slow"]], [states[1]["average"], states[2]["average"]])
    with pytest.raises(ArgumentError, match=r"keeps \['average', 'average_count'\](.|\n)*takes another name="):
        averaged(averaged(inner, 0.5), 0.9).init(w)


def test_refusals_of_averages() -> None:
    a: dict[str, Any] = {"b": torch.ones(2), "w": torch.ones(3)}
    for bad in (-0.1, 1.1, "0.9", True, None, float("nan"), torch.tensor(0.5)):
        with pytest.raises(ArgumentError, match="ema takes decay as a number from 0 to 1, not"):
            ema(a, a, bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="averaged takes decay as a number"):
        averaged(from_torch(torch.optim.SGD), 2.0)
    with pytest.raises(ArgumentError, match="averaged wraps an Optimizer, not the class"):
        averaged(torch.optim.SGD, 0.9)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="averaged takes the name of an entry, not the int 3"):
        averaged(from_torch(torch.optim.SGD), 0.9, name=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="average does not mirror the parameters: "):
        ema({"w": a["w"]}, a, 0.5)
    with pytest.raises(ArgumentError) as caught:
        ema({"b": a["b"].double(), "w": torch.ones(4)}, a, 0.5)
    assert str(caught.value).splitlines()[1:] == [
        "  average['b'] is a torch.float64 tensor of shape (2,) on cpu, not like a torch.float32 tensor of shape (2,) "
        "on cpu",
        "  average['w'] is a torch.float32 tensor of shape (4,) on cpu, not like a torch.float32 tensor of shape (3,) "
        "on cpu",
        "Remedy: start the average as a copy of the parameters.",
    ]
    optimizer = averaged(from_torch(torch.optim.SGD), 0.9)
    opt_state = {**optimizer.init(a), "average": None}
    with pytest.raises(ArgumentError, match=r"opt_state\['average'\] does not mirror"):
        optimizer.update(a, opt_state, a)
    assert ema({"x": 1, "n": None}, {"x": 2, "n": None}, 0.5) == {"x": 2, "n": None}


def test_the_average_is_a_tree_that_the_model_takes() -> None:
    apply, params, buffers = fdp.from_module(nn.Linear(2, 1))
    optimizer = averaged(from_torch(torch.optim.SGD, lr=0.1), 0.9)
    params, opt_state = optimizer.update(optree.tree_map(torch.ones_like, params), optimizer.init(params), params)
    x: Tensor = torch.ones(3, 2)
    assert same_leaves(apply(opt_state["average"], buffers, x)[0].detach(), apply(params, buffers, x)[0].detach())
