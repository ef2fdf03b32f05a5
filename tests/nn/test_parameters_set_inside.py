"""Modules that set `.data` of their own parameters while they run, as MoCo does: against plain training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from samples import exhaustive
from torch import nn

import fdp


class Momentum(nn.Module):
    """A query encoder, and a key encoder that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
        return (self.query(x) - self.key(x).detach()).square().mean()


def pieces(model: nn.Module) -> tuple[Any, Any]:
    apply, params, buffers = fdp.from_module(copy.deepcopy(model))

    def step(params: Any, x: torch.Tensor) -> Any:
        loss, grads = fdp.value_and_grad(lambda params: apply(params, buffers, x)[0])(params)
        return {name: params[name] - 0.1 * grads[name] for name in params}, fdp.pmean(loss)

    return step, params


@pytest.mark.parametrize("how", ["as it is", "traced", pytest.param("compiled", marks=exhaustive)])
def test_the_key_encoder_follows(how: str) -> None:
    model = Momentum()
    step, params = pieces(model)
    if how != "as it is":
        step = fdp.data_parallel(step, donate_argnums=0, compile=how == "compiled")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in range(4):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(call))
        optimizer.zero_grad()
        expected = model(x)
        expected.backward()
        optimizer.step()
        params, loss = step(params, x)
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(params, {name: value.detach() for name, value in model.named_parameters()})


def test_parameters_that_are_not_donated_are_not_set() -> None:
    step, params = pieces(Momentum())
    before = {name: value.clone() for name, value in params.items()}
    with pytest.raises(fdp.PurityError, match=r"params\['key.weight'\]"):
        fdp.data_parallel(step)(params, torch.randn(5, 3))
    torch.testing.assert_close(params, before, rtol=0, atol=0)


def test_a_conjugate_of_the_same_memory_is_another_value() -> None:
    def step(params: Any, x: torch.Tensor) -> Any:
        def loss(params: Any) -> torch.Tensor:
            params["w"].data = params["w"].data.conj()
            return (params["w"] * x).abs().square().sum()

        grads = fdp.grad(loss)(params)
        return {"w": params["w"] - 0.1 * grads["w"]}

    x = torch.ones(2)
    for run in (step, fdp.data_parallel(step, donate_argnums=0, check_replication=False)):
        params = {"w": torch.tensor([1 + 2j, 3 - 1j])}
        expected = params["w"].conj().resolve_conj() * (1 - 0.2)
        torch.testing.assert_close(run(params, x)["w"].resolve_conj(), expected)
